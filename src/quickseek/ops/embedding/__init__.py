"""Token embedding of a decode step: one launch for the lookup and the residual streams (spec/decode.md D).

``ReplicatedEmbedding`` keeps a full copy of a vocabulary-sharded table on every rank, so that a lookup needs no peers.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from quickseek.ops.embedding import reference
from quickseek.parallel.world import World, default_world, require_agreement, together

__all__ = ["ReplicatedEmbedding", "ShardedTable", "embed_streams"]


class ShardedTable(Protocol):
    """What is read of a vocabulary-sharded embedding layer: rows [start, end) of the vocabulary in ``weight``."""

    weight: Tensor
    start: int
    end: int
    vocab_size: int
    reduce_results: bool
    world: World


def embed_streams(ids: Tensor, table: Tensor, embedding: Tensor, streams: Tensor) -> None:
    """Write table[ids] into embedding [n, H] and each of the hc copies of streams [n, hc, H].

    ids int32 [n]; table BF16 [vocab, H] on CUDA, any float dtype on a CPU; all contiguous on one device; zeros for an
    id outside [0, vocab); n = 0 does nothing. Runs on the current CUDA stream. ValueError names what does not fit.
    """
    _check(ids, table, embedding, streams)
    if ids.numel() == 0:
        return
    if ids.is_cuda:
        from quickseek.ops.embedding.cute import launch

        launch(ids, table, embedding, streams)
        return
    reference.embed_streams(ids, table, embedding, streams)


class ReplicatedEmbedding:
    """A full copy of the embedding table on every rank; equals the all-reduced lookup up to the sign of zero."""

    def __init__(self, embed: ShardedTable, hc_mult: int, world: World) -> None:
        self.embed, self.hc_mult, self.world = embed, hc_mult, world
        weight = embed.weight
        require_agreement(world, {"vocabulary": embed.vocab_size, "width": weight.shape[1], "streams": hc_mult})

        def empty() -> Tensor:
            return torch.empty(embed.vocab_size, weight.shape[1], dtype=weight.dtype, device=weight.device)

        self.table = together(world, "allocating the embedding's replica", empty)
        self.refresh()

    @classmethod
    def create(cls, embed: Any, hc_mult: int, world: World | None = None) -> "ReplicatedEmbedding | None":
        """The replica, or None on every rank when ``embed`` of some rank is not the plain sharded BF16 lookup.

        None for TP 1 (use the table itself), results not reduced, another group than ``world``, a weight that is not
        2-D, contiguous and BF16 with rows of a multiple of 16 bytes, or added vocabulary. RankDisagreement, on every
        rank, where widths, vocabularies or streams differ. Collective.
        """
        world = default_world() if world is None else world
        if world.size == 1 or not world.all_reduce_min(_is_plain(embed, world)):
            return None
        return cls(embed, hc_mult, world)

    def refresh(self) -> None:
        """Copy the shards after a weight update. Collective; RuntimeError when they do not tile the vocabulary."""
        start, end, held = self.embed.start, self.embed.end, self.embed.weight.shape[0]
        ranges = self.world.gather_object((start, min(end, start + held)))
        reached = 0
        for start, end in sorted(r for r in ranges if r[1] > r[0]):
            if start != reached:
                break
            reached = end
        if reached != self.embed.vocab_size:
            raise RuntimeError(f"embedding shards {ranges} do not tile a vocabulary of {self.embed.vocab_size}")
        with torch.no_grad():
            for source, (start, end) in enumerate(ranges):
                if end <= start:
                    continue
                rows = self.table[start:end]
                if source == self.world.rank:
                    rows.copy_(self.embed.weight[: end - start])
                self.world.broadcast(rows, source)
        if self.table.is_cuda:
            # Compiles and loads the kernel: steps use it only under capture.
            self(torch.zeros(1, dtype=torch.int32, device=self.table.device))
            torch.cuda.synchronize(self.table.device)

    def accepts(self, ids: Tensor) -> bool:
        """Whether ids are int32, one-dimensional, non-empty and contiguous."""
        return ids.dtype == torch.int32 and ids.ndim == 1 and ids.numel() > 0 and ids.is_contiguous()

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(embedding [n, H], streams [n, hc, H]) of ids int32 [n]."""
        rows, hidden = ids.shape[0], self.table.shape[1]
        embedding = self.table.new_empty(rows, hidden)
        streams = self.table.new_empty(rows, self.hc_mult, hidden)
        embed_streams(ids, self.table, embedding, streams)
        return embedding, streams


def _is_plain(embed: Any, world: World) -> bool:
    """Whether this rank's ``embed`` is the plain sharded BF16 lookup over ``world``."""
    weight = getattr(embed, "weight", None)
    if not isinstance(weight, Tensor) or not getattr(embed, "reduce_results", True):
        return False
    if weight.ndim != 2 or not weight.is_contiguous() or weight.dtype != torch.bfloat16 or weight.shape[1] % 8:
        return False
    return not getattr(embed, "num_added_embeddings", 0) and getattr(embed, "world", world) is world


def _check(ids: Tensor, table: Tensor, embedding: Tensor, streams: Tensor) -> None:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(message)

    require(ids.ndim == 1 and ids.dtype == torch.int32, f"ids {ids.dtype} {list(ids.shape)}: int32 [n]")
    require(table.ndim == 2 and table.dtype.is_floating_point, f"table {table.dtype} {list(table.shape)}: [vocab, H]")
    require(not table.is_cuda or table.dtype == torch.bfloat16, f"table is {table.dtype}: torch.bfloat16 on CUDA")
    require(table.shape[0] > 0, "table has no rows")
    rows, hidden = ids.shape[0], table.shape[1]
    require(list(embedding.shape) == [rows, hidden], f"embedding {list(embedding.shape)}: [{rows}, {hidden}]")
    fits = streams.ndim == 3 and streams.shape[0] == rows and streams.shape[2] == hidden and streams.shape[1] > 0
    require(fits, f"streams {list(streams.shape)}: [{rows}, hc, {hidden}]")
    require(hidden * table.element_size() % 16 == 0, f"rows of {hidden} values: a multiple of 16 bytes")
    for name, tensor in (("ids", ids), ("table", table), ("embedding", embedding), ("streams", streams)):
        require(tensor.is_contiguous(), f"{name} with strides {tensor.stride()}: contiguous")
        require(tensor.device == table.device, f"{name} is on {tensor.device}: {table.device}")
        require(name == "ids" or tensor.dtype == table.dtype, f"{name} is {tensor.dtype}: {table.dtype}")

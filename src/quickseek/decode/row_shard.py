"""Selections of an index source by rank: each for its share of the requests, then gathered (spec/decode.md F.3)."""

from dataclasses import replace

from torch import Tensor

from quickseek.config import ModelConfig
from quickseek.decode.gates import FUSED_MHC_MAX_ROWS, shards_rows
from quickseek.model.context import ForwardContext, StepShared
from quickseek.model.indexer import Indexer
from quickseek.ops.collectives import LamportAllGather
from quickseek.ops.indexer import Selection
from quickseek.ops.rows import StepRows
from quickseek.parallel.fabric import Fabric
from quickseek.parallel.world import World

NUMBER_BYTES = 8
"""Lists hold int64 numbers of -1 and more below 2**31: no 32-bit word of them is the one that mailboxes reserve."""


class RowShard:
    """Selects for the rows [rank * T / ranks, (rank + 1) * T / ranks) of a step of T rows, and gathers the others'.

    ``width``: the most numbers of a list or of a row's candidate blocks. ``fewest``: see ``Gates.row_shard``. What
    ``LamportAllGather`` does not take goes through the world. ``runs`` counts selections, ``fused`` Lamport gathers.
    Construction and ``select`` are collective.
    """

    def __init__(self, width: int, fewest: int, world: World, fabric: Fabric | None = None) -> None:
        self.fewest, self.world = fewest, world
        self.runs = self.fused = 0
        capacity = -(-(FUSED_MHC_MAX_ROWS // world.size) * width * NUMBER_BYTES // 16) * 16
        self.lamport = LamportAllGather(rank_capacity_bytes=capacity, device=world.device, world=world, fabric=fabric)

    @classmethod
    def of(cls, config: ModelConfig, fewest: int, world: World, fabric: Fabric | None = None) -> "RowShard":
        """For the index sources of a model. Collective."""
        return cls(max(config.index_topk, config.candidate_topk_blocks), fewest, world, fabric)

    def takes(self, rows: StepRows) -> bool:
        """Whether a step is divided: enough requests of equally many rows, equally many on each rank.

        Reads shapes and host bounds alone, so that ranks agree.
        """
        count, requests = rows.positions.shape[0], rows.first_rows.shape[0]
        return count == requests * rows.max_rows and shards_rows(count, requests, self.world.size, self.fewest)

    def select(
        self, indexer: Indexer, x: Tensor, latent: Tensor, shared: StepShared, context: ForwardContext
    ) -> Selection:
        """What ``indexer`` selects for rows x [T, H] with latents [T, q_lora_rank] of a step that it ``takes``."""
        mine = self._share(shared.rows.positions.shape[0])
        found = indexer(x[mine], latent[mine], self.shared(shared), self.context(context))
        self.runs += 1
        candidates = None if found.candidates is None else self.gather(found.candidates)
        return Selection(self.gather(found.lists), candidates)

    def gather(self, local: Tensor) -> Tensor:
        """int64 [T, k] of this rank's rows [T / ranks, k], ranks ascending. Collective."""
        if not local.numel():
            return local.new_empty(local.shape[0] * self.world.size, local.shape[1])
        if not self.lamport.accepts(local):
            return self.world.all_gather(local)
        self.fused += 1
        return self.lamport(local)

    # ------------------------------------------------------------------------------------------ this rank's share

    def _share(self, count: int) -> slice:
        each = count // self.world.size
        return slice(self.world.rank * each, (self.world.rank + 1) * each)

    def rows(self, rows: StepRows) -> StepRows:
        """This rank's rows, their requests numbered from 0; views, as each request has equally many rows."""
        mine, requests = self._share(rows.positions.shape[0]), self._share(rows.first_rows.shape[0])
        return replace(
            rows,
            positions=rows.positions[mine],
            requests=rows.requests[: mine.stop - mine.start],
            first_rows=rows.first_rows[: requests.stop - requests.start],
            starts=rows.starts[requests],
            ends=rows.ends[requests],
        )

    def shared(self, shared: StepShared) -> StepShared:
        """What an indexer reads of ``shared``, for this rank's rows."""
        mine = self._share(shared.rows.positions.shape[0])
        return replace(
            shared,
            rows=self.rows(shared.rows),
            turns={True: shared.turns[True][mine]},
            group_turns={},
            candidates=None if shared.candidates is None else shared.candidates[mine],
        )

    def context(self, context: ForwardContext) -> ForwardContext:
        """The caches as this rank's requests see them."""
        metadata = {
            name: replace(group, rows=self.rows(group.rows), table=group.table[self._share(group.table.shape[0])])
            for name, group in context.metadata.items()
        }
        return replace(context, metadata=metadata)

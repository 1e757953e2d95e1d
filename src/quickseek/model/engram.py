"""The n-gram memory of one layer, and the hashing that all of them share (spec/model.md 8)."""

import torch
from torch import Tensor, nn

from quickseek.config import ModelConfig
from quickseek.model.context import ForwardContext
from quickseek.model.loader import WeightLoader
from quickseek.model.modules import Linear, parameter
from quickseek.numerics import Numerics
from quickseek.ops import engram as engram_op
from quickseek.ops import rings
from quickseek.ops.engram import DEAD, HashConstants, HostTable
from quickseek.ops.linear import Weight

HISTORY = "token_history"


class Engram(nn.Module):
    """Table, projection and gate of one Engram layer; a large table stays where the checkpoint is mapped."""

    def __init__(self, config: ModelConfig, index: int, numerics: Numerics) -> None:
        super().__init__()
        self.config, self.index, self.numerics = config, index, numerics
        layout = config.engram_layout
        n, hidden = config.hc_mult, config.hidden_size
        self.wkv = Linear((n + 1) * hidden, layout.width, numerics)
        self.q_weight = parameter(n, hidden, dtype=numerics.dtype)
        self.k_weight = parameter(n, hidden, dtype=numerics.dtype)
        self.table: Weight | None = None
        self._placed: HostTable | None = None

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenated table rows [T, columns * width] in the activations' dtype of row numbers [T, columns]."""
        if self.table is None:
            raise RuntimeError(f"Engram table {self.index} has not been loaded")
        return engram_op.gather_rows(self.table, rows, self.numerics.dtype).to(self.wkv.weight.device)

    def forward(self, streams: Tensor, embedding: Tensor, dead: Tensor) -> Tensor:
        """Streams [T, n, H] with the gated memory added; ``embedding``: gathered rows, ``dead`` bool [T]."""
        return self.inject(streams, self.wkv(embedding), dead)

    def inject(self, streams: Tensor, key_value: Tensor, dead: Tensor) -> Tensor:
        """``forward`` from the projection ``key_value`` [T, (n + 1) * H] of the gathered rows on."""
        return engram_op.inject(streams, key_value, self.q_weight, self.k_weight, dead, self.config.rms_norm_eps)

    def load(self, loader: WeightLoader, prefix: str) -> None:
        """``prefix``: "layers.1.engram."."""
        rows = self.config.engram_num_embeddings[self.index]
        table = loader.table(f"{prefix}embed", rows, self.config.engram_head_dim)
        self._placed = HostTable(table, self.q_weight.device)
        self.table = self._placed.weight
        loader.linear(self.wkv, f"{prefix}wkv")
        loader.tensor(self.q_weight, f"{prefix}q_weight")
        loader.tensor(self.k_weight, f"{prefix}k_weight")


class NgramHashState(nn.Module):
    """Table rows of a whole flattened batch, before any layer runs.

    ``token_map`` int32 [vocab]: compressed id of each token (spec 8.1). The history of each request is a ring of
    compressed ids in the caches, so that n-grams cross chunks and decode steps but never a request's start.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.layout = config, config.engram_layout
        self.token_map: Tensor | None = None

    def set_token_map(self, token_map: Tensor) -> None:
        """``token_map``: integer [vocab_size], on the device of the ids that will be hashed."""
        if token_map.shape != (self.config.vocab_size,):
            raise ValueError(f"token_map has shape {tuple(token_map.shape)}: expected [{self.config.vocab_size}]")
        self.token_map = token_map.to(torch.int64)
        layout = self.layout
        self._constants = [
            HashConstants(
                multipliers=torch.tensor(layout.multipliers[i], dtype=torch.int64, device=token_map.device),
                primes=torch.tensor(layout.primes[i], dtype=torch.int64, device=token_map.device),
                offsets=torch.tensor(layout.offsets[i], dtype=torch.int64, device=token_map.device),
                pad=int(self.token_map[layout.pad_id]),
            )
            for i in range(len(layout.layer_ids))
        ]

    def is_image(self, ids: Tensor) -> Tensor:
        """Bool mask of the positions of image spans: they all carry one id (spec 13)."""
        image = self.config.image_token_id
        return torch.zeros_like(ids, dtype=torch.bool) if image is None else ids == image

    def compress(self, ids: Tensor, dead: Tensor) -> Tensor:
        """Compressed ids int64 of token ids, DEAD where ``dead`` is set."""
        if self.token_map is None:
            raise RuntimeError("the n-gram memory has no token map: set_token_map comes before the first forward")
        return torch.where(dead, DEAD, self.token_map[ids])

    def forward(
        self, ids: Tensor, dead: Tensor, context: ForwardContext, lookback_token_ids: Tensor | None = None
    ) -> list[Tensor]:
        """Row numbers int64 [T, columns] for each Engram layer of token ids [T]; remembers the ids.

        ``lookback_token_ids`` int64 [B, lookback] gives the raw ids before each request's first row, nearest first,
        -1 before its start; None reads the history of the caches. Without either: NotImplementedError.
        """
        has_history = HISTORY in context.caches
        if lookback_token_ids is None and not has_history:
            raise NotImplementedError("NgramHashState without look-back ids and without a token history cache")
        compressed = self.compress(ids, dead)
        given = None
        if lookback_token_ids is not None:
            given = self.compress(
                lookback_token_ids.clamp_min(0), (lookback_token_ids < 0) | self.is_image(lookback_token_ids)
            )
        rows = context.rows
        history = context.view(HISTORY) if has_history else None
        windows = engram_op.token_windows(compressed, history, rows, self.layout.lookback, given)
        if history is not None:
            rings.keep(history, rows, compressed.unsqueeze(-1))
        return [engram_op.hash_ngrams(windows, constants) for constants in self._constants]

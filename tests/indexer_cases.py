"""Inputs for tests of the indexer's kernels: paged keys of requests, in shuffled blocks, poisoned where not written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from op_cases import normal, poisoned_outputs
from quickseek import formats
from quickseek.ops.cache import CacheView, IndexKeyCodec, PlainCodec
from quickseek.ops.indexer import Selection, reference
from quickseek.ops.rows import StepRows

BF16 = torch.bfloat16
EPS = 2.0**-17
"""Roundings of FP32 sums in another order, relative to the largest score."""


@dataclass(frozen=True)
class IndexerCase:
    """BF16 queries [T, h, d] after Q4i, FP32 weights [T, h], keys [groups, d] of each request behind a block table."""

    queries: Tensor
    weights: Tensor
    keys: CacheView
    rows: StepRows
    ratio: int

    @classmethod
    def build(
        cls,
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        ratio: int = 1,
        heads: int = 16,
        width: int = 32,
        block_rows: int = 8,
        packed: bool = True,
        seed: int = 0,
    ) -> "IndexerCase":
        rows = StepRows.build(list(starts), list(counts))
        queries = formats.fake_quantize_q4i(normal(sum(counts), heads, width, seed=seed, dtype=BF16))
        weights = normal(sum(counts), heads, seed=seed + 1, dtype=torch.float32)
        codec = IndexKeyCodec(width) if packed else PlainCodec(width, BF16)
        blocks = -(-rows.max_length // ratio // block_rows) + 1
        shuffled = torch.randperm(len(starts) * blocks, generator=torch.Generator().manual_seed(seed))
        # An E8M0 byte of 255, and a BF16 of those bits, is NaN.
        storage = torch.full((len(starts) * blocks + 1, block_rows, codec.record), 255 if packed else torch.nan)
        keys = CacheView(storage.to(codec.dtype), shuffled.view(len(starts), blocks) + 1, codec)
        for request, end in enumerate(rows.ends.tolist()):
            groups = torch.arange(end // ratio)
            keys.write(torch.full_like(groups, request), groups, normal(len(groups), width, seed=seed + 2 + request))
        return cls(queries, weights, keys, rows, ratio)

    def to(self, device: torch.device) -> "IndexerCase":
        rows = self.rows
        moved = {
            name: getattr(rows, name).to(device) for name in ("positions", "requests", "first_rows", "starts", "ends")
        }
        view = CacheView(self.keys.storage.to(device), self.keys.table.to(device), self.keys.codec)
        return IndexerCase(
            self.queries.to(device), self.weights.to(device), view, replace(rows, **moved), self.ratio
        )  # fmt: skip

    @property
    def groups(self) -> int:
        return self.rows.max_length // self.ratio

    @property
    def visible(self) -> Tensor:
        """Groups that each row sees, int64 [T]."""
        return (self.rows.positions + 1) // self.ratio

    def select(
        self,
        form: Any,
        top_k: int,
        *,
        block_size: int = 4,
        publish: int = 0,
        candidates: Tensor | None = None,
        scale: float = 1.0,
    ) -> Selection:
        """By a form of the operation, with outputs poisoned before."""
        with poisoned_outputs():
            found: Selection = form.select(
                self.queries,
                self.weights,
                self.keys,
                self.rows,
                self.ratio,
                top_k,
                block_size,
                publish,
                candidates,
                scale,
            )
        return found

    def scores(self) -> Tensor:
        """The reference's [T, groups], -inf where a row does not see the group."""
        values = reference.scores(self.queries, self.weights, self.keys, self.rows, self.groups)
        hidden = torch.arange(self.groups, device=values.device) >= self.visible.unsqueeze(1)
        return values.masked_fill(hidden, -torch.inf)

    def block_scores(self, block_size: int) -> Tensor:
        """The reference's [T, blocks]: best member, +inf for the newest, -inf where no member is visible."""
        values = self.scores()
        best = torch.nn.functional.pad(values, (0, -self.groups % block_size), value=-torch.inf)
        best = best.unflatten(1, (-1, block_size)).amax(-1)
        newest = (self.visible - 1) // block_size
        return best.masked_fill(torch.arange(best.shape[1], device=best.device) == newest.unsqueeze(1), torch.inf)

    def restricted(self, candidates: Tensor, block_size: int) -> Tensor:
        """The reference's scores, -inf outside the candidate blocks too."""
        inside = reference.in_blocks(candidates, self.groups, block_size)
        return self.scores().masked_fill(~inside, -torch.inf)


def eps_of(scores: Tensor) -> float:
    """How near to the border scores of the two forms may change sides."""
    return EPS * float(scores[scores.isfinite()].abs().max())

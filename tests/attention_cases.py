"""Inputs for tests of attention's kernels: rings and pages of requests, NaN where no record was written."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from op_cases import normal, poisoned_outputs
from quickseek.ops import norm_rope
from quickseek.ops.cache import SLACK, CacheView, Codec, GlobalKvCodec, PlainCodec, WindowCodec
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows

BF16 = torch.bfloat16
PAGE_ROWS = 8


def moved(x: Any, device: torch.device) -> Any:
    """A tensor, or a dataclass of tensors, on ``device``."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, StepRows | CacheView | Rotation | AttentionCase | BlockCase):
        return replace(x, **{field.name: moved(getattr(x, field.name), device) for field in fields(x)})
    return x


def poisoned_view(codec: Codec, table: Tensor, rows: int) -> CacheView:
    """A cache with the blocks of ``table`` and scratch, every record NaN: bytes of 255 are one in each format."""
    size = (int(table.max()) + 1, rows, codec.record)
    return CacheView(torch.full(size, 255 if codec.dtype == torch.uint8 else torch.nan).to(codec.dtype), table, codec)


def shuffled(requests: int, blocks: int, seed: int) -> Tensor:
    """A table int64 [requests, blocks] of the numbers from 1 on, in any order."""
    order = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(seed))
    return order.view(requests, blocks) + 1


def filled_window(lengths: Sequence[int], window: int, width: int, packed: bool, seed: int) -> CacheView:
    """A ring that holds the last positions before ``lengths`` of each request."""
    codec = WindowCodec(width) if packed else PlainCodec(width, BF16)
    ring = poisoned_view(codec, shuffled(len(lengths), 1, seed), window + SLACK)
    for request, length in enumerate(lengths):
        positions = torch.arange(max(0, length - window - SLACK), length)
        values = normal(len(positions), width, seed=seed + request, dtype=BF16)
        ring.write(torch.full_like(positions, request), ring.ring_rows(positions), values)
    return ring


@dataclass(frozen=True)
class AttentionCase:
    """What ``sparse_attention`` is given; ``lists`` name ``written`` global rows of each request, in any order."""

    queries: Tensor
    step_kv: Tensor
    window: CacheView
    rows: StepRows
    sinks: Tensor
    window_size: int
    oldest: Tensor
    pages: CacheView | None
    lists: Tensor | None
    turn: Rotation | None = None

    @classmethod
    def build(
        cls,
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        heads: int = 3,
        width: int = 64,
        window: int = 70,
        listed: int = 80,
        written: int = 90,
        packed: bool = True,
        seed: int = 0,
    ) -> "AttentionCase":
        """``listed`` entries a row, about an eighth of them -1; 0: no global KV."""
        rows = StepRows.build(list(starts), list(counts))
        total = sum(counts)
        pages = lists = None
        if listed:
            codec = GlobalKvCodec(width) if packed else PlainCodec(width, BF16)
            pages = poisoned_view(codec, shuffled(len(starts), -(-written // PAGE_ROWS) + 1, seed), PAGE_ROWS)
            for request in range(len(starts)):
                groups = torch.arange(written)
                values = normal(written, width, seed=seed + 50 + request, dtype=BF16)
                pages.write(torch.full_like(groups, request), groups, values)
            drawn = torch.rand(total, written, generator=torch.Generator().manual_seed(seed))
            lists = torch.full((total, listed), -1)
            chosen = drawn.argsort(1)[:, :listed]
            lists[:, : chosen.shape[1]] = torch.where(drawn[:, : chosen.shape[1]] < 0.125, -1, chosen)
        return cls(
            queries=normal(total, heads, width, seed=seed, dtype=BF16),
            step_kv=normal(total, width, seed=seed + 1, dtype=BF16),
            window=filled_window(starts, window, width, packed, seed + 100),
            rows=rows,
            sinks=normal(heads, seed=seed + 2, dtype=torch.float32),
            window_size=window,
            oldest=torch.zeros(len(starts), dtype=torch.int64),
            pages=pages,
            lists=lists,
        )

    def run(self, form: Any) -> Tensor:
        """By a form of the operation, with outputs poisoned before."""
        with poisoned_outputs():
            out: Tensor = form.sparse_attention(
                self.queries, self.step_kv, self.window, self.rows, self.sinks, self.window_size, self.oldest,
                self.pages, self.lists, self.turn,
            )  # fmt: skip
        return out


@dataclass(frozen=True)
class BlockCase:
    """What ``block_attention`` is given."""

    queries: Tensor
    block_kv: Tensor
    window: CacheView
    requests: Tensor
    last: Tensor
    sinks: Tensor
    window_size: int
    turn: Rotation | None = None

    @classmethod
    def build(
        cls,
        last: Sequence[int],
        size: int,
        *,
        heads: int = 3,
        width: int = 64,
        window: int = 70,
        packed: bool = True,
        seed: int = 0,
    ) -> "BlockCase":
        """A block of ``size`` rows for each request, the requests in descending order."""
        requests = torch.arange(len(last) - 1, -1, -1)
        return cls(
            queries=normal(len(last), size, heads, width, seed=seed, dtype=BF16),
            block_kv=normal(len(last), size, width, seed=seed + 1, dtype=BF16),
            window=filled_window([position + 1 for position in last], window, width, packed, seed + 100),
            requests=requests,
            last=torch.tensor(last)[requests],
            sinks=normal(heads, seed=seed + 2, dtype=torch.float32),
            window_size=window,
        )

    def run(self, form: Any) -> Tensor:
        """By a form of the operation, with outputs poisoned before."""
        with poisoned_outputs():
            out: Tensor = form.block_attention(
                self.queries, self.block_kv, self.window, self.requests, self.last, self.sinks, self.window_size,
                self.turn,
            )  # fmt: skip
        return out


def turned(case: AttentionCase | BlockCase, pairs: int, seed: int = 0) -> AttentionCase | BlockCase:
    """``case`` with a rotation of its rows' last ``pairs`` pairs."""
    rows = case.queries.shape[:-2].numel()
    angles = normal(rows, pairs, seed=seed + 7, dtype=torch.float32) * 3
    return replace(case, turn=Rotation(angles.cos(), angles.sin()))


def in_three_calls(case: AttentionCase | BlockCase, form: Any) -> Tensor:
    """``case`` by rotation, attention without one, and rotation back."""
    assert case.turn is not None
    shape = case.queries.shape
    queries = norm_rope.apply_rope(case.queries.reshape(-1, *shape[-2:]), case.turn).view(shape)
    out = replace(case, queries=queries, turn=None).run(form)
    return norm_rope.apply_rope(out.view(-1, *shape[-2:]), case.turn, inverse=True).view(shape)

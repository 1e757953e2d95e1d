"""Attention in released shapes: heads of TP 1, 4 and 8, packed and plain caches, few and many rows."""

from collections.abc import Callable

import torch

from quickseek.ops.attention import triton as kernels
from quickseek.ops.cache import CacheView, Codec, GlobalKvCodec, PlainCodec, WindowCodec
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows

WIDTH, WINDOW, LISTED, BLOCK_ROWS, PAIRS = 512, 128, 512, 64, 32


def view(codec: Codec, rows: int) -> CacheView:
    return CacheView(torch.zeros(2, rows, codec.record, dtype=codec.dtype), torch.ones(1, 1, dtype=torch.int64), codec)


def rotation(rows: int) -> Rotation:
    return Rotation(torch.ones(rows, PAIRS), torch.zeros(rows, PAIRS))


def step(
    count: int, heads: int, *, packed: bool = True, reads_global: bool = True, queries_last: bool = True
) -> Callable[[], object]:
    plain = PlainCodec(WIDTH, torch.bfloat16)
    ring = view(WindowCodec(WIDTH) if packed else plain, WINDOW + 8)
    pages = view(GlobalKvCodec(WIDTH) if packed else plain, BLOCK_ROWS)
    kv = torch.zeros(count, WIDTH, dtype=torch.bfloat16)
    rows, oldest = StepRows.build([0], [count]), torch.zeros(1, dtype=torch.int64)
    queries, sinks = torch.zeros(count, heads, WIDTH, dtype=torch.bfloat16), torch.zeros(heads)
    lists = torch.full((count, LISTED), -1)
    chosen = (pages, lists) if reads_global else (None, None)
    turn = rotation(count)
    return lambda: kernels.sparse_attention(queries, kv, ring, rows, sinks, WINDOW, oldest, *chosen, turn, queries_last)


def block(count: int, heads: int) -> Callable[[], object]:
    queries = torch.zeros(1, count, heads, WIDTH, dtype=torch.bfloat16)
    kv = torch.zeros(1, count, WIDTH, dtype=torch.bfloat16)
    zero = torch.zeros(1, dtype=torch.int64)
    ring = view(WindowCodec(WIDTH), WINDOW + 8)
    turn = rotation(count)
    return lambda: kernels.block_attention(queries, kv, ring, zero, zero, torch.zeros(heads), WINDOW, turn, True)


def launches() -> dict[str, Callable[[], object]]:
    return {
        "1 row, TP 4": step(1, 16),
        "1 row, TP 4, waits first": step(1, 16, queries_last=False),
        "1 row, TP 1": step(1, 64),
        "1 row, TP 8, plain caches": step(1, 8, packed=False),
        "6 rows, TP 4": step(6, 16),
        "6 rows, TP 4, window only": step(6, 16, reads_global=False),
        "6 rows, TP 1": step(6, 64),
        "6 rows, TP 8, plain caches": step(6, 8, packed=False),
        "2048 rows, TP 4": step(2048, 16),
        "2048 rows, TP 1": step(2048, 64),
        "2048 rows, TP 4, window only": step(2048, 16, reads_global=False),
        "a block of 5 rows, TP 4": block(5, 16),
    }

"""Selection in released shapes: 32 heads of 128, lists of 512, 2,048 candidate blocks of 8."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quickseek.ops.cache import CacheView, IndexKeyCodec
from quickseek.ops.indexer import triton as kernels
from quickseek.ops.rows import StepRows

LENGTH = 100_000
TOP_K, BLOCK_SIZE, BLOCKS = 512, 8, 2048


def call(count: int, length: int, ratio: int, publish_blocks: int, candidates: bool) -> None:
    rows = StepRows.uniform(torch.full((1,), length - count), count, length)
    codec = IndexKeyCodec(128)
    storage = torch.zeros(2, 64, codec.record, dtype=torch.uint8)
    view = CacheView(storage, torch.zeros(1, -(-length // 64), dtype=torch.int64), codec)
    published: Tensor | None = torch.zeros(count, BLOCKS, dtype=torch.int64) if candidates else None
    kernels.select(
        torch.zeros(count, 32, 128, dtype=torch.bfloat16), torch.zeros(count, 32, dtype=torch.bfloat16), view, rows,
        ratio, TOP_K, BLOCK_SIZE, publish_blocks, published, 2.0**-6,
    )  # fmt: skip


def launches() -> dict[str, Callable[[], object]]:
    return {
        "ratio 2": partial(call, 6, LENGTH, 2, 0, False),
        "source": partial(call, 6, LENGTH, 1, BLOCKS, False),
        "restricted": partial(call, 6, LENGTH, 1, 0, True),
        "prefill": partial(call, 384, LENGTH, 1, BLOCKS, False),
        "restricted prefill": partial(call, 384, LENGTH, 1, 0, True),
        "short": partial(call, 6, 256, 1, BLOCKS, False),
        "short, restricted": partial(call, 6, 256, 1, 0, True),
    }

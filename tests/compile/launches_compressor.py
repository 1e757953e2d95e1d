"""The compressor in released shapes."""

from collections.abc import Callable

import torch

from quickseek.ops.cache import CacheView, Codec, GlobalKvCodec, IndexKeyCodec, PlainCodec
from quickseek.ops.compressor import triton as kernels
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows

EPS = 1e-20


def view(codec: Codec, rows: int) -> CacheView:
    storage = torch.zeros(4, rows, codec.record, dtype=codec.dtype)
    return CacheView(storage, torch.zeros(2, 8, dtype=torch.int64), codec)


def launches() -> dict[str, Callable[[], object]]:
    ring = view(PlainCodec(1024, torch.float32), 9)
    weight, key_weight = torch.zeros(512, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16)

    def pooled(count: int) -> object:
        rows = StepRows.build([3, 5], [count, count])
        return kernels.pooled_latents(torch.zeros(2 * count, 2, 512), ring, rows, 2, weight, EPS, torch.bfloat16)

    def write(ratio: int, packed: bool) -> None:
        rows = StepRows.build([3, 5], [4, 4])
        latents, keys = torch.zeros(8, 512, dtype=torch.bfloat16), torch.zeros(8, 128, dtype=torch.bfloat16)
        plain = PlainCodec(512, torch.bfloat16), PlainCodec(128, torch.bfloat16)
        kv, key = (GlobalKvCodec(512), IndexKeyCodec(128)) if packed else plain
        turn = Rotation(torch.zeros(8, 32), torch.zeros(8, 32))
        caches = view(kv, 64), view(key, 64)
        kernels.write_groups(latents, keys, key_weight, EPS, turn, rows, ratio, *caches, None, not packed)

    rows = StepRows.build([3, 5], [4, 4])
    return {
        "pool": lambda: kernels.pool(torch.zeros(8, 2, 512), ring, rows, 2),
        "pooled_latents of a decode step": lambda: pooled(4),
        "pooled_latents of a prefill": lambda: pooled(100),
        "write_groups, packed, ratio 2": lambda: write(2, True),
        "write_groups, packed, ratio 1": lambda: write(1, True),
        "write_groups, plain": lambda: write(2, False),
    }

"""Quantisation in released shapes."""

from collections.abc import Callable

import torch

from quickseek.ops.quantize import triton as kernels


def launches() -> dict[str, Callable[[], object]]:
    x = torch.zeros(8, 32, 128, dtype=torch.bfloat16)
    return {
        "quantize_a8": lambda: kernels.quantize_a8(x),
        "fake_quantize_a8": lambda: kernels.fake_quantize_a8(x),
        "fake_quantize_q4i": lambda: kernels.fake_quantize_q4i(x),
        "fake_quantize_q4k": lambda: kernels.fake_quantize_q4k(x),
        "swizzle_scales": lambda: kernels.swizzle_scales(torch.zeros(8, 160, dtype=torch.uint8)),
    }

"""The kernels that test the shared device functions."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
import triton_math_kernels as kernels


def launches() -> dict[str, Callable[[], object]]:
    x, codes = torch.zeros(8, 128), torch.zeros(8, 128, dtype=torch.uint8)
    calls: dict[str, Callable[[], object]] = {
        name: lambda name=name: getattr(kernels, name)[(8,)](x, codes, codes)  # type: ignore[misc]
        for name in ("a8", "q4i", "q4k")
    }
    return calls | {"values": lambda: kernels.values[(1,)](codes, x)}

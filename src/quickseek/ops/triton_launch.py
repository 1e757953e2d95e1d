"""What launches of Triton kernels ask of the device and of the rows they work on."""

from functools import cache

import torch
import triton

H200_MULTIPROCESSORS = 132


def multiprocessors(device: torch.device) -> int:
    """How many there are, so that grids fill the GPU; those of an H200 for a CPU, which plans, compiles and interprets.

    ``device``: that of a tensor, so with its index.
    """
    return _of_gpu(device.index) if device.type == "cuda" else H200_MULTIPROCESSORS


@cache
def _of_gpu(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def padded(width: int, least: int = 1) -> int:
    """The power of two that holds a row of ``width`` values, and at least ``least`` of them (a power of two)."""
    return max(triton.next_power_of_2(width), least)


def warps(values: int, most: int) -> int:
    """Warps of a program for ``values``, a power of two, at 8 values a thread; at most ``most``, a power of two."""
    return max(1, min(most, values // 256))

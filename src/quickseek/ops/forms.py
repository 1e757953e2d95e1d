"""Which form of an operation runs: its kernels on CUDA, its reference elsewhere."""

import importlib
from functools import cache
from types import ModuleType
from typing import Any

from torch import Tensor


def form(door: str, x: Tensor) -> Any:
    """The module behind ``door`` (its ``__name__``) that computes on x's device: ``triton`` or ``reference``.

    Both define the same functions with the same arguments. Kernels take BF16 values (FP32 where the reference is wide)
    and raise a ValueError for other dtypes before they launch anything.
    """
    return _module(door, x.is_cuda)


@cache
def _module(door: str, on_cuda: bool) -> ModuleType:
    # Imported late: Triton need not be there where there is no GPU.
    return importlib.import_module(f"{door}.{'triton' if on_cuda else 'reference'}")

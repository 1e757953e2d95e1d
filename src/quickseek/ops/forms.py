"""Which form of an operation runs: its kernels on CUDA, its reference elsewhere."""

import importlib
import importlib.util
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
def cute_form(door: str) -> ModuleType | None:
    """The kernels in CuTe DSL behind ``door`` (``cute``), which ``triton`` calls; None where there is no CuTe DSL."""
    return None if importlib.util.find_spec("cutlass") is None else importlib.import_module(f"{door}.cute")


@cache
def _module(door: str, on_cuda: bool) -> ModuleType:
    # Imported late: Triton need not be there where there is no GPU.
    return importlib.import_module(f"{door}.{'triton' if on_cuda else 'reference'}")

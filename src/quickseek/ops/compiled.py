"""Compiled kernels, one a configuration and device kind, shared by all instances of a process."""

from collections.abc import Sequence
from typing import Any, TypeVar

import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from quickseek.compilation import COMPILATION

Group = TypeVar("Group", bound=tuple[Any, ...])
Arguments = Sequence[str | type[tuple[Any, ...]]]
"""The arguments of a kernel before the stream: a letter for each, a(ddress or other 64-bit integer), i(nt32), f(loat),
or a NamedTuple of such types that travel together."""

KINDS = {"a": Int64, "i": Int32, "f": Float32}

_compiled: dict[tuple[Any, ...], Any] = {}


def compiled(kernel: type, arguments: Arguments, device: torch.device, **configuration: Any) -> Any:
    """The launcher of ``kernel(**configuration)``, compiled on first use for the device's architecture."""
    key = (kernel, arguments, torch.cuda.get_device_capability(device), *sorted(configuration.items()))
    if key not in _compiled:
        with torch.cuda.device(device), COMPILATION.timed(f"{kernel.__module__}.{kernel.__name__}"):
            _compiled[key] = compile_kernel(kernel(**configuration), arguments)
    return _compiled[key]


def compile_kernel(kernel: Any, arguments: Arguments, options: str = "") -> Any:
    """A launcher for the architecture of the current device or, without one, of CUTE_DSL_ARCH."""
    stand_ins = [
        KINDS[one](0) if isinstance(one, str) else typed(one, *[0] * len(one.__annotations__)) for one in arguments
    ]
    return cute.compile(kernel, *stand_ins, make_fake_stream(), **({"options": options} if options else {}))


def typed(group: type[Group], *values: float) -> Group:
    """A NamedTuple of kernel arguments from plain numbers in its order.

    Launchers convert plain numbers that stand alone, but drop those within a tuple without a word.
    """
    return group(*(kind(value) for kind, value in zip(group.__annotations__.values(), values, strict=True)))


def current_stream(device: torch.device) -> Any:
    """PyTorch's current CUDA stream on a device, in the form that launchers take."""
    return driver.CUstream(torch.cuda.current_stream(device).cuda_stream)

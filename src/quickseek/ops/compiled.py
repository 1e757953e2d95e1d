"""Compiled kernels, one a configuration and device kind, shared by all instances of a process."""

from typing import Any

import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

_compiled: dict[tuple[Any, ...], Any] = {}


def compiled(kernel: type, arguments: str, device: torch.device, **configuration: Any) -> Any:
    """The launcher of ``kernel(**configuration)``, compiled on first use for the device's architecture.

    ``arguments``: a letter for each argument before the stream: a(ddress or other 64-bit integer), i(nt32), f(loat).
    """
    key = (kernel, arguments, torch.cuda.get_device_capability(device), *sorted(configuration.items()))
    if key not in _compiled:
        with torch.cuda.device(device):
            _compiled[key] = compile_kernel(kernel(**configuration), arguments)
    return _compiled[key]


def compile_kernel(kernel: Any, arguments: str, options: str = "") -> Any:
    """A launcher for the architecture of the current device or, without one, of CUTE_DSL_ARCH."""
    makers = {"a": lambda: Int64(0), "i": lambda: Int32(0), "f": lambda: Float32(0.0)}
    stand_ins = [makers[letter]() for letter in arguments]
    return cute.compile(kernel, *stand_ins, make_fake_stream(), **({"options": options} if options else {}))


def current_stream(device: torch.device) -> Any:
    """PyTorch's current CUDA stream on a device, in the form that launchers take."""
    return driver.CUstream(torch.cuda.current_stream(device).cuda_stream)

"""Results on their way to the host: copied beside the next step, read one cycle late (design.md 4.5)."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Readback(Generic[T]):
    """The tensors of a dataclass, and of dataclasses and named tuples in it, in host memory.

    On CUDA they are copied into pinned memory in the order of the current CUDA stream, so that a later replay may
    overwrite them; ``get`` waits for that copy alone. On a CPU they are what they are.
    """

    def __init__(self, value: T, device: torch.device) -> None:
        self._copied: torch.cuda.Event | None = None
        self._value = value
        if device.type == "cuda":
            self._value = _pinned(value)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def get(self) -> T:
        """The value, once it has arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._value


def _pinned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _pinned(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, tuple):
        return type(value)(*map(_pinned, value))
    return value

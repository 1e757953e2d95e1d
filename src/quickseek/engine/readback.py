"""Results on their way to the host: copied beside the next step, read one cycle late (design.md 4.5)."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from quickseek.engine import staging

T = TypeVar("T")

UNREAD = 2
"""Results of one shape that may be under way: those of the cycle just launched, and of the one before."""
MOST_SHAPES = 256
"""Shapes of results whose memory is kept; others, should there ever be as many, take new memory each time."""
POLL_S = 2e-5
"""Between two looks at results that may never come; in practice as long as the operating system's shortest sleep."""

Fault = Callable[[], Exception | None]
"""What has gone wrong on the device so far, as the host can tell without waiting."""


class Readback(Generic[T]):
    """A value that arrives in host memory; ``get`` waits for its own copy alone."""

    def __init__(self, value: T, passed: torch.cuda.Event | None = None, release: Callable[[], None] | None = None):
        self._value, self._passed, self._release = value, passed, release

    def get(self, fault: Fault | None = None) -> T:
        """The value, once it has arrived; to be read before the next ``Readbacks.copy``, which may overwrite it.

        ``fault``: for a value that may never arrive; what it returns meanwhile is raised.
        """
        if self._passed is not None:
            if fault is None:
                self._passed.synchronize()
            else:
                _wait(self._passed, fault)
        if self._release is not None:
            self._release()
            self._release = None
        return self._value


def _wait(passed: torch.cuda.Event, fault: Fault) -> None:
    while not passed.query():
        error = fault()
        # What is known before a result has arrived concerns it, and not what was launched behind it.
        if error is not None and not passed.query():
            raise error
        time.sleep(POLL_S)


class Readbacks:
    """The tensors of a dataclass, and of dataclasses and named tuples in it, on a CPU: they are what they are."""

    def reserve(self, value: Any) -> None:
        """Take the memory that results of the shapes in ``value`` need."""

    def copy(self, value: T) -> Readback[T]:
        """``value`` on its way, unharmed by what the device writes over it later."""
        return Readback(value)


@dataclass(frozen=True)
class _Landing:
    """Pinned memory of one result; ``passed`` is recorded behind the copy into it."""

    value: Any
    tensors: list[Tensor]
    passed: torch.cuda.Event


class PinnedReadbacks(Readbacks):
    """Copies into pinned memory in the order of the current CUDA stream, so that a later replay may overwrite them.

    Memory is used again for the same shapes once its result has been read; nothing is allocated for ``reserve``d ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[Any, ...], list[_Landing]] = {}

    def reserve(self, value: Any) -> None:
        self._free[_shapes(value)] = [_landing(value) for _ in range(UNREAD)]

    def copy(self, value: T) -> Readback[T]:
        shapes = _shapes(value)
        free = self._free.get(shapes, [])
        if len(self._free) < MOST_SHAPES:
            self._free[shapes] = free
        landing = free.pop() if free else _landing(value)
        for target, source in zip(landing.tensors, _tensors(value), strict=True):
            staging.send(target, source)
        landing.passed.record(torch.cuda.current_stream(self._device))
        return Readback(landing.value, landing.passed, partial(free.append, landing))


def readbacks_from(device: torch.device) -> Readbacks:
    """How results come back from ``device``."""
    return PinnedReadbacks(device) if device.type == "cuda" else Readbacks()


def _landing(value: Any) -> _Landing:
    memory = _pinned(value)
    return _Landing(memory, list(_tensors(memory)), torch.cuda.Event())


def _pinned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return staging.pinned(value.shape, value.dtype)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _pinned(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, tuple):
        return type(value)(*map(_pinned, value))
    return value


def _parts(value: Any) -> Iterator[Any]:
    """The tensors of a value and, in their places, whatever else it holds."""
    if is_dataclass(value):
        for field in fields(value):
            yield from _parts(getattr(value, field.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


def _tensors(value: Any) -> Iterator[Tensor]:
    return (part for part in _parts(value) if isinstance(part, Tensor))


def _shapes(value: Any) -> tuple[Any, ...]:
    return tuple((part.shape, part.dtype) if isinstance(part, Tensor) else part for part in _parts(value))

"""Where an Engram table lies: a mapped file for a CPU, memory that kernels can read for a GPU (spec/model.md 3.5)."""

import contextlib
import mmap
import resource
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from quickseek.ops.linear import Weight

COPIED_BYTES = 2 << 30
"""Tables of up to this many bytes are copied into the memory of the device."""
RANGE_BYTES = 16 << 30
"""Bytes that are registered in one call."""
_PORTABLE, _READ_ONLY = 1, 8

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class _Locked:
    """Pages that the driver keeps in memory until no table holds this any more; ``tensors`` keep their addresses."""

    pages: Range
    tensors: tuple[Tensor, ...]

    @classmethod
    def lock(cls, pages: Range, tensors: tuple[Tensor, ...], device: torch.device) -> "_Locked":
        _register(*pages, sum(tensor.nbytes for tensor in tensors))
        locked = cls(pages, tensors)
        # Not at exit: the driver may be gone before, and unlocks all by itself.
        weakref.finalize(locked, _unregister, pages[0], device).atexit = False
        return locked


class HostTable:
    """A table [R, width] that the kernels of ``device`` read where it lies.

    On a CPU: the tensors as they are. On CUDA: a copy on the device where they are small (``copied_bytes``), else host
    memory that is registered with the driver page by page, which locks it in memory, and that kernels read over the
    bus. ``weight`` is what ``gather_rows`` takes, for as long as this lives: pages are unlocked when the last table on
    them is closed or dropped.

    RuntimeError, naming what to do, if the driver refuses to lock a range.
    """

    _registered: ClassVar[weakref.WeakValueDictionary[Range, _Locked]] = weakref.WeakValueDictionary()

    def __init__(self, table: Weight, device: torch.device | str, *, copied_bytes: int = COPIED_BYTES) -> None:
        device = torch.device(device)
        self._held: list[_Locked] = []
        self.weight = table
        tensors = _tensors(table)
        if device.type != "cuda" or all(tensor.is_cuda for tensor in tensors):
            return
        if sum(tensor.nbytes for tensor in tensors) <= copied_bytes:
            self.weight = table.to(device) if isinstance(table, Tensor) else replace(table, **_moved(table, device))
            return
        try:
            with torch.cuda.device(device):
                wanted = pages(tensors)
                self._held = [one for one in self._registered.values() if any(_meet(one.pages, own) for own in wanted)]
                for fresh in list(missing(wanted, (one.pages for one in self._held))):
                    self._held.append(_Locked.lock(fresh, tensors, device))
                    self._registered[fresh] = self._held[-1]
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        """Give up the pages of this table; no kernel may read it any more."""
        self._held = []


def _tensors(table: Weight) -> tuple[Tensor, ...]:
    return (table,) if isinstance(table, Tensor) else (table.codes, table.scales)


def _moved(table: Weight, device: torch.device) -> dict[str, Tensor]:
    assert not isinstance(table, Tensor)
    return {"codes": table.codes.to(device), "scales": table.scales.to(device)}


def pages(tensors: Iterable[Tensor]) -> list[Range]:
    """Address ranges of whole pages, ascending and disjoint, that hold the tensors."""
    found: list[Range] = []
    for start, size in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(start + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((first, stop))
    return found


def missing(wanted: Iterable[Range], taken: Iterable[Range], most: int = RANGE_BYTES) -> Iterator[Range]:
    """The parts of ``wanted`` that no range of ``taken`` holds yet, in ranges of at most ``most`` bytes."""
    held = sorted(taken)
    for start, stop in wanted:
        for low, high in [*(one for one in held if one[1] > start and one[0] < stop), (stop, stop)]:
            end = min(low, stop)
            while start < end:
                yield start, min(start + most, end)
                start = min(start + most, end)
            start = max(start, high)


def _meet(one: Range, other: Range) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _register(start: int, stop: int, total: int) -> None:
    runtime = torch.cuda.cudart()
    # Read-only first: pages of a file that may not be written can be locked in no other way, and pages of a private
    # mapping are copied by a lock for writing.
    for flags in (_PORTABLE | _READ_ONLY, _PORTABLE):
        code = int(runtime.cudaHostRegister(start, stop - start, flags))
        if code == 0:
            return
        _forget_error()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    reason = runtime.cudaGetErrorString(runtime.cudaError(code))
    raise RuntimeError(
        f"Engram table: the driver does not lock {stop - start} of its {total} bytes in host memory ({reason}); "
        f"the limit of this process is {allowed} (ulimit -l), and the machine needs as much free memory as the table"
    )


def _unregister(start: int, device: torch.device) -> None:
    # Of a device that has failed nothing can be waited for, and its pages can be given up.
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(start)


def _forget_error() -> None:
    """A refused call leaves its error for the next launch to report."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)

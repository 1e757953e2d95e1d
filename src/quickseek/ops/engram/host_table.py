"""Where an Engram table lies: a mapped file for a CPU, memory that kernels can read for a GPU (spec/model.md 3.5)."""

import contextlib
import mmap
import resource
from collections.abc import Iterable, Iterator
from dataclasses import replace
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


class HostTable:
    """A table [R, width] that the kernels of ``device`` read where it lies.

    On a CPU: the tensors as they are. On CUDA: a copy on the device where they are small (``copied_bytes``), else host
    memory that is registered with the driver page by page, which locks it in memory, and that kernels read over the
    bus. ``weight`` is what ``gather_rows`` takes. Tables of one file may share a page: close them together.

    RuntimeError, naming what to do, if the driver refuses to lock a range.
    """

    _registered: ClassVar[set[Range]] = set()

    def __init__(self, table: Weight, device: torch.device | str, *, copied_bytes: int = COPIED_BYTES) -> None:
        device = torch.device(device)
        self._own: list[Range] = []
        self.weight = table
        tensors = _tensors(table)
        if device.type != "cuda" or all(tensor.is_cuda for tensor in tensors):
            return
        if sum(tensor.nbytes for tensor in tensors) <= copied_bytes:
            self.weight = table.to(device) if isinstance(table, Tensor) else replace(table, **_moved(table, device))
            return
        try:
            with torch.cuda.device(device):
                for start, stop in missing(pages(tensors), self._registered):
                    _register(start, stop, sum(tensor.nbytes for tensor in tensors))
                    self._registered.add((start, stop))
                    self._own.append((start, stop))
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        """Give up the pages that this table locked; no kernel may read it any more."""
        for start, stop in self._own:
            torch.cuda.cudart().cudaHostUnregister(start)
            self._registered.discard((start, stop))
        self._own = []


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


def _forget_error() -> None:
    """A refused call leaves its error for the next launch to report."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)

"""Host numbers on their way to the device: copies from a ring of pinned memory, in stream order (design.md 4.7)."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT = 128
"""Bytes between which copied tensors begin: kernels are specialised on alignment, and must not compile anew for it."""
SEGMENTS, SEGMENT_BYTES = 4, 1 << 18
"""A ring of 1 MiB: a segment holds a prefill step of 8,000 rows, or 2,000 updates of block tables."""


def pinned(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Page-locked host memory, which anybody may write whatever mode it is first needed in."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, pin_memory=True)


def send(target: Tensor, source: Tensor) -> None:
    """Copy between the device and pinned memory, in the order of the current CUDA stream; the host does not wait."""
    target.copy_(source, non_blocking=True)


class Staging:
    """Tensors of a CPU are where they are needed."""

    def copy(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """``parts``, on the CPU, as tensors without gaps on the device (on a CPU, themselves)."""
        return parts

    def write(self, target: Tensor, source: Tensor) -> None:
        """Copy ``source``, on the CPU, into ``target`` without gaps, of its shape and dtype."""
        target.copy_(source)


@dataclass
class _Segment:
    """``passed`` is recorded behind the last copy out of ``memory`` uint8 [bytes]."""

    memory: Tensor
    passed: torch.cuda.Event


class PinnedStaging(Staging):
    """Copies that the host does not wait for, each one transfer, all on one CUDA stream: that of every call.

    Segments are filled in turn. One is written again once all copies out of it have passed, which the host waits for
    only if the device is a whole ring behind; it grows to what must fit into it.
    """

    def __init__(self, device: torch.device, *, segments: int = SEGMENTS, size: int = SEGMENT_BYTES) -> None:
        self._device = device
        self._segments = [_Segment(pinned((size,), torch.uint8), torch.cuda.Event()) for _ in range(segments)]
        self._current = self._used = 0

    def copy(self, *parts: Tensor) -> tuple[Tensor, ...]:
        starts = [0, *accumulate(_aligned(part.nbytes) for part in parts)]
        memory = self._reserve(starts[-1])
        out = torch.empty(memory.shape, dtype=torch.uint8, device=self._device)
        for part, start in zip(parts, starts, strict=False):
            _shaped(memory, start, part).copy_(part)
        send(out, memory)
        return tuple(_shaped(out, start, part) for part, start in zip(parts, starts, strict=False))

    def write(self, target: Tensor, source: Tensor) -> None:
        assert target.is_contiguous() and target.shape == source.shape and target.dtype == source.dtype
        memory = _shaped(self._reserve(_aligned(source.nbytes)), 0, source)
        send(target, memory.copy_(source))

    def _reserve(self, size: int) -> Tensor:
        """The next ``size`` bytes of the ring."""
        if self._used + size > self._segments[self._current].memory.numel():
            self._segments[self._current].passed.record(torch.cuda.current_stream(self._device))
            following = (self._current + 1) % len(self._segments)
            segment = self._segments[following]
            segment.passed.synchronize()
            if size > segment.memory.numel():
                segment.memory = pinned((size,), torch.uint8)
            # Only now: whoever is interrupted while waiting must not find the segment open.
            self._current, self._used = following, 0
        start, self._used = self._used, self._used + size
        return self._segments[self._current].memory[start : self._used]


def staging_on(device: torch.device) -> Staging:
    """How numbers reach ``device``."""
    return PinnedStaging(device) if device.type == "cuda" else Staging()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _shaped(memory: Tensor, start: int, like: Tensor) -> Tensor:
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)

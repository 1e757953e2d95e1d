"""Side CUDA streams: work put beside the main one, and the proof that all of it came back (spec/decode.md A.3)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """One side CUDA stream; on a CPU the work runs where it stands, and forks and joins are counted all the same.

    ``open``: work was forked that the main CUDA stream has not waited for. What a fork wrote may be read after
    ``join`` only.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.forks = self.joins = 0
        self.open = False

    @contextmanager
    def fork(self, active: bool = True) -> Iterator[None]:
        """Run the body beside the main CUDA stream, after all that is on it so far; inline unless ``active``."""
        if not active:
            yield
            return
        self.open = True
        self.forks += 1
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def share(self, *tensors: Tensor) -> None:
        """Tell the allocator that tensors of the main CUDA stream are read by the forked work."""
        if self.stream is not None and self.open:
            for tensor in tensors:
                tensor.record_stream(self.stream)

    def join(self) -> None:
        """The main CUDA stream waits for the forked work; nothing to do if none is open."""
        if not self.open:
            return
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.open = False
        self.joins += 1


class SideStreams:
    """The side CUDA streams of one executor, shared by its layers.

    ``mhc``: the next coefficients, auxiliary means and what attention leaves in its window. ``inputs``: what attention
    needs besides its queries. ``shared_expert``: the shared expert. ``engram``: projections of the n-gram memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.mhc = SideStream("mhc", device)
        self.inputs = SideStream("inputs", device)
        self.shared_expert = SideStream("shared_expert", device)
        self.engram = SideStream("engram", device)

    @property
    def all(self) -> tuple[SideStream, ...]:
        """Every side CUDA stream."""
        return (self.mhc, self.inputs, self.shared_expert, self.engram)

    @property
    def open(self) -> list[str]:
        """Names of those with work that nobody has waited for."""
        return [stream.name for stream in self.all if stream.open]

    def join(self) -> None:
        """Wait for everything that is still open."""
        for stream in self.all:
            stream.join()

"""A device that runs late, on a CPU: what it is told waits until somebody waits for it."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from micro import make_runner
from torch import Tensor

from quickseek.engine import staging
from quickseek.engine.cycle import Cycle, Needs
from quickseek.engine.graphs import CudaGraphs, padded_sizes
from quickseek.engine.readback import PinnedReadbacks, _tensors
from quickseek.engine.runner import Runner


class LateDevice:
    """Stands for one CUDA stream. ``allocated`` counts pinned tensors, ``waits`` what the host had to wait for.

    ``patient`` False: waiting does nothing, which is the fault that its tests plant.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = self.allocated = self.waits = 0
        self.patient = True
        monkeypatch.setattr(torch.cuda, "Event", lambda: LateEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(staging, "pinned", self._pinned)
        monkeypatch.setattr(staging, "send", lambda target, source: self.queue.append(lambda: target.copy_(source)))

    def _pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        self.allocated += 1
        return torch.empty(shape, dtype=dtype)

    def run(self, until: int | None = None) -> None:
        """Run what was queued, up to command number ``until``."""
        until = len(self.queue) if until is None else until
        for command in self.queue[self.done : until]:
            command()
        self.done = max(self.done, until)


class LateEvent:
    """Passes once all that was queued before it has run."""

    def __init__(self, device: LateDevice) -> None:
        self.device, self.place = device, 0

    def record(self, stream: LateDevice) -> None:
        self.place = len(stream.queue)

    def synchronize(self) -> None:
        if self.place > self.device.done and self.device.patient:
            self.device.waits += 1
            self.device.run(self.place)


class RunAgainGraphs(CudaGraphs):
    """Graphs whose replay runs the recorded step again and, as a graph does, overwrites what it returned before."""

    def __init__(self, cycle: Cycle, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self._recording)
        super().__init__(cycle, sizes)

    def _captured(self, run: Callable[[], Any]) -> Any:
        def recorded() -> Any:
            self._recording = self._capturing = True
            try:
                return run()
            finally:
                self._recording = self._capturing = False

        first = recorded()
        return _Again(recorded, first), first


class _Again:
    """What a replay of ``run`` writes goes where its first run wrote."""

    def __init__(self, run: Callable[[], Any], first: Any) -> None:
        self.run, self.first = run, first

    def replay(self) -> None:
        for old, value in zip(_tensors(self.first), _tensors(self.run()), strict=True):
            old.copy_(value)


def replaying(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Runner:
    """A runner on a CPU whose decode steps are replayed by running them again."""
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None, query=lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(staging, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    runner = make_runner(**options)
    runner.graphs = RunAgainGraphs(runner.cycle, padded_sizes(runner.plan.max_num_seqs), monkeypatch)
    plain = Needs.of([])
    runner.graphs.capture([plain, replace(plain, sampled=True)])
    runner._readbacks = PinnedReadbacks(torch.device("cpu"))
    return runner

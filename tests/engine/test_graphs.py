"""How graphs are captured and which batches keep what they have on the device, with stand-ins for a GPU."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from micro import make_request, make_runner

from quickseek.engine import runner as runner_module
from quickseek.engine.cycle import Needs
from quickseek.engine.graphs import CudaGraphs

CPU = torch.device("cpu")


class _Graph:
    """A graph that tells when it is replayed."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def replay(self) -> None:
        self.events.append("replay")


def captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order, when graphs of one size and one kind of choice are captured."""
    events: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def recording(graph: _Graph, **options: object):  # type: ignore[no-untyped-def]
        events.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: _Graph(events))
    monkeypatch.setattr(torch.cuda, "graph", recording)
    cycle = SimpleNamespace(
        pools=SimpleNamespace(device=CPU, reach=64),
        verify=lambda slots, reach: events.append("V"),
        decide=lambda step, needs: events.append("D"),
        steps=2, specialized=0,
    )
    CudaGraphs(cycle, [2]).capture([Needs.of([])])  # type: ignore[arg-type]
    return events


def test_the_first_run_of_d_reads_what_a_replay_of_v_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    events = captured(monkeypatch)
    assert events == ["V", "capture", "V", "replay", "D", "capture", "D"]
    monkeypatch.setattr(_Graph, "replay", lambda self: None)
    assert captured(monkeypatch) != events


def test_a_batch_that_goes_on_keeps_its_slots_and_another_does_not() -> None:
    requests = [make_request([1, 2, 3]), make_request([4, 5])]
    for number, request in enumerate(requests):
        request.slot = number + 1
    first = batch = runner_module._Batch().next(requests, 3, CPU)
    for _ in range(runner_module.BATCH_REFRESH + 1):
        batch = batch.next(requests, 3, CPU)
    assert batch.age == 0 and batch.slots is first.slots and batch.slots.tolist() == [1, 2]
    assert batch.next(requests[:1], 3, CPU).slots.tolist() == [1]


def test_a_step_makes_its_gpu_the_current_one_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    runner = make_runner()
    runner.step()
    assert chosen == []
    runner.pools.device = torch.device("cuda", 1)
    runner.step()
    assert chosen == [torch.device("cuda", 1)]

"""How graphs are captured and which batches keep what they have on the device, with stand-ins for a GPU."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_device import replaying
from micro import GREEDY, alone, assert_nothing_leaks, finish_all, make_request, make_runner, tokens_of

from quickseek.engine import runner as runner_module
from quickseek.engine.cycle import Needs
from quickseek.engine.graphs import CudaGraphs, Recorder
from quickseek.engine.readback import Readbacks
from quickseek.engine.staging import Staging
from quickseek.model.context import SLOT_GROUP, ForwardContext
from quickseek.sampling_params import SamplingParams

CPU = torch.device("cpu")


class _Graph:
    """A graph that tells when it is replayed."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def replay(self) -> None:
        self.events.append("replay")


def install(monkeypatch: pytest.MonkeyPatch, events: list[str], captures: bool = True) -> None:
    """Stand-ins for PyTorch's graphs; ``captures``: whether PyTorch says so while it captures."""
    stream, under_way = SimpleNamespace(wait_stream=lambda other: None), [False]

    @contextmanager
    def recording(graph: _Graph, **options: object):  # type: ignore[no-untyped-def]
        events.append("capture")
        under_way[0] = captures
        try:
            yield
        finally:
            under_way[0] = False

    monkeypatch.setattr("quickseek.engine.graphs._free_streams", defaultdict(list))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: _Graph(events))
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: under_way[0])


def graphs_of(verify: Callable[[], object], decide: Callable[[], object] = lambda: None) -> CudaGraphs:
    cycle: Any = SimpleNamespace(
        pools=SimpleNamespace(device=CPU, reach=64),
        verify=lambda slots, reach: verify(),
        decide=lambda step, needs: decide(),
        steps=2, specialized=0,
    )  # fmt: skip
    return CudaGraphs(cycle, [2])


def captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order, when graphs of one size and one kind of choice are captured."""
    events: list[str] = []
    install(monkeypatch, events)
    graphs_of(lambda: events.append("V"), lambda: events.append("D")).capture([Needs.of([])])
    return events


def test_the_first_run_of_d_reads_what_a_replay_of_v_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    events = captured(monkeypatch)
    assert events == ["V", "capture", "V", "replay", "D", "capture", "D"]
    monkeypatch.setattr(_Graph, "replay", lambda self: None)
    assert captured(monkeypatch) != events


def test_a_context_says_what_pytorch_says_except_in_the_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def record() -> None:
        said.append((graphs.record(context).capturing, torch.cuda.is_current_stream_capturing()))

    context = replace(ForwardContext({}, {}), metadata={SLOT_GROUP: SimpleNamespace(num_prefills=0)})  # type: ignore[dict-item]
    said: list[tuple[bool, bool]] = []
    install(monkeypatch, [])
    graphs = graphs_of(record, record)
    graphs.capture([Needs.of([])])
    record()
    assert said == [(True, False), (True, True), (True, False), (True, True), (False, False)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(AssertionError, match="PyTorch captures: True, the engine: False"):
        record()
    install(monkeypatch, [], captures=False)
    with pytest.raises(AssertionError, match="PyTorch captures: False, the engine: True"):
        graphs_of(lambda: None).capture([Needs.of([])])


def test_what_goes_wrong_in_a_capture_says_where_and_leaves_the_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        runs.append(len(runs))
        if len(runs) == 2:
            raise MemoryError("planted")

    runs: list[int] = []
    install(monkeypatch, [])
    graphs = graphs_of(lambda: None, fail)
    with pytest.raises(MemoryError, match="planted") as caught:
        graphs.capture([Needs.of([])])
    assert caught.value.__notes__ == ["while the decode graphs for 2 requests were captured"]
    assert not graphs._recording and not graphs._capturing and graphs.decisions == []
    graphs.capture([Needs.of([])])
    assert len(graphs.decisions) == 1 and len(runs) == 4


def test_a_batch_that_goes_on_keeps_its_slots_and_another_does_not() -> None:
    requests = [make_request([1, 2, 3]), make_request([4, 5])]
    for number, request in enumerate(requests):
        request.slot = number + 1
    first = batch = runner_module._Batch().next(requests, 3, Staging())
    for _ in range(runner_module.BATCH_REFRESH + 1):
        batch = batch.next(requests, 3, Staging())
    assert batch.age == 0 and batch.slots is first.slots and batch.slots.tolist() == [1, 2]
    assert batch.next(requests[:1], 3, Staging()).slots.tolist() == [1]


def test_a_step_makes_its_gpu_the_current_one_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    runner = make_runner()
    runner.step()
    assert chosen == []
    runner.pools.device = torch.device("cuda", 1)
    runner.step()
    assert chosen == [torch.device("cuda", 1)]


# ------------------------------------------------------------------------------------------ lanes


PROMPTS = [list(range(20 + 9 * count, 20 + 10 * count)) for count in (3, 17, 8, 23, 5)]
EAGER_D = SamplingParams(
    max_tokens=9, temperature=0.9, seed=5, logprobs=2, min_tokens=4, presence_penalty=0.5, logit_bias={40: 2.0}
)


@pytest.mark.parametrize("drafts", [0, 3])
def test_replayed_steps_in_any_company_give_plain_decoding(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    other = replace(EAGER_D, ignore_eos=True)
    expected = tokens_of(make_runner(drafts=drafts), [make_request(PROMPTS[0], other)])[0]
    runner = replaying(monkeypatch, drafts=drafts, num_blocks=10)
    masked = make_request(PROMPTS[4], replace(GREEDY, temperature=1.0, regex="[ab]{4}", ignore_eos=False))
    free = [make_request(prompt, replace(GREEDY, max_tokens=30)) for prompt in PROMPTS[1:4]]
    mixed = [free[0], make_request(PROMPTS[0], other), free[1], masked, free[2]]
    found = tokens_of(runner, mixed)
    assert [found[0], found[2], found[4]] == [alone(prompt, 30) for prompt in PROMPTS[1:4]] and found[1] == expected
    assert masked.finish_reason == "stop" and runner.graphs is not None and runner.graphs.replays > 3
    assert sum(request.preemptions for request in mixed) > 0, "nothing was preempted"
    first, again = make_request(PROMPTS[3]), make_request(PROMPTS[3])
    for request in (first, again):
        assert tokens_of(runner, [request]) == [alone(PROMPTS[3])]
    assert again.cached_tokens > 0
    dropped, kept = make_request(PROMPTS[1]), make_request(PROMPTS[2])
    runner.add(dropped)
    runner.add(kept)
    for _ in range(4):
        runner.step()
    runner.abort(dropped.request_id)
    assert finish_all(runner)[kept.request_id] == alone(PROMPTS[2])
    assert_nothing_leaks(runner)
    runner._readbacks = Readbacks()
    assert tokens_of(runner, [make_request(PROMPTS[1])]) != [alone(PROMPTS[1])], "overwritten results are not noticed"


def test_recorders_that_live_have_streams_of_their_own_and_leave_them_to_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    device, other = torch.device("cuda", 101), torch.device("cuda", 102)
    first, second = Recorder(device), Recorder(device)
    streams = [first.stream, second.stream]
    assert streams[0] is not streams[1]
    del first
    third, elsewhere = Recorder(device), Recorder(other)
    assert third.stream is streams[0] and elsewhere.stream.device == other
    assert all(Recorder(device).stream is not one for one in streams), "theirs are taken"


def test_a_runner_whose_step_was_interrupted_hands_on_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = replaying(monkeypatch, drafts=2)
    for prompt in PROMPTS[:3]:
        runner.add(make_request(prompt))
    for _ in range(4):
        runner.step()
    new = runner.renewed()
    assert new.pools is runner.pools and new.graphs is runner.graphs and new.idle and not runner.idle
    assert new.scheduler is not runner.scheduler
    assert tokens_of(new, [make_request(prompt) for prompt in PROMPTS]) == [alone(prompt) for prompt in PROMPTS]
    assert_nothing_leaks(new)

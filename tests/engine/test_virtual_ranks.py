"""The whole engine on virtual ranks: one rank's tokens in exact arithmetic, one graph for all ranks' work."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_cases import written
from quickseek.config import DecodeConfig
from quickseek.decode.executor import SpecializedDecode
from quickseek.engine.cycle import Needs
from quickseek.engine.graphs import CudaGraphs, Recorder, VirtualRecorder
from quickseek.errors import RankFailure
from quickseek.llm import LLM
from quickseek.parallel.virtual import VirtualWorld, run_virtual
from quickseek.parallel.world import SoloWorld, World
from quickseek.sampling_params import SamplingParams

CPU = torch.device("cpu")
PROMPTS = [[0, *range(8, 8 + count)] for count in (3, 11, 18, 5)]
LENGTHS = (5, 2, 4, 3)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float64",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 20,
    "kv_cache_memory_bytes": 16 << 20,
    "rank_check_interval": 1,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("checkpoint"), "tiny-tp")


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> dict[str, Any]:
    """Tokens of requests of different lengths, two more than run at once, each of which joins as another leaves."""
    requests = [
        llm._requests([prompt], replace(GREEDY, max_tokens=count))[0]
        for prompt, count in zip(prompts, LENGTHS, strict=True)
    ]
    for number, request in enumerate(requests):
        # Ranks of one process count their requests together: what they compare must not name them apart.
        request.request_id = f"request {number}"
        llm.runner.add(request)
    at_once = set()
    while not llm.runner.idle:
        llm.runner.step()
        at_once.add(sum(request.slot is not None for request in requests))
    executor = llm.model.backbone.executor
    draft = None if executor is None else executor.draft
    return {
        "tokens": [request.output_ids for request in requests],
        "ends": [request.finish_reason for request in requests],
        "at once": sorted(at_once),
        "runs": (0 if executor is None else executor.runs, 0 if draft is None else draft.runs),
    }


def engine(world: World, directory: Path, drafts: int) -> LLM:
    options = OPTIONS | {"decode_backend": "stock", "num_speculative_tokens": drafts}
    return LLM(directory, world=world, tensor_parallel_size=world.size, **options)


def serve(world: World, directory: Path, drafts: int) -> list[dict[str, Any]]:
    """What the stock layers answer, and what the same model answers with an executor."""
    llm = engine(world, directory, drafts)
    stock = answers(llm)
    SpecializedDecode.for_target(llm.model, DecodeConfig())
    llm.runner = llm._runner()
    return [stock, answers(llm)]


def serve_unlike(world: World, directory: Path) -> None:
    """Rank 1 reads another first prompt than its peer."""
    prompts = [list(prompt) for prompt in PROMPTS]
    prompts[0][1] += world.rank
    answers(engine(world, directory, 0), prompts)


@cache
def alone(directory: Path) -> list[list[int]]:
    """What one rank without an executor or drafts answers."""
    found: list[list[int]] = answers(engine(SoloWorld(), directory, 0))["tokens"]
    return found


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_virtual_ranks_answer_as_one_rank_does(directory: Path, size: int, drafts: int) -> None:
    first, *others = run_virtual(serve, size, directory, drafts, seed=size + drafts)
    assert all(other == first for other in others)
    for found in first:
        assert found["tokens"] == alone(directory) and found["ends"] == ["length"] * len(PROMPTS)
        assert [len(answer) for answer in found["tokens"]] == list(LENGTHS)
        assert found["at once"][0] < OPTIONS["max_num_seqs"] == found["at once"][-1]
    stock, (runs, draft_runs) = first[0]["runs"], first[1]["runs"]
    assert stock == (0, 0) and runs > 3 and draft_runs == (runs if drafts else 0)


def test_a_rank_that_reads_another_prompt_is_noticed(directory: Path) -> None:
    """Negative control: what ranks decide is compared."""
    with pytest.raises(RankFailure, match="RankDisagreement: ranks disagree on what was scheduled"):
        run_virtual(serve_unlike, 2, directory)


# ------------------------------------------------------------------------------------------ one graph for all


class _Graph:
    """What a graph does, written down."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def replay(self) -> None:
        self.events.append("replay")


def install(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Stand-ins for PyTorch's graphs, which a capture on a thread must find as the one that began it."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    made, under_way = [0], [False]

    def pool() -> int:
        made[0] += 1
        return made[0]

    @contextmanager
    def recording(graph: _Graph, *, pool: int, stream: Any, capture_error_mode: str) -> Iterator[None]:
        events.append(f"begin {capture_error_mode}, pool {pool}")
        under_way[0] = True
        try:
            yield
        finally:
            under_way[0] = False
            events.append("end")

    @contextmanager
    def on(one: Any) -> Iterator[None]:
        assert one is stream
        yield

    monkeypatch.setattr("quickseek.engine.graphs._free_streams", defaultdict(list))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", pool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: _Graph(events))
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: under_way[0])


def capture(world: VirtualWorld, events: list[str], recorder: Callable[[VirtualWorld], Recorder]) -> None:
    """Capture V and D, which meet once in the middle, and run both."""

    def part(name: str) -> Callable[..., object]:
        def run(*_: object) -> str:
            events.append(f"{name}{world.rank}")
            world.barrier()
            events.append(f"{name.lower()}{world.rank}")
            return name

        return run

    cycle: Any = SimpleNamespace(
        pools=SimpleNamespace(device=CPU, reach=64), verify=part("V"), decide=part("D"), steps=0, specialized=0,
        count=lambda specialized: None, model=SimpleNamespace(world=world),
    )  # fmt: skip
    graphs = CudaGraphs(cycle, [2], recorder(world))
    graphs.capture([Needs.of([])])
    if world.rank == 0:
        events.append("captured")
    before = world.launches
    assert graphs.run(torch.tensor([1]), 8, Needs.of([])) == "D"
    assert world.launches > before, "what ranks that fail compare"


def captured(monkeypatch: pytest.MonkeyPatch, seed: int | None, recorder: Callable[[VirtualWorld], Recorder]) -> str:
    """What happens when two virtual ranks capture, in order."""
    events: list[str] = []
    install(monkeypatch, events)
    run_virtual(capture, 2, events, recorder, seed=seed)
    return " ".join(events)


def test_a_graph_begins_once_holds_all_ranks_work_and_is_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(name: str) -> str:
        run = f"{name}0 {name}1 {name.lower()}0 {name.lower()}1"
        return f"{run} begin relaxed, pool 1 {run} end"

    expected = f"{part('V')} replay {part('D')} captured replay replay"
    assert captured(monkeypatch, None, VirtualRecorder) == expected
    assert isinstance(Recorder.of(SimpleNamespace(device=CPU)), Recorder)  # type: ignore[arg-type]
    separate = captured(monkeypatch, None, lambda world: Recorder(world.device))
    assert separate != expected, "graphs of their own are not noticed"


@pytest.mark.parametrize("seed", range(4))
def test_in_any_order_of_turns_a_graph_holds_what_all_ranks_do(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    events = captured(monkeypatch, seed, VirtualRecorder)
    inside = [piece.split(" end")[0].split("pool 1 ")[1] for piece in events.split("begin relaxed, ")[1:]]
    assert [sorted(piece.split()) for piece in inside] == [["V0", "V1", "v0", "v1"], ["D0", "D1", "d0", "d1"]]
    assert events.count("replay") == 3

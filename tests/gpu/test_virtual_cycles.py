"""Whole models on virtual ranks of one GPU: graph cycles of a changing set of requests, all ranks' work in one graph.

QUICKSEEK_CYCLES: cycles of the longest runs.
"""

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compare import LogitDistance, assert_bits, assert_model, logit_distance
from engine_cases import CLOSE_CALL, OWN_SHARE, written
from judging import judged
from quickseek.engine.graphs import CudaGraphs
from quickseek.engine.request import Request, Status
from quickseek.errors import RankFailure
from quickseek.llm import LLM
from quickseek.ops.cache import SCRATCH
from quickseek.parallel.virtual import VirtualWorld, run_virtual
from quickseek.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

SHORT = 300
CYCLES = max(SHORT, int(os.environ.get("QUICKSEEK_CYCLES", "10000")))
CHECKS = 100
"""Cycles of the longest runs between two looks at logits; short runs look four times as often."""
FEW_REQUESTS, MANY_REQUESTS = 4, 8
"""The most requests at a time. Ranks divide the selections of MANY_REQUESTS."""
KEPT = 8
"""Tokens of an answer before something is spoiled."""
OPTIONS: dict[str, Any] = {"device": "cuda", "max_model_len": 256, "max_num_seqs": FEW_REQUESTS}
OPTIONS |= {"jit_warmup": False}
OPTIONS |= {"kv_cache_memory_bytes": 128 << 20, "enable_prefix_caching": False, "rank_check_interval": 16}
PROMPTS = [[0, *range(20 + number, 20 + number + count)] for number, count in enumerate((3, 40, 17, 120, 9, 64))]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
LIMIT_S = 1200.0
STOCK = LogitDistance(0.2, 1.5)
"""How far the executor's logits may be from those of the stock layers: the bound of tests/gpu/test_decode_gpu.py."""
ODD_ROW, FEW = 0.5, 0.05
"""A row whose median distance is beyond ODD_ROW is another row's or a turned choice of experts: at most FEW of them."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Miniatures that divide among ranks, by name."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return {name: written(folder, name) for name in ("tiny-tp", "mid")}


# ------------------------------------------------------------------------------------------ one rank


@dataclass
class Looks:
    """What was found at the cycles that were looked at: logits [rows, V] of the captured steps and of the stock ones.

    ``batches``: how many requests each of the replayed steps had. ``orders``: steps whose rows differ among each other.
    """

    captured: list[Tensor] = field(default_factory=list)
    stock: list[Tensor] = field(default_factory=list)
    batches: set[int] = field(default_factory=set)
    orders: int = 0


class WatchedGraphs:
    """Runs the graphs of an engine, and at every ``every``th step looks at what it replays.

    V is first run eagerly by the stock layers, then replayed, then replayed again in its cycle: it commits nothing, and
    what it writes into the caches the next run writes again.
    """

    def __init__(self, llm: LLM, every: int) -> None:
        assert llm.runner.graphs is not None
        self.llm, self.graphs, self.every = llm, llm.runner.graphs, every
        self.looks, self._run = Looks(), self.graphs.run
        self.graphs.run = self.run  # type: ignore[method-assign]

    def run(self, slots: Tensor, max_length: int, needs: Any) -> Any:
        count = slots.shape[0]
        self.looks.batches.add(count)
        if self.graphs.replays % self.every:
            return self._run(slots, max_length, needs)
        stock = self.stock_logits(slots, max_length)
        first = self.replayed_logits(slots)
        decision = self._run(slots, max_length, needs)
        again = captured_step(self.graphs, count)
        assert_bits(again, first, "a replay repeated")
        self.looks.orders += not torch.equal(first.roll(1, 0), first)
        self.looks.captured.append(again.cpu())
        self.looks.stock.append(stock.cpu())
        return decision

    def stock_logits(self, slots: Tensor, max_length: int) -> Tensor:
        """Logits [rows, V] of the step by the stock layers, eagerly."""
        backbone, head = self.llm.model.backbone, self.llm.model.head
        kept = backbone.executor, head.gather
        backbone.executor = head.gather = None
        try:
            return self.llm.runner.cycle.verify(slots, max_length).logits.flatten(0, 1).clone()
        finally:
            backbone.executor, head.gather = kept

    def replayed_logits(self, slots: Tensor) -> Tensor:
        """Logits [rows, V] of the step by its graph."""
        graphs, count = self.graphs, slots.shape[0]
        graphs._slots[:count] = slots
        graphs._slots[count:] = SCRATCH
        graphs._filled = None
        graphs._verify[padded(graphs, count)][0].replay()
        return captured_step(graphs, count)


def padded(graphs: CudaGraphs, count: int) -> int:
    return next(size for size in graphs.sizes if size >= count)


def captured_step(graphs: CudaGraphs, count: int) -> Tensor:
    """Logits [rows, V] that the last replay for ``count`` requests left."""
    return graphs._verify[padded(graphs, count)][1].logits[:count].flatten(0, 1).clone()


class Service:
    """One rank's engine under one to ``most`` requests at a time that come and go; every rank draws the same ones."""

    def __init__(self, llm: LLM, most: int, seed: int) -> None:
        self.llm, self.most, self.chooser = llm, most, random.Random(seed)
        self.numbers: list[int] = []
        self.all: list[Request] = []
        self.live: list[Request] = []
        self.wanted = self.ticks = self.aborted = 0

    def tick(self) -> list[Any]:
        """Let requests join and leave, run a tick, and give what it told: request, tokens so far, the last ones."""
        if self.ticks % 12 == 0:
            self.numbers = self.numbers or self.chooser.sample(range(1, self.most + 1), self.most)
            self.wanted = self.numbers.pop()
        self.ticks += 1
        self.live = [request for request in self.live if request.state is not Status.FINISHED]
        while len(self.live) < self.wanted:
            self.join()
        if len(self.live) > self.wanted and self.chooser.random() < 0.4:
            self.llm.runner.abort(self.live.pop(0).request_id)
            self.aborted += 1
        told = []
        for update in self.llm.runner.step():
            output = update.output
            assert output.error is None, output.error
            told.append((output.request_id, len(output.token_ids), output.token_ids[-8:]))
        return told

    def join(self) -> None:
        prompt = self.chooser.choice(PROMPTS)
        params = replace(GREEDY, max_tokens=self.chooser.randint(6, 60))
        (request,) = self.llm._requests([prompt], params)
        # Ranks of one process count their requests together: what they compare must not name them apart.
        request.request_id = f"request {len(self.all)}"
        self.llm.runner.add(request)
        self.all.append(request)
        self.live.append(request)


def assert_alike(told: Sequence[Any]) -> None:
    """Every rank told the same in a cycle."""
    for rank, other in enumerate(told):
        assert other == told[0], f"rank 0 told {told[0]}, rank {rank} {other}"


@dataclass
class Report:
    """What a rank saw of a run. ``divided``: selections that were captured, or warmed up, divided among ranks."""

    answers: list[tuple[list[int], list[int]]]
    looks: Looks
    cycles: int
    told: int
    aborted: int
    seconds: float
    executor_steps: bool
    divided: int
    token_map: Tensor


def serve(
    world: VirtualWorld, directory: Path, backend: str, drafts: int, cycles: int, every: int, most: int
) -> Report:
    """Run ``cycles`` graph cycles; all ranks compare what each of them told, cycle by cycle."""
    options = OPTIONS | {"max_num_seqs": most, "decode_backend": backend, "num_speculative_tokens": drafts}
    llm = LLM(directory, world=world, tensor_parallel_size=world.size, **options)
    watched, service, told = WatchedGraphs(llm, every), Service(llm, most, seed=drafts), 0
    begun = time.monotonic()
    while watched.graphs.replays < cycles:
        here = service.tick()
        assert_alike(world.gather_object(here))
        told += len(here)
    seconds = time.monotonic() - begun
    for request in service.live:
        llm.runner.abort(request.request_id)
    while not llm.runner.idle:
        llm.runner.step()
    return Report(
        answers=[(request.prompt_ids, request.output_ids) for request in service.all if request.output_ids],
        looks=watched.looks,
        cycles=watched.graphs.replays,
        told=told,
        aborted=service.aborted,
        seconds=seconds,
        executor_steps=all(watched.graphs._specialized.values()),
        divided=0 if llm.executor is None or llm.executor.row_shard is None else llm.executor.row_shard.runs,
        token_map=llm.model.backbone.hashes.token_map.cpu(),
    )


# ------------------------------------------------------------------------------------------ what is asked of a run


def longest(answers: Sequence[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers without those that only begin another answer to the same prompt."""
    kept: list[tuple[list[int], list[int]]] = []
    for prompt, answer in sorted(answers, key=lambda pair: (pair[0], pair[1]), reverse=True):
        # In this order what an answer begins comes right before it.
        if not kept or kept[-1][0] != prompt or kept[-1][1][: len(answer)] != answer:
            kept.append((prompt, answer))
    return kept


def assert_plausible(behind: Sequence[Tensor]) -> None:
    """The reference could have given every answer, whose tokens are ``behind`` its best ones (``judging``); prints how
    often it would have chosen the very token."""
    tokens, worst = torch.cat(list(behind)), max(float(one.mean()) for one in behind)
    own, far = float((tokens == 0).double().mean()), float((tokens >= CLOSE_CALL).double().mean())
    print(f"{len(behind)} answers: {own:.1%} the reference's own, {far:.2%} far behind, an answer's mean {worst:.2f}")
    assert own > OWN_SHARE and far < 0.005, f"{own:.1%} the reference's own, {far:.2%} far behind"
    assert worst < 1.0, f"an answer is {worst:.2f} behind in the mean"


def assert_logits(captured: Tensor, stock: Tensor) -> None:
    """*model* equality of all rows [n, V], and no more odd rows than few."""
    assert_model(captured, stock, STOCK)
    medians = ((captured - stock).abs() / stock.std()).median(1).values
    odd = float((medians > ODD_ROW).double().mean())
    print(f"{captured.shape[0]} rows: {logit_distance(captured, stock)}, {odd:.2%} odd")
    assert odd <= FEW, f"{odd:.2%} of the rows are odd"


def check(directory: Path, size: int, backend: str, drafts: int, cycles: int, most: int = FEW_REQUESTS) -> Report:
    """Run and judge; what is printed are the figures of the run."""
    every = CHECKS if cycles > SHORT else CHECKS // 4
    report: Report = run_virtual(
        serve, size, directory, backend, drafts, cycles, every, most, device="cuda", timeout_s=LIMIT_S
    )[0]
    print(
        f"{directory.name}, TP {size}, {backend}, {drafts} drafts: {report.cycles} cycles, "
        f"{report.cycles / report.seconds:.0f} a second, {report.aborted} answers cut short"
    )
    assert report.cycles >= cycles and report.told > cycles // 2
    assert report.executor_steps == (backend == "latency_specialized")
    looks = report.looks
    assert looks.batches == set(range(1, most + 1)), "not every number of requests ran"
    assert len(looks.captured) >= cycles // every and looks.orders > 0
    captured, stock = torch.cat(looks.captured).double(), torch.cat(looks.stock).double()
    assert_logits(captured, stock)
    with pytest.raises(AssertionError, match="distance"):
        assert_logits(captured.roll(1, 0), stock)
    answers, begun = longest(report.answers), time.monotonic()
    behind = judged(directory, report.token_map, answers)
    seconds = time.monotonic() - begun
    print(f"{len(report.answers)} answers, {len(answers)} of them different, all judged in {seconds:.0f} s")
    assert_plausible(behind)
    backwards = [(prompt, answer[::-1]) for prompt, answer in answers[:8]]
    with pytest.raises(AssertionError, match="behind"):
        assert_plausible(judged(directory, report.token_map, backwards))
    return report


# ------------------------------------------------------------------------------------------ the runs


def test_virtual_ranks_replay_the_stock_layers(checkpoints: dict[str, Path]) -> None:
    check(checkpoints["tiny-tp"], 2, "stock", 3, SHORT)


@pytest.mark.parametrize("drafts", [0, 3])
def test_thousands_of_cycles_of_two_virtual_ranks(checkpoints: dict[str, Path], drafts: int) -> None:
    pytest.importorskip("cutlass")
    check(checkpoints["tiny-tp"], 2, "latency_specialized", drafts, CYCLES)


@pytest.mark.parametrize(
    ("name", "size", "drafts"),
    [("tiny-tp", 4, 0), ("tiny-tp", 4, 3), ("tiny-tp", 8, 3), ("mid", 2, 3), ("mid", 4, 0), ("mid", 8, 3)],
)
def test_hundreds_of_cycles_of_more_virtual_ranks(
    checkpoints: dict[str, Path], name: str, size: int, drafts: int
) -> None:
    pytest.importorskip("cutlass")
    check(checkpoints[name], size, "latency_specialized", drafts, SHORT)


@pytest.mark.parametrize("drafts", [0, 3])
def test_selections_that_virtual_ranks_divide(checkpoints: dict[str, Path], drafts: int) -> None:
    pytest.importorskip("cutlass")
    report = check(checkpoints["tiny-tp"], 2, "latency_specialized", drafts, SHORT, MANY_REQUESTS)
    assert report.divided > 0


# ------------------------------------------------------------------------------------------ negative controls


def test_a_rank_that_tells_another_token_is_noticed() -> None:
    told = [("request 0", 3, [4, 5, 6])]
    assert_alike([told, list(told)])
    with pytest.raises(AssertionError, match="rank 1"):
        assert_alike([told, [("request 0", 3, [4, 5, 7])]])


def test_only_answers_that_begin_others_are_left_out() -> None:
    answers = [([1], [5, 6]), ([1], [5, 6, 7]), ([2], [5, 6]), ([1], [5, 8]), ([1], [5, 6])]
    assert sorted(longest(answers)) == [([1], [5, 6, 7]), ([1], [5, 8]), ([2], [5, 6])]


def spoil(world: VirtualWorld, directory: Path, backend: str) -> list[list[int]]:
    """An answer twice; and again while rank 1 loses its routed experts, from the weights that graphs read."""
    options = OPTIONS | {"tensor_parallel_size": world.size, "decode_backend": backend, "rank_check_interval": 0}
    llm = LLM(directory, world=world, **options)
    params = replace(GREEDY, max_tokens=32)
    found = [llm.generate(PROMPTS[:1], params)[0].token_ids for _ in range(2)]
    for _, output in llm.stream(PROMPTS[0], params):
        if world.rank == 1 and len(output.token_ids) == KEPT:
            for layer in llm.model.backbone.layers:
                for parameter in layer.ffn.experts.parameters():
                    parameter.data.view(torch.uint8).zero_()
        last = output.token_ids
    return [*found, last]


@pytest.mark.parametrize("backend", ["stock", "latency_specialized"])
def test_a_graph_holds_the_work_of_every_rank(checkpoints: dict[str, Path], backend: str) -> None:
    """Negative control of all runs: what another rank than the first has in its memory changes the tokens of all."""
    if backend == "latency_specialized":
        pytest.importorskip("cutlass")
    first, second = run_virtual(spoil, 2, checkpoints["tiny-tp"], backend, device="cuda", timeout_s=LIMIT_S)
    plain, again, spoiled = first
    assert first == second and plain == again and len(spoiled) == len(plain)
    assert spoiled[:KEPT] == plain[:KEPT] and spoiled != plain


def fail_in_a_capture(world: VirtualWorld, directory: Path) -> None:
    llm = LLM(directory, world=world, tensor_parallel_size=world.size, decode_backend="stock", **OPTIONS)
    graphs, cycle = llm.runner.graphs, llm.runner.cycle
    assert graphs is not None

    def verify() -> Any:
        if world.rank == 1 and torch.cuda.is_current_stream_capturing():
            raise MemoryError("planted")
        return cycle.verify(graphs._slots, cycle.pools.reach)

    with torch.inference_mode():
        graphs._captured(verify)


def test_a_rank_that_fails_in_a_capture_is_named_and_the_gpu_serves_on(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(RankFailure, match="planted") as caught:
        run_virtual(fail_in_a_capture, 2, checkpoints["tiny-tp"], device="cuda", timeout_s=LIMIT_S)
    assert caught.value.rank == 1
    check(checkpoints["tiny-tp"], 2, "stock", 0, SHORT)

"""Ranks that select each for its share of the requests select what the stock layers do (spec/decode.md F.3)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from decode_runs import Requests, Seen, assert_same, build
from torch import Tensor

from compare import assert_float64
from model_helpers import config_of, differs, forward, prompt
from quickseek import LLM, SamplingParams
from quickseek.checkpoint.miniature import write_miniature
from quickseek.config import DecodeConfig
from quickseek.decode.executor import SpecializedDecode
from quickseek.decode.gates import GATES, ROW_SHARD_MIN_REQUESTS, Gates, shards_rows, step_gates
from quickseek.decode.row_shard import RowShard
from quickseek.engine.graphs import EagerGraphs
from quickseek.model.attention import Attention
from quickseek.model.causal_lm import CausalLM
from quickseek.model.context import ForwardContext, GroupMetadata
from quickseek.ops.cache import SCRATCH
from quickseek.ops.rows import StepRows
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import SoloWorld, World

TAKEN = ((1,) * 8, (2,) * 8, (6,) * 8, (1,) * 16, (3,) * 16)
"""Rows of each request of steps that 2 and 4 ranks divide: 8 and 16 requests, of one row and of several."""
LEFT = ((1,) * 7, (3,) * 4, (2,) * 6, (1,) * 9, (1,) * 11, (1, 3) * 4)
"""Steps that they do not: too few requests, a number that ranks do not divide, requests of unequal rows."""
STEPS = {2: (TAKEN, LEFT, ("on", "off")), 4: (TAKEN[:1] + TAKEN[3:], (LEFT[2], LEFT[5]), ("on",))}
"""By ranks: steps that they divide, steps that they do not, and executors. Four take what tells them from two."""
SOURCES = 3
"""Index sources of the miniature: layers 2, 4 (the candidate source) and 6."""
REQUESTS = 16

Selected = dict[str, Tensor]
"""What attention saw at each index source, rows sorted: "lists 2", "candidates 4"."""


@dataclass
class Run:
    """Decode steps by one rank, and at each: how many selections were divided, and how many gathers were fused."""

    seen: Seen = field(default_factory=Seen)
    selected: list[Selected] = field(default_factory=list)
    divided: list[int] = field(default_factory=list)
    fused: list[int] = field(default_factory=list)


@contextmanager
def selections_of(into: list[Selected]) -> Iterator[None]:
    """Add one entry a step, of what was published by the time each index source attends."""
    original = Attention.attended

    def attended(self: Attention, latent: Tensor, kv: Tensor, shared: Any, context: ForwardContext) -> Tensor:
        if self.indexer is not None:
            layer = self.indexer.layer
            if layer == 2:
                into.append({})
            into[-1][f"lists {layer}"] = shared.lists.sort(-1).values
            if layer == 4:
                into[-1][f"candidates {layer}"] = shared.candidates.sort(-1).values
        return original(self, latent, kv, shared, context)

    Attention.attended = attended  # type: ignore[method-assign]
    try:
        yield
    finally:
        Attention.attended = original  # type: ignore[method-assign]


def run(model: CausalLM, recorded: bool, shapes: Sequence[Sequence[int]], shard: RowShard | None) -> Run:
    found, requests = Run(), Requests(model, recorded, REQUESTS)
    for counts in shapes:
        before = (0, 0) if shard is None else (shard.runs, shard.fused)
        with selections_of(found.selected):
            requests.decode(counts, found.seen)
        found.divided.append(0 if shard is None else shard.runs - before[0])
        found.fused.append(0 if shard is None else shard.fused - before[1])
    return found


def swapped(self: RowShard, local: Tensor) -> Tensor:
    """The planted mistake: the ranks' parts stand one place on."""
    return self.world.all_gather(local).roll(local.shape[0], 0)


def runs(world: World, shapes: Sequence[Sequence[int]], kinds: Sequence[str]) -> dict[str, Run]:
    """The stock layers' run, and those of executors: "on", "off", "six" (the fewest requests) and "swapped"."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        model = build(config_of("tiny-tp"), world)
        found = {"stock": run(model, False, shapes, None)}
        for kind in kinds:
            gates = replace(GATES["cpu"], row_shard=6) if kind == "six" else None
            off = ("row_shard",) if kind == "off" else ()
            executor = SpecializedDecode.for_target(model, DecodeConfig(off=off), gates=gates)
            assert (executor.row_shard is None) == (kind == "off")
            with pytest.MonkeyPatch.context() as patch:
                if kind == "swapped":
                    patch.setattr(RowShard, "gather", swapped)
                found[kind] = run(model, True, shapes, executor.row_shard)
            assert executor.runs == len(shapes) and executor.streams.open == []
            model.backbone.executor = None
    return found


def assert_selected(found: Run, wanted: Run) -> None:
    assert len(found.selected) == len(wanted.selected)
    for step, (ours, theirs) in enumerate(zip(found.selected, wanted.selected, strict=True)):
        assert ours.keys() == theirs.keys() == {"lists 2", "lists 4", "lists 6", "candidates 4"}
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), f"{name} of step {step}"


@pytest.fixture(scope="module", params=STEPS)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Run]]:
    taken, left, kinds = STEPS[request.param]
    return spawn(runs, request.param, (*taken, *left), kinds, timeout_s=400)


def test_logits_states_drafts_and_selections_are_those_of_the_stock_layers_with_the_path_on_and_off(ranks):
    for rank in ranks:
        for kind in STEPS[len(ranks)][2]:
            assert_same(rank[kind].seen, rank["stock"].seen)
            assert_selected(rank[kind], rank["stock"])


def test_enough_requests_of_equal_rows_are_divided_at_every_source_and_gathered_by_the_fused_kernel(ranks):
    taken, left, _ = STEPS[len(ranks)]
    for rank in ranks:
        assert rank["on"].divided == [SOURCES] * len(taken) + [0] * len(left)
        # Lists of three layers, and the candidate blocks of one.
        assert rank["on"].fused == [SOURCES + 1] * len(taken) + [0] * len(left)
        assert "off" not in rank or rank["off"].divided == [0] * len(taken + left)


def test_selections_of_the_steps_choose_and_are_restricted_by_candidates(ranks):
    """Else equal selections would show nothing."""
    last = ranks[0]["stock"].selected[STEPS[len(ranks)][0].index((1,) * 16)]
    assert last["lists 6"].shape[1] == 8 and last["candidates 4"].shape[1] == 4
    assert not torch.equal(last["lists 2"], last["lists 6"])
    per_row = {tuple(row) for row in last["lists 4"].tolist()}
    assert len(per_row) > 12


def test_ranks_parts_in_the_wrong_places_are_noticed():
    """Negative control of the comparisons."""
    for rank in spawn(runs, 2, ((1,) * 8,), ("swapped",), timeout_s=200):
        assert rank["swapped"].divided == [SOURCES]
        assert differs(rank["swapped"].seen.logits[0], rank["stock"].seen.logits[0])
        with pytest.raises(AssertionError):
            assert_selected(rank["swapped"], rank["stock"])


def test_the_fewest_requests_are_the_gates():
    for rank in spawn(runs, 2, ((2,) * 6, (1,) * 4), ("six",), timeout_s=200):
        assert rank["six"].divided == [SOURCES, 0]
        assert_same(rank["six"].seen, rank["stock"].seen)
        assert_selected(rank["six"], rank["stock"])


# ---------------------------------------------------------------------------------------------- padded batches


def padded_step(requests: Requests, real: int, total: int, count: int, start: int) -> tuple[Tensor, Selected]:
    """Logits of ``real`` requests of ``count`` rows, and selections of all, with rows of scratch up to ``total``."""
    state, slots = requests.state, requests.slots[:real]
    starts = [state.length(slot) for slot in slots] + [start] * (total - real)
    rows = StepRows.build(starts, [count] * total)
    table = torch.tensor([[slot] for slot in slots] + [[SCRATCH]] * (total - real))
    metadata = {name: GroupMetadata(rows, table, 0) for name in state.context(slots, [1] * real).metadata}
    context = ForwardContext(metadata, state.caches)
    context = EagerGraphs().record(context) if requests.recorded else context
    ids = [requests.ids[slot][n : n + count] for slot, n in zip(slots, starts, strict=False)]
    selected: list[Selected] = []
    with selections_of(selected):
        hidden, _ = forward(requests.model, torch.cat([*ids, prompt((total - real) * count)]), context)
    return requests.model.logits(hidden)[: real * count], {n: t[: real * count] for n, t in selected[0].items()}


def padded(world: World) -> dict[tuple[int, int, int], tuple[Any, Any, int]]:
    """By (requests, rows of each, first position of scratch): stock and executor, and selections divided."""
    torch.set_num_threads(1)
    found = {}
    with torch.inference_mode():
        for case in ((5, 1, 0), (5, 2, 21), (1, 6, 40)):
            real, count, start = case
            model = build(config_of("tiny-tp"), world)
            stock = padded_step(Requests(model, False), real, 8, count, start)
            executor = SpecializedDecode.for_target(model, DecodeConfig())
            ours = padded_step(Requests(model, True), real, 8, count, start)
            assert executor.row_shard is not None
            found[case] = (stock, ours, executor.row_shard.runs)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_rows_of_scratch_that_fill_a_batch_are_divided_too_and_change_nothing(size):
    for rank in spawn(padded, size, timeout_s=200):
        for (real, count, _), (stock, ours, divided) in rank.items():
            assert divided == SOURCES
            assert stock[0].shape[0] == real * count and bool(stock[0].isfinite().all())
            assert_float64(ours[0], stock[0], f"{real} requests of {count} rows")
            for name, tensor in stock[1].items():
                assert torch.equal(ours[1][name], tensor), name


# ---------------------------------------------------------------------------------------------- through the engine


def answers(world: World, directory: str, backend: str) -> tuple[list[list[int]], int]:
    """Greedy answers to nine prompts, of which eight decode together; selections that were divided."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {
        "dtype": "float64",
        "max_model_len": 64,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
    }
    llm = LLM(
        directory,
        world=world,
        tensor_parallel_size=world.size,
        decode_backend=backend,
        num_speculative_tokens=3,
        **options,
    )
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[0, *range(8, 11 + 4 * number)] for number in range(9)]
    found = [output.token_ids for output in llm.generate(prompts, params)]
    shard = None if llm.executor is None else llm.executor.row_shard
    return found, 0 if shard is None else shard.runs


def test_answers_of_a_full_batch_are_those_of_the_stock_decode_on_one_rank(tmp_path):
    directory = str(tmp_path / "tiny-tp")
    write_miniature(directory, "tiny-tp")
    wanted, divided = answers(SoloWorld(), directory, "stock")
    assert divided == 0
    for found, divided in spawn(answers, 2, directory, "latency_specialized", timeout_s=200):
        assert found == wanted
        assert divided >= SOURCES and divided % SOURCES == 0


# ---------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("rows", "requests", "ranks", "taken"),
    [
        (8, 8, 2, True),
        (48, 8, 4, True),
        (384, 64, 8, True),
        (8, 8, 8, True),
        (8, 8, 1, False),
        (7, 7, 7, False),
        (6, 6, 2, False),
        (9, 9, 2, False),
        (10, 10, 4, False),
        (17, 8, 2, False),
    ],
)
def test_the_choice_reads_rows_requests_and_ranks(rows, requests, ranks, taken):
    assert shards_rows(rows, requests, ranks, ROW_SHARD_MIN_REQUESTS) is taken
    assert not shards_rows(rows, requests, ranks, 0)


@pytest.mark.parametrize("kind", GATES)
def test_the_least_batch_is_eight_requests_on_every_kind_of_device_and_off_is_never(kind):
    assert GATES[kind].row_shard == ROW_SHARD_MIN_REQUESTS == 8
    assert GATES[kind].without(("row_shard",)).row_shard == 0


def test_one_rank_has_no_peers_to_divide_with_and_a_draft_pass_selects_nothing():
    executor = SpecializedDecode.for_target(build(config_of("tiny-tp")), DecodeConfig(), gates=Gates(row_shard=1))
    assert executor.row_shard is None
    assert not step_gates(40, executor).row_shard


def test_requests_of_unequal_rows_are_not_divided_although_their_number_divides_the_rows():
    shard = RowShard(8, 2, SoloWorld())
    shard.world.size = 2
    assert shard.takes(StepRows.build([5, 9], [2, 2]))
    assert not shard.takes(StepRows.build([5, 9], [1, 3]))
    assert not shard.takes(StepRows.build([5], [2]))


# ---------------------------------------------------------------------------------------------- the gather


def gathered(world: World) -> dict[str, tuple[Tensor, int]]:
    """What ranks make of numbers that say whose they are, by shape, and how many gathers were fused."""
    found = {}
    for name, shape in {"pairs": (2, 4), "odd": (1, 3), "none": (4, 0), "large": (200, 8)}.items():
        shard = RowShard(8, 8, world)
        local = torch.arange(shape[0] * shape[1]).view(shape) + 1000 * world.rank - 1
        found[name] = shard.gather(local), shard.fused
    return found


def test_numbers_arrive_whole_and_sizes_that_the_fused_kernel_does_not_take_go_through_the_world():
    for rank in spawn(gathered, 2):
        for name, (shape, fused) in {"pairs": ((2, 4), 1), "odd": ((1, 3), 0), "large": ((200, 8), 0)}.items():
            numbers = torch.arange(shape[0] * shape[1]).view(shape) - 1
            assert torch.equal(rank[name][0], torch.cat((numbers, numbers + 1000))), name
            assert rank[name][1] == fused
        assert rank["none"][0].shape == (8, 0) and rank["none"][1] == 0


def shares(world: World) -> tuple[StepRows, StepRows]:
    rows = StepRows.build([3, 50, 7, 11, 20, 1, 2, 9], [3] * 8)
    return rows, RowShard(8, 8, world).rows(rows)


@pytest.mark.parametrize("size", [2, 4])
def test_a_share_is_a_step_of_its_own_requests(size):
    each = 8 // size
    for rank, (whole, share) in enumerate(spawn(shares, size)):
        wanted = StepRows.build(whole.starts[rank * each : (rank + 1) * each].tolist(), [3] * each)
        for name in ("positions", "requests", "first_rows", "starts", "ends"):
            assert torch.equal(getattr(share, name), getattr(wanted, name)), name
        # The host's bound of the whole step: kernels of all ranks give lists of one width.
        assert share.max_length == whole.max_length

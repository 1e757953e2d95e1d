"""The fused collectives with all ranks on one GPU: bits across ranks, float64, adversarial inputs, time-outs."""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from collectives_cases import (
    ADVERSARIAL,
    KINDS,
    Case,
    check,
    check_copy,
    concurrent,
    make_case,
    make_ranks,
    phased,
    routed_arguments,
    same_bits,
    special,
)
from torch import Tensor

from quickseek.errors import CollectiveTimeout
from quickseek.ops.collectives import AllReduceMHC
from quickseek.ops.collectives.spec import Routed
from quickseek.parallel.fabric import LoopbackFabric

Runner = Callable[[Any, Any, Any, Any], list[Any]]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

HIDDEN, STREAMS, CAPACITY = 5120, 4, 160
SENTINEL = -0x8000
MIXED_CALLS = 3_334
"""At each of three numbers of ranks: above 10,000 together."""


def streams_for(count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream() for _ in range(count)]


@pytest.mark.parametrize("two_shot", [False, True], ids=["one-shot", "two-shot"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_ranks_hold_the_same_bits_and_they_are_right(ranks: int, two_shot: bool) -> None:
    options = {"two_shot_rows": 1} if two_shot else {"two_shot_rows": CAPACITY + 1}
    instances = make_ranks(ranks, HIDDEN, STREAMS, CAPACITY, **options)
    for seed, rows in enumerate((1, ranks - 1, ranks, ranks + 1, 31, 32, 33, 127, 128, 129, CAPACITY)):
        for kind in KINDS:
            for finalize in (False, True):
                case = make_case(ranks, rows, HIDDEN, STREAMS, seed, kind=kind, finalize=finalize)
                results = phased(instances, case)
                for rank in range(ranks):
                    check(case, rank, results[rank])
                    assert same_bits(results[0], results[rank])


@pytest.mark.parametrize(
    ("hidden", "streams"), [(64, 1), (264, 2), (1024, 4), (2048, 3), (4096, 8), (7168, 4), (16384, 4)]
)
def test_other_widths_and_stream_counts_are_right(hidden: int, streams: int) -> None:
    instances = make_ranks(2, hidden, streams, 40)
    kinds = KINDS if hidden % 128 == 0 else ("plain", "residual")
    for seed, kind in enumerate(kinds):
        for finalize in (False, True):
            case = make_case(2, 5, hidden, streams, seed, kind=kind, finalize=finalize)
            results = phased(instances, case)
            for rank in range(2):
                check(case, rank, results[rank])
            assert same_bits(results[0], results[1])
            waited = concurrent(instances, case, streams_for(2))
            assert all(same_bits(one, other) for one, other in zip(results, waited, strict=True))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_form_gives_the_same_bits(ranks: int) -> None:
    one_shot = make_ranks(ranks, HIDDEN, STREAMS, 48, two_shot_rows=49)
    two_shot = make_ranks(ranks, HIDDEN, STREAMS, 48, two_shot_rows=1)
    replayed = make_ranks(ranks, HIDDEN, STREAMS, 48, two_shot_rows=49, replay_multicast=True)
    owners_replayed = make_ranks(ranks, HIDDEN, STREAMS, 48, two_shot_rows=1, replay_multicast=True)
    side = streams_for(ranks)
    for seed in range(6):
        case = make_case(ranks, 1 + 8 * seed, HIDDEN, STREAMS, seed, kind=KINDS[seed % 3], finalize=seed % 2 == 1)
        expected = phased(one_shot, case)
        for form in (phased(two_shot, case), phased(replayed, case), phased(owners_replayed, case)):
            assert all(same_bits(one, other) for one, other in zip(expected, form, strict=True))
        for instances in (one_shot, replayed):
            waited = concurrent(instances, case, side)
            assert all(same_bits(one, other) for one, other in zip(expected, waited, strict=True))


def test_one_rank_needs_no_mailbox() -> None:
    (instance,) = make_ranks(1, HIDDEN, STREAMS, 8)
    for seed, kind in enumerate(KINDS):
        for finalize in (False, True):
            case = make_case(1, 8, HIDDEN, STREAMS, seed, kind=kind, finalize=finalize)
            (result,) = concurrent([instance], case, streams_for(1))
            check(case, 0, result)


@pytest.mark.parametrize("two_shot", [False, True], ids=["one-shot", "two-shot"])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_no_payload_is_taken_for_an_empty_slot(name: str, two_shot: bool) -> None:
    ranks, rows = 4, 5
    instances = make_ranks(ranks, HIDDEN, STREAMS, 8, two_shot_rows=1 if two_shot else 9, timeout_s=2.0)
    plain = make_case(ranks, rows, HIDDEN, STREAMS, 3)
    case = replace(plain, partials=special(ranks, rows, HIDDEN, ADVERSARIAL[name]))
    for _ in range(4):
        results = phased(instances, case)
        torch.cuda.synchronize()
        instances[0].implementation.watchdog.check()
        assert all(same_bits(results[0], result) for result in results)
    partials = torch.stack(case.partials).float()
    if partials.isfinite().all():
        check(case, 0, results[0])
    else:
        assert torch.equal(results[0][0].isnan().any(1), _nan_sums(case.partials))


def _nan_sums(partials: Sequence[Tensor]) -> Tensor:
    """Where the sum of ranks is NaN, or infinite and so NaN after mixing streams of either sign or weight."""
    total = torch.zeros_like(partials[0], dtype=torch.float32)
    for part in partials:
        total = total + part.float()
    return total.isnan()


def test_underflow_to_negative_zero_in_finalize_does_not_hang() -> None:
    instances = make_ranks(2, HIDDEN, STREAMS, 4, timeout_s=2.0)
    case = make_case(2, 4, HIDDEN, STREAMS, 1, finalize=True)
    assert case.routed is not None
    tiny = torch.full_like(case.routed[0].gemm2_permuted, -(2.0**-100))
    weights = torch.full_like(case.routed[0].expert_weights, 2.0**-45)
    routed = [
        replace(r, gemm2_permuted=tiny, expert_weights=weights, shared_output=r.shared_output * 0.0)
        for r in case.routed
    ]
    results = phased(instances, replace(case, routed=routed, partials=[r.shared_output for r in routed]))
    torch.cuda.synchronize()
    instances[0].implementation.watchdog.check()
    assert same_bits(results[0], results[1])


def test_an_absent_expert_is_never_read() -> None:
    instances = make_ranks(2, HIDDEN, STREAMS, 4)
    case = make_case(2, 4, HIDDEN, STREAMS, 2, finalize=True)
    assert case.routed is not None
    rows = torch.full_like(case.routed[0].gemm2_permuted, torch.nan)
    absent = torch.full_like(case.routed[0].expanded_idx_to_permuted_idx, -1)
    routed = [replace(r, gemm2_permuted=rows, expanded_idx_to_permuted_idx=absent) for r in case.routed]
    results = phased(instances, replace(case, routed=routed))
    check(replace(case, routed=None), 0, results[0])
    empty = [replace(r, gemm2_permuted=rows[:0]) for r in routed]
    assert same_bits(results[0], phased(instances, replace(case, routed=empty))[0])


def test_the_mxfp8_copy_follows_the_a8_rule_at_its_borders() -> None:
    (instance,) = make_ranks(1, HIDDEN, 1, 130)
    case = make_case(1, 130, HIDDEN, 1, 5, kind="quantize")
    gain = case.boundary["norm_weight"]
    gain[:32], gain[32:64], gain[64:96] = 0.0, 1e-6, 3e38
    gain[96], gain[128], gain[160] = torch.nan, torch.inf, -torch.inf
    _, layer_input = instance(case.partials[0], **case.arguments(0))
    check_copy(layer_input, *case.outputs[0])
    case.outputs[0][1][0] ^= 1
    with pytest.raises(AssertionError, match="scales"):
        check_copy(layer_input, *case.outputs[0])


def test_a_planted_difference_of_one_bit_is_noticed() -> None:
    instances = make_ranks(2, HIDDEN, STREAMS, 8)
    case = make_case(2, 8, HIDDEN, STREAMS, 11)
    results = phased(instances, case)
    check(case, 0, results[0])
    wrong = results[1][0].clone()
    wrong.view(torch.int16)[3, 2, 100] ^= 1
    assert not same_bits(results[0], (wrong, results[1][1]))
    wrong[3, 2, 100] *= 1.02
    with pytest.raises(AssertionError, match="streams off"):
        check(case, 1, (wrong, results[1][1]))
    assert results[1][1] is not None
    shifted = results[1][1].clone()
    shifted.view(torch.int16)[0, 0] += 3
    with pytest.raises(AssertionError, match="ulp"):
        check(case, 1, (results[1][0], shifted))


def test_a_stale_payload_in_a_slot_is_noticed() -> None:
    """The negative control of every test that repeats calls: what another call left in a slot shows in the result."""
    instances = make_ranks(2, HIDDEN, STREAMS, 8)
    case = make_case(2, 8, HIDDEN, STREAMS, 12)
    expected = phased(instances, case)
    implementation = instances[0].implementation
    assert same_bits(expected[0], phased(instances, case)[0])
    stale = make_case(2, 8, HIDDEN, STREAMS, 13)
    instances[0].publish(stale.partials[0])
    instances[1].publish(stale.partials[1])
    implementation.one_shot.local[2, 1, 4].fill_(1.0)
    with pytest.raises(AssertionError, match="streams off"):
        check(stale, 0, instances[0].collect(**stale.arguments(0)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_thousands_of_mixed_calls_agree(ranks: int) -> None:
    """Random rows, kinds, protocols and orders of ranks; every call compared across ranks, each kind with float64."""
    chooser = random.Random(ranks)
    instances = make_ranks(ranks, HIDDEN, STREAMS, 24, two_shot_rows=13)
    cases = [
        make_case(ranks, rows, HIDDEN, STREAMS, rows, kind=KINDS[rows % 3], finalize=rows % 2 == 0)
        for rows in range(1, 25)
    ]
    expected = [phased(instances, case)[0] for case in cases]
    for case, result in zip(cases, expected, strict=True):
        check(case, 0, result)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(MIXED_CALLS):
        number = chooser.randrange(len(cases))
        results = phased(instances, cases[number], lambda: chooser.sample(range(ranks), ranks))
        for result in results:
            wrong += ~same_bits(result, expected[number])
    assert int(wrong) == 0
    for instance in instances:
        instance.implementation.watchdog.check()
        for mailbox in instance.implementation.mailboxes:
            assert (mailbox.local.view(torch.int16) == SENTINEL).all(), "a slot was not cleared"


class Replay:
    """A graph a rank of calls with different inputs, and how many results differed from the eager ones."""

    def __init__(
        self, instances: Sequence[AllReduceMHC], side: Sequence[torch.cuda.Stream], seeds: Sequence[int], rows: int
    ) -> None:
        ranks = len(instances)
        self.side = side
        self.cases = [
            make_case(ranks, rows, HIDDEN, STREAMS, seed, kind=KINDS[seed % 2], finalize=seed % 3 == 0)
            for seed in seeds
        ]
        self.expected = [concurrent(instances, case, side)[0] for case in self.cases]
        self.arguments = [[case.arguments(rank) for rank in range(ranks)] for case in self.cases]
        self.wrong = torch.zeros(ranks, dtype=torch.int64, device="cuda")
        self.graphs = [self._capture(rank, instance) for rank, instance in enumerate(instances)]

    def _capture(self, rank: int, instance: AllReduceMHC) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self.side[rank]):
            for case, arguments, wanted in zip(self.cases, self.arguments, self.expected, strict=True):
                if case.routed is None:
                    result = instance(case.partials[rank], **arguments[rank])
                else:
                    result = instance.finalize(*routed_arguments(case.routed[rank]), **arguments[rank])
                self.wrong[rank] += ~same_bits(result, wanted)
        return graph

    def run(self) -> None:
        for graph, stream in zip(self.graphs, self.side, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()


@pytest.mark.parametrize(("ranks", "replays"), [(2, 50_000), (4, 50_000), (8, 10_000)])
def test_graphs_of_two_sizes_replay_alternately(ranks: int, replays: int) -> None:
    """Each graph makes a number of calls that 3 does not divide, so that every replay starts at another generation."""
    instances, side = make_ranks(ranks, HIDDEN, STREAMS, 8), streams_for(ranks)
    small, large = Replay(instances, side, [1], 1), Replay(instances, side, [2, 3, 4, 5], 4)
    for turn in range(replays // 2):
        small.run()
        large.run()
        if turn % 1000 == 999:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    instances[0].implementation.watchdog.check()
    assert int(small.wrong.sum()) == 0 and int(large.wrong.sum()) == 0
    large.expected[2][0].view(torch.int16)[0, 0, 0] ^= 1
    large.run()
    torch.cuda.synchronize()
    assert int(large.wrong.sum()) == ranks, "a difference of one bit must be counted"


def chained(instances: Sequence[AllReduceMHC], case: Case, calls: int, run: Runner) -> list[Tensor]:
    """Each rank's streams after calls that feed on each other: streams become residual, layer inputs contributions."""
    current = [case.boundary["residual"]] * len(instances)
    partials = list(case.partials)
    for _ in range(calls):
        results = run(instances, partials, current, case.boundary)
        current = [result[0] for result in results]
        partials = [result[1] for result in results]
    return current


def test_a_chain_reads_nothing_before_its_slow_predecessor_is_done() -> None:
    """Kernels start early; with one rank delayed at random every call still sees the whole result of the one before."""
    chooser = random.Random(1)
    instances, side = make_ranks(2, HIDDEN, STREAMS, 8), streams_for(2)
    case = make_case(2, 8, HIDDEN, STREAMS, 41)

    def phased_run(ranks: Any, partials: Any, residuals: Any, boundary: Any) -> list[Any]:
        for rank, instance in enumerate(ranks):
            instance.publish(partials[rank])
        return [instance.collect(**boundary | {"residual": residuals[r]}) for r, instance in enumerate(ranks)]

    def delayed_run(ranks: Any, partials: Any, residuals: Any, boundary: Any) -> list[Any]:
        results = []
        for rank, instance in enumerate(ranks):
            with torch.cuda.stream(side[rank]):
                torch.cuda._sleep(chooser.choice((0, 0, 20_000, 200_000)))
                results.append(instance(partials[rank], **boundary | {"residual": residuals[rank]}))
        return results

    expected = chained(instances, case, 200, phased_run)
    torch.cuda.synchronize()
    found = chained(instances, case, 200, delayed_run)
    torch.cuda.synchronize()
    instances[0].implementation.watchdog.check()
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert not torch.equal(expected[0], chained(instances, case, 199, phased_run)[0])


def test_a_producer_can_publish_by_itself() -> None:
    instances = make_ranks(2, HIDDEN, STREAMS, 8, two_shot_rows=8)
    case = make_case(2, 5, HIDDEN, STREAMS, 42)
    expected = phased(instances, case)
    boxes = [instance.implementation.one_shot.local for instance in instances]
    for rank, instance in enumerate(instances):
        target = instance.publish_target(5)
        assert (target.rank, target.ranks, target.capacity) == (rank, 2, 7)
        state = instance.implementation.one_shot_state
        generation = int(state[0])
        for box in boxes:
            box[generation, rank, :5] = case.partials[rank] + 0.0
        state[1] = generation
        instance.mark_published(5)
        with pytest.raises(RuntimeError, match="unreduced"):
            instance.mark_published(5)
    results = [instance.collect(**case.boundary) for instance in instances]
    assert all(same_bits(one, other) for one, other in zip(expected, results, strict=True))
    with pytest.raises(ValueError, match="one-shot"):
        instances[0].publish_target(8)


def test_loopback_sums_the_own_contribution_once_a_rank() -> None:
    fabric = LoopbackFabric(4, torch.device("cuda", torch.cuda.current_device()))
    alone = AllReduceMHC(
        hidden_size=HIDDEN, hc_mult=STREAMS, max_num_tokens=200, top_k=6, device=fabric.device, fabric=fabric
    )
    for rows in (1, 8, 200):
        case = make_case(1, rows, HIDDEN, STREAMS, rows)
        result = alone(case.partials[0], **case.boundary)
        check(replace(case, partials=case.partials * 4), 0, result)
        with pytest.raises(AssertionError, match="streams off"):
            check(case, 0, result)


def test_a_missing_rank_is_named_and_reset_restores_service() -> None:
    instances = make_ranks(2, HIDDEN, STREAMS, 8, timeout_s=0.2)
    case = make_case(2, 3, HIDDEN, STREAMS, 21)
    expected = phased(instances, case)
    instances[0](case.partials[0], **case.boundary)
    torch.cuda.synchronize()
    with pytest.raises(CollectiveTimeout) as caught:
        instances[0](case.partials[0], **case.boundary)
    assert (caught.value.kind, caught.value.rank, caught.value.generation) == ("all_reduce", 0, 1)
    assert caught.value.missing == (1,) and 0 <= caught.value.token < 3
    # The late rank finds its flag raised: it leaves at once and says so at the call after.
    instances[1](case.partials[1], **case.boundary)
    torch.cuda.synchronize()
    with pytest.raises(CollectiveTimeout) as caught:
        instances[1].publish(case.partials[1])
    assert caught.value.rank == 1 and caught.value.missing == ()
    for instance in instances:
        instance.reset()
    again = phased(instances, case)
    assert all(same_bits(one, other) for one, other in zip(expected, again, strict=True))


@pytest.mark.parametrize("two_shot", [False, True], ids=["one-shot", "two-shot"])
def test_ranks_with_different_row_counts_time_out_instead_of_returning(two_shot: bool) -> None:
    instances = make_ranks(2, HIDDEN, STREAMS, 8, timeout_s=0.2, two_shot_rows=1 if two_shot else 9)
    more, fewer = make_case(2, 4, HIDDEN, STREAMS, 22), make_case(2, 2, HIDDEN, STREAMS, 22)
    instances[0].publish(more.partials[0])
    instances[1].publish(fewer.partials[1])
    for instance in instances:
        instance.sum_owned()
    instances[0].collect(**more.boundary)
    instances[1].collect(**fewer.boundary)
    torch.cuda.synchronize()
    with pytest.raises(CollectiveTimeout):
        instances[0].implementation.watchdog.check()


def test_a_refused_call_leaves_mailboxes_and_generations_alone() -> None:
    instances = make_ranks(2, HIDDEN, STREAMS, 4)
    case = make_case(2, 4, HIDDEN, STREAMS, 31)
    before = [i.implementation.one_shot_state.clone() for i in instances]
    with pytest.raises(ValueError, match="outside"):
        instances[0](torch.cat([case.partials[0]] * 2), **case.boundary)
    with pytest.raises(ValueError, match="norm_weight"):
        instances[0](case.partials[0], **{k: v for k, v in case.boundary.items() if k != "norm_weight"})
    with pytest.raises(RuntimeError, match="no published"):
        instances[0].collect(**case.boundary)
    instances[0].publish(case.partials[0])
    with pytest.raises(RuntimeError, match="unreduced"):
        instances[0].publish(case.partials[0])
    instances[1].publish(case.partials[1])
    results = [i.collect(**case.boundary) for i in instances]
    check(case, 1, results[1])
    for instance, state in zip(instances, before, strict=True):
        assert instance.implementation.one_shot_state[0] == state[0] + 1
        assert (instance.implementation.one_shot.local.view(torch.int16) == SENTINEL).all()


def test_mixes_may_have_a_trailing_dimension_and_routed_tensors_are_checked() -> None:
    (instance,) = make_ranks(1, HIDDEN, STREAMS, 4)
    case = make_case(1, 4, HIDDEN, STREAMS, 32, finalize=True)
    assert case.routed is not None
    boundary = case.boundary | {"post": case.boundary["post"][..., None]}
    check(case, 0, instance.finalize(*routed_arguments(case.routed[0]), **boundary))
    wrong: Routed = replace(case.routed[0], expert_weights=case.routed[0].expert_weights.bfloat16())
    with pytest.raises(ValueError, match="expert_weights"):
        instance.finalize(*routed_arguments(wrong), **boundary)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_phased_schedule_is_clean_under_the_sanitizer(tool: str) -> None:
    script = Path(__file__).with_name("collectives_phased.py")
    checker = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
    command = [*checker, sys.executable, str(script), *(["--small"] if tool == "racecheck" else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0 and "phased schedule done" in done.stdout, done.stdout[-3000:]

"""The fused collectives between two GPUs: bits, float64, replays, and a rank that stalls."""

import os
import random
import time
from dataclasses import replace

import pytest
import torch
from collectives_cases import ADVERSARIAL, KINDS, TOP_K, check, make_case, one_call, same_bits, special

from quickseek.errors import CollectiveTimeout
from quickseek.ops.collectives import AllReduceMHC
from quickseek.parallel.fabric import SymmetricFabric
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import World

pytestmark = [pytest.mark.gpu2, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

HIDDEN, STREAMS = 5120, 4
CALLS = int(os.environ.get("QUICKSEEK_CALLS", "1000"))
REPLAYS = int(os.environ.get("QUICKSEEK_REPLAYS", "20000"))


def build(world: World, capacity: int, **options: object) -> AllReduceMHC:
    return AllReduceMHC(
        hidden_size=HIDDEN, hc_mult=STREAMS, max_num_tokens=capacity, top_k=TOP_K, device=world.device,
        quantize_layer_input=True, residual_only=True, world=world, fabric=SymmetricFabric(world), **options,
    )  # fmt: skip


def across(world: World, result: tuple[torch.Tensor, torch.Tensor | None]) -> bool:
    """Whether both ranks hold the same bytes."""
    flat = torch.cat([part.flatten().view(torch.int16) for part in result if part is not None])
    parts = world.all_gather(flat[None])
    return bool((parts[0] == parts[1]).all())


def mixed_calls(world: World) -> int:
    one_shot, two_shot = build(world, 384), build(world, 384, two_shot_rows=1)
    chooser = random.Random(5)
    wrong = torch.zeros((), dtype=torch.int64, device=world.device)
    cases = []
    for number, rows in enumerate((1, 2, 3, 4, 6, 8, 16, 31, 48, 64, 65, 128, 200, 384)):
        for finalize in (False, True):
            case = make_case(2, rows, HIDDEN, STREAMS, number, kind=KINDS[(number + finalize) % 3], finalize=finalize)
            result = one_call(one_shot, case, world.rank)
            check(case, world.rank, result)
            assert across(world, result)
            assert not across(world, (result[0] + world.rank, None)), "the comparison cannot fail"
            cases.append((case, result))
    for _ in range(CALLS):
        case, expected = cases[chooser.randrange(len(cases))]
        result = one_call(chooser.choice((one_shot, two_shot)), case, world.rank)
        wrong += ~same_bits(result, expected)
    torch.cuda.synchronize()
    one_shot.implementation.watchdog.check()
    return int(wrong)


def test_mixed_calls_agree_in_bits_and_with_float64() -> None:
    assert spawn(mixed_calls, 2, device="cuda", timeout_s=120) == [0, 0]


def unfused(instance: AllReduceMHC) -> AllReduceMHC:
    """The same collective, in the form of publish and collect at any number of rows."""
    from quickseek.ops.collectives.all_reduce import FusedAllReduceMHC

    implementation = instance.implementation
    assert isinstance(implementation, FusedAllReduceMHC)
    chosen = replace(implementation.thresholds, fused_rows=0)
    instance.implementation = FusedAllReduceMHC(instance.shape, implementation.fabric, chosen)
    return instance


def compare_forms(world: World) -> tuple[list[str], list[str]]:
    """The calls whose results differ between ranks or forms, and those noticed with a bit flipped on purpose."""
    fused, two_shot = build(world, 384, two_shot_rows=385), build(world, 384, two_shot_rows=1)
    instances = (fused, unfused(build(world, 384, two_shot_rows=385)), two_shot)
    wrong, noticed = [], []
    for rows in (1, 64, 79, 80, 81, 128, 200, 384):
        for kind in KINDS:
            for finalize in (False, True):
                case = make_case(2, rows, HIDDEN, STREAMS, rows, kind=kind, finalize=finalize)
                results, copies = [], []
                for instance in instances:
                    results.append(one_call(instance, case, world.rank))
                    copies.append([part.view(torch.uint8) for part in case.outputs[world.rank]] if case.outputs else [])
                name = f"{rows} rows, {kind}, finalize {finalize}"
                same = all(same_bits(results[0], result) for result in results) and across(world, results[0])
                copied = all(torch.equal(a, b) for other in copies for a, b in zip(copies[0], other, strict=True))
                if not (same and copied):
                    wrong.append(name)
                results[1][0].view(torch.int16)[-1, -1, -1] ^= 1
                if not same_bits(results[0], results[1]):
                    noticed.append(name)
    for instance in instances:
        instance.implementation.watchdog.check()
    return wrong, noticed


def test_all_forms_and_both_gpus_agree_in_bits() -> None:
    for wrong, noticed in spawn(compare_forms, 2, device="cuda", timeout_s=120):
        assert wrong == [] and len(noticed) == 48


def adversarial(world: World) -> list[str]:
    """The contributions whose results differ between ranks, protocols or from float64; and a record for any wait."""
    instances = [build(world, 8, two_shot_rows=9, timeout_s=2.0), build(world, 8, two_shot_rows=1, timeout_s=2.0)]
    wrong = []
    for name, patterns in ADVERSARIAL.items():
        case = make_case(2, 5, HIDDEN, STREAMS, 3)
        case = replace(case, partials=special(2, 5, HIDDEN, patterns))
        results = [one_call(instance, case, world.rank) for instance in instances for _ in range(4)]
        torch.cuda.synchronize()
        for instance in instances:
            instance.implementation.watchdog.check()
        if not across(world, results[0]) or not all(same_bits(results[0], result) for result in results):
            wrong.append(name)
        if torch.stack(case.partials).float().isfinite().all():
            check(case, world.rank, results[0])
    return wrong


def test_no_payload_of_a_peer_is_taken_for_an_empty_slot() -> None:
    assert spawn(adversarial, 2, device="cuda", timeout_s=90) == [[], []]


class Replay:
    """A graph of calls with different inputs, and how many results differed from the eager ones."""

    def __init__(self, instance: AllReduceMHC, world: World, rows: int, seeds: list[int]) -> None:
        self.cases = [
            make_case(2, rows, HIDDEN, STREAMS, seed, kind=KINDS[seed % 2], finalize=seed % 3 == 0) for seed in seeds
        ]
        self.expected = [one_call(instance, case, world.rank) for case in self.cases]
        self.wrong = torch.zeros((), dtype=torch.int64, device=world.device)
        for case in self.cases:
            case.boundary, case.kind = case.arguments(world.rank), "plain"
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for case, wanted in zip(self.cases, self.expected, strict=True):
                self.wrong += ~same_bits(one_call(instance, case, world.rank), wanted)


def replays(world: World) -> int:
    instance = build(world, 384)
    small, large, looped = (
        Replay(instance, world, rows, seeds) for rows, seeds in ((1, [1]), (8, [2, 3, 4, 5]), (200, [6, 7]))
    )
    for turn in range(REPLAYS // 2):
        small.graph.replay()
        (looped if turn % 10 == 9 else large).graph.replay()
    torch.cuda.synchronize()
    instance.implementation.watchdog.check()
    wrong = int(small.wrong + large.wrong + looped.wrong)
    small.expected[0][0].view(torch.int16)[0, 0, 0] ^= 1
    small.graph.replay()
    assert int(small.wrong) == 1, "a difference of one bit must be counted"
    return wrong


def test_graphs_of_two_sizes_replay_alternately() -> None:
    assert spawn(replays, 2, device="cuda", timeout_s=120) == [0, 0]


def stall(world: World) -> dict[str, object]:
    """Rank 1 comes 5 s late to a call with a limit of 1 s; both must raise, and serve again after ``reset``."""
    instance = build(world, 8, timeout_s=1.0)
    case = make_case(2, 4, HIDDEN, STREAMS, 1)
    expected = one_call(instance, case, world.rank)
    torch.cuda.synchronize()
    world.barrier()
    start = time.monotonic()
    if world.rank == 1:
        time.sleep(5.0)
    report: dict[str, object] = {}
    try:
        one_call(instance, case, world.rank)
        torch.cuda.synchronize()
        instance.implementation.watchdog.check()
    except CollectiveTimeout as error:
        report = {"after_s": time.monotonic() - start, "missing": error.missing, "rank": error.rank, "text": str(error)}
    instance.reset()
    result = one_call(instance, case, world.rank)
    torch.cuda.synchronize()
    instance.implementation.watchdog.check()
    return report | {"serves_again": bool(same_bits(result, expected))}


def test_a_stalled_rank_raises_everywhere_and_reset_restores_service() -> None:
    first, second = spawn(stall, 2, device="cuda", timeout_s=120)
    print(first, second)
    assert first["missing"] == (1,) and first["rank"] == 0 and 1.0 <= float(str(first["after_s"])) <= 2.0
    assert second["missing"] == () and second["rank"] == 1 and float(str(second["after_s"])) <= 6.0
    assert first["serves_again"] and second["serves_again"]


def disagree(world: World) -> str:
    try:
        build(world, 8 + world.rank)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_build_different_collectives_all_raise_the_same_error() -> None:
    first, second = spawn(disagree, 2, device="cuda", timeout_s=120)
    assert first == second and "max_num_tokens=8" in first and "max_num_tokens=9" in first

"""The executable mailbox protocol gives the bits of one process, for hostile inputs, orders and faults (L.3 a)."""

import random
from collections.abc import Generator

import numpy as np
import pytest
from mailbox_arithmetic import SENTINEL, Bits, boundary, finalize, sanitise, widen
from mailbox_cases import CASES, HIDDEN, bits, mixes, partials, same, tensor
from mailbox_protocol import FAULTS, Participant, Sizes, Stuck, drive, private_boxes, run, shared_boxes

from quickseek.ops.collectives.reference import sum_ranks
from quickseek.parallel.host_fabric import HostFabric
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import World


@pytest.fixture(autouse=True)
def hostile_numbers_are_no_mistakes():
    with np.errstate(all="ignore"):
        yield


def participants(sizes: Sizes, seed: int, fault: str = "", faulty: int | None = None) -> list[Participant]:
    """All ranks in this process; ``faulty`` None: the fault is on every rank."""
    boxes = private_boxes(sizes)
    return [
        Participant(rank, sizes, boxes, seed, fault if faulty in (None, rank) else "") for rank in range(sizes.ranks)
    ]


def several(one: Participant, calls: list[tuple[list[Bits], bool]]) -> Generator[bool, None, list[Bits]]:
    """One rank's part of several calls, each with every rank's partials and whether it is two-shot."""
    results = []
    for parts, two_shot in calls:
        results.append((yield from one.call(parts[one.rank], two_shot=two_shot)))
    return results


def attempt(ranks: list[Participant], calls: list[tuple[list[Bits], bool]], seed: int) -> str:
    """ "right", "wrong" or "stuck"."""
    try:
        results = run([several(one, calls) for one in ranks], seed)
    except Stuck:
        return "stuck"
    wanted = [sum_ranks([tensor(part) for part in parts]) for parts, _ in calls]
    right = all(same(ours, theirs) for found in results for ours, theirs in zip(found, wanted, strict=True))
    alike = all(np.array_equal(a, b) for found in results for a, b in zip(found, results[0], strict=True))
    return "right" if right and alike else "wrong"


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_hostile_values_arrive_as_the_sum_of_one_process(name, ranks):
    sizes = Sizes(ranks, 5, HIDDEN)
    calls = [(partials(name, ranks, rows, seed), seed % 3 == 1) for seed, rows in enumerate((2, 5, 1, 4, 3, 5, 2))]
    assert attempt(participants(sizes, 1), calls, seed=2) == "right"
    # Negative control: a sum with one wrong bit is seen.
    parts = calls[1][0]
    total = run([one.call(parts[one.rank]) for one in participants(sizes, 1)], 2)[0]
    total[0, 0] ^= 0x4000
    assert not same(total, sum_ranks([tensor(part) for part in parts]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_row_counts_at_every_border_and_changing_from_call_to_call(ranks):
    borders = [1, ranks - 1, ranks, ranks + 1, 31, 32, 33, 127, 128, 129]
    random.Random(3).shuffle(borders)
    calls = [(partials("normal numbers", ranks, rows, rows), seed % 2 == 0) for seed, rows in enumerate(borders)]
    assert attempt(participants(Sizes(ranks, 129, HIDDEN), 1), calls, seed=1) == "right"
    # Negative control: one rank that runs a row less leaves its peers waiting, and no one with a wrong sum.
    fewer = [([*parts[:-1], parts[-1][:-1]], two_shot) for parts, two_shot in calls if len(parts[0]) == ranks + 1]
    assert attempt(participants(Sizes(ranks, 129, HIDDEN), 1), fewer, seed=1) == "stuck"


def test_two_shot_gives_the_bits_of_one_shot():
    for name in ("normal numbers", "random bits", "subnormals"):
        parts, found = partials(name, 4, 7, 5), []
        for two_shot in (False, True):
            ranks = participants(Sizes(4, 7, HIDDEN), 1)
            found.append(run([one.call(parts[one.rank], two_shot=two_shot) for one in ranks], 1)[0])
        assert np.array_equal(sanitise(found[0]), sanitise(found[1]))
        assert not np.array_equal(found[0], sanitise(parts[0]))


FAULTY_CALLS = {
    "no sanitise": ("all -0", False, None, "stuck"),
    "float compare": ("zeros", False, None, "stuck"),
    "flush to zero": ("subnormals", False, None, "stuck"),
    "first half": ("normal numbers", False, None, "wrong"),
    "first word": ("normal numbers", True, None, "wrong"),
    "blocked owner": ("normal numbers", True, 1, "wrong"),
}


@pytest.mark.parametrize("fault", FAULTY_CALLS)
def test_a_fault_of_the_exchange_is_seen(fault):
    name, two_shot, faulty, outcome = FAULTY_CALLS[fault]
    calls = [(partials(name, 2, 3, seed), two_shot) for seed in range(4)]
    assert attempt(participants(Sizes(2, 3, HIDDEN), 1, fault, faulty), calls, seed=1) == outcome
    assert attempt(participants(Sizes(2, 3, HIDDEN), 1), calls, seed=1) == "right"


def test_every_fault_of_the_exchange_has_its_test():
    assert {*FAULTY_CALLS, "sanitise before rounding"} == set(FAULTS)


def test_a_sanitiser_before_the_rounding_is_seen():
    """FP32 sums that only the rounding turns into -0."""
    rows, index, weights = np.full((1, HIDDEN), 0x8001, np.uint16), np.zeros((3, 1), np.int32), np.full((3, 1), 0.25)
    shared, fault = np.full((3, HIDDEN), SENTINEL), "sanitise before rounding"
    for planted, outcome in ((fault, "stuck"), ("", "right")):
        x = finalize(rows, weights.astype(np.float32), index, shared, planted)
        assert (x == SENTINEL).all()
        assert attempt(participants(Sizes(2, 3, HIDDEN), 1, planted), [([x, x], False)], seed=1) == outcome


def exchange(world: World, calls: int, seed: int) -> list[tuple[Bits, Bits]]:
    """One rank among processes: random rows, protocols and inputs; every call's streams and layer input."""
    sizes, results = Sizes(world.size, 9, HIDDEN), []
    fabric = HostFabric(world)
    one = Participant(world.rank, sizes, shared_boxes(sizes, fabric), seed)
    for rows, two_shot, name, number in plan(calls, seed):
        x = partials(name, world.size, rows, number)[world.rank]
        pause = random.Random(f"{seed} {world.rank} {number}")
        total = drive(one.call(x, two_shot=two_shot), 60.0, pause)
        results.append(boundary(total, **mixes(rows, number), eps=1e-6))
    fabric.barrier()
    return results


def plan(calls: int, seed: int) -> list[tuple[int, bool, str, int]]:
    """What all ranks do, in order."""
    chance = random.Random(seed)
    names = ["normal numbers", "all -0", "round to -0", "subnormals", "zeros"]
    return [(chance.randint(1, 9), chance.random() < 0.5, chance.choice(names), number) for number in range(calls)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_over_shared_memory_agree_in_bits_with_one_process(ranks):
    found = spawn(exchange, ranks, 16, 11, timeout_s=240)
    for number, (rows, _, name, seed) in enumerate(plan(16, 11)):
        total = sum_ranks([tensor(part) for part in partials(name, ranks, rows, seed)])
        streams, layer_input = found[0][number]
        wanted = boundary(bits(total), **mixes(rows, seed), eps=1e-6)
        assert np.array_equal(streams, wanted[0]) and np.array_equal(layer_input, wanted[1])
        for other in found[1:]:
            assert np.array_equal(other[number][0], streams) and np.array_equal(other[number][1], layer_input)
    # Negative control: the results of two calls can be told apart.
    assert not np.array_equal(widen(found[0][0][0][:1]), widen(found[0][1][0][:1]))


def one_row_less(world: World) -> str:
    sizes, fabric = Sizes(2, 4, HIDDEN), HostFabric(world)
    one = Participant(world.rank, sizes, shared_boxes(sizes, fabric), 1)
    try:
        drive(one.call(partials("normal numbers", 2, 3 - world.rank, 1)[0]), 0.5, random.Random(1))
    except TimeoutError:
        return "timed out"
    return "returned"


def test_a_rank_that_waits_for_a_row_that_never_comes_times_out():
    assert spawn(one_row_less, 2) == ["timed out", "returned"]

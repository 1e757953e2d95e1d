"""Virtual ranks: the collectives of a world, turns that change at meetings only, and no failure that becomes a hang."""

import threading
import time
from typing import Any

import pytest
import torch

from quickseek.errors import RankDisagreement, RankFailure, WorldError
from quickseek.parallel.launch import spawn
from quickseek.parallel.virtual import VirtualWorld, run_virtual
from quickseek.parallel.world import World, require_agreement, together

SIZES = [1, 2, 4]


def collectives(world: World) -> dict[str, Any]:
    """What every collective gives; ranks write into what they sent as soon as they may."""
    rank = world.rank
    mine = torch.full((3, 2), float(rank)).t()
    gathered = world.all_gather(mine, 1)
    mine.fill_(-1.0)
    given = torch.full((2,), rank, dtype=torch.int64)
    received = world.broadcast(given, world.size - 1)
    same = received is given
    sent = received.clone()
    received.fill_(-1)
    held = [rank]
    objects = world.gather_object(held)
    held.append(99)
    objects[0].append(rank)
    world.barrier()
    return {
        "gathered": gathered,
        "float8": world.all_gather(torch.tensor([rank + 1.0]).to(torch.float8_e4m3fn)).to(torch.float32),
        "broadcast": sent,
        "in place": same,
        "least": world.all_reduce_min(7 - rank),
        "objects": objects,
        # In FP32, ascending: (1e8 - 1e8) + 1 = 1, but 1e8 + (1 - 1e8) = 0.
        "sum": world.all_reduce(torch.tensor([(1e8, -1e8, 1.0, 2.0)[rank]])),
    }


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("size", SIZES)
def test_collectives_give_what_they_promise(size: int, seed: int | None) -> None:
    ranks = run_virtual(collectives, size, seed=seed)
    assert len(ranks) == size
    for rank, got in enumerate(ranks):
        assert torch.equal(got["gathered"], torch.tensor([[float(r) for r in range(size) for _ in range(3)]] * 2))
        assert got["float8"].tolist() == [rank + 1.0 for rank in range(size)]
        assert got["broadcast"].tolist() == [size - 1] * 2 and got["in place"]
        assert got["least"] == 7 - (size - 1)
        assert got["objects"] == [[0, rank], *([r] for r in range(1, size))], "each rank has copies of its own"
        assert got["sum"].item() == {1: 1e8, 2: 0.0, 4: 3.0}[size]


def test_processes_of_their_own_give_the_same() -> None:
    for virtual, real in zip(run_virtual(collectives, 2), spawn(collectives, 2), strict=True):
        assert virtual.keys() == real.keys()
        for name, value in virtual.items():
            assert torch.equal(value, real[name]) if isinstance(value, torch.Tensor) else value == real[name], name


def turns(world: World, log: list[tuple[int, int]], at_once: list[int]) -> int:
    """Each rank's steps between meetings, written down; and how many ranks ran at any one time."""
    for step in range(30):
        at_once.append(world.rank)
        time.sleep(0.0002 * ((world.rank + step) % 3))
        log.append((step, world.rank))
        assert at_once == [world.rank]
        at_once.pop()
        world.barrier()
    return threading.get_ident()


@pytest.mark.parametrize("seed", [None, 0])
def test_one_rank_runs_at_a_time_and_turns_change_at_meetings_only(seed: int | None) -> None:
    log: list[tuple[int, int]] = []
    threads = run_virtual(turns, 4, log, [], seed=seed)
    assert len(set(threads)) == 4
    assert [step for step, _ in log] == [step for step in range(30) for _ in range(4)]
    orders = [[rank for _, rank in log[4 * step : 4 * step + 4]] for step in range(30)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert all(order == [0, 1, 2, 3] for order in orders) == (seed is None)


def once_for_all(world: VirtualWorld, calls: list[int]) -> tuple[Any, int]:
    found = world.once("a place to meet", lambda: calls.append(world.rank) or object())
    return found, len(calls)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_done_once_is_done_before_any_rank_goes_on(size: int) -> None:
    calls: list[int] = []
    ranks = run_virtual(once_for_all, size, calls)
    assert len(calls) == 1 and [count for _, count in ranks] == [1] * size
    assert all(found is ranks[0][0] for found, _ in ranks)


def disagreements(world: World) -> list[str]:
    told = []
    for attempt in (
        lambda: require_agreement(world, {"drafts": world.rank // 2}),
        lambda: together(world, "loading", lambda: 1 // (world.rank - 2)),
    ):
        with pytest.raises(RankDisagreement) as caught:
            attempt()
        told.append(str(caught.value))
    return told


def test_what_ranks_find_out_together_is_one_error_on_all() -> None:
    first, *others = run_virtual(disagreements, 3)
    assert all(other == first for other in others)
    assert "drafts (rank 0: 0; rank 1: 0; rank 2: 1)" in first[0] and "rank 2: ZeroDivisionError" in first[1]


def memory(world: VirtualWorld) -> tuple[list[int], list[Any], int]:
    """What arrives when each rank writes its number into every copy of an allocation."""
    fabric = world.fabric()
    boxes = [fabric.allocate([4], torch.int32) for _ in range(2)]
    box = boxes[1]
    fabric.barrier()
    copies = world.gather_object(box.local.data_ptr())
    assert box.peer_pointers.tolist() == copies
    box.local.fill_(10 * world.rank)
    fabric.barrier()
    return box.local.tolist(), fabric.gather_object(world.rank), fabric.all_reduce_min(world.rank + 3)


def test_the_fabric_of_virtual_ranks_has_their_memory_and_their_own_values() -> None:
    for rank, (found, values, least) in enumerate(run_virtual(memory, 2)):
        assert found == [10 * rank] * 4 and values == [0, 1] and least == 3


# ------------------------------------------------------------------------------------------ what goes wrong


def raise_on_one(world: World, unwound: list[int]) -> None:
    try:
        world.barrier()
        if world.rank == 1:
            raise ValueError("the shard of rank one is torn")
        try:
            world.barrier()
        except Exception as error:
            raise AssertionError("a peer's end is no fault of this rank") from error
    finally:
        unwound.append(world.rank)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_rank_that_raises_is_named_with_its_traceback_and_ends_all_others(seed: int | None) -> None:
    unwound: list[int] = []
    with pytest.raises(RankFailure, match=r"rank 1 raised:(?s:.)*the shard of rank one is torn") as caught:
        run_virtual(raise_on_one, 3, unwound, seed=seed)
    assert caught.value.rank == 1 and "in raise_on_one" in str(caught.value)
    assert sorted(unwound) == [0, 1, 2]


def fail_at_once(world: VirtualWorld) -> None:
    world.once("a place to meet", lambda: [][0])


def test_a_fault_in_what_is_done_once_ends_all() -> None:
    with pytest.raises(RankFailure, match="IndexError"):
        run_virtual(fail_at_once, 2)


def never_come_back(world: World, wait: threading.Event, unwound: list[int]) -> None:
    try:
        world.barrier()
        if world.rank == 1:
            wait.wait(60)
        world.barrier()
    finally:
        unwound.append(world.rank)


def test_a_rank_that_never_comes_back_is_named_in_time_and_says_where_it_was() -> None:
    wait, unwound, begun = threading.Event(), [], time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 was not done after 0\.5 s") as caught:
        run_virtual(never_come_back, 3, wait, unwound, timeout_s=0.5)
    assert time.monotonic() - begun < 20
    assert caught.value.rank == 1 and "wait.wait(60)" in str(caught.value)
    assert sorted(unwound) == [0, 2], "the others have left"
    wait.set()
    deadline = time.monotonic() + 20
    while len(unwound) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(unwound) == [0, 1, 2], "the late one leaves when it comes"


def part_ways(world: World, how: str) -> None:
    world.barrier()
    if how == "kind" and world.rank == 1:
        world.barrier()
    elif how == "end" and world.rank == 1:
        return
    else:
        world.all_gather(torch.zeros(3 + (how == "shape") * world.rank))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("kind", r"rank 1: barrier"),
        ("shape", r"rank 1: all_gather torch\.float32 \(4,\) 0"),
        ("end", r"rank 1: has ended"),
    ],
)
def test_ranks_in_different_collectives_are_told_so(how: str, told: str) -> None:
    with pytest.raises(RankFailure, match="ranks are in different collectives") as caught:
        run_virtual(part_ways, 3, how)
    assert caught.value.rank == 1
    caught.match(r"rank 0: all_gather torch\.float32 \(3,\) 0, at\n")
    caught.match(told)
    caught.match("in part_ways")
    assert run_virtual(part_ways, 3, "together") == [None] * 3


def test_a_world_of_no_ranks_is_refused() -> None:
    with pytest.raises(WorldError, match="0 ranks"):
        run_virtual(collectives, 0)


def itself(world: World) -> World:
    return world


def test_ranks_whose_run_is_over_have_no_peers_to_wait_for() -> None:
    for world in run_virtual(itself, 2):
        with pytest.raises(WorldError, match=rf"barrier of virtual rank {world.rank}: the run .* is over"):
            world.barrier()

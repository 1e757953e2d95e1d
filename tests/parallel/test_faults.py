"""One rank's fault becomes all ranks' verdict: alike and on they go, or lost, with one text, and nobody waits."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quickseek.errors import CollectiveTimeout, RankFailure
from quickseek.parallel import faults
from quickseek.parallel.faults import FaultBoard, PeersLost
from quickseek.parallel.host_fabric import HostFabric
from quickseek.parallel.launch import spawn
from quickseek.parallel.virtual import run_virtual
from quickseek.parallel.watchdog import Watchdog
from quickseek.parallel.world import SoloWorld, World


def boards(size: int) -> list[FaultBoard]:
    store = dist.HashStore()
    return [FaultBoard(store, rank, size) for rank in range(size)]


def outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except PeersLost as lost:
        return str(lost)
    return "goes on"


def at_once(*attempts: Callable[[], object]) -> list[str]:
    with ThreadPoolExecutor(len(attempts)) as pool:
        return list(pool.map(outcome, attempts))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "AGREE_S", 0.3)
    monkeypatch.setattr(faults, "SETTLE_S", 0.1)


def test_ranks_that_fail_alike_go_on_as_often_as_they_do() -> None:
    ranks = boards(3)
    for calls in (4, 9):
        assert at_once(*(partial(one.agree, calls, "in a step: x") for one in ranks)) == ["goes on"] * 3
        for one in ranks:
            one.look(calls + 1)


@pytest.mark.parametrize("other", [(4, "in a step: y"), (5, "in a step: x")])
def test_ranks_that_fail_otherwise_or_elsewhere_are_lost_with_one_text(other: tuple[int, str]) -> None:
    first, second = boards(2)
    told = at_once(lambda: first.agree(4, "in a step: x"), lambda: second.agree(*other))
    assert told == [f"rank 0 failed in a step: x; rank 1 failed {other[1]}"] * 2
    assert outcome(first.check) == outcome(second.check) == told[0]
    assert first.lost is not None and first.lost.ranks == (0, 1)


def test_ranks_that_launched_more_or_less_in_mailboxes_are_lost() -> None:
    first, second = boards(2)
    text = "in a step: x"
    assert at_once(lambda: first.agree(4, text, 7), lambda: second.agree(4, text, 7)) == ["goes on"] * 2
    told = at_once(lambda: first.agree(4, text, 7), lambda: second.agree(4, text, 8))
    assert told == ["rank 0 failed in a step: x; rank 1 failed in a step: x"] * 2


def test_a_rank_that_waits_for_one_that_failed_is_lost_and_tells_it_so() -> None:
    first, second, third = boards(3)

    def wait() -> None:
        while True:
            first.look(8)
            time.sleep(0.01)

    begun = time.monotonic()
    assert at_once(wait, lambda: second.agree(7, "in a step: x")) == ["rank 1 failed in a step: x"] * 2
    assert time.monotonic() - begun < faults.AGREE_S / 2
    assert outcome(lambda: third.look(8)) == "rank 1 failed in a step: x"


def test_a_rank_whose_collective_the_failed_one_has_taken_part_in_waits_on(short: None) -> None:
    first, second = boards(2)
    second._set(second._fault(1), '[8, "in a step: x"]')
    assert outcome(lambda: first.look(8)) == "goes on"
    assert outcome(lambda: first.look(9)) == "rank 1 failed in a step: x"


def test_a_rank_that_fails_while_its_peers_are_elsewhere_waits_no_longer_than_the_limit(short: None) -> None:
    first, second = boards(2)
    assert outcome(lambda: second.agree(7, "in a step: x")) == "rank 1 failed in a step: x"
    assert outcome(lambda: first.agree(7, "in a step: x")) == "rank 1 failed in a step: x", "the verdict stands"


def test_a_rank_that_gives_up_ends_the_wait_of_all() -> None:
    first, second = boards(2)
    first.look(3)
    second.give_up("ValueError: torn")
    assert outcome(lambda: first.look(3)) == "rank 1 failed: ValueError: torn"


def test_a_peer_whose_process_has_ended_is_told_from_one_that_runs(short: None) -> None:
    first, second = boards(2)
    first.met()
    error = RuntimeError("Connection closed by peer")
    assert str(first.broken("an all-gather", error)).startswith("rank 1 not reached by rank 0 in an all-gather: Conn")
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    first, second = boards(2)
    second._set("process 1", f"{process.pid} {faults.socket.gethostname()}")
    first.met()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    lost = first.broken("an all-gather", error)
    assert (str(lost), lost.ranks) == ("rank 1 ended; rank 0 waited in an all-gather", (1,))
    process.wait()


class Gone:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("failed to recv, got 0 bytes")


def test_without_the_store_a_rank_still_raises(short: None) -> None:
    for attempt in (
        lambda board: board.agree(3, "in a step: x"),
        lambda board: (_ for _ in ()).throw(board.broken("a broadcast", RuntimeError("reset"))),
    ):
        board = FaultBoard(dist.HashStore(), 0, 2)
        board.store = Gone()
        board.look(1)
        assert outcome(lambda attempt=attempt, board=board: attempt(board)) != "goes on"


# ------------------------------------------------------------------------------------------ worlds


def fail(world: World, ranks: tuple[int, ...], kind: type[Exception]) -> None:
    """A step between two collectives, in which some ranks fail."""
    world.all_reduce(torch.ones(2))
    with world.as_one("a step"):
        if world.rank in ranks:
            raise kind("torn")
        world.all_reduce(torch.ones(3))


def fail_and_go_on(world: World, ranks: tuple[int, ...]) -> list[str]:
    told = []
    for _ in range(2):
        try:
            fail(world, ranks, ValueError)
        except ValueError as error:
            told.append(str(error))
        except PeersLost as lost:
            told.append(str(lost))
    return told


def fail_after_launches(world: World, launches: Sequence[Sequence[int]]) -> list[str]:
    """Steps in which all ranks raise the same, each after as many launches of its own; the mailboxes are emptied
    after the first."""
    fabric = HostFabric(world)
    watchdog, told = Watchdog.of(fabric), []
    for step, counts in enumerate(launches):
        try:
            with world.as_one("a step"):
                for _ in range(counts[world.rank]):
                    watchdog.check()
                raise ValueError("torn")
        except (ValueError, PeersLost) as error:
            told.append(f"{type(error).__name__} {world.launches}")
        if step == 0:
            watchdog.reset()
    return told


def test_ranks_that_fail_at_different_launches_of_a_step_do_not_go_on() -> None:
    for told in spawn(fail_after_launches, 2, ((2, 2), (3, 3), (1, 1))):
        assert told == ["ValueError 2", "ValueError 3", "ValueError 4"]
    first, second = spawn(fail_after_launches, 2, ((1, 1), (2, 3)))
    assert (first, second) == (["ValueError 1", "PeersLost 2"], ["ValueError 1", "PeersLost 3"])


def test_worlds_fail_as_one() -> None:
    assert spawn(fail_and_go_on, 3, (0, 1, 2)) == [["torn", "torn"]] * 3
    assert spawn(fail_and_go_on, 3, (2,)) == [["rank 2 failed in a step: ValueError: torn"] * 2] * 3


def test_virtual_ranks_fail_as_one() -> None:
    assert run_virtual(fail_and_go_on, 3, (0, 1, 2)) == [["torn", "torn"]] * 3
    with pytest.raises(RankFailure, match="rank 2: failed in a step: ValueError: torn") as caught:
        run_virtual(fail_and_go_on, 3, (2,))
    assert caught.value.rank == 2


def test_one_rank_alone_raises_its_own_error() -> None:
    assert fail_and_go_on(SoloWorld(), (0,)) == ["torn", "torn"]


class Late(CollectiveTimeout):
    def __init__(self, text: str) -> None:
        super().__init__(text, 1, 0, 0, (0,))


def time_out(world: World) -> str:
    try:
        fail(world, (1,), Late)
    except CollectiveTimeout as error:
        world.give_up(error)
        return "its own"
    except PeersLost as lost:
        return str(lost)
    return "nothing"


def test_a_time_out_is_not_told_by_the_world() -> None:
    peer, own = spawn(time_out, 2)
    assert own == "its own" and peer.startswith("rank 1 failed: Late: torn on rank 1 gave up"), "by give_up alone"


def wait_in_vain(world: World, fails: bool) -> tuple[str, str, float]:
    """Rank 0 gives up waiting for rank 1 on its device, which has failed or is only late: how each ends, how fast."""
    begun = time.monotonic()
    try:
        with world.as_one("a step"):
            world.barrier()
            if world.rank == 0:
                time.sleep(1.0)
                raise Late("a wait")
            if fails:
                raise ValueError("torn")
    except (Exception, PeersLost) as error:
        return str(error), repr(error.__cause__), time.monotonic() - begun
    return "goes on", "", 0.0


def test_a_time_out_for_a_rank_that_failed_says_with_what() -> None:
    first, second = spawn(wait_in_vain, 2, True)
    assert first[0] == second[0] == "rank 1 failed in a step: ValueError: torn"
    assert first[1].startswith("Late(") and second[1].startswith("ValueError(")
    assert max(first[2], second[2]) < faults.AGREE_S / 2, "a rank waits until its time to agree is over"
    first, second = spawn(wait_in_vain, 2, False)
    assert first[0].startswith("a wait on rank 1 gave up") and second[0] == "goes on"


def die(world: World) -> None:
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.all_gather(torch.ones(2))


def raise_alone(world: World) -> None:
    if world.rank == 1:
        raise ValueError("the shard of rank one is torn")
    world.gather_object("here")


def test_a_peer_of_a_rank_that_dies_or_raises_reports_it_too() -> None:
    with pytest.raises(RankFailure, match="rank 1 ended with exit code -9") as caught:
        spawn(die, 2)
    assert "PeersLost: rank 1 ended; rank 0 waited in an all-gather" in str(caught.value)
    with pytest.raises(RankFailure, match="rank 1 raised") as caught:
        spawn(raise_alone, 2)
    assert caught.value.rank == 1
    assert "PeersLost: rank 1 failed: ValueError: the shard of rank one is torn" in str(caught.value)

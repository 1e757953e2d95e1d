"""A record that a kernel leaves becomes one CollectiveTimeout that names who was missing; reset forgets it."""

import threading

import pytest

from lost_peers import give_up, leave_record, raise_flags
from quickseek.errors import CollectiveTimeout
from quickseek.parallel.fabric import VirtualFabric
from quickseek.parallel.watchdog import ABORT, CLAIMED, CONTROL_WORDS, KINDS, PEERS, RECORD, Watchdog


def test_a_record_names_kind_rank_generation_token_and_missing_ranks() -> None:
    fabric = VirtualFabric.ranks(4, "cpu")[2]
    watchdog = Watchdog.of(fabric)
    watchdog.check()
    leave_record(watchdog, 3, 0b1010)
    with pytest.raises(CollectiveTimeout, match="all_gather on rank 2") as caught:
        watchdog.check()
    assert (caught.value.generation, caught.value.token, caught.value.missing) == (2, 17, (1, 3))
    assert watchdog.error() is caught.value, "one time-out is one error"


def test_every_kind_has_a_name() -> None:
    for kind, name in enumerate(KINDS):
        fabric = VirtualFabric.ranks(1, "cpu")[0]
        watchdog = Watchdog(fabric)
        leave_record(watchdog, kind, 0)
        error = watchdog.error()
        assert error is not None and error.kind == name and error.missing == ()


def test_a_reduced_row_that_does_not_come_is_missed_from_the_owner_of_its_token() -> None:
    for kind, name in enumerate(KINDS):
        for mask in (0, 1):
            fabric = VirtualFabric.ranks(4, "cpu")[2]
            watchdog = Watchdog(fabric)
            leave_record(watchdog, kind, mask)
            error = watchdog.error()
            assert error is not None and error.token == 17
            owner = 17 % 4 if name == "two_shot_collect" else 0
            assert error.missing == ((owner,) if mask else ()), name


@pytest.mark.parametrize(("ranks", "refused"), [(8, False), (9, True)])
def test_more_ranks_than_a_control_block_has_addresses_for_are_refused(ranks: int, refused: bool) -> None:
    fabric = VirtualFabric.ranks(ranks, "cpu")[0]
    if refused:
        with pytest.raises(ValueError, match="9 ranks: at most 8"):
            Watchdog(fabric)
    else:
        assert Watchdog(fabric).error() is None


def test_the_control_block_holds_the_record_and_every_peer() -> None:
    fabrics = VirtualFabric.ranks(3, "cpu")
    dogs = [Watchdog.of(fabric) for fabric in fabrics]
    assert PEERS // 8 + 8 <= CONTROL_WORDS
    assert [Watchdog.of(fabric) for fabric in fabrics] == dogs
    for dog in dogs:
        block = dog.mailbox.local
        assert block[ABORT // 8] == 0 and block[CLAIMED // 8] == 0
        assert block[RECORD // 8] == dog.record.data_ptr()
        assert block[PEERS // 8 : PEERS // 8 + 3].tolist() == [other.control for other in dogs]


class Collective:
    """Counts how often its mailboxes were emptied."""

    refills = 0

    def refill(self) -> None:
        self.refills += 1


def test_reset_lowers_the_flag_and_empties_every_collective_that_lives() -> None:
    fabric = VirtualFabric.ranks(2, "cpu")[0]
    watchdog = Watchdog.of(fabric)
    kept, gone = Collective(), Collective()
    assert (watchdog.register(kept), watchdog.register(gone)) == (1, 2)
    del gone
    give_up(watchdog, 1)
    assert watchdog.flag.item() == 1
    with pytest.raises(CollectiveTimeout):
        watchdog.check()
    watchdog.reset()
    watchdog.check()
    assert kept.refills == 1 and watchdog.flag.item() == 0


def test_the_flag_of_every_rank_tells_that_one_gave_up() -> None:
    fabrics = VirtualFabric.ranks(3, "cpu")
    dogs = [Watchdog.of(fabric) for fabric in fabrics]
    assert [dog.flag.item() for dog in dogs] == [0, 0, 0]
    raise_flags(dogs[1])
    assert [dog.flag.item() for dog in dogs] == [1, 1, 1] and dogs[0].error() is None


def test_an_owner_that_looks_at_results_defers_what_checks_raise() -> None:
    fabric = VirtualFabric.ranks(2, "cpu")[0]
    watchdog = Watchdog.of(fabric)
    give_up(watchdog, 1)
    with watchdog.deferred():
        watchdog.check()
        assert watchdog.error() is not None
    with pytest.raises(CollectiveTimeout):
        watchdog.check()
    with pytest.raises(MemoryError), watchdog.deferred():
        raise MemoryError
    with pytest.raises(CollectiveTimeout):
        watchdog.check()


def test_the_thread_reports_a_time_out_once() -> None:
    seen: list[CollectiveTimeout] = []
    called = threading.Event()

    def report(error: CollectiveTimeout) -> None:
        seen.append(error)
        called.set()

    fabric = VirtualFabric.ranks(2, "cpu")[1]
    watchdog = Watchdog(fabric, report)
    assert not called.wait(0.2), "nothing has happened yet"
    leave_record(watchdog, 0, 1)
    assert called.wait(5.0)
    assert not threading.Event().wait(0.2) and len(seen) == 1 and seen[0].missing == (0,)
    watchdog.close()

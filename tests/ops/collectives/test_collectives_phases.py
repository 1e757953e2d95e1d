"""The phases of a call on a GPU refuse an order that would leave peers waiting; no kernel is launched here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from quickseek.ops.collectives import all_reduce
from quickseek.ops.collectives.all_reduce import FusedAllReduceMHC

Launched = list[str]


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[FusedAllReduceMHC, Launched]:
    """One of two ranks, two-shot from 5 rows, whose kernels only say that they were launched."""
    one, launched = FusedAllReduceMHC.__new__(FusedAllReduceMHC), Launched()

    def kernel(name: str) -> Any:
        return lambda *_, **__: lambda *_: launched.append(name)

    one.ranks, one.bt_min_rows, one.bt_min_finalize_rows = 2, 5, 5
    one.fabric = SimpleNamespace(turns=None)  # type: ignore[assignment]
    one.device, one._pending, one._summed = torch.device("cpu"), None, False
    one.exchange = dict.fromkeys(("publish", "contribute", "own"))  # type: ignore[assignment]
    one.watchdog = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
    monkeypatch.setattr(one, "_publish_kernel", kernel("publish"))
    monkeypatch.setattr(one, "_owner_kernel", kernel("own"))
    monkeypatch.setattr(one, "_launch_boundary", lambda *_: launched.append("collect"))
    monkeypatch.setattr(all_reduce, "_contribution", lambda *_: None)
    monkeypatch.setattr(all_reduce, "current_stream", lambda _: None)
    return one, launched


def test_two_shot_sums_are_made_once_and_before_they_are_collected(
    two_ranks: tuple[FusedAllReduceMHC, Launched],
) -> None:
    one, launched = two_ranks
    boundary: Any = None
    for _ in range(2):
        one.publish(torch.zeros(6, 8))
        with pytest.raises(RuntimeError, match="before collect"):
            one.collect(boundary)
        one.sum_owned()
        with pytest.raises(RuntimeError, match="summed already"):
            one.sum_owned()
        one.collect(boundary)
    assert launched == ["publish", "own", "collect"] * 2


def test_one_shot_needs_no_sums(two_ranks: tuple[FusedAllReduceMHC, Launched]) -> None:
    one, launched = two_ranks
    boundary: Any = None
    one.publish(torch.zeros(4, 8))
    one.sum_owned()
    one.collect(boundary)
    one.mark_published(4)
    one.collect(boundary)
    assert launched == ["publish", "collect", "collect"]


@pytest.mark.parametrize("rows", [-1, 0, 5, 10_000])
def test_a_producer_may_not_mark_rows_that_no_slot_of_the_mailbox_holds(
    two_ranks: tuple[FusedAllReduceMHC, Launched], rows: int
) -> None:
    one, launched = two_ranks
    for ask in (one.mark_published, one.publish_target):
        with pytest.raises(ValueError, match="one-shot"):
            ask(rows)
    assert one._pending is None and not launched

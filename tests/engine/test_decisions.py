"""Ranks that schedule or choose differently are told apart, all by one error."""

from collections.abc import Callable
from typing import Any

import pytest
from micro import finish_all, make_request, make_runner

from quickseek.engine.decisions import Decisions
from quickseek.engine.runner import Runner
from quickseek.errors import RankDisagreement
from quickseek.parallel.world import SoloWorld

PROMPTS = [list(range(20 + 9 * count, 20 + 10 * count)) for count in (3, 17, 8)]


class Pair(SoloWorld):
    """Two ranks that run one after the other: the second is compared with what the first held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []
        self.theirs: list[Any] | None = None

    def gather_object(self, value: Any) -> list[Any]:
        self.held.append(value)
        return [value] if self.theirs is None else [self.theirs[len(self.held) - 1], value]

    def second(self) -> "Pair":
        other = Pair()
        other.theirs = self.held
        return other


def run(world: Pair, interval: int, change: Callable[[Runner], None] | None = None) -> int:
    """Ticks of three requests on one rank; ``change`` is called after the fourth."""
    runner = make_runner()
    runner.decisions = Decisions(world, interval)
    for number, prompt in enumerate(PROMPTS):
        runner.add(make_request(prompt, max_tokens=12, request_id=f"r{number}"))
    for _ in range(4):
        runner.step()
    if change is not None:
        change(runner)
    finish_all(runner)
    return runner.decisions.ticks


def another_token(runner: Runner) -> None:
    request = next(iter(runner.scheduler.running))
    request.output_ids[-1] += 1


def another_order(runner: Runner) -> None:
    runner.abort("r1")


def test_ranks_that_do_the_same_agree() -> None:
    first = Pair()
    ticks = run(first, 3)
    assert ticks > 12 and len(first.held) == ticks // 3
    second = first.second()
    run(second, 3)
    assert second.held == first.held


@pytest.mark.parametrize("change", [another_token, another_order])
def test_ranks_that_part_are_told_at_the_next_comparison(change: Callable[[Runner], None]) -> None:
    first = Pair()
    run(first, 3)
    second = first.second()
    with pytest.raises(RankDisagreement, match=r"what was scheduled in them \(hash\) \(rank 0: '[0-9a-f]{32}'; rank 1"):
        run(second, 3, change)
    assert 2 <= len(second.held) <= 3


def test_nothing_is_compared_without_an_interval() -> None:
    world = Pair()
    assert run(world, 0) == 0 and not world.held

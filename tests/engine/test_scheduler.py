"""The scheduler against a simulated device: nothing is lost, overtaken, reused early or computed wrongly."""

import random
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from simulated_runner import SimulatedRunner, expected_output, make_request

from quickseek.engine.blocks import BlockPool, Holding
from quickseek.engine.request import Request, Status
from quickseek.engine.scheduler import Scheduler, SchedulerLimits, _Round
from quickseek.errors import ConfigError, PromptError

STEM = [(i * 7) % 19 + 2 for i in range(40)]
"""Prompts begin with a part of it, so that they share prefixes."""


def prompt_of(stem: int, rest: int, salt: int) -> list[int]:
    return STEM[:stem] + [(salt * 5 + i) % 20 + 2 for i in range(rest)]


class AnyOrder(RuleBasedStateMachine):
    """Arrivals, cycles, late results, aborts and stops in any order; the runner checks after each."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = SimulatedRunner(num_blocks=14, snapshot_interval=16)

    @rule(
        stem=st.integers(0, 40),
        rest=st.integers(1, 20),
        salt=st.integers(0, 3),
        limit=st.integers(1, 30),
        priority=st.integers(0, 1),
    )
    def arrive(self, stem: int, rest: int, salt: int, limit: int, priority: int) -> None:
        self.runner.add(make_request(prompt_of(stem, rest, salt), limit, priority=priority))

    @precondition(lambda self: len(self.runner.unread) <= 1)
    @rule()
    def launch(self) -> None:
        self.runner.launch()

    @precondition(lambda self: self.runner.unread)
    @rule()
    def read(self) -> None:
        self.runner.read()

    @rule(count=st.integers(1, 4))
    def run(self, count: int) -> None:
        for _ in range(count):
            while len(self.runner.unread) > 1:
                self.runner.read()
            self.runner.step()

    @precondition(lambda self: self.runner.requests)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        request = self.runner.requests[which % len(self.runner.requests)]
        live = request in self.runner.live
        assert self.runner.abort(request) == live
        assert not self.runner.abort(request)

    @precondition(lambda self: any(r.state is Status.DECODE and r in self.runner.live for r in self.runner.requests))
    @rule(which=st.integers(0, 1000))
    def stop_late(self, which: int) -> None:
        decoding = [r for r in self.runner.requests if r.state is Status.DECODE and r in self.runner.live]
        self.runner.stop_late(decoding[which % len(decoding)])

    def teardown(self) -> None:
        while len(self.runner.unread) > 1:
            self.runner.read()
        self.runner.drain()


AnyOrder.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase


def drive(steps: int, seed: int, **options: object) -> SimulatedRunner:
    """Random arrivals, aborts and cycles; drained at the end."""
    chance = random.Random(seed)
    runner = SimulatedRunner(seed=seed, **options)  # type: ignore[arg-type]
    for _ in range(steps):
        if chance.random() < 0.2 and len(runner.live) < 12:
            prompt = prompt_of(chance.randint(0, 40), chance.randint(1, 20), chance.randint(0, 3))
            runner.add(make_request(prompt, chance.randint(1, 30), priority=chance.choice((0, 0, 0, 1))))
        if chance.random() < 0.02 and runner.live:
            runner.abort(chance.choice(sorted(runner.live, key=lambda request: request.arrival)))
        runner.step()
        runner.requests = [request for request in runner.requests if request in runner.live]
    runner.drain()
    return runner


@pytest.mark.parametrize(("steps", "num_blocks", "snapshots"), [(10_000, 13, 3), (2500, 13, 0), (2500, 40, 3)])
def test_a_long_random_run_leaves_nothing_behind(steps: int, num_blocks: int, snapshots: int) -> None:
    runner = drive(steps, seed=5, num_blocks=num_blocks, snapshots=snapshots, snapshot_interval=16)
    preempted = sum(len(tick.preempted) for tick in runner.ticks)
    restored = sum(restore.length > 0 for tick in runner.ticks for restore in tick.restores)
    assert preempted > 20
    assert restored > 20 if snapshots else restored == 0


# ------------------------------------------------------------------------------------------ planted faults


class ReusesEarly(Scheduler):
    def _retire(self, request: Request) -> None:
        assert request.slot is not None
        self.retired.retire(Holding(-1, request.slot, request.block_table))
        request.slot, request.block_table = None, []


class LeaksABlock(Scheduler):
    def _retire(self, request: Request) -> None:
        request.block_table = request.block_table[:-1]
        super()._retire(request)


class OwnsOneCycleAhead(Scheduler):
    def __init__(self, limits: SchedulerLimits, *others: object) -> None:
        super().__init__(limits, *others)  # type: ignore[arg-type]
        self.__dict__["limits"] = Short(**vars(limits))


class Short(SchedulerLimits):
    @property
    def rows_ahead(self) -> int:
        return self.num_speculative_tokens + 1


class StopsTheMostImportant(Scheduler):
    def _preempt(self, request: Request, round_: _Round) -> None:
        super()._preempt(self.running[0], round_)


class SharesThePartialBlock(Scheduler):
    def _take_blocks(self, request: Request, hit: object, round_: _Round) -> bool:
        done = super()._take_blocks(request, hit, round_)  # type: ignore[arg-type]
        for restore in round_.tick.restores:
            restore.__dict__["copies"] = []
        return done


class Overtakes(Scheduler):
    def _start(self, request: Request, round_: _Round) -> bool:
        return super()._start(self.waiting[-1], round_)


class DropsSnapshotsEarly(Scheduler):
    def completed(self, cycle: int) -> None:
        super().completed(cycle)
        assert self.prefix is not None
        self.prefix.completed = cycle + 2


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [
        (ReusesEarly, "reused early"),
        (LeaksABlock, "references differ"),
        (OwnsOneCycleAhead, "owns too few blocks ahead"),
        (StopsTheMostImportant, "stopped for a less important one|stopped has work"),
        (SharesThePartialBlock, "is not its own"),
        (Overtakes, "is overtaken"),
        (DropsSnapshotsEarly, "a snapshot is dropped early"),
    ],
)
def test_a_planted_fault_is_noticed(fault: type[Scheduler], noticed: str) -> None:
    with pytest.raises(AssertionError, match=noticed):
        for seed in range(5):
            drive(400, seed, num_blocks=13, snapshots=2, scheduler=fault)


# ------------------------------------------------------------------------------------------ single rules


def test_a_request_gets_the_tokens_that_it_gets_alone() -> None:
    runner = SimulatedRunner(num_blocks=9, snapshots=0)
    requests = [runner.add(make_request(prompt_of(i, 9, i), 40)) for i in range(8)]
    runner.drain()
    assert [r.output_ids for r in requests] == [expected_output(r.prompt_ids, 40) for r in requests]
    assert any(request.preemptions for request in requests)


def test_a_request_that_can_never_fit_is_refused_with_the_largest_length_that_would() -> None:
    runner = SimulatedRunner(num_blocks=6, max_model_len=96)
    assert runner.scheduler.max_length == 5 * 8 - 6 + 1
    with pytest.raises(PromptError, match=r"30 tokens and up to 6 new ones need 36: expected at most 35"):
        runner.scheduler.add(make_request(STEM[:30], 6))
    runner.add(make_request(STEM[:30], 5))
    runner.drain()


def test_a_request_alone_reaches_its_limit_whatever_the_cache_holds() -> None:
    runner = SimulatedRunner(num_blocks=6, snapshot_interval=8)
    for first in (0, 1, 0, 2):
        runner.add(make_request(STEM[first : first + 30], 5))
        while not runner.scheduler.idle:
            runner.step()
    runner.drain()


def test_the_pool_must_hold_a_request() -> None:
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=64, num_speculative_tokens=5)
    with pytest.raises(ConfigError, match="num_blocks = 2"):
        Scheduler(limits, BlockPool(2, 8))
    with pytest.raises(ConfigError, match="max_num_seqs = 0: expected 1 or more"):
        SchedulerLimits(max_num_seqs=0, max_num_batched_tokens=8, max_model_len=64)


def test_the_policy_does_not_load_torch() -> None:
    script = "import sys; import quickseek.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", f"import torch; {script}"], check=False).returncode == 1


def test_a_live_id_is_refused() -> None:
    runner = SimulatedRunner()
    request = runner.add(make_request(STEM[:3]))
    with pytest.raises(ValueError, match=request.request_id):
        runner.scheduler.add(request)


def test_two_unread_cycles_stop_the_scheduler() -> None:
    runner = SimulatedRunner()
    runner.add(make_request(STEM[:3]))
    runner.launch()
    runner.launch()
    with pytest.raises(RuntimeError, match="cycle 0 has not been reported completed"):
        runner.scheduler.schedule()
    with pytest.raises(ValueError, match="cycle = 2"):
        runner.scheduler.completed(2)


def test_tokens_come_before_the_rows_they_follow() -> None:
    runner = SimulatedRunner()
    request = runner.add(make_request(STEM[:3]))
    runner.launch()
    with pytest.raises(ValueError, match="1 rows after 3 cannot be committed with 3 tokens"):
        runner.scheduler.committed(request, 1)


def test_a_more_important_request_starts_first_and_takes_the_place_of_a_lesser_one() -> None:
    runner = SimulatedRunner(max_num_seqs=1)
    lesser = runner.add(make_request(STEM[:5], 30, priority=1))
    runner.step()
    runner.step()
    greater = runner.add(make_request(STEM[1:6], 3))
    late = runner.add(make_request(STEM[2:7], 3))
    runner.drain()
    assert [r for r in runner.starts if r is not lesser] == [greater, late]
    assert lesser.preemptions == 1 and runner.starts[-1] is lesser
    assert lesser.output_ids == expected_output(lesser.prompt_ids, 30)


def test_an_equal_request_never_takes_a_place() -> None:
    runner = SimulatedRunner(max_num_seqs=1)
    first = runner.add(make_request(STEM[:5], 30))
    runner.add(make_request(STEM[:6], 3))
    runner.drain()
    assert first.preemptions == 0


def test_decode_goes_on_in_every_cycle_in_which_a_long_prompt_is_read() -> None:
    runner = SimulatedRunner(num_blocks=40, max_num_batched_tokens=4, num_speculative_tokens=0)
    short = runner.add(make_request([5, 6], 20))
    runner.step()
    long = runner.add(make_request(STEM, 4))
    reading = []
    while long.state is not Status.DECODE:
        reading.append(runner.step())
    assert len(reading) == 10
    assert all(len(tick.prefills) == 1 and tick.prefills[0].count == 4 for tick in reading)
    assert all(tick.decodes == [short] for tick in reading[: len(short.output_ids)])


def test_one_prefill_step_reads_several_prompts_within_the_budget() -> None:
    runner = SimulatedRunner(max_num_batched_tokens=12)
    requests = [runner.add(make_request(STEM[:5])) for _ in range(3)]
    tick = runner.launch()
    assert [(chunk.request, chunk.start, chunk.count, chunk.last) for chunk in tick.prefills] == [
        (requests[0], 0, 5, True),
        (requests[1], 0, 5, True),
        (requests[2], 0, 2, False),
    ]
    assert tick.decodes == []
    assert runner.launch().decodes == requests[:2]


def test_every_prompt_starts_while_others_keep_arriving() -> None:
    runner = SimulatedRunner(num_blocks=14)
    large = runner.add(make_request(STEM * 2, 4))
    waited = 0
    while large in runner.live and waited < 200:
        if len(runner.live) < 6:
            runner.add(make_request([waited % 20 + 2, 3, 4], 6))
        runner.step()
        waited += 1
    assert large not in runner.live
    early = runner.add(make_request(STEM * 2, 4))
    for count in range(200):
        if early not in runner.live:
            break
        runner.add(make_request([count % 20 + 2, 3, 4], 6))
        runner.step()
    assert early not in runner.live


@pytest.mark.parametrize("steps", range(6))
def test_a_request_can_be_aborted_at_any_moment_and_twice(steps: int) -> None:
    runner = SimulatedRunner()
    request, other = runner.add(make_request(STEM[:30], 20)), runner.add(make_request(STEM[:4], 6))
    for _ in range(steps):
        runner.step()
    assert runner.abort(request) and not runner.abort(request)
    assert request.finish_reason == "abort"
    assert not runner.scheduler.abort("nobody")
    runner.drain()
    assert other.output_ids == expected_output(other.prompt_ids, 6)


def test_a_repeated_prompt_runs_its_last_token_only() -> None:
    for length in range(2, 35):
        runner = SimulatedRunner(num_blocks=40, snapshots=4)
        first = runner.add(make_request(STEM[:length], 6))
        while first in runner.live:
            runner.step()
        again = runner.add(make_request(STEM[:length], 6))
        runner.drain()
        assert (first.cached_tokens, again.cached_tokens) == (0, length - 1)
        assert again.output_ids == first.output_ids


def test_a_conversation_continues_at_the_last_answers_end() -> None:
    runner = SimulatedRunner(num_blocks=40, snapshots=4)
    first = runner.add(make_request(STEM[:21], 6))
    while first in runner.live or not runner.scheduler.idle:
        runner.step()
    second = runner.add(make_request(STEM[:21] + first.output_ids + [9, 8, 7], 6))
    runner.drain()
    assert second.cached_tokens == 21 + len(first.output_ids) - 1


def test_prompts_are_cut_where_snapshots_are_wanted() -> None:
    runner = SimulatedRunner(num_blocks=40, snapshots=8, snapshot_interval=10, max_num_batched_tokens=32)
    runner.add(make_request(STEM[:25], 2))
    while not runner.scheduler.idle:
        runner.step()
    assert sorted(save.length for tick in runner.ticks for save in tick.saves)[:3] == [10, 20, 25]
    branch = runner.add(make_request([*STEM[:22], 3, 3, 3], 2))
    runner.drain()
    assert branch.cached_tokens == 20

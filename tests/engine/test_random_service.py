"""Random arrivals, aborts, preemptions and evictions: every finished answer is plain decoding's, and nothing leaks."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from micro import GREEDY, assert_nothing_leaks, make_request, make_runner, micro_model

from model_helpers import Driver
from quickseek.engine.runner import Runner

STEMS = [[(17 * i + 29 * j) % 470 + 20 for i in range(40)] for j in range(3)]
LENGTHS = (1, 2, 7, 8, 9, 16, 23, 31)
TAILS = 3
MOST_TOKENS = 12


def prompt_of(stem: int, length: int, tail: int) -> list[int]:
    """Prompts share beginnings: a stem cut somewhere, then perhaps one token of another."""
    return [*STEMS[stem][:length], *([300 + tail] if tail else [])]


@cache
@torch.inference_mode()
def plain_answers() -> dict[tuple[int, ...], list[int]]:
    """The greedy answer to every prompt, by forwards of the model alone: no engine, no speculation."""
    cases = [(stem, length, tail) for stem in range(len(STEMS)) for length in LENGTHS for tail in range(TAILS)]
    prompts = [prompt_of(*case) for case in cases]
    driver = Driver(micro_model(False), max_requests=len(prompts), max_length=64)
    step = {driver.state.acquire(): torch.tensor(prompt) for prompt in prompts}
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(MOST_TOKENS):
        step = {slot: logits[-1:].argmax(-1) for slot, logits in driver.feed(step).items()}
        for answer, token in zip(answers, step.values(), strict=True):
            answer.append(int(token))
    return {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}


class Service:
    """A runner under load, and what each request must say."""

    def __init__(self, drafts: int, blocks: int, seqs: int, chunk: int, snapshots: int) -> None:
        self.runner: Runner = make_runner(
            drafts=drafts, num_blocks=blocks, max_num_seqs=seqs, max_num_batched_tokens=chunk, snapshots=snapshots
        )
        self.expected: dict[str, list[int]] = {}
        self.finished = self.aborted = self.preempted = self.cached = 0

    def arrive(self, stem: int, length: int, tail: int, count: int, priority: int) -> None:
        prompt = prompt_of(stem, length, tail)
        request = make_request(prompt, replace(GREEDY, max_tokens=count), priority=priority)
        self.runner.add(request)
        self.expected[request.request_id] = plain_answers()[tuple(prompt)][:count]

    def abort(self, which: int) -> None:
        if self.expected:
            request_id = sorted(self.expected)[which % len(self.expected)]
            if self.runner.abort(request_id) is not None:
                self.aborted += 1
            del self.expected[request_id]

    def tick(self) -> None:
        for update in self.runner.step():
            output = update.output
            expected = self.expected.get(output.request_id)
            if expected is None:
                continue
            assert output.token_ids == expected[: len(output.token_ids)]
            if output.finished:
                assert output.finish_reason == "length" and output.token_ids == expected
                self.finished += 1
                self.cached += output.cached_tokens
                del self.expected[output.request_id]

    def drain(self) -> None:
        for _ in range(3000):
            if self.runner.idle:
                break
            self.tick()
        assert not self.expected, f"never finished: {sorted(self.expected)}"
        assert_nothing_leaks(self.runner)


class ServiceMachine(RuleBasedStateMachine):
    service: Service | None = None

    @initialize(
        drafts=st.sampled_from([0, 1, 5]),
        blocks=st.integers(9, 20),
        seqs=st.integers(1, 4),
        chunk=st.sampled_from([3, 8, 64]),
        snapshots=st.sampled_from([0, 2, 4]),
    )
    def start(self, drafts: int, blocks: int, seqs: int, chunk: int, snapshots: int) -> None:
        self.service = Service(drafts, blocks, seqs, chunk, snapshots)

    @precondition(lambda self: self.service is not None and len(self.service.expected) < 8)
    @rule(
        stem=st.integers(0, 2),
        length=st.sampled_from(LENGTHS),
        tail=st.integers(0, TAILS - 1),
        count=st.integers(1, MOST_TOKENS),
        priority=st.integers(0, 2),
    )
    def arrive(self, stem: int, length: int, tail: int, count: int, priority: int) -> None:
        assert self.service is not None
        self.service.arrive(stem, length, tail, count, priority)

    @rule(ticks=st.integers(1, 4))
    def run(self, ticks: int) -> None:
        assert self.service is not None
        for _ in range(ticks):
            self.service.tick()

    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        assert self.service is not None
        self.service.abort(which)

    def teardown(self) -> None:
        if self.service is not None:
            self.service.drain()


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        ServiceMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_service_is_plain_decoding() -> None:
    run_machine(12, 30)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_random_service_is_plain_decoding_200_runs_of_50_rules() -> None:
    run_machine(200, 50)


def drive(steps: int, seed: int) -> Service:
    """One long service at a fixed seed: bursts, aborts, little memory."""
    rng = random.Random(seed)
    service = Service(drafts=5, blocks=16, seqs=4, chunk=24, snapshots=4)
    for _ in range(steps):
        if len(service.expected) < 9 and rng.random() < 0.35:
            service.arrive(
                rng.randrange(3),
                rng.choice(LENGTHS),
                rng.randrange(TAILS),
                rng.randint(1, MOST_TOKENS),
                rng.randrange(3),
            )
        if rng.random() < 0.03:
            service.abort(rng.randrange(9))
        service.preempted += sum(request.preemptions > 0 for request in service.runner.scheduler.waiting)
        service.tick()
    service.drain()
    return service


def test_a_long_service_at_a_fixed_seed_finishes_everything() -> None:
    service = drive(300, seed=3)
    assert service.finished > 50 and service.aborted > 3 and service.preempted > 0 and service.cached > 100


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_steps_of_service() -> None:
    service = drive(10_000, seed=7)
    assert service.finished > 1500 and service.aborted > 100 and service.preempted > 10 and service.cached > 2000


def test_a_wrong_token_would_be_noticed() -> None:
    """Negative control: the machine's own check fails when a cache row is spoiled between two ticks."""
    service = Service(drafts=1, blocks=20, seqs=2, chunk=64, snapshots=0)
    service.arrive(0, 31, 0, MOST_TOKENS, 0)
    service.tick()
    service.runner.pools.caches["layers.0.window"].tensor.mul_(-1.0)
    with pytest.raises(AssertionError):
        service.drain()

"""The warm-up asks for every kernel that requests ask for, and leaves nothing behind."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from micro import GREEDY, alone, assert_nothing_leaks, make_request, make_runner, micro_model, tokens_of
from torch import Tensor

from engine_cases import written
from lost_peers import give_up, raise_flags
from quickseek.decode.gates import GATES
from quickseek.engine import warm_up
from quickseek.engine.cycle import Cycle
from quickseek.engine.peers import Peers
from quickseek.engine.runner import Runner
from quickseek.engine.warm_up import WarmUp, contexts, sizes
from quickseek.errors import CollectiveTimeout
from quickseek.llm import LLM
from quickseek.parallel.fabric import VirtualFabric
from quickseek.parallel.faults import PeersLost
from quickseek.parallel.virtual import VirtualWorld, run_virtual
from quickseek.parallel.watchdog import Watchdog
from quickseek.parallel.world import SoloWorld

PROMPTS = [list(range(20 + 9 * count, 20 + 10 * count)) for count in (3, 17, 8)]

SMALL: dict[str, Any] = {"max_num_batched_tokens": 5, "max_model_len": 32, "max_num_seqs": 2}


def memory(runner: Runner) -> list[Tensor]:
    """Copies of everything that requests and snapshots live in."""
    state = [value for value in vars(runner.state).values() if isinstance(value, Tensor)]
    return [tensor.clone() for tensor in (runner.pools.tables, *state)] + [
        cache.tensor.clone() for cache in runner.pools.caches.values()
    ]


@pytest.mark.parametrize("options", [{}, {"drafts": 1, "confidence": 0.5, "approximate_prefix": True}])
def test_a_warm_up_leaves_memory_counts_and_answers_as_they_were(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    options = options | SMALL
    cold, warm = make_runner(**options), make_runner(**options, warm_up=True)
    assert all(map(torch.equal, memory(cold), memory(warm)))
    assert warm.cycle.steps == warm.cycle.specialized == 0 and warm.idle
    requests = [make_request(prompt) for prompt in PROMPTS]
    assert tokens_of(warm, requests) == [alone(prompt) for prompt in PROMPTS]
    assert_nothing_leaks(warm)
    # Negative control: what is run is seen in memory unless it is put back.
    monkeypatch.setattr(Tensor, "clone", lambda self: self)
    assert not all(map(torch.equal, memory(cold), memory(make_runner(**options, warm_up=True))))


def test_a_warm_up_runs_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[WarmUp] = []
    monkeypatch.setattr(WarmUp, "run", lambda self: runs.append(self))
    make_runner()
    assert not runs
    make_runner(warm_up=True).renewed()
    assert len(runs) == 1


def test_prompts_of_all_requests_together_are_no_more_rows_than_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    prefill = Cycle.prefill

    def told(self: Cycle, slots: Tensor, ids: Tensor, *given: Any, **named: Any) -> Any:
        seen.append((ids.shape[0], slots.shape[0]))
        return prefill(self, slots, ids, *given, **named)

    monkeypatch.setattr(Cycle, "prefill", told)
    runner = make_runner(max_num_seqs=3, max_model_len=16, max_num_batched_tokens=64, warm_up=True)
    warmed = [max(counts) for counts in zip(*seen, strict=True)]
    seen.clear()
    tokens_of(runner, [make_request(range(20 * n, 20 * n + 13), max_model_len=16) for n in (1, 2, 3)])
    assert max(seen) == (39, 3) and runner.pools.reach < 39, "one request could hold them"
    assert warmed == [min(64, 3 * runner.pools.reach), 3], "more rows, and no more requests, than can run"


def test_what_goes_wrong_in_a_warm_up_puts_scratch_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(**SMALL)
    before, decide = memory(runner), Cycle.decide

    def fail(self: Cycle, *arguments: Any, **named: Any) -> Any:
        decide(self, *arguments, **named)
        raise MemoryError("planted")

    monkeypatch.setattr(Cycle, "decide", fail)
    with pytest.raises(MemoryError, match="planted"):
        runner._warm_up()
    assert all(map(torch.equal, before, memory(runner)))


@pytest.mark.parametrize("fault", ["record", "flag"])
def test_a_peer_that_comes_late_to_a_warm_up_is_told_at_its_end(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Of this rank's own wait the error names the peer; of a wait of another rank only the flag is seen."""
    fabric = VirtualFabric.ranks(2, "cpu")[0]
    watchdog, late, steps, prefill = Watchdog.of(fabric), [False], list[int](), Cycle.prefill
    monkeypatch.setattr(Peers, "of", lambda model: Peers(watchdog))

    def told(self: Cycle, *given: Any, **named: Any) -> Any:
        watchdog.check()  # as a collective does before its launch
        steps.append(len(steps))
        if late[0] and len(steps) == 2:
            raise_flags(watchdog) if fault == "flag" else give_up(watchdog, 1)
        return prefill(self, *given, **named)

    monkeypatch.setattr(Cycle, "prefill", told)
    make_runner(**SMALL, warm_up=True)
    all_steps, late[0] = list(steps), True
    steps.clear()
    with pytest.raises(CollectiveTimeout, match="missing source ranks: 1" if fault == "record" else "another rank"):
        make_runner(**SMALL, warm_up=True)
    assert steps == all_steps and len(steps) > 2, "a rank that stops early leaves out what its peers wait for"


class FailsAsOne(SoloWorld):
    """A world in which every wait in vain was for a rank that is known to have failed."""

    def _missed(self, error: CollectiveTimeout) -> None:
        raise PeersLost("rank 1 failed: ValueError: torn") from error


def test_a_warm_up_that_waited_for_a_rank_that_failed_says_with_what(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog = Watchdog.of(fabric := VirtualFabric.ranks(2, "cpu")[0])
    monkeypatch.setattr(Peers, "of", lambda model: Peers(watchdog))
    monkeypatch.setattr(micro_model(False), "world", FailsAsOne())
    monkeypatch.setattr(WarmUp, "run", lambda self: give_up(watchdog, 1))
    with pytest.raises(PeersLost, match="torn"):
        make_runner(warm_up=True)
    assert fabric.size == 2


def counts(llm: LLM) -> list[int]:
    """What the executor of a model and its parts have counted."""
    executor = llm.executor
    assert executor is not None and executor.draft is not None
    gather, shard = executor.gather, executor.row_shard
    assert gather is not None and shard is not None
    return [executor.runs, executor.draft.runs, gather.fused, shard.runs, shard.fused]


def counted(world: VirtualWorld, directory: Path) -> tuple[list[int], list[int]]:
    """Counts after a start with a warm-up, and after another whose steps are counted."""
    options: dict[str, Any] = {"decode_backend": "latency_specialized", "num_speculative_tokens": 1, "max_num_seqs": 2}
    options |= {"max_model_len": 16, "max_num_batched_tokens": 2, "tensor_parallel_size": 2}
    llm = LLM(directory, world=world, jit_warmup=True, **options)
    started = counts(llm)
    assert llm.executor is not None
    llm.executor.uncounted = nullcontext  # type: ignore[method-assign]
    llm.runner._warm_up()
    return started, counts(llm)


def test_a_warm_up_adds_to_no_count_of_the_specialized_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GATES, "cpu", replace(GATES["cpu"], row_shard=2))
    monkeypatch.setattr(WarmUp, "_kinds", lambda self, requests, rows: self._plain())
    for started, again in run_virtual(counted, 2, written(tmp_path, "tiny-tp"), timeout_s=300.0):
        assert started == [0] * 5 and all(again), again


def test_every_class_of_rows_has_one_of_the_sizes() -> None:
    found = sizes(2048)
    assert found[:24] == list(range(1, 25)) and found[-1] == 2048 and sizes(100)[-1] == 100 and sizes(1) == [1]
    # Classes end at powers of two, at half the multiprocessors, at pairs of experts: (64, 66] on an H200, (72, 80].
    for first, last in ((8, 16), (16, 32), (32, 33), (64, 66), (72, 80), (128, 132), (192, 200), (256, 384)):
        assert any(first < size <= last for size in found), (first, last)


def test_contexts_reach_the_longest_one() -> None:
    assert contexts(20) == [1, 2, 3, 4, 7, 8, 15, 16, 20]


def steps_of(world: VirtualWorld, directory: Path) -> tuple[list[Any], list[int]]:
    """What each step of the warm-up runs on this rank, and the tokens of an answer after it."""
    steps: list[Any] = []
    options: dict[str, Any] = {"tensor_parallel_size": 2, "num_speculative_tokens": 2, "max_num_seqs": 2}
    llm = LLM(directory, world=world, max_model_len=32, max_num_batched_tokens=6, **options)
    prefill, verify, decide = Cycle.prefill, Cycle.verify, Cycle.decide

    class Told(Cycle):
        def prefill(self, slots: Tensor, ids: Tensor, *given: Any, **named: Any) -> Any:
            steps.append(("prefill", ids.shape[0], slots.shape[0]))
            return prefill(self, slots, ids, *given, **named)

        def verify(self, slots: Tensor, *given: Any, **named: Any) -> Any:
            steps.append(("verify", slots.shape[0], given))
            return verify(self, slots, *given, **named)

        def decide(self, step: Any, needs: Any, *given: Any, **named: Any) -> Any:
            steps.append(("decide", step.logits.shape, needs))
            return decide(self, step, needs, *given, **named)

    llm.runner.cycle.__class__ = Told
    llm.runner._warm_up()
    answer = llm.generate([PROMPTS[0]], GREEDY)[0]
    assert answer.error is None
    return steps, answer.token_ids


def test_ranks_warm_up_with_the_same_steps_in_the_same_order(tmp_path: Path) -> None:
    (first, answer), (second, other) = run_virtual(steps_of, 2, written(tmp_path, "tiny-tp"), timeout_s=300.0)
    assert first == second and answer == other
    assert {name for name, *_ in first} == {"prefill", "verify", "decide"} and len(first) > 50


def test_requests_ask_for_no_kernel_that_the_warm_up_did_not(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("cutlass")
    options = {"decode_backend": "stock", "num_speculative_tokens": 3, "max_num_seqs": 4, "jit_warmup": True}
    options |= {"max_model_len": 192, "max_num_batched_tokens": 96}
    script = Path(__file__).with_name("dry_launches.py")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, str(script), str(written(tmp_path, "tiny-tp")), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["missed"] == [] and found["load"] > 90
    assert len(found["missed by less"]) > 4, "the requests ask for little"


def test_all_that_requests_may_ask_of_the_choice_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    decide = Cycle.decide

    def seen(self: Cycle, step: Any, needs: Any, masks: Any = None, **named: Any) -> Any:
        asked.append((needs, masks is not None, named.get("rows_ran", True)))
        return decide(self, step, needs, masks, **named)

    monkeypatch.setattr(Cycle, "decide", seen)
    make_runner(drafts=2, **SMALL, warm_up=True)
    for rows_ran in (False, True):
        of = [(needs, masks) for needs, masks, ran in asked if ran is rows_ran]
        for name in ("penalties", "bias", "min_tokens", "masks", "sampled"):
            assert {getattr(needs, name) for needs, _ in of} == {False, True}, name
        assert {needs.logprobs for needs, _ in of} >= {None, 0, 1, warm_up.MAX_LOGPROBS}
        assert all(needs.masks == masks for needs, masks in of)

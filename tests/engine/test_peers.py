"""A peer that does not come: no token of a void cycle gets out, the error names it, and ``reset`` restores service."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_device import replaying
from micro import alone, assert_nothing_leaks, finish_all, make_request, make_runner, tokens_of
from torch import Tensor

from engine_cases import written
from lost_peers import give_up, leave_record, raise_flags
from quickseek import LLM, SamplingParams
from quickseek.engine.async_engine import AsyncEngine, EngineDead
from quickseek.engine.peers import Peers
from quickseek.engine.readback import Readback
from quickseek.engine.runner import Runner
from quickseek.errors import CollectiveTimeout
from quickseek.parallel.fabric import Fabric, LoopbackFabric, VirtualFabric
from quickseek.parallel.host_fabric import HostFabric
from quickseek.parallel.launch import spawn
from quickseek.parallel.watchdog import Watchdog
from quickseek.parallel.world import World

PROMPTS = [list(range(20 + 9 * count, 20 + 10 * count)) for count in (3, 17, 8)]
VOID = 7
"""The token that void logits choose here."""
DECODING = 4
"""Steps after which all prompts have been read and their first tokens given out."""


@pytest.fixture
def fabric() -> Fabric:
    return VirtualFabric.ranks(2, "cpu")[0]


def watched(runner: Runner, fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    """Let a runner watch ``fabric``; while its flag is up the model's logits are void."""
    watchdog = Watchdog.of(fabric)
    runner.peers, real = Peers(watchdog), runner.model.logits

    def logits(hidden: Tensor) -> Tensor:
        found = real(hidden)
        return torch.zeros_like(found).index_fill_(1, torch.tensor([VOID]), 1.0) if int(watchdog.flag) else found

    monkeypatch.setattr(runner.model, "logits", logits)
    return watchdog


def lose_rank_1(runner: Runner, watchdog: Watchdog, part: str, call: int, patch: pytest.MonkeyPatch) -> list[str]:
    """Rank 1 does not come to call number ``call`` of a part of the cycle, nor later; the calls as they are made."""
    real, calls = getattr(runner.cycle, part), []

    def run(*arguments: Any, **named: Any) -> Any:
        calls.append(part)
        if len(calls) == call:
            give_up(watchdog, 1)
        return real(*arguments, **named)

    patch.setattr(runner.cycle, part, run)
    return calls


def shown(runner: Runner, prepare: Callable[[], object] = lambda: None) -> tuple[list[Any], CollectiveTimeout | None]:
    """Tokens given out after each step, and the error that ended it; ``prepare`` is called once all decode."""
    requests = [make_request(prompt) for prompt in PROMPTS]
    for request in requests:
        runner.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    after: list[Any] = []
    while not runner.idle:
        if len(after) == DECODING:
            prepare()
        try:
            updates = runner.step()
        except CollectiveTimeout as error:
            return after, error
        for update in updates:
            assert update.output.error is None, update.output.error
            tokens[update.output.request_id] = list(update.output.token_ids)
        after.append(list(tokens.values()))
        tokens = {key: list(value) for key, value in tokens.items()}
    return after, None


def names_rank_1(error: CollectiveTimeout | None) -> bool:
    assert error is not None
    found = (error.kind, error.rank, error.generation, error.token, error.missing)
    return found == ("all_reduce", 0, 2, 17, (1,)) and "missing source ranks: 1" in str(error)


# ------------------------------------------------------------------------------------------ no void token


@pytest.mark.parametrize("part", ["_run", "_accept", "_draft"])
def test_no_token_of_a_void_replay_gets_out_and_all_before_it_do(
    part: str, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, _ = shown(replaying(monkeypatch, drafts=3))
    runner = replaying(monkeypatch, drafts=3)
    watchdog, calls = watched(runner, fabric, monkeypatch), []

    def lose() -> None:
        calls.append(lose_rank_1(runner, watchdog, part, 2, monkeypatch))

    found, error = shown(runner, lose)
    # The second cycle from here is void; it is read in the step that launches the third.
    assert names_rank_1(error) and found == clean[: DECODING + 2] and len(calls[0]) == 3

    fresh = runner.renewed()
    request = make_request(PROMPTS[1])
    fresh.add(request)
    with pytest.raises(CollectiveTimeout, match="missing source ranks: 1"):
        fresh.step()
    assert len(calls[0]) == 3, "something was launched before reset"
    fresh.peers.reset()
    assert finish_all(fresh)[request.request_id] == alone(PROMPTS[1])
    assert tokens_of(fresh, [make_request(prompt) for prompt in PROMPTS]) == [alone(prompt) for prompt in PROMPTS]
    assert_nothing_leaks(fresh)


def test_void_tokens_would_be_noticed(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    clean, _ = shown(replaying(monkeypatch, drafts=3))
    runner = replaying(monkeypatch, drafts=3)
    watchdog = watched(runner, fabric, monkeypatch)
    runner.peers = Peers(None)
    found, error = shown(runner, lambda: lose_rank_1(runner, watchdog, "_run", 2, monkeypatch))
    assert error is None and found != clean and found[DECODING + 1] == clean[DECODING + 1]
    assert all(VOID in tokens for tokens in found[-1]) and not any(VOID in tokens for tokens in clean[-1])


def test_a_record_that_is_seen_early_stops_no_rank_early(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is late finds the record while it still reads valid results; its peer has launched one step more."""
    runner = replaying(monkeypatch, drafts=3)
    watchdog = watched(runner, fabric, monkeypatch)
    monkeypatch.setattr(runner.peers, "check_results", lambda flag: runner.peers.check())
    calls = []
    found, error = shown(runner, lambda: calls.append(lose_rank_1(runner, watchdog, "_run", 2, monkeypatch)))
    assert names_rank_1(error) and (len(found), len(calls[0])) == (DECODING + 1, 2), "stopping early is not noticed"


@pytest.mark.parametrize("options", [{}, {"drafts": 3}, {"drafts": 3, "confidence": 0.01}])
def test_eager_steps_and_those_that_the_host_paces_give_out_no_void_token(
    options: dict[str, Any], fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, _ = shown(make_runner(**options))
    runner = make_runner(**options)
    watchdog = watched(runner, fabric, monkeypatch)
    found, error = shown(runner, lambda: lose_rank_1(runner, watchdog, "_run", 2, monkeypatch))
    assert names_rank_1(error) and found == clean[: DECODING + 1]


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_first_token_of_a_void_prompt_step_does_not_get_out(
    drafts: int, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(drafts=drafts)
    lose_rank_1(runner, watched(runner, fabric, monkeypatch), "prefill", 1, monkeypatch)
    found, error = shown(runner)
    assert names_rank_1(error) and not any(tokens for after in found for tokens in after)


# ------------------------------------------------------------------------------------------ ranks launch alike


@pytest.mark.parametrize("deferred", [True, False])
def test_a_prompt_step_behind_a_void_cycle_is_launched_to_its_end(
    deferred: bool, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = replaying(monkeypatch, drafts=3)
    watchdog, first_token, done = watched(runner, fabric, monkeypatch), runner.cycle.first_token, []
    if not deferred:
        monkeypatch.setattr(runner.peers, "deferred", nullcontext)

    def gathering(*arguments: Any) -> Any:
        watchdog.check()  # as a collective does before its launch
        decision = first_token(*arguments)
        done.append(decision)
        return decision

    def lose() -> None:
        lose_rank_1(runner, watchdog, "_run", 1, monkeypatch)
        monkeypatch.setattr(runner.cycle, "first_token", gathering)

    for prompt in PROMPTS[:2]:
        runner.add(make_request(prompt))
    for _ in range(DECODING):
        runner.step()
    lose()
    runner.step()
    late = make_request(PROMPTS[2])
    runner.add(late)
    with pytest.raises(CollectiveTimeout):
        runner.step()
    assert len(done) == deferred and (late.finish_reason == "error") != deferred
    with pytest.raises(CollectiveTimeout):
        watchdog.check()


# ------------------------------------------------------------------------------------------ waiting


class Passing:
    """A CUDA event that has passed at look number ``at`` (None: never), and what was looked at, in order."""

    def __init__(self, at: int | None) -> None:
        self.at, self.looks = at, 0

    def query(self) -> bool:
        self.looks += 1
        return self.at is not None and self.looks >= self.at


def waited(at: int | None, fault_from: int | None) -> str:
    """What comes of waiting for a result, if a fault is known from a look on."""
    event: Any = Passing(at)
    error = CollectiveTimeout("all_gather", 0, 1, 2, (1,))
    fault = lambda: error if fault_from is not None and event.looks >= fault_from else None  # noqa: E731
    try:
        return Readback("result", event).get(fault)
    except CollectiveTimeout as caught:
        assert caught is error
        return f"raised after {event.looks} looks"


def test_a_result_that_never_comes_is_waited_for_until_a_time_out_is_known() -> None:
    assert waited(at=30, fault_from=None) == "result"
    assert waited(at=None, fault_from=20) == "raised after 21 looks"
    # A result that has arrived by the next look may have met nothing: its own flag tells.
    assert waited(at=21, fault_from=20) == "result" and waited(at=22, fault_from=20) == "raised after 21 looks"


# ------------------------------------------------------------------------------------------ who is watched


def test_the_peers_of_a_model_are_those_of_its_executor(fabric: Fabric) -> None:
    def peers(executor: object) -> Peers:
        return Peers.of(SimpleNamespace(backbone=SimpleNamespace(executor=executor)))  # type: ignore[arg-type]

    assert peers(SimpleNamespace(fabric=fabric)).watchdog is Watchdog.of(fabric)
    nobody = (None, SimpleNamespace(fabric=None), SimpleNamespace(fabric=LoopbackFabric(1, "cpu")))
    for executor in nobody:
        alone_ = peers(executor)
        assert alone_.watchdog is None and alone_.flag is None and alone_.error() is None
        alone_.check()
        alone_.check_results(None)
        alone_.reset()


def test_a_flag_without_a_record_is_an_error_too(fabric: Fabric) -> None:
    peers = Peers(Watchdog.of(fabric))
    peers.check_results(peers.flag)
    raise_flags(Watchdog.of(fabric))
    peers.check()
    with pytest.raises(CollectiveTimeout, match=r"on rank 0 .* none \(another rank gave up first\)"):
        peers.check_results(peers.flag)
    peers.reset()
    peers.check_results(peers.flag)


def test_an_engine_whose_peer_is_lost_names_it_and_another_serves_after_reset(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(drafts=3)
    lose_rank_1(runner, watched(runner, fabric, monkeypatch), "decide", 3, monkeypatch)

    async def answer(engine: AsyncEngine) -> list[int]:
        try:
            return (await asyncio.wait_for(engine.generate(make_request(PROMPTS[0])), 60)).token_ids
        finally:
            engine.close()

    with pytest.raises(EngineDead, match="missing source ranks: 1") as caught:
        asyncio.run(answer(AsyncEngine(runner)))
    assert names_rank_1(caught.value.__cause__)  # type: ignore[arg-type]
    runner.peers.reset()
    assert asyncio.run(answer(AsyncEngine(runner.renewed()))) == alone(PROMPTS[0])


# ------------------------------------------------------------------------------------------ two ranks

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


def meet_and_lose(world: World, directory: str) -> dict[str, Any]:
    """Rank 0 gives up in its third V, rank 1 finds the flag in the D behind it; then both serve again."""
    options = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32", "num_speculative_tokens": 2}
    llm = LLM(directory, world=world, tensor_parallel_size=2, decode_backend="latency_specialized", **options)
    assert llm.executor is not None
    llm.executor.fabric = HostFabric(world)
    llm.runner = llm._runner()
    cycle, watchdog = llm.runner.cycle, llm.runner.peers.watchdog
    assert watchdog is not None
    verify, decide, calls, shown = cycle.verify, cycle.decide, [], []

    def expected() -> list[int]:
        return llm.generate([PROMPTS[0]], PARAMS)[0].token_ids

    def verify_alone(*arguments: Any) -> Any:
        step = verify(*arguments)
        calls.append(step)
        if len(calls) == 3 and world.rank == 0:
            give_up(watchdog, 1)
        return step

    def decide_late(*arguments: Any, **named: Any) -> Any:
        decision = decide(*arguments, **named)
        if world.rank == 1 and int(watchdog.flag) and watchdog.error() is None:
            leave_record(watchdog, 0, 0)
        return decision

    plain = expected()
    cycle.verify, cycle.decide = verify_alone, decide_late  # type: ignore[method-assign]
    report: dict[str, Any] = {"errors": []}
    try:
        for _, output in llm.stream(PROMPTS[0], PARAMS):
            shown = list(output.token_ids)
    except CollectiveTimeout as error:
        report["errors"].append((error.rank, error.missing, str(error)))
    try:
        expected()
    except CollectiveTimeout as error:
        report["errors"].append((error.rank, error.missing, str(error)))
    report |= {"launched": len(calls), "shown": shown, "plain": plain, "impaired": [world.impaired]}
    llm.reset()
    report["impaired"].append(world.impaired)
    return report | {"again": expected()}


def test_two_ranks_raise_together_and_serve_together_after_reset(tmp_path: Path) -> None:
    first, second = spawn(meet_and_lose, 2, str(written(tmp_path, "tiny-tp")), timeout_s=120)
    assert [found[:2] for found in first["errors"]] == [(0, (1,))] * 2
    assert [found[:2] for found in second["errors"]] == [(1, ())] * 2
    assert "missing source ranks: 1" in first["errors"][0][2] and "another rank" in second["errors"][0][2]
    for report in (first, second):
        assert report["launched"] == 3 and report["again"] == report["plain"]
        assert report["impaired"] == [True, False]
        assert 0 < len(report["shown"]) < len(report["plain"])
        assert report["shown"] == report["plain"][: len(report["shown"])]

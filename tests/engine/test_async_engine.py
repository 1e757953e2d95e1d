"""Streams from asyncio: what they say is what the runner says, and whoever leaves takes nothing along."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest
from micro import GREEDY, alone, assert_nothing_leaks, make_request, make_runner

from quickseek.engine.async_engine import AsyncEngine, EngineDead
from quickseek.engine.runner import Update
from quickseek.errors import PromptError
from quickseek.parallel.faults import PeersLost
from quickseek.sampling_params import SamplingParams

T = TypeVar("T")
PROMPTS = [[20 + i, 40 + i, 77] for i in range(6)]


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    started = AsyncEngine(make_runner(drafts=2))
    yield started
    started.close()


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work(), 60)

    return asyncio.run(bounded())


def test_many_streams_at_once_say_what_plain_decoding_says(engine: AsyncEngine) -> None:
    async def work() -> list[list[int]]:
        outputs = await asyncio.gather(*(engine.generate(make_request(prompt)) for prompt in PROMPTS))
        return [output.token_ids for output in outputs]

    assert run(work) == [alone(prompt) for prompt in PROMPTS]


def test_a_stream_brings_text_in_pieces(engine: AsyncEngine) -> None:
    async def work() -> tuple[str, str]:
        shown, output = "", None
        async for update in engine.stream(make_request(PROMPTS[0])):
            shown, output = shown + update.text, update.output
        assert output is not None and output.finish_reason == "length"
        return shown, output.text

    shown, text = run(work)
    assert shown == text


def test_a_consumer_that_leaves_aborts_its_request(engine: AsyncEngine) -> None:
    async def work() -> None:
        long = make_request(PROMPTS[1], replace(GREEDY, max_tokens=80))
        async for _ in engine.stream(long):
            break
        output = await engine.generate(make_request(PROMPTS[2]))
        assert output.token_ids == alone(PROMPTS[2])
        while not await engine.call(lambda runner: runner.idle):
            await asyncio.sleep(0.01)
        assert long.finish_reason == "abort"
        await engine.call(assert_nothing_leaks)

    run(work)


def test_a_time_out_ends_a_request_as_aborted(engine: AsyncEngine) -> None:
    async def work() -> str | None:
        output = await engine.generate(make_request(PROMPTS[1], replace(GREEDY, max_tokens=90)), timeout_s=0.0)
        return output.finish_reason

    assert run(work) == "abort"


def test_a_request_that_cannot_run_raises_where_it_was_made(engine: AsyncEngine) -> None:
    async def work() -> None:
        request = make_request(PROMPTS[0])
        request.limit = 500
        with pytest.raises(PromptError, match="together"):
            await engine.generate(request)
        assert (await engine.generate(make_request(PROMPTS[0]))).token_ids == alone(PROMPTS[0])

    run(work)


def test_a_dead_engine_says_so_to_everyone() -> None:
    runner = make_runner()

    def explode() -> list[object]:
        raise MemoryError("planted")

    runner.step = explode  # type: ignore[method-assign, assignment]
    engine = AsyncEngine(runner)

    async def work() -> None:
        with pytest.raises(EngineDead, match="planted"):
            await engine.generate(make_request(PROMPTS[0]))
        with pytest.raises(EngineDead):
            await engine.generate(make_request(PROMPTS[0]))

    run(work)
    engine.close()


@pytest.mark.parametrize("where", ["step", "call", "add"])
def test_an_engine_that_lost_its_peers_tells_all_who_wait_and_ends(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also whoever asked for what it was doing then: PeersLost, unlike other errors, is not that request's alone."""
    runner = make_runner()
    engine, begun = AsyncEngine(runner), threading.Event()

    def lose(*_: object, **__: object) -> None:
        begun.wait(30)
        raise PeersLost("rank 1 failed in a step: torn", [1])

    target, name = {"step": (runner.cycle, "decide"), "call": (runner, "compile_grammar"), "add": (runner, "add")}[
        where
    ]
    monkeypatch.setattr(target, name, lose)

    async def work() -> None:
        waiting = [asyncio.ensure_future(engine.generate(make_request(prompt))) for prompt in PROMPTS[:2]]
        waiting.append(asyncio.ensure_future(engine.call(lambda runner: runner.compile_grammar(GREEDY))))
        await asyncio.sleep(0.1)
        begun.set()
        for outcome in await asyncio.gather(*waiting[: 3 if where != "step" else 2], return_exceptions=True):
            assert isinstance(outcome, EngineDead) and "rank 1 failed in a step: torn" in str(outcome), outcome
            assert isinstance(outcome.__cause__, PeersLost) and outcome.__cause__.ranks == (1,)
        with pytest.raises(EngineDead):
            await engine.generate(make_request(PROMPTS[0]))

    run(work)
    engine._thread.join(30)
    assert not engine._thread.is_alive()


def test_closing_ends_waiting_streams() -> None:
    engine = AsyncEngine(make_runner())

    async def work() -> None:
        stream = engine.stream(make_request(PROMPTS[0], replace(GREEDY, max_tokens=90)))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineDead, match="closed"):
            async for _ in stream:
                pass

    run(work)


def test_a_consumer_that_is_slower_than_the_engine_loses_no_text(engine: AsyncEngine) -> None:
    async def work() -> tuple[str, str]:
        shown, output = "", None
        async for update in engine.stream(make_request(PROMPTS[3])):
            await asyncio.sleep(0.05)
            shown, output = shown + update.text, update.output
        assert output is not None
        return shown, output.text

    shown, text = run(work)
    assert shown == text


def test_closing_answers_what_the_engine_has_not_begun() -> None:
    runner = make_runner()
    busy, go_on = threading.Event(), threading.Event()
    step = runner.step

    def slow() -> list[Update]:
        busy.set()
        go_on.wait(30)
        return step()

    runner.step = slow  # type: ignore[method-assign]
    engine = AsyncEngine(runner)

    async def work() -> None:
        waiting = [asyncio.ensure_future(engine.generate(make_request(PROMPTS[0])))]
        await asyncio.to_thread(busy.wait, 30)
        # The thread is inside a step: these are queued behind it, and it will never come to them.
        waiting.append(asyncio.ensure_future(engine.generate(make_request(PROMPTS[1]))))
        waiting.append(asyncio.ensure_future(engine.call(lambda runner: runner.idle)))
        await asyncio.sleep(0)
        closing = asyncio.to_thread(engine.close)
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        await closing
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, EngineDead), outcome
        with pytest.raises(EngineDead):
            await engine.generate(make_request(PROMPTS[0]))

    run(work)


def test_an_event_loop_that_ends_early_takes_nothing_along(engine: AsyncEngine) -> None:
    inside, go_on = threading.Event(), threading.Event()

    async def leave() -> None:
        waiting = asyncio.ensure_future(engine.call(lambda runner: (inside.set(), go_on.wait(30))))
        await asyncio.to_thread(inside.wait, 30)
        assert not waiting.done()

    run(leave)
    go_on.set()
    assert run(lambda: engine.generate(make_request(PROMPTS[1]))).token_ids == alone(PROMPTS[1])


def test_leaving_a_stream_whose_id_was_taken_spares_the_one_that_has_it(engine: AsyncEngine) -> None:
    async def work() -> None:
        first = make_request(PROMPTS[0], request_id="same")
        stream = engine.stream(first)
        shown = (await anext(stream)).text
        second = asyncio.ensure_future(engine.generate(make_request(PROMPTS[1], request_id="same")))
        await asyncio.sleep(0)
        second.cancel()
        async for update in stream:
            shown += update.text
        assert first.finish_reason == "length" and update.output.text == shown
        with pytest.raises(ValueError, match="same"):
            await asyncio.gather(
                *(engine.generate(make_request(PROMPTS[n], request_id="same")) for n in range(2)),
            )

    run(work)


@pytest.mark.parametrize("seed", range(3))
def test_tasks_cancelled_at_any_await_leave_nothing_behind(seed: int) -> None:
    engine = AsyncEngine(make_runner(drafts=seed, max_num_seqs=3, num_blocks=24))
    chance = random.Random(seed)

    async def work() -> None:
        async def one(number: int) -> None:
            prompt = PROMPTS[number % len(PROMPTS)]
            timeout = chance.choice([None, None, 0.01, 0.05])
            try:
                output = await engine.generate(make_request(prompt), timeout_s=timeout)
            except asyncio.CancelledError:
                return
            assert output.token_ids == alone(prompt) or output.finish_reason == "abort"

        tasks = [asyncio.ensure_future(one(number)) for number in range(40)]
        while any(not task.done() for task in tasks):
            await asyncio.sleep(chance.random() * 0.01)
            chance.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=False)
        while not await engine.call(lambda runner: runner.idle):
            await asyncio.sleep(0.01)
        await engine.call(assert_nothing_leaks)

    for prompt in PROMPTS:
        alone(prompt)
    try:
        run(work)
    finally:
        engine.close()


def test_a_slow_grammar_stalls_nobody_else(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, release = threading.Event(), threading.Event()

    def slow(params: SamplingParams) -> None:
        compiling.set()
        assert release.wait(30)
        original(params)

    original = engine._runner.compile_grammar
    monkeypatch.setattr(engine._runner, "compile_grammar", slow)

    async def work() -> None:
        params = SamplingParams(max_tokens=12, temperature=0.0, regex="[ab]{3}")
        structured = asyncio.create_task(engine.generate(make_request(PROMPTS[0], params)))
        await asyncio.to_thread(compiling.wait, 30)
        monkeypatch.setattr(engine._runner, "compile_grammar", original)
        assert (await engine.generate(make_request(PROMPTS[1]))).token_ids == alone(PROMPTS[1])
        assert not structured.done()
        release.set()
        output = await structured
        assert output.finish_reason == "stop" and set(output.text) <= {"a", "b"} and len(output.text) == 3

    run(work)

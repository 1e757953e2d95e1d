"""Streams from asyncio: what they say is what the runner says, and whoever leaves takes nothing along."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest
from micro import GREEDY, alone, assert_nothing_leaks, make_request, make_runner

from quickseek.engine.async_engine import AsyncEngine, EngineDead
from quickseek.errors import PromptError

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

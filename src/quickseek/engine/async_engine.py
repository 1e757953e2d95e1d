"""``AsyncEngine``: the runner on a thread of its own, requests and streams from asyncio."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from quickseek.engine.answer import RequestOutput
from quickseek.engine.request import Request
from quickseek.engine.runner import Runner, Update
from quickseek.errors import QuickseekError


class EngineDead(QuickseekError, RuntimeError):
    """The engine's thread ended on an error; nothing it held can be trusted."""


class AsyncEngine:
    """Runs a runner until ``close``. All methods belong to one event loop, except that ``close`` may come from any.

    The runner is touched by the engine's thread only; a stream's consumer that goes away aborts its request.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._closing = threading.Event(), False
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Update | Exception]]] = {}
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="quickseek-engine", daemon=True)
        self._thread.start()

    async def stream(self, request: Request, *, timeout_s: float | None = None) -> AsyncIterator[Update]:
        """Updates of a request as they come, the last one finished.

        ``timeout_s``: abort it if it has not finished by then; its last update says "abort". Raises what ``Runner.add``
        raises, and EngineDead if the engine fails.
        """
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Update | Exception] = asyncio.Queue()
        timer = None
        self._submit(lambda: self._add(request, loop, updates))
        if timeout_s is not None:
            timer = loop.call_later(timeout_s, self.abort, request.request_id)
        finished = False
        try:
            while not finished:
                update = await updates.get()
                if isinstance(update, Exception):
                    finished = True
                    raise update
                finished = update.output.finished
                yield update
        finally:
            if timer is not None:
                timer.cancel()
            if not finished:
                self.abort(request.request_id)

    async def generate(self, request: Request, *, timeout_s: float | None = None) -> RequestOutput:
        """The finished output of a request; errors as ``stream``."""
        output = None
        async for update in self.stream(request, timeout_s=timeout_s):
            output = update.output
        assert output is not None
        return output

    def abort(self, request_id: str) -> None:
        """Drop a request, wherever it is; no effect when it is gone."""
        if self._dead is None and not self._closing:
            self._submit(lambda: self._abort(request_id))

    async def call(self, function: Callable[[Runner], Any]) -> Any:
        """The result of ``function(runner)`` on the engine's thread, between two ticks: for metrics and inspection."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                result = function(self._runner)
            except Exception as error:
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_resolve, future, result)

        self._submit(run)
        return await future

    def close(self) -> None:
        """Stop the thread after the tick under way; streams that wait get EngineDead."""
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _submit(self, command: Callable[[], None]) -> None:
        if self._dead is not None or self._closing:
            raise EngineDead("the engine has stopped") from self._dead
        self._commands.put(command)
        self._wake.set()

    def _work(self) -> None:
        try:
            while not self._closing:
                if self._runner.idle and self._commands.empty():
                    self._wake.wait()
                self._wake.clear()
                while not self._commands.empty():
                    self._commands.get()()
                if not self._runner.idle and not self._closing:
                    for update in self._runner.step():
                        self._deliver(update.output.request_id, update)
        except BaseException as error:
            self._dead = error
        finally:
            for request_id in list(self._streams):
                failure = EngineDead(
                    f"the engine has stopped: {self._dead!r}" if self._dead else "the engine was closed"
                )
                failure.__cause__ = self._dead
                self._deliver(request_id, failure)

    def _add(
        self, request: Request, loop: asyncio.AbstractEventLoop, updates: "asyncio.Queue[Update | Exception]"
    ) -> None:
        try:
            self._runner.add(request)
        except Exception as error:
            _post(loop, updates, error)
        else:
            self._streams[request.request_id] = (loop, updates)

    def _abort(self, request_id: str) -> None:
        update = self._runner.abort(request_id)
        if update is not None:
            self._deliver(request_id, update)

    def _deliver(self, request_id: str, update: Update | Exception) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if isinstance(update, Exception) or update.output.finished:
            del self._streams[request_id]
        _post(*stream, update)


def _post(
    loop: asyncio.AbstractEventLoop, updates: "asyncio.Queue[Update | Exception]", update: Update | Exception
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(updates.put_nowait, update)


def _resolve(future: "asyncio.Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)

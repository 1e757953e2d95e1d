"""``AsyncEngine``: the runner on a thread of its own, requests and streams from asyncio."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from quickseek.engine.answer import RequestOutput
from quickseek.engine.request import Request
from quickseek.engine.runner import Runner, Update
from quickseek.errors import QuickseekError


class EngineDead(QuickseekError, RuntimeError):
    """The engine's thread ended on an error; nothing it held can be trusted."""


Post = Callable[[Update | Exception], None]
"""Hands something to the event loop of whoever waits for it."""


@dataclass(frozen=True)
class _Command:
    """What the engine's thread is to do, and whom to tell when it never will."""

    run: Callable[[], None]
    fail: Callable[[Exception], None] = lambda _: None


class AsyncEngine:
    """Runs a runner until ``close``. All methods belong to one event loop, except that ``close`` may come from any.

    The runner is touched by the engine's thread only; a stream's consumer that goes away aborts its request.
    """

    def __init__(self, runner: Runner) -> None:
        if runner.closed:
            raise EngineDead("the engine was closed")
        self._runner = runner
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._wake, self._closing = threading.Event(), False
        # Between a look at ``_stopped`` and what it allows, the engine must not stop: a command would wait for ever.
        self._lock, self._stopped = threading.Lock(), False
        self._streams: dict[str, Post] = {}
        self._dead: BaseException | None = None
        runner.drivers.add(self)
        self._thread = threading.Thread(target=self._work, name="quickseek-engine", daemon=True)
        self._thread.start()

    async def stream(self, request: Request, *, timeout_s: float | None = None) -> AsyncIterator[Update]:
        """Updates of a request as they come, the last one ``finished``; their one output grows as the engine runs on.

        ``timeout_s``: abort it if it has not finished by then; its last update says "abort". Raises what ``Runner.add``
        raises, and EngineDead if the engine fails. A grammar is compiled on another thread: the engine goes on.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        if request.params.structure is not None:
            await asyncio.to_thread(self._runner.compile_grammar, request.params)
        updates: asyncio.Queue[Update | Exception] = asyncio.Queue()
        timer = None
        post = partial(_post, loop, updates.put_nowait)
        leave = _Command(lambda: self._leave(request.request_id, post))
        self._submit(_Command(lambda: self._add(request, post), post))
        if timeout_s is not None:
            timer = loop.call_at(started + timeout_s, self._try_submit, leave)
        finished = False
        try:
            while not finished:
                update = await updates.get()
                if isinstance(update, Exception):
                    finished = True
                    raise update
                finished = update.finished
                yield update
        finally:
            if timer is not None:
                timer.cancel()
            if not finished:
                self._try_submit(leave)

    async def generate(self, request: Request, *, timeout_s: float | None = None) -> RequestOutput:
        """The finished output of a request; errors as ``stream``."""
        output = None
        async for update in self.stream(request, timeout_s=timeout_s):
            output = update.output
        assert output is not None
        return output

    def abort(self, request_id: str) -> None:
        """Drop a request, wherever it is; no effect when it is gone."""
        self._try_submit(_Command(lambda: self._abort(request_id)))

    async def call(self, function: Callable[[Runner], Any]) -> Any:
        """The result of ``function(runner)`` on the engine's thread, between two ticks: for metrics and inspection."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                result = function(self._runner)
            except Exception as error:
                fail(error)
            else:
                _post(loop, partial(_resolve, future), result)

        def fail(error: Exception) -> None:
            _post(loop, partial(_fail, future), error)

        self._submit(_Command(run, fail))
        return await future

    def close(self) -> None:
        """Stop the thread after the tick under way; whoever waits for something gets EngineDead."""
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _submit(self, command: _Command) -> None:
        with self._lock:
            if self._stopped or self._closing:
                raise EngineDead("the engine has stopped") from self._dead
            self._commands.put(command)
        self._wake.set()

    def _try_submit(self, command: _Command) -> None:
        with contextlib.suppress(EngineDead):
            self._submit(command)

    def _work(self) -> None:
        begun: list[_Command] = []
        try:
            while not self._closing:
                if self._runner.idle and self._commands.empty():
                    self._wake.wait()
                self._wake.clear()
                while not self._commands.empty():
                    begun.append(self._commands.get())
                    begun[0].run()
                    begun.clear()
                if not self._runner.idle and not self._closing:
                    for update in self._runner.step():
                        self._deliver(update.output.request_id, update)
        except BaseException as error:
            self._dead = error
        finally:
            with self._lock:
                self._stopped = True
            failure = EngineDead(f"the engine has stopped: {self._dead!r}" if self._dead else "the engine was closed")
            failure.__cause__ = self._dead
            for request_id in list(self._streams):
                self._deliver(request_id, failure)
            while not self._commands.empty():
                begun.append(self._commands.get())
            for command in begun:
                command.fail(failure)

    def _add(self, request: Request, post: Post) -> None:
        try:
            self._runner.add(request)
        except Exception as error:
            post(error)
        else:
            self._streams[request.request_id] = post

    def _leave(self, request_id: str, post: Post) -> None:
        """Abort what a stream asked for; another stream's request may have taken, or always had, the same id."""
        if self._streams.get(request_id) is post:
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        update = self._runner.abort(request_id)
        if update is not None:
            self._deliver(request_id, update)

    def _deliver(self, request_id: str, update: Update | Exception) -> None:
        post = self._streams.get(request_id)
        if post is None:
            return
        if isinstance(update, Exception) or update.finished:
            del self._streams[request_id]
        post(update)


def _post(loop: asyncio.AbstractEventLoop, take: Callable[[Any], object], value: object) -> None:
    # A loop may close at any moment; whoever waited in it is gone then.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(take, value)


def _resolve(future: "asyncio.Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)

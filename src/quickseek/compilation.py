"""What was compiled in this process: kernels are counted and timed, and those that come too late are named."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)


class Compilation:
    """``kernels`` compiled so far, each configuration by itself, and the ``seconds`` that took; of the whole process.

    A kernel of Triton that its cache on disk holds counts too, since a launch waits for it to be loaded. Once a
    ``start_up`` with a warm-up has ended, a kernel that is compiled outside of one is reported by a warning, the first
    of each name.
    """

    def __init__(self) -> None:
        self.kernels, self.seconds = 0, 0.0
        self._lock, self._starting, self._ready = threading.Lock(), 0, False
        self._named: set[str] = set()
        self._told = threading.local()

    @contextmanager
    def start_up(self, warm: bool) -> Iterator[None]:
        """Inside, compiling is expected; afterwards it is not, if the start ends ``warm``."""
        with self._lock:
            self._starting += 1
        try:
            yield
        finally:
            with self._lock:
                self._starting -= 1
                self._ready = warm

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count what is compiled inside as one kernel of this name; nothing if it raises."""
        began = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        """Count one kernel that took ``seconds``."""
        with self._lock:
            self.kernels += 1
            self.seconds += seconds
            late = self._ready and not self._starting and name not in self._named
            if late:
                self._named.add(name)
        if late:
            logger.warning("kernel %s was compiled while serving: %.2f s (said once for each name)", name, seconds)

    def watch_triton(self) -> None:
        """Count Triton's kernels from now on, beside what its hooks call already; nothing without Triton."""
        try:
            from triton import knobs
        except ImportError:
            return
        runtime = knobs.runtime
        if getattr(runtime.jit_post_compile_hook, "counts_for", None) is self:
            return
        before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook
        began, told = threading.local(), self._told

        def start(**launch: Any) -> Any:
            began.at = time.perf_counter()
            return None if before is None else before(**launch)

        def end(**launch: Any) -> Any:
            now, kernel = time.perf_counter(), launch["fn"]
            if getattr(told, "inside", False):
                # By a hook that was put around this one, which was then taken for another's.
                return None if after is None else after(**launch)
            self.add(f"{kernel.module}.{kernel.name}", now - getattr(began, "at", now))
            told.inside = True
            try:
                return None if after is None else after(**launch)
            finally:
                told.inside = False

        end.counts_for = self  # type: ignore[attr-defined]
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = start, end


COMPILATION = Compilation()
"""That of this process."""

"""Kernels are counted as they are compiled, and those that come while serving are named once."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quickseek.compilation import Compilation


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Triton's hooks, as they were before anything of this package was told of them."""
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    yield knobs.runtime


def launch(runtime: Any, name: str) -> None:
    """What a first launch of a kernel tells Triton's hooks."""
    kernel = SimpleNamespace(module="somewhere", name=name)
    if not (runtime.jit_cache_hook and runtime.jit_cache_hook(fn=kernel)):
        runtime.jit_post_compile_hook(fn=kernel)


def test_kernels_and_their_time_are_counted() -> None:
    compilation = Compilation()
    with compilation.timed("one"):
        pass
    compilation.add("two", 1.5)
    with pytest.raises(ValueError, match="planted"), compilation.timed("three"):
        raise ValueError("planted")
    assert compilation.kernels == 2 and 1.5 <= compilation.seconds < 2.5


def test_what_is_compiled_while_serving_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    compilation = Compilation()
    compilation.add("early", 1.0)
    with compilation.start_up(warm=False):
        compilation.add("expected", 1.0)
    compilation.add("by a request, since nothing was warmed up", 1.0)
    with compilation.start_up(warm=True):
        compilation.add("expected", 1.0)
    assert not caplog.records
    for name in ("late", "late", "later"):
        compilation.add(name, 1.25)
    with compilation.start_up(warm=True):
        compilation.add("another engine starts", 1.0)
    told = [record.getMessage() for record in caplog.records]
    assert [text.split()[1] for text in told] == ["late", "later"] and "1.25 s" in told[0]


def test_tritons_kernels_are_counted_beside_the_hooks_that_were_there(runtime: Any) -> None:
    seen: list[str] = []
    runtime.jit_cache_hook = lambda fn: seen.append(f"before {fn.name}")
    runtime.jit_post_compile_hook = lambda fn: seen.append(f"after {fn.name}")
    compilation = Compilation()
    for _ in range(2):
        compilation.watch_triton()
    launch(runtime, "gather")
    assert compilation.kernels == 1 and seen == ["before gather", "after gather"]


def test_a_hook_put_around_the_one_that_counts_counts_nothing_twice(runtime: Any) -> None:
    compilation, seen = Compilation(), list[str]()
    compilation.watch_triton()
    counting = runtime.jit_post_compile_hook

    def around(fn: Any) -> None:
        seen.append(f"around {fn.name}")
        counting(fn=fn)

    runtime.jit_post_compile_hook = around
    compilation.watch_triton()
    for number in range(2):
        launch(runtime, f"kernel {number}")
        assert compilation.kernels == number + 1 and len(seen) == number + 1
    # One in its place hears of kernels, too, and takes nothing away.
    runtime.jit_post_compile_hook = lambda fn: seen.append(f"instead {fn.name}")
    compilation.watch_triton()
    launch(runtime, "another")
    assert compilation.kernels == 3 and seen[-1] == "instead another"


def test_a_compilation_that_another_hook_takes_over_is_not_counted(runtime: Any) -> None:
    runtime.jit_cache_hook = lambda fn: True
    compilation = Compilation()
    compilation.watch_triton()
    launch(runtime, "gather")
    assert compilation.kernels == 0

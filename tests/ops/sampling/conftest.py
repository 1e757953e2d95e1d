"""Kernels in Triton's interpreter, at twice its speed."""

from typing import Any

import pytest

import interpreter

_PREPARED: set[str] = set()
"""Modules of device functions that have found the language prepared; it stays so in Triton's own."""


@pytest.fixture(autouse=True)
def language_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first call of a device function of a module prepares the language: that takes half the time otherwise.

    A launch does so, too, for what its kernel calls, and undoes it.
    """
    if not interpreter.INTERPRETED:
        return
    from triton.runtime.interpreter import InterpretedFunction

    shipped = InterpretedFunction.__call__

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.fn.__module__ in _PREPARED:
            return self.rewrite()(*args, **options)
        _PREPARED.add(self.fn.__module__)
        return shipped(self, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "__call__", call)

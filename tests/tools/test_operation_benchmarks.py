"""What ``benchmarks/ops.py`` times and flags, without a GPU."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module ``ops``, which finds its cases beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("ops")


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("ops_*.py")))
def test_every_operation_has_cases_at_any_rows(name: str, benchmark: ModuleType) -> None:
    cases = importlib.import_module(name).cases
    # Attention inside a draft block has rows of its own.
    blocks = {case.rows for case in cases() if case.name == "draft block"}
    for rows in (benchmark.ROWS, (3, 17)):
        assert {case.rows for case in cases(rows)} - blocks == set(rows)
    names = [(case.name, case.rows) for case in cases((3,))]
    assert names and len(names) == len(set(names))


def test_a_sweep_flags_steps_of_each_operation_between_neighbours(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = importlib.import_module("op_case").Case

    class Planted(ModuleType):
        @staticmethod
        def cases(rows: range) -> list[object]:
            return [case(name=name, rows=count, bytes=1, build=list) for count in rows for name in ("flat", "steep")]

    monkeypatch.setitem(sys.modules, "ops_planted", Planted("ops_planted"))
    us = {"flat": 4.0, "steep": 4.0}
    monkeypatch.setattr(benchmark, "ours_us", lambda one: us[one.name] * (1 + (one.name == "steep" and one.rows > 8)))
    flat, steep = benchmark.sweep("planted", range(7, 11))
    assert flat["steps"] == [] and steep["steps"] == ["4.0 us at 8, 8.0 at 9 rows"]
    assert steep["us_by_rows"] == {7: 4.0, 8: 4.0, 9: 8.0, 10: 8.0}
    assert "step: 4.0 us at 8" in capsys.readouterr().out

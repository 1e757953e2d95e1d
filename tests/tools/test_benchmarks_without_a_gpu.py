"""Benchmarks of a GPU say so where there is none."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model_helpers import config_of
from quickseek.engine.slot_state import SlotState

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def told(name: str, *arguments: str) -> str:
    """The last line on stderr of a benchmark that ends with exit code 2."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / name, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--paths", "stock,specialised"), "expected stock, stock_nccl, specialized"),
        (("--paths", "stock_nccl"), "needs --peers"),
        (("--off", "sidestream"), "sidestream in --off or --gates: expected side_stream"),
        (("--gates", "side_stream=4,drafts=1"), "drafts in --off or --gates"),
        (("--timeline", "no/such/folder"), "a folder that exists"),
    ],
)
def test_arguments_that_a_step_cannot_use_are_refused_before_anything_runs(
    arguments: tuple[str, ...], words: str
) -> None:
    assert words in told("step.py", *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["ops.py", "step.py"])
def test_a_benchmark_of_a_gpu_ends_with_one_line_without_one(name: str) -> None:
    assert told(name).endswith("PyTorch finds no GPU here")


def test_what_a_step_commits_while_it_is_timed_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the steps timed later would run beyond their caches."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    step = importlib.import_module("step")
    state = SlotState(config_of(), 3, 2, torch.device("cpu"))
    state.lengths[1:], state.finished[1:] = 40, False
    slots, tokens = torch.tensor([1, 2]), torch.full((2, 3), 7)
    with step.unchanged(state):
        for _ in range(30):
            state.take(slots, tokens, torch.tensor([2, 0]), rows_ran=True)
        assert state.lengths.tolist() == [0, 130, 70] and state.anchors.tolist() == [0, 7, 7]
    assert state.lengths.tolist() == [0, 40, 40] and state.produced.tolist() == [0, 0, 0]
    assert not state.anchors.any() and not state.output_counts.any()

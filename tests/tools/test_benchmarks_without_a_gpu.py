"""Benchmarks of a GPU say so where there is none."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

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

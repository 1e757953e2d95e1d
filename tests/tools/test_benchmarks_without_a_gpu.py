"""Benchmarks of a GPU say so where there is none."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["ops.py", "step.py"])
def test_a_benchmark_of_a_gpu_ends_with_one_line_without_one(name: str) -> None:
    done = subprocess.run([sys.executable, BENCHMARKS / name], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("PyTorch finds no GPU here") and "Traceback" not in done.stderr

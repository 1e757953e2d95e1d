"""The router's choice of experts compiles to turns in which no warp waits for another."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

kernels = pytest.importorskip("quickseek.ops.moe.triton")

pytestmark = pytest.mark.compiler


def test_warps_wait_for_each_other_only_between_their_lists_and_the_choice() -> None:
    script, right = Path(__file__).with_name("choose_order.py"), kernels.CHOOSE_WARPS
    done = subprocess.run(
        [sys.executable, str(script), str(right), str(2 * right)],
        capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"}, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    orders = {line["warps"]: line["order"] for line in lines}
    # Three a turn, of the key, the expert and the score; six turns.
    expected = r"(b\d+)?m18b\d+m18(b\d+)?"
    assert re.fullmatch(expected, orders[right]), orders[right]
    # A row of experts that several warps hold needs them all.
    assert not re.fullmatch(expected, orders[2 * right]), orders[2 * right]

"""The router's choice of experts compiles to turns in which no warp waits for another."""

import re
from pathlib import Path

import pytest
from prepared_process import lines_of

kernels = pytest.importorskip("quickseek.ops.moe.triton")

pytestmark = pytest.mark.compiler


def test_warps_wait_for_each_other_only_between_their_lists_and_the_choice() -> None:
    script, right = Path(__file__).with_name("choose_order.py"), kernels.CHOOSE_WARPS
    lines = lines_of(script, str(right), str(2 * right), environment={"TRITON_INTERPRET": "0"})
    orders = {line["warps"]: line["order"] for line in lines}
    # Three a turn, of the key, the expert and the score; six turns.
    expected = r"(b\d+)?m18b\d+m18(b\d+)?"
    assert re.fullmatch(expected, orders[right]), orders[right]
    # A row of experts that several warps hold needs them all.
    assert not re.fullmatch(expected, orders[2 * right]), orders[2 * right]

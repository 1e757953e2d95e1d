"""Compiles the expert kernels in CuTe DSL for the architecture in CUTE_DSL_ARCH, without a GPU; a JSON line each.

With ``ptx`` as argument: the miniatures alone, and their PTX, for a test to run.
"""

import os
from collections.abc import Iterator
from typing import Any

from kept_ptx import tell

from quickseek.ops.moe.cute import (
    DOWN_ARGUMENTS,
    GATE_UP_ARGUMENTS,
    DownKernel,
    GateUpKernel,
    down_settings,
    gate_up_settings,
)

HIDDEN, EXPERTS, TOP = 5120, 384, 6


def released() -> Iterator[tuple[str, Any, Any]]:
    """The kernels of ranks of TP 8, 4, 2 and 1, on Blackwell of TP 4, with their settings for 1, 6 and 85 rows."""
    for inner in (288, 576, 1152, 2304) if os.environ["CUTE_DSL_ARCH"] == "sm_90a" else (576,):
        gate_up = GateUpKernel(HIDDEN, inner, EXPERTS, TOP, **gate_up_settings(1, TOP))
        yield f"gate_up {inner}", gate_up, GATE_UP_ARGUMENTS
        yield f"down {inner}", DownKernel(HIDDEN, inner, **down_settings(1, inner)), DOWN_ARGUMENTS
    gate_up = GateUpKernel(HIDDEN, 576, EXPERTS, TOP, **gate_up_settings(6, 6 * TOP))
    yield "gate_up of more rows", gate_up, GATE_UP_ARGUMENTS
    yield "down of more rows", DownKernel(HIDDEN, 576, **down_settings(6, 576)), DOWN_ARGUMENTS
    gate_up = GateUpKernel(HIDDEN, 576, EXPERTS, TOP, **gate_up_settings(85, 85 * TOP))
    yield "gate_up of a record", gate_up, GATE_UP_ARGUMENTS


def miniatures() -> Iterator[tuple[str, Any, Any]]:
    """Small shapes whose chunks and outputs do not come out even, named by hidden, inner and rows of a tile.

    What finds its tiles itself is compiled for each number of experts a token.
    """
    for top in (1, 2):
        ahead = GateUpKernel(480, 64, 7, top, rows=4, slices=2, depth=2, blocks=1, ahead=True, alone=False)
        yield f"gate_up 480 64 4 {top}", ahead, GATE_UP_ARGUMENTS
        two = GateUpKernel(480, 64, 7, top, rows=2, slices=4, depth=1, blocks=1, ahead=True, alone=False)
        yield f"gate_up 480 64 2 {top}", two, GATE_UP_ARGUMENTS
        wide = GateUpKernel(480, 64, 7, top, rows=8, slices=2, depth=2, blocks=1, ahead=True, alone=False)
        yield f"gate_up 480 64 8 {top}", wide, GATE_UP_ARGUMENTS
        one = GateUpKernel(32, 32, 7, top, rows=4, slices=4, depth=3, blocks=1, ahead=True, alone=False)
        yield f"gate_up 32 32 4 {top}", one, GATE_UP_ARGUMENTS
        alone = GateUpKernel(480, 64, 7, top, rows=2, slices=4, depth=2, blocks=1, ahead=True, alone=True)
        yield f"gate_up 480 64 alone {top}", alone, GATE_UP_ARGUMENTS
        record = GateUpKernel(1024, 32, 7, top, rows=4, slices=4, depth=1, blocks=1, ahead=False, alone=False)
        yield f"gate_up 1024 32 4 {top}", record, GATE_UP_ARGUMENTS
    yield "down 480 64 4", DownKernel(480, 64, rows=4, warps=2, each=2, depth=9, blocks=1), DOWN_ARGUMENTS
    yield "down 480 64 8", DownKernel(480, 64, rows=8, warps=2, each=2, depth=1, blocks=1), DOWN_ARGUMENTS
    yield "down 480 64 2", DownKernel(480, 64, rows=2, warps=2, each=2, depth=1, blocks=1), DOWN_ARGUMENTS
    yield "down 32 32 4", DownKernel(32, 32, rows=4, warps=4, each=1, depth=9, blocks=1), DOWN_ARGUMENTS
    yield "down 224 672 4", DownKernel(224, 672, rows=4, warps=2, each=3, depth=3, blocks=1), DOWN_ARGUMENTS


if __name__ == "__main__":
    tell(released(), miniatures())

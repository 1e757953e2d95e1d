"""Compiles the expert kernels in CuTe DSL for the architecture in CUTE_DSL_ARCH, without a GPU; a JSON line each.

With ``ptx`` as argument: the miniatures alone, and their PTX, for a test to run.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from kept_ptx import ptx_of
from triton_launches import chain_order

from quickseek.ops.moe.cute import (
    DOWN_ARGUMENTS,
    GATE_UP_ARGUMENTS,
    DownKernel,
    GateUpKernel,
    down_settings,
    gate_up_settings,
)

HIDDEN, EXPERTS = 5120, 384


def released() -> Iterator[tuple[str, Any, Any]]:
    """The kernels of ranks of TP 8, 4, 2 and 1, on Blackwell of TP 4, with their settings for one row and for 85."""
    for inner in (288, 576, 1152, 2304) if os.environ["CUTE_DSL_ARCH"] == "sm_90a" else (576,):
        settings = gate_up_settings(HIDDEN, 6)
        yield f"gate_up {inner}", GateUpKernel(HIDDEN, inner, EXPERTS, **settings), GATE_UP_ARGUMENTS
        yield f"down {inner}", DownKernel(HIDDEN, inner, **down_settings(inner, 6)), DOWN_ARGUMENTS
    settings = gate_up_settings(HIDDEN, 510)
    yield "gate_up of a record", GateUpKernel(HIDDEN, 576, EXPERTS, **settings), GATE_UP_ARGUMENTS


def miniatures() -> Iterator[tuple[str, Any, Any]]:
    """Small shapes whose chunks and outputs do not come out even, named by hidden and inner."""
    ahead = GateUpKernel(480, 64, 7, slices=2, depth=2, blocks=1, ahead=True)
    yield "gate_up 480 64", ahead, GATE_UP_ARGUMENTS
    one = GateUpKernel(32, 32, 7, slices=4, depth=3, blocks=1, ahead=True)
    yield "gate_up 32 32", one, GATE_UP_ARGUMENTS
    record = GateUpKernel(1024, 32, 7, slices=4, depth=1, blocks=1, ahead=False)
    yield "gate_up 1024 32", record, GATE_UP_ARGUMENTS
    yield "down 480 64", DownKernel(480, 64, warps=2, each=2, depth=9, blocks=1), DOWN_ARGUMENTS
    yield "down 32 32", DownKernel(32, 32, warps=4, each=1, depth=9, blocks=1), DOWN_ARGUMENTS
    yield "down 224 672", DownKernel(224, 672, warps=2, each=3, depth=3, blocks=1), DOWN_ARGUMENTS


def main() -> None:
    small = sys.argv[1:] == ["ptx"]
    for name, kernel, arguments in miniatures() if small else released():
        text, target = ptx_of(kernel, arguments)
        found = {
            "name": name,
            "target": target,
            "order": chain_order(text),
            "constant": text.count("ld.global.nc"),
        }
        print(json.dumps(found | ({"ptx": text} if small else {})), flush=True)


if __name__ == "__main__":
    main()

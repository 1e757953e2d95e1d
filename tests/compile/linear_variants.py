"""Compiles the few-row products in CuTe DSL for the architecture in CUTE_DSL_ARCH, without a GPU; a JSON line each.

With ``ptx`` as argument: the miniatures alone, and their PTX, for a test to run.
"""

import json
import sys
from collections.abc import Iterator

from kept_ptx import ptx_of
from triton_launches import chain_order

from quickseek.ops.linear.cute import ARGUMENTS, FewRows, settings


def released() -> Iterator[tuple[str, FewRows]]:
    """What a rank of TP 4 multiplies: latents, queries, both output projections, the shared expert."""
    for name, inputs, given in (
        ("latents", 5120, "a8"),
        ("queries", 1280, "a8"),
        ("output in", 4096, "plain"),
        ("output", 2048, "a8"),
        ("shared down", 576, "codes"),
    ):
        for rows in (1, 6):
            yield f"{name}, {rows} rows", FewRows(inputs, given, **settings(rows, inputs))


def miniatures() -> Iterator[tuple[str, FewRows]]:
    """Small sizes whose pieces do not come out even, named by inputs, form of the inputs and columns."""
    for given in ("a8", "plain", "codes"):
        for inputs, warps in ((64, 4), (320, 2)):
            for columns in (1, 2, 6, 8):
                yield f"{inputs} {given} {columns}", FewRows(inputs, given, columns, warps, 1)
    yield "5120 a8 8", FewRows(5120, "a8", 8, 8, 1)


def main() -> None:
    small = sys.argv[1:] == ["ptx"]
    for name, kernel in miniatures() if small else released():
        text, target = ptx_of(kernel, ARGUMENTS)
        found = {
            "name": name,
            "target": target,
            "order": chain_order(text),
            "constant": text.count("ld.global.nc"),
            "passes": kernel.passes,
        }
        print(json.dumps(found | ({"ptx": text} if small else {})), flush=True)


if __name__ == "__main__":
    main()

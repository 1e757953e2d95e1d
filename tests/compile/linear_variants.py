"""Compiles the few-row products in CuTe DSL for the architecture in CUTE_DSL_ARCH, without a GPU; a JSON line each.

With ``ptx`` as argument: the miniatures alone, and their PTX, for a test to run.
"""

from collections.abc import Iterator
from typing import Any

from kept_ptx import tell

from quickseek.ops.linear.cute import ARGUMENTS, FewRows, settings


def released() -> Iterator[tuple[str, Any, Any]]:
    """What a rank of TP 4 multiplies: latents, queries, both output projections, the shared expert."""
    for name, inputs, given in (
        ("latents", 5120, "a8"),
        ("queries", 1280, "a8"),
        ("output in", 4096, "plain"),
        ("output", 2048, "a8"),
        ("shared down", 576, "codes"),
    ):
        for rows in (1, 6):
            yield f"{name}, {rows} rows", FewRows(inputs, given, **settings(rows, inputs)), ARGUMENTS


def miniatures() -> Iterator[tuple[str, Any, Any]]:
    """Small sizes whose pieces do not come out even, named by inputs, form of the inputs and columns."""
    for given in ("a8", "plain", "codes"):
        for inputs, warps in ((64, 4), (320, 2)):
            for columns in (1, 2, 6, 8):
                yield f"{inputs} {given} {columns}", FewRows(inputs, given, columns, warps, 1), ARGUMENTS
    yield "5120 a8 8", FewRows(5120, "a8", 8, 8, 1), ARGUMENTS


if __name__ == "__main__":
    tell(released(), miniatures())

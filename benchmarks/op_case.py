"""One operation at one number of rows, as ``benchmarks/ops.py`` times it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ROWS = (1, 6, 8, 48, 384)
"""Rows of the table."""
SWEPT = range(1, 65)
"""Rows of a sweep."""

Calls = Sequence[Callable[[], object]]
Build = Callable[[torch.device, int], Calls]


@dataclass(frozen=True, kw_only=True)
class Case:
    """``name``: operation and form. ``rows``: rows of the step. ``bytes``: what a call must move at least.

    ``build(device, copies)`` gives one call for each of ``copies`` copies of what the call reads from memory (weights,
    caches), so that a graph over all of them finds none in a cache. ``alternative``: the same for PyTorch's own best
    way, with a word on what that is in ``alternative_name``.
    """

    name: str
    rows: int
    bytes: int
    build: Build
    alternative: Build | None = None
    alternative_name: str = ""


def requests_of(rows: int) -> int:
    """Requests of a step: a batch of 8 without and with drafts; else one, its drafts, or a chunk of its prompt."""
    return 8 if rows in (8, 48) else 1

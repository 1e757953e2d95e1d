"""Compressor of the KV sources: pooling groups of positions into latents, keeping open groups (spec/model.md 6.3)."""

from torch import Tensor

from quickseek.ops import rings
from quickseek.ops.cache import CacheView
from quickseek.ops.checks import expect_shape
from quickseek.ops.compressor import reference
from quickseek.ops.rows import StepRows


def pool(raw: Tensor, open_rows: CacheView, rows: StepRows, ratio: int) -> Tensor:
    """Gated mean over the group that each row closes: [T, D] in raw's dtype; rows that close none hold no meaning.

    ``raw`` [T, 2, D]: values and gate logits of each row, in the wide dtype. ``open_rows``: ring of width 2*D with
    the raw rows of earlier steps, read before ``keep_open_rows`` writes this step's.
    """
    expect_shape("raw", raw, [rows.positions.shape[0], 2, None])
    return reference.pool(raw, open_rows, rows, ratio)


def keep_open_rows(raw: Tensor, open_rows: CacheView, rows: StepRows) -> None:
    """Write raw [T, 2, D] into the ring; where a request has more rows than the ring, only its last ones."""
    rings.keep(open_rows, rows, raw.flatten(1))


def closed_groups(rows: StepRows, ratio: int) -> Tensor:
    """Number of the group that each row closes, int64 [T]; -1 where its group stays open."""
    return reference.closed_groups(rows.positions, ratio)

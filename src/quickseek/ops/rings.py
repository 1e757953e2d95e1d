"""Rings by request slot: what earlier steps left beside this step's rows, and what this step leaves (design.md 4.4)."""

import torch
from torch import Tensor

from quickseek.ops.cache import CacheView
from quickseek.ops.rows import StepRows


def earlier_rows(values: Tensor, ring: CacheView, rows: StepRows, distance: Tensor, offset: int = 0) -> Tensor:
    """The value at ``position - distance`` of each row, [N, len(distance), width], zero before position 0.

    ``values`` [T, width] are this step's rows; older ones come from the ring. ``rows`` may be N consecutive rows of
    the step that begin at row ``offset``. ``distance``: int64, not negative.
    """
    step = torch.arange(offset, offset + rows.positions.shape[0], device=values.device).unsqueeze(-1)
    target = rows.positions.unsqueeze(-1) - distance
    inside = target >= rows.starts[rows.requests].unsqueeze(-1)
    old = ring.gather(rows.requests.unsqueeze(-1), ring.ring_rows(torch.where(inside, -1, target)), values.dtype)
    return torch.where(inside.unsqueeze(-1), values[(step - distance).clamp_min(0)], old)


def keep(ring: CacheView, rows: StepRows, values: Tensor) -> None:
    """Write values [T, width] of the step; where a request has more rows than the ring, only its last ones."""
    ring.keep(rows.requests, rows.positions, rows.ends, values)

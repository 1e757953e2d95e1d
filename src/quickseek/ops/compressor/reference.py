"""Compression in plain PyTorch; differentiable."""

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
    starts = rows.starts[rows.requests].unsqueeze(-1)
    inside = target >= starts
    old = ring.gather(rows.requests.unsqueeze(-1), ring.ring_rows(torch.where(inside, -1, target)), values.dtype)
    return torch.where(inside.unsqueeze(-1), values[(step - distance).clamp_min(0)], old)


def pool(raw: Tensor, open_rows: CacheView, rows: StepRows, ratio: int) -> Tensor:
    distance = torch.arange(ratio - 1, -1, -1, device=raw.device)
    members = earlier_rows(raw.flatten(1), open_rows, rows, distance).unflatten(-1, raw.shape[1:])
    weights = torch.softmax(members[:, :, 1], 1)
    return (weights * members[:, :, 0]).sum(1)


def closed_groups(positions: Tensor, ratio: int) -> Tensor:
    return torch.where((positions + 1) % ratio == 0, positions // ratio, -1)


def ring_rows_to_keep(ring: CacheView, rows: StepRows) -> Tensor:
    last = rows.positions >= rows.ends[rows.requests] - ring.block_rows
    return torch.where(last, rows.positions % ring.block_rows, -1)

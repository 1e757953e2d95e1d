"""Compression in plain PyTorch; differentiable."""

import torch
from torch import Tensor

from quickseek.ops.cache import CacheView
from quickseek.ops.rings import earlier_rows
from quickseek.ops.rows import StepRows


def pool(raw: Tensor, open_rows: CacheView, rows: StepRows, ratio: int) -> Tensor:
    distance = torch.arange(ratio - 1, -1, -1, device=raw.device)
    members = earlier_rows(raw.flatten(1), open_rows, rows, distance).unflatten(-1, raw.shape[1:])
    weights = torch.softmax(members[:, :, 1], 1)
    return (weights * members[:, :, 0]).sum(1)


def closed_groups(positions: Tensor, ratio: int) -> Tensor:
    return torch.where((positions + 1) % ratio == 0, positions // ratio, -1)

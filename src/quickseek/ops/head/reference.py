"""Heads in plain PyTorch."""

import torch
from torch import Tensor

from quickseek.ops import linear as linear_op


def confidence(collapsed: Tensor, markov: Tensor, weight: Tensor) -> Tensor:
    return torch.sigmoid(linear_op.linear_wide(torch.cat((collapsed, markov.to(collapsed.dtype)), -1), weight)).squeeze(
        -1
    )

"""RMSNorm and the rotary embedding (spec/model.md 6.1, 6.2)."""

from functools import cache

import torch
from torch import Tensor

from quickseek.ops.checks import expect_shape
from quickseek.ops.norm_rope import reference
from quickseek.ops.norm_rope.reference import Rotation as Rotation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., C] over its own root mean square, times weight [C]: fp32 inside, x's dtype out."""
    expect_shape("weight", weight, [x.shape[-1]])
    return reference.rms_norm(x, weight, eps)


@cache
def rotary_frequencies(
    width: int,
    theta: float,
    *,
    factor: float = 1.0,
    original_length: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Angle per position [width/2] in ``dtype``; ``factor`` not 1 applies YaRN without magnitude scaling (spec 6.2).

    On the CPU, computed once and shared: not to be written to.
    """
    # Every forward asks for the same few, in inference or in training.
    with torch.inference_mode(False):
        return reference.rotary_frequencies(width, theta, factor, original_length, beta_fast, beta_slow).to(dtype)


def rotation(positions: Tensor, frequencies: Tensor) -> Rotation:
    """cos and sin [..., width/2] of positions [...] times frequencies [width/2], in the frequencies' dtype."""
    return reference.rotation(positions, frequencies)


def apply_rope(x: Tensor, turn: Rotation, *, inverse: bool = False) -> Tensor:
    """x [T, ..., C] with its last channels rotated as adjacent pairs by ``turn`` [T, width/2]; x's dtype out."""
    expect_shape("cos", turn.cos, [x.shape[0], None])
    return reference.apply_rope(x, turn, inverse)

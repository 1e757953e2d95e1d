"""RMSNorm and the rotary embedding, alone and as attention chains them (spec/model.md 6.1, 6.2)."""

from functools import cache

import torch
from torch import Tensor

from quickseek.ops.checks import expect_shape
from quickseek.ops.forms import form
from quickseek.ops.norm_rope import reference
from quickseek.ops.norm_rope.reference import Rotation as Rotation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., C] over its own root mean square, times weight [C]: fp32 inside, x's dtype out."""
    expect_shape("weight", weight, [x.shape[-1]])
    out: Tensor = form(__name__, x).rms_norm(x, weight, eps)
    return out


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
    device: torch.device | str = "cpu",
) -> Tensor:
    """Angle per position [width/2] in ``dtype``; ``factor`` not 1 applies YaRN without magnitude scaling (spec 6.2).

    Computed once for each ``device`` and shared: not to be written to.
    """
    # Every forward asks for the same few, in inference or in training, and a graph must find them on its device.
    with torch.inference_mode(False):
        found = reference.rotary_frequencies(width, theta, factor, original_length, beta_fast, beta_slow)
        return found.to(dtype).to(device)


def rotation(positions: Tensor, frequencies: Tensor) -> Rotation:
    """cos and sin [..., width/2] of positions int64 [...] times frequencies [width/2], in the frequencies' dtype."""
    turn: Rotation = form(__name__, positions).rotation(positions, frequencies)
    return turn


def apply_rope(x: Tensor, turn: Rotation, *, inverse: bool = False, overwrite: bool = False) -> Tensor:
    """x [T, ..., C] with its last channels rotated as adjacent pairs by ``turn`` [T, width/2]; x's dtype out.

    ``overwrite``: x is of no use afterwards, and its memory may become the result's.
    """
    expect_shape("cos", turn.cos, [x.shape[0], None])
    kernels = form(__name__, x)
    out: Tensor = (kernels.apply_rope_over if overwrite else kernels.apply_rope)(x, turn, inverse)
    return out


def normalised_latents(
    projected: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float, turn: Rotation, *, quantise: bool
) -> tuple[Tensor, Tensor]:
    """Query latent [T, R] and KV rows [T, D] of their common projection [T, R + D] (spec/model.md 6.1).

    Each part goes through its RMSNorm with weights [R] and [D]; KV rows are then rotated by ``turn`` and, with
    ``quantise``, go through A8 and back.
    """
    expect_shape("projected", projected, [turn.cos.shape[0], q_weight.shape[0] + kv_weight.shape[0]])
    latent, kv = form(__name__, projected).normalised_latents(projected, q_weight, kv_weight, eps, turn, quantise)
    return latent, kv


def normalised_kv(kv: Tensor, weight: Tensor, eps: float, turn: Rotation, *, quantise: bool) -> Tensor:
    """KV rows [T, D] of their projection [T, D] alone, as in ``normalised_latents``."""
    expect_shape("kv", kv, [turn.cos.shape[0], weight.shape[0]])
    out: Tensor = form(__name__, kv).normalised_kv(kv, weight, eps, turn, quantise)
    return out

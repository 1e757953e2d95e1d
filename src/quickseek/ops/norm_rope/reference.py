"""RMSNorm and rotation in plain PyTorch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quickseek.numerics import wide_dtype
from quickseek.ops.quantize import fake_quantize_a8


@dataclass(frozen=True)
class Rotation:
    """``cos`` and ``sin`` [T, width/2] of the rows of a step."""

    cos: Tensor
    sin: Tensor

    def __getitem__(self, rows: Tensor | slice) -> "Rotation":
        return Rotation(self.cos[rows], self.sin[rows])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(wide_dtype(x.dtype))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(wide.dtype)).to(x.dtype)


def rotary_frequencies(
    width: int, theta: float, factor: float, original_length: int, beta_fast: float, beta_slow: float
) -> Tensor:
    pairs = torch.arange(width // 2, dtype=torch.float64, device="cpu")
    frequencies = theta ** (-2.0 * pairs / width)
    if factor == 1.0:
        return frequencies

    def corner(turns: float) -> float:
        """The pair that makes ``turns`` full turns over the original length."""
        return width * math.log(original_length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(corner(beta_fast)), 0)
    high = min(math.ceil(corner(beta_slow)), width - 1)
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / factor * ramp


def rotation(positions: Tensor, frequencies: Tensor) -> Rotation:
    angles = positions.to(frequencies.dtype).unsqueeze(-1) * frequencies
    return Rotation(angles.cos(), angles.sin())


def apply_rope(x: Tensor, turn: Rotation, inverse: bool) -> Tensor:
    width = turn.cos.shape[-1] * 2
    shape = (x.shape[0], *([1] * (x.dim() - 2)), width // 2)
    cos, sin = turn.cos.view(shape), turn.sin.view(shape)
    if inverse:
        sin = -sin
    even, odd = x[..., -width::2].to(cos.dtype), x[..., x.shape[-1] - width + 1 :: 2].to(cos.dtype)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)
    return torch.cat((x[..., : x.shape[-1] - width], rotated), -1)


def apply_rope_over(x: Tensor, turn: Rotation, inverse: bool) -> Tensor:
    return apply_rope(x, turn, inverse)


def normalised_latents(
    projected: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float, turn: Rotation, quantise: bool
) -> tuple[Tensor, Tensor]:
    latent, kv = projected.split((q_weight.shape[0], kv_weight.shape[0]), -1)
    return rms_norm(latent, q_weight, eps), normalised_kv(kv, kv_weight, eps, turn, quantise)


def normalised_kv(kv: Tensor, weight: Tensor, eps: float, turn: Rotation, quantise: bool) -> Tensor:
    kv = apply_rope(rms_norm(kv, weight, eps), turn, False)
    return fake_quantize_a8(kv) if quantise else kv

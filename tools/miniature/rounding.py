"""Fake quantisation for training: the values of the released formats, with straight-through gradients.

The values are those of ``quickseek.formats`` bit for bit, in few kernels and without anything that a CUDA graph cannot
record. ``Rounding(on=False)`` leaves everything as it is.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quickseek.formats import BLOCK, E2M1_MAX, E4M3_MAX, GLOBAL_KV_GROUP

A8_FLOOR = 1e-4
# fl32(1/448) and fl32(1/6): the products of spec/model.md 4 are taken with the rounded reciprocals.
A8_INVERSE = float(torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32))
Q4I_INVERSE = float(torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32))


def power_of_two_above(value: Tensor) -> Tensor:
    """2^ceil(log2 value) of positive fp32 values that are not subnormal."""
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def nearest_e4m3(value: Tensor) -> Tensor:
    """fp32 values rounded to E4M3, saturating."""
    return value.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def nearest_e2m1(value: Tensor) -> Tensor:
    """fp32 values in [-6, 6] rounded to E2M1, ties to the even code."""
    magnitude = value.abs()
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.round(value / step) * step


def a8_values(x: Tensor) -> Tensor:
    """x [..., K] after A8 and back, in x's dtype."""
    groups = x.to(torch.float32).unflatten(-1, (-1, BLOCK))
    scale = power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp_min(A8_FLOOR) * A8_INVERSE)
    return (nearest_e4m3(groups / scale) * scale).flatten(-2).to(x.dtype)


def q4i_values(x: Tensor) -> Tensor:
    """x [..., K] after Q4i (MXFP4, groups of 32) and back, in x's dtype; also FP4 weights."""
    groups = x.to(torch.float32).unflatten(-1, (-1, BLOCK))
    scale = power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-120) * Q4I_INVERSE)
    return (nearest_e2m1((groups / scale).clamp(-E2M1_MAX, E2M1_MAX)) * scale).flatten(-2).to(x.dtype)


def q4k_values(x: Tensor) -> Tensor:
    """x [..., K] after Q4k (groups of 16 with an E4M3 scale) and back, in x's dtype."""
    groups = x.to(torch.float32).unflatten(-1, (-1, GLOBAL_KV_GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-9)
    scale = nearest_e4m3(largest / E2M1_MAX)
    return (nearest_e2m1((groups / scale).clamp(-E2M1_MAX, E2M1_MAX)) * scale).flatten(-2).to(x.dtype)


def fp8_block_values(weights: list[Tensor]) -> list[Tensor]:
    """fp32 weights [O, I] (multiples of 32) after FP8 with one scale per 32x32 block and back; all in one pass."""
    blocks = [w.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(2) for w in weights]
    flat = torch.cat([block.flatten(0, 1) for block in blocks])
    scale = power_of_two_above(flat.abs().amax(-1, keepdim=True).clamp_min(1e-30) / E4M3_MAX)
    values = (nearest_e4m3(flat / scale) * scale).split([block.shape[0] * block.shape[1] for block in blocks])
    return [
        value.view(*block.shape[:2], BLOCK, BLOCK).transpose(1, 2).reshape(weight.shape)
        for value, block, weight in zip(values, blocks, weights, strict=True)
    ]


def fp4_row_values(weights: list[Tensor]) -> list[Tensor]:
    """fp32 weights [..., O, I] after FP4 with one scale per 32 elements of a row and back; all in one pass."""
    values = q4i_values(torch.cat([weight.reshape(-1, BLOCK) for weight in weights]))
    parts = values.split([weight.numel() // BLOCK for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]


class _StraightThrough(torch.autograd.Function):
    """Gives ``values`` for inputs and passes their gradients on unchanged."""

    @staticmethod
    def forward(ctx: Any, rule: Any, *inputs: Tensor) -> Any:
        values = rule([x.detach() for x in inputs])
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *gradients


def _through(rule: Any, x: Tensor) -> Tensor:
    out: Tensor = _StraightThrough.apply(lambda inputs: [rule(inputs[0])], x)[0]
    return out


@dataclass(frozen=True)
class Rounding:
    """Which fake quantisation a forward makes: all that trained mode makes, or none."""

    on: bool

    def a8(self, x: Tensor) -> Tensor:
        """Inputs of quantised linears, window KV and Engram rows."""
        return _through(a8_values, x) if self.on else x

    def q4i(self, x: Tensor) -> Tensor:
        """Index queries and keys."""
        return _through(q4i_values, x) if self.on else x

    def q4k(self, x: Tensor) -> Tensor:
        """Global KV."""
        return _through(q4k_values, x) if self.on else x

    def fp8(self, weights: list[Tensor]) -> list[Tensor]:
        """Weights of quantised linears."""
        return list(_StraightThrough.apply(fp8_block_values, *weights)) if self.on else weights

    def fp4(self, weights: list[Tensor]) -> list[Tensor]:
        """Weights of routed experts."""
        return list(_StraightThrough.apply(fp4_row_values, *weights)) if self.on else weights

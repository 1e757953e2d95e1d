"""Linear layers on weights as the checkpoint stores them: E4M3 in 32x32 blocks, packed E2M1, or plain values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quickseek.ops.checks import expect_shape
from quickseek.ops.linear import reference


@dataclass(frozen=True)
class Fp8Weight:
    """``codes`` float8_e4m3fn [O, I] and ``scales`` E8M0 bytes uint8 [ceil(O/32), ceil(I/32)] (spec/model.md 3.3)."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


@dataclass(frozen=True)
class Fp4Weight:
    """``codes`` packed E2M1 uint8 [..., O, I/2] and ``scales`` E8M0 bytes uint8 [..., O, I/32] (spec/model.md 3.4)."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))


Weight = Tensor | Fp8Weight | Fp4Weight
"""A weight [O, I]: plain, or packed; a packed one asks for quantised inputs."""


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight's values [..., O, I] in ``dtype`` (spec/model.md 3.3, 3.4)."""
    return reference.dequantize(weight, dtype)


def linear(x: Tensor, weight: Weight, *, quantize_input: bool = True) -> Tensor:
    """x [..., I] times weight [O, I] transposed: [..., O] in x's dtype.

    A packed weight takes A8-quantised inputs (spec/model.md 3.6) unless ``quantize_input`` is off; products
    accumulate in fp32 (float64 for float64 inputs).
    """
    expect_shape("x", x, [*x.shape[:-1], weight.shape[-1]])
    return reference.linear(x, weight, quantize_input)


def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 (float64 for float64 inputs) product of both sides promoted: router, ratio-2 compressor, heads."""
    expect_shape("x", x, [*x.shape[:-1], weight.shape[-1]])
    return reference.linear_wide(x, weight)


def grouped_linear(x: Tensor, weight: Weight) -> Tensor:
    """Block-diagonal product: x [T, G, I] with weight [G*R, I] (rows of group g: g*R..) gives [T, G*R] (spec 6.7).

    Inputs are never quantised here.
    """
    expect_shape("x", x, [None, None, weight.shape[-1]])
    if weight.shape[0] % x.shape[1]:
        raise ValueError(f"weight has {weight.shape[0]} rows: expected a multiple of x's {x.shape[1]} groups")
    return reference.grouped_linear(x, weight)

"""Linear layers on weights as the checkpoint stores them: E4M3 in 32x32 blocks, packed E2M1, or plain values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quickseek.formats import BLOCK
from quickseek.ops.checks import expect_dtype, expect_shape
from quickseek.ops.forms import form
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


@dataclass(frozen=True)
class QuantizedRows:
    """Inputs after A8: ``codes`` float8_e4m3fn [..., K] and ``scales`` E8M0 bytes uint8 [..., K/32] (spec 3.6, 4)."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


Weight = Tensor | Fp8Weight | Fp4Weight
"""A weight [O, I]: plain, or packed; a packed one asks for quantised inputs."""


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight's values [..., O, I] in ``dtype`` (spec/model.md 3.3, 3.4)."""
    return reference.dequantize(weight, dtype)


def linear(x: Tensor | QuantizedRows, weight: Weight, *, quantize_input: bool = True) -> Tensor:
    """x [..., I] times weight [O, I] transposed: [..., O] in x's dtype, BF16 for ``QuantizedRows``.

    A packed weight takes A8-quantised inputs (spec/model.md 3.6): x as ``QuantizedRows``, or quantised here unless
    ``quantize_input`` is off. Products accumulate in fp32 (float64 for float64 inputs).
    """
    values = x if isinstance(x, Tensor) else x.codes
    expect_shape("x", values, [*values.shape[:-1], weight.shape[-1]])
    if isinstance(x, QuantizedRows):
        expect_dtype("x.codes", x.codes, torch.float8_e4m3fn)
        expect_dtype("x.scales", x.scales, torch.uint8)
        expect_shape("x.scales", x.scales, [*values.shape[:-1], values.shape[-1] // BLOCK])
        if isinstance(weight, Tensor):
            raise ValueError("x is quantised: expected a packed weight, not plain values")
    quantised = isinstance(x, QuantizedRows) or (not isinstance(weight, Tensor) and quantize_input)
    if quantised and values.shape[-1] % BLOCK:
        raise ValueError(f"x has {values.shape[-1]} columns: expected a multiple of {BLOCK} to quantise them")
    _expect_matrix(weight)
    out: Tensor = form(__name__, values).linear(x, weight, quantize_input)
    return out


def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 (float64 for float64 inputs) product of both sides promoted: router, ratio-2 compressor, heads."""
    expect_shape("x", x, [*x.shape[:-1], weight.shape[-1]])
    out: Tensor = form(__name__, x).linear_wide(x, weight)
    return out


def grouped_linear(x: Tensor, weight: Weight) -> Tensor:
    """Block-diagonal product: x [T, G, I] with weight [G*R, I] (rows of group g: g*R..) gives [T, G*R] (spec 6.7).

    Inputs are never quantised here.
    """
    expect_shape("x", x, [None, None, weight.shape[-1]])
    if weight.shape[0] % x.shape[1]:
        raise ValueError(f"weight has {weight.shape[0]} rows: expected a multiple of x's {x.shape[1]} groups")
    _expect_matrix(weight)
    out: Tensor = form(__name__, x).grouped_linear(x, weight)
    return out


def _expect_matrix(weight: Weight) -> None:
    """``weight`` is one matrix, and a packed one has a scale for each of its blocks."""
    expect_shape("weight", weight if isinstance(weight, Tensor) else weight.codes, [None, None])
    if not isinstance(weight, Tensor):
        outputs, inputs = weight.shape
        block_row = BLOCK if isinstance(weight, Fp8Weight) else 1
        expect_shape("weight.scales", weight.scales, [-(-outputs // block_row), -(-inputs // BLOCK)])

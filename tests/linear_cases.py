"""Weights and inputs for tests of linear kernels, and what their outputs may differ by."""

import torch
from torch import Tensor

from op_cases import normal
from quickseek import formats
from quickseek.ops.linear import Fp4Weight, Fp8Weight, QuantizedRows, Weight, dequantize

KINDS = ("bf16", "fp8", "fp4")


def weight_of(kind: str, outputs: int, inner: int, seed: int = 1, device: torch.device | str = "cpu") -> Weight:
    """A weight [outputs, inputs] whose scales differ from block to block."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-3, 4, (-(-outputs // 32), -(-inner // 32)), generator=generator).to(torch.float32).exp2()
    spread = blocks.repeat_interleave(32, 0)[:outputs].repeat_interleave(32, 1)[:, :inner]
    values = torch.randn(outputs, inner, generator=generator) * spread * inner**-0.5
    if kind == "bf16":
        return values.to(torch.bfloat16).to(device)
    quantize = formats.quantize_fp8_blocks if kind == "fp8" else formats.quantize_fp4_rows
    codes, scales = (part.to(device) for part in quantize(values))
    return Fp8Weight(codes, scales) if kind == "fp8" else Fp4Weight(codes, scales)


def inputs(rows: int, inner: int, seed: int = 0) -> Tensor:
    """BF16 rows with a zero group, negative zeros and a group far larger than the others."""
    x = normal(rows, inner, seed=seed, dtype=torch.bfloat16)
    x[:, : inner // 4] = -0.0 if rows % 2 else 0.0
    x[0, -(inner // 4) :] *= 1000
    return x


def to(weight: Weight, device: torch.device) -> Weight:
    if isinstance(weight, Tensor):
        return weight.to(device)
    return type(weight)(weight.codes.to(device), weight.scales.to(device))


def quantized(x: Tensor) -> QuantizedRows:
    return QuantizedRows(*formats.quantize_a8(x))


def terms(x: Tensor, weight: Weight, quantize_input: bool) -> Tensor:
    """Sum of the absolute products behind each output [T, O] of rows [T, I]."""
    if quantize_input and not isinstance(weight, Tensor):
        x = formats.fake_quantize_a8(x)
    return x.double().abs() @ dequantize(weight, torch.float64).abs().T

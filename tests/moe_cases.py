"""Inputs for the kernels of the mixture of experts: packed experts, chosen routes, and what their products may err."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from op_cases import normal
from quickseek import formats
from quickseek.ops.linear import Fp4Weight, Fp8Weight
from quickseek.ops.moe import ExpertWeights, Routing


def packed_experts(experts: int, hidden: int, inner: int, seed: int = 5) -> ExpertWeights:
    """Random FP4 experts whose rows have scales of many sizes."""
    sizes = [normal(experts, 2 * inner, hidden, seed=seed), normal(experts, hidden, inner, seed=seed + 1)]
    scaled = [x * torch.exp2(normal(*x.shape[:2], 1, seed=7)) / x.shape[2] ** 0.5 for x in sizes]
    return ExpertWeights(*(Fp4Weight(*formats.quantize_fp4_rows(x)) for x in scaled))


def packed_matrix(outputs: int, inputs: int, seed: int = 9) -> Fp8Weight:
    return Fp8Weight(*formats.quantize_fp8_blocks(normal(outputs, inputs, seed=seed) / inputs**0.5))


def rows_of(rows: int, hidden: int, seed: int = 0) -> Tensor:
    """BF16 rows; some values are zeros of both signs."""
    x = normal(rows, hidden, seed=seed, dtype=torch.bfloat16)
    x[:, ::7], x[:, ::11] = 0.0, -0.0
    return x


def routing_of(experts: Tensor) -> Routing:
    """A routing to given experts int64 [T, k] with weights of its own."""
    return Routing(experts, normal(*experts.shape, seed=3, dtype=torch.float32).abs())


def drawn(rows: int, experts: int, top_k: int, seed: int = 2) -> Tensor:
    """Different experts int64 [rows, k] for each row."""
    return normal(rows, experts, seed=seed).argsort(1)[:, :top_k].contiguous()


def down_terms(x: Tensor, routing: Routing, weights: ExpertWeights, limit: float) -> Tensor:
    """Sum of the absolute products behind each value of the experts' rows, in the order of the reference."""
    from quickseek.ops.moe import reference

    order = routing.experts.flatten().argsort(stable=True)
    tokens = order // routing.experts.shape[1]
    out = []
    for token, number in zip(tokens.tolist(), routing.experts.flatten()[order].tolist(), strict=True):
        w13, w2 = (reference.of_expert(w, number) for w in (weights.w13, weights.w2))
        hidden = reference.swiglu(reference.linear_op.linear(x[token : token + 1], w13), limit).to(x.dtype)
        values = formats.fake_quantize_a8(hidden).double().abs()
        out.append(values @ reference.linear_op.dequantize(w2, torch.float64).abs().T)
    return torch.cat(out)


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a record of tensors, on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(*(moved(getattr(value, field.name), device) for field in fields(value)))

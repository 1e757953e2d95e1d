"""Sinkhorn normalisation with its gradient in one Triton kernel each way; plain PyTorch elsewhere (spec/model.md 5.2).

Forty alternating normalisations of 4x4 matrices are a few hundred launches for PyTorch and two for this.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    import triton
    import triton.language as tl

STREAMS = 4
BLOCK = 64


def alternate(matrix: Tensor, eps: float, iterations: int) -> Tensor:
    """[N, n, n] with positive entries, normalised: columns, then ``iterations - 1`` times rows and columns."""
    matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(2, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
    return matrix


def sinkhorn(matrix: Tensor, eps: float, iterations: int) -> Tensor:
    """``alternate``, by Triton for fp32 matrices 4x4 on a GPU."""
    if HAS_TRITON and matrix.is_cuda and matrix.dtype == torch.float32 and matrix.shape[1] == STREAMS:
        out: Tensor = Fused.apply(matrix, eps, iterations)
        return out
    return alternate(matrix, eps, iterations)


class Fused(torch.autograd.Function):
    """The Triton form; keeps the result and the divisors, from which the way back is exact."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, eps: float, iterations: int) -> Tensor:
        matrix = matrix.contiguous()
        rows = matrix.shape[0]
        result = torch.empty_like(matrix)
        divisors = torch.empty(2 * iterations - 1, rows, STREAMS, dtype=matrix.dtype, device=matrix.device)
        _forward[(triton.cdiv(rows, BLOCK),)](matrix, result, divisors, rows, eps, iterations, BLOCK)
        ctx.save_for_backward(result, divisors)
        ctx.iterations = iterations
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        result, divisors = ctx.saved_tensors
        out = torch.empty_like(result)
        rows = result.shape[0]
        grid = (triton.cdiv(rows, BLOCK),)
        _backward[grid](result, divisors, gradient.contiguous(), out, rows, ctx.iterations, BLOCK)
        return out, None, None


if HAS_TRITON:

    @triton.jit
    def _forward(matrix, result, divisors, rows, eps, iterations, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        index = tl.arange(0, 4)
        offsets = row[:, None, None] * 16 + index[None, :, None] * 4 + index[None, None, :]
        inside = (row < rows)[:, None, None] & (index >= 0)[None, :, None] & (index >= 0)[None, None, :]
        kept = row[:, None] * 4 + index[None, :]
        kept_inside = (row < rows)[:, None] & (index >= 0)[None, :]
        x = tl.load(matrix + offsets, mask=inside, other=1.0)
        place = divisors
        for i in range(iterations):
            if i > 0:
                total = tl.sum(x, axis=2) + eps
                tl.store(place + kept, total, mask=kept_inside)
                x = x / total[:, :, None]
                place += 4 * rows
            total = tl.sum(x, axis=1) + eps
            tl.store(place + kept, total, mask=kept_inside)
            x = x / total[:, None, :]
            place += 4 * rows
        tl.store(result + offsets, x, mask=inside)

    @triton.jit
    def _backward(result, divisors, gradient, out, rows, iterations, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        # With y = x / s and s = sum(x) + eps: x = y s, and dx = (dy - sum(dy y)) / s.
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        index = tl.arange(0, 4)
        offsets = row[:, None, None] * 16 + index[None, :, None] * 4 + index[None, None, :]
        inside = (row < rows)[:, None, None] & (index >= 0)[None, :, None] & (index >= 0)[None, None, :]
        kept = row[:, None] * 4 + index[None, :]
        kept_inside = (row < rows)[:, None] & (index >= 0)[None, :]
        y = tl.load(result + offsets, mask=inside, other=0.0)
        dy = tl.load(gradient + offsets, mask=inside, other=0.0)
        place = divisors + (2 * iterations - 2) * 4 * rows
        for i in range(iterations):
            total = tl.load(place + kept, mask=kept_inside, other=1.0)
            dy = (dy - tl.sum(dy * y, axis=1)[:, None, :]) / total[:, None, :]
            y = y * total[:, None, :]
            place -= 4 * rows
            if i < iterations - 1:
                total = tl.load(place + kept, mask=kept_inside, other=1.0)
                dy = (dy - tl.sum(dy * y, axis=2)[:, :, None]) / total[:, :, None]
                y = y * total[:, :, None]
                place -= 4 * rows
        tl.store(out + offsets, dy, mask=inside)

"""Kernels of the heads: logits are ``linear_wide``'s; ``_confidence`` is one launch of a program for each row.

It reads a row of both inputs and the weight: 2 (H + r) bytes a row, and as many of the weight from a cache. Nothing is
read before a predecessor's output.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek.ops.checks import expect_dtype
from quickseek.ops.triton_chain import begin, chained

STEP = 1024


@chained
@triton.jit
def _confidence(
    collapsed, markov, weight, out, hidden, rank, collapsed_stride, markov_stride, STEP: tl.constexpr
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64)
    terms = tl.zeros((STEP,), tl.float32)
    for start in range(0, hidden, STEP):
        k = start + tl.arange(0, STEP)
        value = tl.load(collapsed + row * collapsed_stride + k, mask=k < hidden, other=0.0).to(tl.float32)
        terms += value * tl.load(weight + k, mask=k < hidden, other=0.0).to(tl.float32)
    for start in range(0, rank, STEP):
        k = start + tl.arange(0, STEP)
        value = tl.load(markov + row * markov_stride + k, mask=k < rank, other=0.0).to(tl.float32)
        terms += value * tl.load(weight + hidden + k, mask=k < rank, other=0.0).to(tl.float32)
    total = tl.sum(terms, 0)
    small = tl.exp(-tl.abs(total))
    tl.store(out + row, tl.where(total < 0, small, 1.0) / (1.0 + small))


def confidence(collapsed: Tensor, markov: Tensor, weight: Tensor) -> Tensor:
    expect_dtype("collapsed", collapsed, torch.bfloat16)
    expect_dtype("markov", markov, torch.bfloat16)
    expect_dtype("weight", weight, torch.bfloat16)
    collapsed, markov = (x if x.stride(-1) == 1 else x.contiguous() for x in (collapsed, markov))
    rows, hidden = collapsed.shape
    out = torch.empty(rows, dtype=torch.float32, device=collapsed.device)
    if rows:
        strides = (collapsed.stride(0), markov.stride(0))
        _confidence[(rows,)](
            collapsed, markov, weight.contiguous(), out, hidden, markov.shape[1], *strides, STEP=STEP, num_warps=4
        )
    return out

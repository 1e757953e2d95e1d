"""Mixture of experts in plain PyTorch: a loop over the experts that were chosen."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from quickseek.numerics import wide_dtype
from quickseek.ops import linear as linear_op
from quickseek.ops.linear import Weight

if TYPE_CHECKING:
    from quickseek.ops.moe import ExpertWeights

WEIGHT_FLOOR = 1e-20
"""Keeps the renormalisation finite when every chosen score underflows (spec 7.1)."""


@dataclass(frozen=True)
class Routing:
    """``experts`` int64 [T, k] and ``weights`` [T, k] in the wide dtype."""

    experts: Tensor
    weights: Tensor


@dataclass(frozen=True)
class UnfinalizedMoE:
    """``rows`` [R, H] grouped by expert, ``weights`` [T, k], ``index`` int32 [T, k]: the row of each slot, -1: none."""

    rows: Tensor
    weights: Tensor
    index: Tensor


def router_scores(logits: Tensor) -> Tensor:
    """sqrt(softplus(logits)) in its stable form."""
    return torch.sqrt(logits.clamp_min(0) + torch.log1p(torch.exp(-logits.abs())))


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    scale: float,
    temperature: float,
    image_bias: Tensor | None,
    image_rows: Tensor | None,
) -> Routing:
    scores = router_scores(linear_op.linear_wide(x, weight) / temperature)
    added = bias.to(scores.dtype)
    if image_bias is not None and image_rows is not None:
        added = torch.where(image_rows.unsqueeze(1), image_bias.to(scores.dtype), added)
    experts = torch.sort(scores + added, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, experts)
    return Routing(experts, chosen / (chosen.sum(-1, keepdim=True) + WEIGHT_FLOOR) * scale)


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of [..., 2*I], in the wide dtype."""
    gate, up = gate_up.to(wide_dtype(gate_up.dtype)).chunk(2, -1)
    return F.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)


def expert(x: Tensor, w13: Weight, w2: Weight, limit: float, weight: Tensor | None = None) -> Tensor:
    """One expert's rows [N, H] of x [N, H]; ``weight`` [N, 1] multiplies before the down projection."""
    hidden = swiglu(linear_op.linear(x, w13), limit)
    if weight is not None:
        hidden = hidden * weight
    return linear_op.linear(hidden.to(x.dtype), w2)


def of_expert(weight: Weight, number: int) -> Weight:
    """The matrix of one expert."""
    if isinstance(weight, Tensor):
        return weight[number]
    return type(weight)(weight.codes[number], weight.scales[number])


def routed_experts(
    x: Tensor, routing: Routing, weights: "ExpertWeights", limit: float, routed_weight: str
) -> UnfinalizedMoE:
    experts, hidden = weights.w2.shape[:2]
    slots, top_k = routing.experts.flatten(), routing.experts.shape[1]
    exists = (slots >= 0) & (slots < experts)
    slots = torch.where(exists, slots, experts)
    order = torch.argsort(slots, stable=True)
    index = torch.empty_like(order)
    index[order] = torch.arange(order.shape[0], device=order.device)
    index = torch.where(exists, index, -1)
    tokens = order // top_k
    before = routing.weights.flatten()[order].unsqueeze(1) if routed_weight == "before" else None
    rows, first = [x.new_zeros(0, hidden)], 0
    chosen, counts = torch.unique_consecutive(slots[order], return_counts=True)
    for number, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        if number == experts:
            rows.append(x.new_zeros(count, hidden))
            continue
        span = slice(first, first + count)
        weight = before[span] if before is not None else None
        rows.append(
            expert(x[tokens[span]], of_expert(weights.w13, number), of_expert(weights.w2, number), limit, weight)
        )
        first += count
    kept = torch.ones_like(routing.weights) if before is not None else routing.weights
    return UnfinalizedMoE(torch.cat(rows), kept, index.view_as(routing.experts).to(torch.int32))


def finalize(routed: UnfinalizedMoE, shared: Tensor) -> Tensor:
    wide = routed.weights.dtype
    total = torch.zeros(shared.shape, dtype=wide, device=shared.device)
    for slot in range(routed.index.shape[1]):
        row = routed.index[:, slot]
        present = (row >= 0).unsqueeze(1)
        piece = routed.rows[row.clamp_min(0)].to(wide) * routed.weights[:, slot : slot + 1]
        total = total + torch.where(present, piece, 0.0)
    return (total + shared.to(wide)).to(shared.dtype)

"""Mixture of experts: router, routed experts, shared expert, finalisation (spec/model.md 7)."""

from dataclasses import dataclass

from torch import Tensor

from quickseek.ops.checks import expect_shape
from quickseek.ops.forms import form
from quickseek.ops.linear import Weight
from quickseek.ops.moe.reference import Routing as Routing
from quickseek.ops.moe.reference import UnfinalizedMoE as UnfinalizedMoE


@dataclass(frozen=True)
class ExpertWeights:
    """``w13`` [E, 2*I, H]: rows of w1 (gate), then of w3 (up). ``w2`` [E, H, I]. Plain or packed, one rank's slice."""

    w13: Weight
    w2: Weight


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    scale: float,
    temperature: float = 1.0,
    image_bias: Tensor | None = None,
    image_rows: Tensor | None = None,
) -> Routing:
    """Experts int64 [T, k] and weights [T, k] (wide dtype, renormalised and scaled) of x [T, H] (spec 7.1).

    Selection adds ``bias`` [E], or ``image_bias`` on rows where ``image_rows`` [T] is set; weights come from the
    un-biased scores. Ties go to the lowest expert.
    """
    expect_shape("x", x, [None, weight.shape[1]])
    expect_shape("bias", bias, [weight.shape[0]])
    bias = bias.contiguous()
    if image_bias is not None and image_rows is not None:
        expect_shape("image_bias", image_bias, [weight.shape[0]])
        expect_shape("image_rows", image_rows, [x.shape[0]])
        image_bias, image_rows = image_bias.contiguous(), image_rows.contiguous()
    found: Routing = form(__name__, x).route(x, weight, bias, top_k, scale, temperature, image_bias, image_rows)
    return found


def routed_experts(
    x: Tensor, routing: Routing, weights: ExpertWeights, *, limit: float, routed_weight: str = "after"
) -> UnfinalizedMoE:
    """One row per (token, chosen expert), not yet summed (spec 7.2; spec/api.md); none where no such expert exists.

    ``limit`` clamps the SwiGLU. ``routed_weight`` "after" leaves the rows unweighted (the settled rule);
    "before" multiplies inside and hands on weights of 1 (the released reference; not on a GPU: ValueError). A GPU
    takes packed weights.
    """
    expect_shape("routing.experts", routing.experts, [x.shape[0], None])
    expect_shape("routing.weights", routing.weights, routing.experts.shape)
    found: UnfinalizedMoE = form(__name__, x).routed_experts(x, routing, weights, limit, routed_weight)
    return found


def shared_expert(x: Tensor, w13: Weight, w2: Weight, *, limit: float) -> Tensor:
    """The shared expert's output [T, H], a partial sum over ranks (spec 7.2)."""
    out: Tensor = form(__name__, x).expert(x, w13, w2, limit)
    return out


def finalize(routed: UnfinalizedMoE, shared: Tensor) -> Tensor:
    """[T, H]: weighted rows in ascending slot order plus ``shared``, summed wide and rounded once."""
    expect_shape("routed.index", routed.index, [shared.shape[0], None])
    expect_shape("routed.weights", routed.weights, routed.index.shape)
    expect_shape("routed.rows", routed.rows, [None, shared.shape[1]])
    out: Tensor = form(__name__, shared).finalize(routed, shared)
    return out

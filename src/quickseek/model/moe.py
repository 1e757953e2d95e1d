"""Mixture of experts of one layer (spec/model.md 7)."""

import torch
from torch import Tensor, nn

from quickseek.config import ModelConfig
from quickseek.formats import BLOCK
from quickseek.model.attention import BlockShared
from quickseek.model.context import StepShared
from quickseek.model.loader import WeightLoader
from quickseek.model.modules import Linear, parameter, shard
from quickseek.numerics import Numerics
from quickseek.ops import moe as moe_op
from quickseek.ops.linear import Fp4Weight, Weight
from quickseek.ops.moe import ExpertWeights, Routing, UnfinalizedMoE
from quickseek.parallel.world import World


class Router(nn.Module):
    """Chooses experts by biased scores and weighs them by un-biased ones; replicated."""

    def __init__(self, config: ModelConfig, experts: int, top_k: int, numerics: Numerics, *, image_bias: bool) -> None:
        super().__init__()
        self.config, self.top_k = config, top_k
        self.weight = parameter(experts, config.hidden_size, dtype=numerics.dtype)
        self.bias = parameter(experts, dtype=numerics.wide)
        self.bias_vl = parameter(experts, dtype=numerics.wide)
        self.uses_image_bias = image_bias

    def forward(self, x: Tensor, image_rows: Tensor | None) -> Routing:
        """Experts and weights of rows x [T, H]; ``image_rows`` [T] marks rows that take the image bias."""
        return moe_op.route(
            x,
            self.weight,
            self.bias,
            top_k=self.top_k,
            scale=self.config.routed_scaling_factor,
            temperature=self.config.gate_temp,
            image_bias=self.bias_vl if self.uses_image_bias else None,
            image_rows=image_rows,
        )


class Experts(nn.Module):
    """The routed experts' matrices, stacked; a rank holds a slice of every expert's inner width."""

    def __init__(self, experts: int, hidden: int, inner: int, numerics: Numerics) -> None:
        super().__init__()
        self.w13_scale: nn.Parameter | None = None
        self.w2_scale: nn.Parameter | None = None
        if numerics.packed_weights:
            self.w13 = parameter(experts, 2 * inner, hidden // 2, dtype=torch.uint8)
            self.w13_scale = parameter(experts, 2 * inner, hidden // BLOCK, dtype=torch.uint8)
            self.w2 = parameter(experts, hidden, inner // 2, dtype=torch.uint8)
            self.w2_scale = parameter(experts, hidden, inner // BLOCK, dtype=torch.uint8)
        else:
            self.w13 = parameter(experts, 2 * inner, hidden, dtype=numerics.dtype)
            self.w2 = parameter(experts, hidden, inner, dtype=numerics.dtype)

    @property
    def weights(self) -> ExpertWeights:
        """The matrices as ops take them."""

        def value(codes: nn.Parameter, scale: nn.Parameter | None) -> Weight:
            return codes if scale is None else Fp4Weight(codes, scale)

        return ExpertWeights(value(self.w13, self.w13_scale), value(self.w2, self.w2_scale))


class MixtureOfExperts(nn.Module):
    """Router, routed experts and the shared expert. ``draft``: the sizes of a draft stage, never the image bias."""

    def __init__(self, config: ModelConfig, numerics: Numerics, world: World, *, draft: bool = False) -> None:
        super().__init__()
        self.config, self.numerics = config, numerics
        self.experts_total = config.dspark_n_routed_experts if draft else config.n_routed_experts
        top_k = config.dspark_num_experts_per_tok if draft else config.num_experts_per_tok
        self.inner = shard("moe_intermediate_size", config.moe_intermediate_size, world, BLOCK)
        width, hidden = self.inner.stop - self.inner.start, config.hidden_size
        self.gate = Router(config, self.experts_total, top_k, numerics, image_bias=not draft)
        self.experts = Experts(self.experts_total, hidden, width, numerics)
        self.shared_w13 = Linear(2 * width, hidden, numerics)
        self.shared_w2 = Linear(hidden, width, numerics)

    def parts(self, x: Tensor, image_rows: Tensor | None) -> tuple[UnfinalizedMoE, Tensor]:
        """Rows of the routed experts, not yet summed, and the shared expert's share [T, H]."""
        return self.routed_part(x, image_rows), self.shared_part(x)

    def routed_part(self, x: Tensor, image_rows: Tensor | None) -> UnfinalizedMoE:
        """Rows of the routed experts, not yet summed."""
        routing: Routing = self.gate(x, image_rows)
        limit, routed_weight = self.config.swiglu_limit, self.numerics.routed_weight
        return moe_op.routed_experts(x, routing, self.experts.weights, limit=limit, routed_weight=routed_weight)

    def shared_part(self, x: Tensor) -> Tensor:
        """The shared expert's share [T, H]."""
        limit = self.config.swiglu_limit
        return moe_op.shared_expert(x, self.shared_w13.value, self.shared_w2.value, limit=limit)

    def forward(self, x: Tensor, shared: StepShared | BlockShared) -> Tensor:
        """This rank's share of the sublayer's output [T, H] of its normalised input [T, H]."""
        return moe_op.finalize(*self.parts(x, shared.image_rows))

    def load(self, loader: WeightLoader, prefix: str) -> None:
        """``prefix``: "layers.3.ffn."."""
        loader.tensor(self.gate.weight, f"{prefix}gate.weight")
        loader.tensor(self.gate.bias, f"{prefix}gate.bias")
        loader.tensor(self.gate.bias_vl, f"{prefix}gate.bias_vl")
        inner, whole = self.inner, slice(None)
        width = inner.stop - inner.start
        shared = f"{prefix}shared_experts."
        loader.linear(self.shared_w13, f"{shared}w1", rows=inner, size=width)
        loader.linear(self.shared_w13, f"{shared}w3", rows=inner, at=width)
        loader.linear(self.shared_w2, f"{shared}w2", columns=inner)
        for expert in range(self.experts_total):
            name = f"{prefix}experts.{expert}."
            loader.expert(self.experts, "w13", expert, f"{name}w1", inner, whole, 0)
            loader.expert(self.experts, "w13", expert, f"{name}w3", inner, whole, width)
            loader.expert(self.experts, "w2", expert, f"{name}w2", whole, inner, 0)

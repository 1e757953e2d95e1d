"""The compressor of a KV source: global KV rows and index keys from hidden states (spec/model.md 6.3)."""

import torch
from torch import Tensor, nn

from quickseek.config import ModelConfig
from quickseek.model.context import ForwardContext, StepShared
from quickseek.model.loader import WeightLoader
from quickseek.model.modules import Linear, RMSNorm
from quickseek.numerics import Numerics
from quickseek.ops import compressor as compressor_op
from quickseek.ops import linear as linear_op
from quickseek.ops import norm_rope, quantize


class Compressor(nn.Module):
    """Turns groups of positions into one latent, and writes its two forms into the caches of this layer.

    ``index_key`` belongs to the indexer (checkpoint names ``indexer.wk``, ``indexer.k_norm``) but reads the latent
    before it is rotated, so it is computed here.
    """

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics) -> None:
        super().__init__()
        self.config, self.layer, self.numerics = config, layer, numerics
        self.ratio = config.ratio(layer)
        width, hidden = config.head_dim, config.hidden_size
        self.wkv = Linear(width, hidden, numerics, packed=False)
        self.wgate = Linear(width, hidden, numerics, packed=False) if self.ratio > 1 else None
        self.norm = RMSNorm(width, config.rms_norm_eps, numerics)
        self.wk = Linear(config.index_head_dim, width, numerics, packed=False)
        self.k_norm = RMSNorm(config.index_head_dim, config.rms_norm_eps, numerics)

    def latents(self, x: Tensor, shared: StepShared, context: ForwardContext) -> Tensor:
        """Normalised latents [T, D] of the groups that the rows close, not rotated; open groups are kept."""
        if self.wgate is None:
            return self.norm(self.wkv(x))
        raw = torch.stack((linear_op.linear_wide(x, self.wkv.weight), linear_op.linear_wide(x, self.wgate.weight)), 1)
        ring = context.view(f"layers.{self.layer}.open_group")
        pooled = compressor_op.pool(raw, ring, shared.rows, self.ratio)
        compressor_op.keep_open_rows(raw, ring, shared.rows)
        return self.norm(pooled.to(x.dtype))

    def forward(self, x: Tensor, shared: StepShared, context: ForwardContext) -> None:
        """Write global KV and index keys of every group that rows x [T, H] close."""
        latents = self.latents(x, shared, context)
        turn = shared.group_turns[self.ratio]
        keys = norm_rope.apply_rope(self.k_norm(self.wk(latents)), turn)
        values = norm_rope.apply_rope(latents, turn)
        if self.numerics.quantize_caches and not self.numerics.packed_caches:
            keys, values = quantize.fake_quantize_q4i(keys), quantize.fake_quantize_q4k(values)
        groups = compressor_op.closed_groups(shared.rows, self.ratio)
        if context.keep_from is not None:
            groups = torch.where(shared.rows.positions < context.keep_from[shared.rows.requests], -1, groups)
        context.view(f"layers.{self.layer}.index_k").write(shared.rows.requests, groups, keys)
        context.view(f"layers.{self.layer}.global_kv").write(shared.rows.requests, groups, values)

    def load(self, loader: WeightLoader, prefix: str) -> None:
        """``prefix``: "layers.2.attn."."""
        loader.tensor(self.wkv.weight, f"{prefix}compressor.wkv.weight")
        if self.wgate is not None:
            loader.tensor(self.wgate.weight, f"{prefix}compressor.wgate.weight")
        loader.tensor(self.norm.weight, f"{prefix}compressor.norm.weight")
        loader.tensor(self.wk.weight, f"{prefix}indexer.wk.weight")
        loader.tensor(self.k_norm.weight, f"{prefix}indexer.k_norm.weight")

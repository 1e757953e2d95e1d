"""The compressor of a KV source: global KV rows and index keys from hidden states (spec/model.md 6.3)."""

from torch import Tensor, nn

from quickseek.config import ModelConfig
from quickseek.model.context import ForwardContext, StepShared
from quickseek.model.loader import WeightLoader
from quickseek.model.modules import Linear, RMSNorm
from quickseek.numerics import Numerics
from quickseek.ops import compressor as compressor_op
from quickseek.ops import linear as linear_op


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
        # With a ratio above 1 the gate's rows follow the values', so that one product gives both.
        self.wkv = Linear(width if self.ratio == 1 else 2 * width, hidden, numerics, packed=False)
        self.norm = RMSNorm(width, config.rms_norm_eps, numerics)
        self.wk = Linear(config.index_head_dim, width, numerics, packed=False)
        self.k_norm = RMSNorm(config.index_head_dim, config.rms_norm_eps, numerics)

    def latents(self, x: Tensor, shared: StepShared, context: ForwardContext) -> Tensor:
        """Normalised latents [T, D] of the groups that the rows close, not rotated; open groups are kept."""
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        raw = linear_op.linear_wide(x, self.wkv.weight).unflatten(-1, (2, -1))
        ring = context.view(f"layers.{self.layer}.open_group")
        return compressor_op.pooled_latents(
            raw, ring, shared.rows, self.ratio, self.norm.weight, self.norm.eps, x.dtype
        )

    def forward(self, x: Tensor, shared: StepShared, context: ForwardContext) -> None:
        """Write global KV and index keys of every group that rows x [T, H] close."""
        latents = self.latents(x, shared, context)
        compressor_op.write_groups(
            latents,
            self.wk(latents),
            self.k_norm.weight,
            self.k_norm.eps,
            shared.group_turns[self.ratio],
            shared.rows,
            self.ratio,
            context.view(f"layers.{self.layer}.global_kv"),
            context.view(f"layers.{self.layer}.index_k"),
            keep_from=context.keep_from,
            fake_quantise=self.numerics.quantize_caches and not self.numerics.packed_caches,
        )

    def load(self, loader: WeightLoader, prefix: str) -> None:
        """``prefix``: "layers.2.attn."."""
        width = self.config.head_dim
        loader.tensor(self.wkv.weight[:width], f"{prefix}compressor.wkv.weight")
        if self.ratio > 1:
            loader.tensor(self.wkv.weight[width:], f"{prefix}compressor.wgate.weight")
        loader.tensor(self.norm.weight, f"{prefix}compressor.norm.weight")
        loader.tensor(self.wk.weight, f"{prefix}indexer.wk.weight")
        loader.tensor(self.k_norm.weight, f"{prefix}indexer.k_norm.weight")

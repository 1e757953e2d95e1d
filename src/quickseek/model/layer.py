"""One layer: Engram (where there is one), attention sublayer, mixture-of-experts sublayer (spec/model.md 5.3)."""

from typing import Any

from torch import Tensor, nn

from quickseek.config import ModelConfig
from quickseek.model.attention import Attention, DraftAttention
from quickseek.model.context import ForwardContext, StepShared
from quickseek.model.engram import Engram
from quickseek.model.hyper_connections import HyperConnections
from quickseek.model.loader import WeightLoader
from quickseek.model.modules import RMSNorm
from quickseek.model.moe import MixtureOfExperts
from quickseek.numerics import Numerics
from quickseek.ops import mhc
from quickseek.ops.mhc import Mixes
from quickseek.parallel.world import World


class Layer(nn.Module):
    """A backbone layer (``prefix`` "layers.3") or a draft stage ("mtp.0"; ``layer`` counts on after the backbone)."""

    def __init__(self, config: ModelConfig, layer: int, prefix: str, numerics: Numerics, world: World) -> None:
        super().__init__()
        self.layer, self.prefix, self.world = layer, prefix, world
        draft = prefix.startswith("mtp.")
        self.attn = (DraftAttention if draft else Attention)(config, layer, prefix, numerics, world)
        self.ffn = MixtureOfExperts(config, numerics, world, draft=draft)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics)
        self.hc_attn = HyperConnections(config, numerics)
        self.hc_ffn = HyperConnections(config, numerics)
        self.engram: Engram | None = None
        if not draft and layer in config.engram_layer_ids:
            self.engram = Engram(config, config.engram_layer_ids.index(layer), numerics)

    def attention_sublayer(
        self, streams: Tensor, pre: Tensor, shared: Any, context: ForwardContext, *, equal_copies: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Streams [T, n, H] after attention, and the pre-mix [T, n] for the next sublayer."""
        mixes = self.hc_attn(streams[:, 0] if equal_copies else streams)
        x = self.attn_norm(mhc.collapse(streams, pre))
        return self.close(streams, self.attn(x, shared, context), mixes)

    def ffn_sublayer(self, streams: Tensor, pre: Tensor, shared: Any) -> tuple[Tensor, Tensor]:
        """Streams [T, n, H] after the experts, and the pre-mix [T, n] for the next sublayer."""
        mixes = self.hc_ffn(streams)
        x = self.ffn_norm(mhc.collapse(streams, pre))
        return self.close(streams, self.ffn(x, shared), mixes)

    def close(self, streams: Tensor, partial: Tensor, mixes: Mixes) -> tuple[Tensor, Tensor]:
        """Sum a sublayer's partial output [T, H] over the ranks and spread it over the streams."""
        return mhc.post(streams, self.world.all_reduce(partial), mixes), mixes.pre

    def forward(
        self,
        streams: Tensor,
        pre: Tensor,
        shared: StepShared | Any,
        context: ForwardContext,
        *,
        equal_copies: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Streams and carried pre-mix after this layer; ``equal_copies``: all copies are still the embedding."""
        streams, pre = self.attention_sublayer(streams, pre, shared, context, equal_copies=equal_copies)
        return self.ffn_sublayer(streams, pre, shared)

    def load(self, loader: WeightLoader) -> None:
        """Fill every parameter from the tensors under ``prefix``."""
        prefix = f"{self.prefix}."
        self.attn.load(loader, f"{prefix}attn.")
        self.ffn.load(loader, f"{prefix}ffn.")
        loader.tensor(self.attn_norm.weight, f"{prefix}attn_norm.weight")
        loader.tensor(self.ffn_norm.weight, f"{prefix}ffn_norm.weight")
        self.hc_attn.load(loader, f"{prefix}hc_attn")
        self.hc_ffn.load(loader, f"{prefix}hc_ffn")
        if self.engram is not None:
            self.engram.load(loader, f"{prefix}engram.")

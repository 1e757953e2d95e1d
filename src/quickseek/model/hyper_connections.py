"""Single-pass mHC of one sublayer (spec/model.md 5)."""

from torch import Tensor, nn

from quickseek.config import ModelConfig
from quickseek.model.loader import WeightLoader
from quickseek.model.modules import parameter
from quickseek.numerics import Numerics
from quickseek.ops import mhc
from quickseek.ops.mhc import Mixes


class HyperConnections(nn.Module):
    """Keeps the mixing weights of one sublayer.

    ``pre`` collapses the streams for the *next* sublayer; ``post`` and ``comb`` spread this sublayer's output.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.config = config
        width = config.mix_width
        self.fn = parameter(width, config.hc_mult * config.hidden_size, dtype=numerics.wide)
        self.base = parameter(width, dtype=numerics.wide)
        self.scale = parameter(3, dtype=numerics.wide)
        self.broadcast_fn: Tensor | None = None

    def finalize_broadcast_weights(self) -> None:
        """Sum the mixing weight over the copies, for streams that are all equal (spec 5.4).

        Again in the same memory, which graphs may hold, unless the module has moved to another device.
        """
        summed = self.fn.unflatten(1, (self.config.hc_mult, -1)).sum(1)
        if self.broadcast_fn is not None and self.broadcast_fn.device == summed.device:
            self.broadcast_fn.copy_(summed)
        else:
            self.broadcast_fn = summed

    def forward(self, streams: Tensor) -> Mixes:
        """pre [T, n], post [T, n], comb [T, n, n] (source, target) of streams [T, n, H].

        [T, H] stands for equal copies and needs ``finalize_broadcast_weights``.
        """
        config = self.config
        fn = self.fn if streams.dim() == 3 else self.broadcast_fn
        if fn is None:
            raise RuntimeError("HyperConnections: finalize_broadcast_weights has not been called")
        return mhc.coefficients(
            streams,
            fn,
            self.scale,
            self.base,
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            iterations=config.hc_sinkhorn_iters,
            hc_mult=config.hc_mult,
        )

    def load(self, loader: WeightLoader, prefix: str) -> None:
        """``prefix``: "layers.0.hc_attn" and the like; these tensors carry no ".weight" suffix."""
        loader.tensor(self.fn, f"{prefix}_fn")
        loader.tensor(self.base, f"{prefix}_base")
        loader.tensor(self.scale, f"{prefix}_scale")

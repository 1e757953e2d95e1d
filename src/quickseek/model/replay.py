"""Decoder bounded replay: run the decoder layers of a prefill on each request's last window only (spec/model.md 9).

An approximation, off by default: global KV stays exact, window KV and logits of the decoder do not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quickseek.config import ModelConfig
from quickseek.model.context import ForwardContext, StepShared
from quickseek.model.layer import Layer
from quickseek.ops import mhc


def why_unsupported(config: ModelConfig) -> str | None:
    """Why this configuration cannot replay its decoder, or None."""
    late = [layer for layer in config.engram_layer_ids if layer >= config.decoder_start]
    if late:
        return f"Engram layers {late} lie in the decoder, which begins at layer {config.decoder_start}"
    if config.decoder_start >= config.num_hidden_layers:
        return "the configuration has no KV source, so no decoder"
    early = [layer for layer in config.dspark_target_layer_ids if layer < config.decoder_start]
    if early and config.num_nextn_predict_layers:
        return f"draft target layers {early} lie before the decoder, whose rows alone are replayed"
    return None


@dataclass(frozen=True)
class DecoderReplayLayers:
    """Which rows of a step the decoder runs: the last window of every request.

    ``kept`` int64: those rows. ``starts`` int64 [B]: the first position kept. ``oldest`` int64 [B]: window keys
    before it do not exist for the decoder; 0 for a request of which nothing is trimmed, so that it stays exact.
    """

    kept: Tensor
    starts: Tensor
    oldest: Tensor

    @classmethod
    def plan(cls, config: ModelConfig, context: ForwardContext) -> "DecoderReplayLayers | None":
        """The trimmed step, or None when no request has more rows than a window (nothing to trim)."""
        rows = context.rows
        if context.num_prefills == 0 or rows.max_rows <= config.sliding_window:
            return None
        starts = torch.maximum(rows.starts, rows.ends - config.sliding_window)
        kept = torch.nonzero(rows.positions >= starts[rows.requests]).squeeze(1)
        return cls(kept, starts, torch.where(starts > rows.starts, starts, 0))

    def cut(
        self, layer: Layer, streams: Tensor, pre: Tensor, shared: StepShared, context: ForwardContext
    ) -> tuple[Tensor, Tensor, StepShared]:
        """Run the last KV source: caches for every row of the step, everything else for the kept rows.

        Returns streams, pre-mix and shared values of the kept rows.
        """
        x = layer.attn_norm(mhc.collapse(streams, pre))
        latent, kv = layer.attn.latents(x, shared.turns[layer.attn.reads_global])
        layer.attn.write_global(x, shared, context)
        trimmed = shared.select(self.kept, self.starts, torch.maximum(self.oldest, shared.oldest))
        streams = streams[self.kept]
        mixes = layer.hc_attn(streams)
        latent = latent[self.kept]
        layer.attn.select(x[self.kept], latent, trimmed, context)
        out = layer.attn.output(layer.attn.attended(latent, kv[self.kept], trimmed, context))
        layer.attn.keep_window(kv, shared, context)
        streams, pre = layer.close(streams, out, mixes)
        return *layer.ffn_sublayer(streams, pre, trimmed), trimmed

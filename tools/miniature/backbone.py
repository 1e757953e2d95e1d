"""The training forward of the backbone: whole sequences from position 0, the same parameters as the stock model."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from miniature.attention import Faults, Shared, attention
from miniature.layers import Hashing, Turn, Values, hyper_connected, mixture, remember, rms_norm
from miniature.rounding import Rounding
from quickseek.config import ModelConfig
from quickseek.model.backbone import rotary_frequencies
from quickseek.numerics import wide_dtype
from quickseek.ops.mhc import reference as mhc_reference


@dataclass(frozen=True)
class States:
    """``hidden`` [B, T, H], normalised; ``aux`` [B, T, targets * H]: what the drafter reads (spec/model.md 10.2).

    ``lesson``: loss of the indexers, 0 if none is taught. ``loads``: rows by expert, by the name of the router's bias.
    """

    hidden: Tensor
    aux: Tensor
    lesson: Tensor
    loads: dict[str, Tensor]


def turns(config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> dict[bool, Turn]:
    """Rotations of positions 0..length-1, by whether a layer reads global KV."""
    positions = torch.arange(length, device=device, dtype=dtype).unsqueeze(1)
    frequencies = rotary_frequencies(config, dtype, device)
    angles = [positions * frequency for frequency in frequencies]
    return {reads: Turn(angle.cos(), angle.sin()) for reads, angle in zip((False, True), angles, strict=True)}


def backbone(
    config: ModelConfig,
    values: Values,
    hashing: Hashing,
    ids: Tensor,
    rounding: Rounding,
    *,
    rotation: dict[bool, Turn] | None = None,
    dropout: float = 0.0,
    taught: int = 0,
    faults: Faults | None = None,
) -> States:
    """States of token ids int64 [B, T] at positions 0..T-1.

    ``dropout`` of every sublayer's output; ``taught``: sequences whose dense attention teaches the indexers.
    ``rotation``: turns of at least T positions; None computes them here.
    """
    faults = Faults() if faults is None else faults
    batch, length = ids.shape
    embedded = F.dropout(F.embedding(ids, values["embed.weight"]), dropout, dropout > 0)
    dtype = embedded.dtype
    if rotation is None:
        rotation = turns(config, length, wide_dtype(dtype), ids.device)
    rotation = {reads: turn[:length] for reads, turn in rotation.items()}
    shared = Shared(rotation, rounding, taught, faults)
    rows = hashing.rows(ids)
    streams, pre = mhc_reference.first_streams(embedded.flatten(0, 1), config.hc_mult)
    aux: dict[int, Tensor] = {}
    loads: dict[str, Tensor] = {}
    one_hot = pre
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        if layer in config.engram_layer_ids and not faults.engram:
            hashed = rows[config.engram_layer_ids.index(layer)].flatten(0, 1)
            streams = remember(config, values, layer, hashed, streams, rounding, dropout)
        if layer in config.dspark_target_layer_ids:
            aux[layer] = mhc_reference.stream_mean(streams)

        def attend(x: Tensor, layer: int = layer) -> Tensor:
            out = attention(config, layer, values, x.unflatten(0, (batch, length)), shared).flatten(0, 1)
            return F.dropout(out, dropout, dropout > 0)

        def feed(x: Tensor, prefix: str = prefix) -> Tensor:
            found = mixture(config, values, f"{prefix}ffn.", config.num_experts_per_tok, x, rounding)
            loads[f"{prefix}ffn.gate.bias"] = found.load
            return F.dropout(found.output, dropout, dropout > 0)

        streams, pre = hyper_connected(
            config, values, f"{prefix}hc_attn", f"{prefix}attn_norm.weight", streams, pre, attend
        )
        pre = one_hot if faults.pre else pre
        streams, pre = hyper_connected(
            config, values, f"{prefix}hc_ffn", f"{prefix}ffn_norm.weight", streams, pre, feed
        )
        pre = one_hot if faults.pre else pre
    hidden = rms_norm(mhc_reference.collapse(streams, pre), values["norm.weight"], config.rms_norm_eps)
    targets = torch.cat([aux[layer] for layer in config.dspark_target_layer_ids], -1)
    loss = torch.stack(shared.lessons).mean() if shared.lessons else hidden.new_zeros((), dtype=wide_dtype(dtype))
    return States(hidden.unflatten(0, (batch, length)), targets.unflatten(0, (batch, length)), loss, loads)


def logits(values: Values, hidden: Tensor) -> Tensor:
    """[..., V] in the wide dtype of normalised states [..., H]."""
    wide = wide_dtype(hidden.dtype)
    return F.linear(hidden, values["head.weight"]).to(wide)

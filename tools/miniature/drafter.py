"""The training forward of the DSpark head: many anchors of a sequence in one pass (spec/model.md 10)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from miniature.attention import INFINITY, gather, output, projections, window_rows
from miniature.layers import Turn, Values, hyper_connected, mixture, rms_norm
from miniature.rounding import Rounding
from quickseek.config import ModelConfig
from quickseek.numerics import wide_dtype
from quickseek.ops.mhc import reference as mhc_reference


@dataclass(frozen=True)
class DraftStates:
    """``logits`` [B, A, k, V] Markov-corrected, ``confidence`` [B, A, k] before the sigmoid, loads by router bias."""

    logits: Tensor
    confidence: Tensor
    loads: dict[str, Tensor]


def draft(
    config: ModelConfig,
    values: Values,
    backbone_values: Values,
    aux: Tensor,
    anchors: Tensor,
    previous: Tensor,
    turn: Turn,
    rounding: Rounding,
    *,
    dropout: float = 0.0,
) -> DraftStates:
    """Drafts after ``anchors`` int64 [B, A], the last committed position of each.

    ``aux`` [B, T, targets * H]: the target's states; ``previous`` int64 [B, A, k]: the token before each draft, the
    first of which is the token that follows the anchor. ``turn``: rotations (theta of window-only layers) of positions
    up to the last anchor's k-th successor.
    """
    batch, count, block = previous.shape
    window = config.sliding_window
    eps, wide = config.rms_norm_eps, wide_dtype(aux.dtype)
    main = rms_norm(F.linear(rounding.a8(aux), values["mtp.0.main_proj.weight"]), values["mtp.0.main_norm.weight"], eps)
    main = rounding.a8(main)
    steps = torch.arange(block, device=aux.device)
    places = anchors.unsqueeze(-1) + 1 + steps
    context = anchors.unsqueeze(-1) - torch.arange(window - 1, -1, -1, device=aux.device)
    seen = F.pad(context >= 0, (0, block), value=True).unsqueeze(2)
    noise = torch.full_like(previous, config.dspark_noise_token_id)
    ids = torch.where(steps == 0, previous, noise)
    embedded = F.embedding(ids, backbone_values["embed.weight"])
    streams, pre = mhc_reference.first_streams(embedded.flatten(0, 2), config.hc_mult)
    loads: dict[str, Tensor] = {}
    for stage in range(config.num_nextn_predict_layers):
        prefix = f"mtp.{stage}."
        rows = window_rows(config, values, f"{prefix}attn.", main, turn[: aux.shape[1]], rounding)

        def attend(x: Tensor, prefix: str = f"{prefix}attn.", rows: Tensor = rows) -> Tensor:
            here = turn[places]
            x = x.view(batch, count, block, -1)
            _, queries, kv = projections(config, values, prefix, x, here, rounding)
            keys = torch.cat((gather(rows, context), kv), 2)
            heads = queries.shape[3]
            flat = queries.flatten(2, 3) * config.head_dim**-0.5
            scores = torch.matmul(flat, keys.transpose(2, 3)).to(wide).masked_fill(~seen, -INFINITY)
            sinks = values[f"{prefix}attn_sink"].to(wide).repeat(block).view(-1, 1).expand(batch, count, -1, 1)
            p = torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1].to(x.dtype)
            attended = torch.matmul(p, keys).unflatten(2, (block, heads))
            out = output(config, values, prefix, attended, here, rounding).flatten(0, 2)
            return F.dropout(out, dropout, dropout > 0)

        def feed(x: Tensor, prefix: str = prefix) -> Tensor:
            found = mixture(config, values, f"{prefix}ffn.", config.dspark_num_experts_per_tok, x, rounding)
            loads[f"{prefix}ffn.gate.bias"] = found.load
            return F.dropout(found.output, dropout, dropout > 0)

        streams, pre = hyper_connected(
            config, values, f"{prefix}hc_attn", f"{prefix}attn_norm.weight", streams, pre, attend
        )
        streams, pre = hyper_connected(
            config, values, f"{prefix}hc_ffn", f"{prefix}ffn_norm.weight", streams, pre, feed
        )
    last = f"mtp.{config.num_nextn_predict_layers - 1}."
    collapsed = mhc_reference.collapse(streams, pre)
    base = F.linear(rms_norm(collapsed, values[f"{last}norm.weight"], eps), backbone_values["head.weight"]).to(wide)
    markov = F.embedding(previous, values[f"{last}markov_head.embed.weight"])
    bias = F.linear(markov, values[f"{last}markov_head.head.weight"]).to(wide)
    joined = torch.cat((collapsed.view(*markov.shape[:-1], -1), markov), -1).to(wide)
    confidence = F.linear(joined, values[f"{last}confidence_head.proj.weight"].to(wide)).squeeze(-1)
    return DraftStates(base.view_as(bias) + bias, confidence, loads)

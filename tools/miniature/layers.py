"""Parts of a layer over whole sequences [B, T, ...], in plain PyTorch (spec/model.md 5, 7 and 8).

Weights come as a dictionary by checkpoint name (``weights.values``). The compute dtype is that of x; sums are made in
its wide dtype.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from miniature.rounding import Rounding
from miniature.sinkhorn import sinkhorn
from quickseek.config import ModelConfig
from quickseek.numerics import wide_dtype
from quickseek.ops.engram import reference as engram_reference
from quickseek.ops.mhc import reference as mhc_reference
from quickseek.ops.moe import reference as moe_reference

Values = Mapping[str, Tensor]
Sublayer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Turn:
    """``cos`` and ``sin`` of rotary angles, [..., width/2], broadcast over the batch."""

    cos: Tensor
    sin: Tensor

    def __getitem__(self, positions: slice | Tensor) -> "Turn":
        return Turn(self.cos[positions], self.sin[positions])

    def per_head(self) -> "Turn":
        """The same turn for every head: an axis before the channels."""
        return Turn(self.cos.unsqueeze(-2), self.sin.unsqueeze(-2))

    def back(self) -> "Turn":
        """The inverse rotation."""
        return Turn(self.cos, -self.sin)


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """x [..., D] with its last channels rotated in adjacent pairs (spec 6.2)."""
    width = 2 * turn.cos.shape[-1]
    still, moved = x.split((x.shape[-1] - width, width), -1)
    even, odd = moved.to(turn.cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * turn.cos - odd * turn.sin, even * turn.sin + odd * turn.cos), -1)
    return torch.cat((still, rotated.flatten(-2).to(x.dtype)), -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in x's dtype."""
    wide = x.to(wide_dtype(x.dtype))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(wide.dtype)).to(x.dtype)


# ---------------------------------------------------------------------------------------------- streams


def coefficients(config: ModelConfig, values: Values, name: str, streams: Tensor) -> mhc_reference.Mixes:
    """Mixing coefficients of a sublayer of streams [N, n, H] (spec 5.2)."""
    n, eps = config.hc_mult, config.hc_eps
    z = streams.flatten(1).to(wide_dtype(streams.dtype))
    projected = F.linear(z, values[f"{name}_fn"]) * torch.rsqrt(z.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    pre, post, comb = projected.split((n, n, n * n), -1)
    scale, base = values[f"{name}_scale"], values[f"{name}_base"]
    pre = torch.sigmoid(pre * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n])
    comb = torch.softmax((comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), -1) + eps
    return mhc_reference.Mixes(pre, post, sinkhorn(comb, eps, config.hc_sinkhorn_iters))


def hyper_connected(
    config: ModelConfig, values: Values, name: str, norm: str, streams: Tensor, pre: Tensor, sublayer: Sublayer
) -> tuple[Tensor, Tensor]:
    """One sublayer between streams [N, n, H]: its output spread over them, and ``pre`` [N, n] for the next.

    ``name``: "layers.3.hc_attn" and the like; ``norm``: the weight of the sublayer's norm. ``sublayer`` maps [N, H].
    """
    mixes = coefficients(config, values, name, streams)
    x = rms_norm(mhc_reference.collapse(streams, pre), values[norm], config.rms_norm_eps)
    return mhc_reference.post(streams, sublayer(x), mixes), mixes.pre


# ---------------------------------------------------------------------------------------------- experts


@dataclass(frozen=True)
class Experts:
    """``output`` [N, H] of the experts, and ``load`` [E]: how many rows chose each."""

    output: Tensor
    load: Tensor


def mixture(config: ModelConfig, values: Values, prefix: str, top_k: int, x: Tensor, rounding: Rounding) -> Experts:
    """Router, routed experts and shared expert of x [N, H]; every expert runs on every row and unchosen ones weigh 0.

    ``prefix``: "layers.3.ffn." (spec 7; the routing weight multiplies after A8 of the hidden rows, which sums to the
    settled rule).
    """
    wide = wide_dtype(x.dtype)
    logits = F.linear(x.to(wide), values[f"{prefix}gate.weight"].to(wide)) / config.gate_temp
    scores = moe_reference.router_scores(logits)
    chosen = torch.topk(scores.detach() + values[f"{prefix}gate.bias"].detach().to(wide), top_k, -1, sorted=False)
    mask = torch.zeros_like(scores).scatter(-1, chosen.indices, 1.0)
    kept = scores * mask
    weight = kept / (kept.sum(-1, keepdim=True) + moe_reference.WEIGHT_FLOOR) * config.routed_scaling_factor
    x = rounding.a8(x)
    w1, w2, w3 = (values[f"{prefix}experts.w{i}.weight"] for i in (1, 2, 3))
    hidden = rounding.a8(_swiglu(F.linear(x, w1.flatten(0, 1)), F.linear(x, w3.flatten(0, 1)), config.swiglu_limit))
    hidden = (hidden.unflatten(-1, (w1.shape[0], -1)) * weight.to(x.dtype).unsqueeze(-1)).flatten(-2)
    routed = F.linear(hidden, w2.transpose(0, 1).flatten(1))
    s1, s2, s3 = (values[f"{prefix}shared_experts.w{i}.weight"] for i in (1, 2, 3))
    shared = F.linear(rounding.a8(_swiglu(F.linear(x, s1), F.linear(x, s3), config.swiglu_limit)), s2)
    return Experts((routed.to(wide) + shared.to(wide)).to(x.dtype), mask.sum(0))


def _swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    wide = wide_dtype(gate.dtype)
    hidden = F.silu(gate.to(wide).clamp_max(limit)) * up.to(wide).clamp(-limit, limit)
    return hidden.to(gate.dtype)


# ---------------------------------------------------------------------------------------------- n-gram memory


@dataclass(frozen=True)
class Hashing:
    """Constants of the n-gram hash of every Engram layer, on the device, and the token map [vocab]."""

    token_map: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    orders: int
    pad: int

    @classmethod
    def of(cls, config: ModelConfig, token_map: Tensor) -> "Hashing":
        """``token_map``: compressed id of every token id, integer [vocab_size]."""
        layout = config.engram_layout
        constants = (layout.multipliers, layout.primes, layout.offsets)
        multipliers, primes, offsets = (torch.tensor(c, dtype=torch.int64).to(token_map.device) for c in constants)
        return cls(
            token_map.to(torch.int64),
            multipliers,
            primes,
            offsets,
            layout.lookback,
            int(token_map[layout.pad_id]),
        )

    def rows(self, ids: Tensor) -> Tensor:
        """Table rows int64 [layers, B, T, columns] of token ids [B, T] that begin at position 0 (spec 8.3)."""
        compressed = self.token_map[ids]
        windows = [F.pad(compressed, (k, 0), value=self.pad)[:, : ids.shape[1]] for k in range(self.orders + 1)]
        found = []
        for multipliers, primes, offsets in zip(self.multipliers, self.primes, self.offsets, strict=True):
            mixed, columns = windows[0] * multipliers[0], []
            for order, of_order in enumerate(primes.view(self.orders, -1), 1):
                mixed = mixed ^ (windows[order] * multipliers[order])
                columns.append(mixed.unsqueeze(-1) % of_order)
            found.append(torch.cat(columns, -1) + offsets)
        return torch.stack(found)


def remember(
    config: ModelConfig, values: Values, layer: int, rows: Tensor, streams: Tensor, rounding: Rounding, dropout: float
) -> Tensor:
    """Streams [N, n, H] with the gated memory of table rows [N, columns] added (spec 8.4)."""
    prefix = f"layers.{layer}.engram."
    table = values[f"{prefix}embed.weight"]
    embedding = rounding.a8(F.embedding(rows, table)).flatten(1).to(streams.dtype)
    embedding = F.dropout(embedding, dropout, dropout > 0)
    key_value = F.linear(embedding, values[f"{prefix}wkv.weight"])
    alive = torch.zeros(streams.shape[0], dtype=torch.bool, device=streams.device)
    return engram_reference.inject(
        streams, key_value, values[f"{prefix}q_weight"], values[f"{prefix}k_weight"], alive, config.rms_norm_eps
    )

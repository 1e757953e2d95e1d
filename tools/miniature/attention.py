"""CSA2 attention over whole sequences: windows by chunks, global rows by lists, and what teaches the indexer.

Shapes: B sequences of T positions, G groups, h heads of D channels (spec/model.md 6).
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from miniature.layers import Turn, Values, rms_norm, rotate
from miniature.rounding import Rounding
from quickseek.config import ModelConfig
from quickseek.numerics import wide_dtype

INFINITY = float("inf")


@dataclass(frozen=True)
class Faults:
    """Mechanisms that an ablation leaves out or gets wrong; none of them in training.

    ``engram``: no memory is read. ``global_kv``: windows only. ``candidates``: Reindex layers choose among all groups.
    ``pre``: every sublayer reads the first stream, as the first one does.
    """

    engram: bool = False
    global_kv: bool = False
    candidates: bool = False
    pre: bool = False


@dataclass
class Shared:
    """What the layers of a forward hand on: turns by position, the last source's rows, the last lists.

    ``taught``: how many of the B sequences teach the indexers. ``lessons``: their losses.
    """

    turns: dict[bool, Turn]
    rounding: Rounding
    taught: int = 0
    faults: Faults = Faults()
    values: Tensor | None = None
    keys: Tensor | None = None
    latents: Tensor | None = None
    lists: Tensor | None = None
    candidates: Tensor | None = None
    lessons: list[Tensor] = field(default_factory=list)


def attention(config: ModelConfig, layer: int, values: Values, x: Tensor, shared: Shared) -> Tensor:
    """Output [B, T, H] of the normalised input x [B, T, H] of a backbone layer."""
    prefix = f"layers.{layer}.attn."
    ratio = config.ratio(layer)
    turn = shared.turns[ratio > 0]
    latent, queries, kv = projections(config, values, prefix, x, turn, shared.rounding)
    queries = queries * config.head_dim**-0.5
    window = Window(queries, kv, config.sliding_window)
    sinks = values[f"{prefix}attn_sink"]
    reads_global = ratio > 0 and not shared.faults.global_kv
    if layer in config.kv_source_layer_ids:
        compress(config, layer, values, x, shared)
    if reads_global and layer in config.index_source_layer_ids:
        select(config, layer, values, x, latent, shared)
        if shared.taught:
            shared.lessons.append(lesson(config, layer, values, x, latent, queries, window, sinks, shared))
    if reads_global:
        assert shared.values is not None and shared.lists is not None
        chosen = gather(shared.values, shared.lists)
        scores = torch.matmul(queries, chosen.transpose(2, 3)).to(sinks.dtype)
        scores = scores.masked_fill((shared.lists < 0).unsqueeze(2), -INFINITY)
        p = torch.softmax(torch.cat((window.scores, scores, _sink_column(sinks, scores)), -1), -1).to(x.dtype)
        width = window.scores.shape[-1]
        attended = window.collect(p[..., :width]) + torch.matmul(p[..., width:-1], chosen)
    else:
        p = torch.softmax(torch.cat((window.scores, _sink_column(sinks, window.scores)), -1), -1).to(x.dtype)
        attended = window.collect(p[..., :-1])
    return output(config, values, prefix, attended, turn, shared.rounding)


def projections(
    config: ModelConfig, values: Values, prefix: str, x: Tensor, turn: Turn, rounding: Rounding
) -> tuple[Tensor, Tensor, Tensor]:
    """Query latent as its linears read it [..., r], queries [..., h, D] and window KV [..., D] of x [..., H]."""
    eps = config.rms_norm_eps
    x = rounding.a8(x)
    latent = rms_norm(F.linear(x, values[f"{prefix}wq_a.weight"]), values[f"{prefix}q_norm.weight"], eps)
    latent = rounding.a8(latent)
    kv = window_rows(config, values, prefix, x, turn, rounding)
    queries = F.linear(latent, values[f"{prefix}wq_b.weight"]).unflatten(-1, (config.num_attention_heads, -1))
    return latent, rotate(queries, turn.per_head()), kv


def window_rows(config: ModelConfig, values: Values, prefix: str, x: Tensor, turn: Turn, rounding: Rounding) -> Tensor:
    """Window KV [..., D] of x [..., H], which has been rounded by A8."""
    kv = rms_norm(F.linear(x, values[f"{prefix}wkv.weight"]), values[f"{prefix}kv_norm.weight"], config.rms_norm_eps)
    return rounding.a8(rotate(kv, turn))


def output(
    config: ModelConfig, values: Values, prefix: str, attended: Tensor, turn: Turn, rounding: Rounding
) -> Tensor:
    """[..., H] of attended values [..., h, D] (spec 6.6, 6.7)."""
    grouped = rotate(attended, turn.per_head().back()).flatten(-2).unflatten(-1, (config.o_groups, -1))
    blocks = values[f"{prefix}wo_a.weight"].unflatten(0, (config.o_groups, -1))
    mixed = torch.einsum("...gi,gri->...gr", grouped, blocks).flatten(-2)
    return F.linear(rounding.a8(mixed), values[f"{prefix}wo_b.weight"])


def _sink_column(sinks: Tensor, scores: Tensor) -> Tensor:
    """Sinks [h] as one more column of scores [B, T, h, K]."""
    return sinks.to(scores.dtype).view(-1, 1).expand(*scores.shape[:-1], 1)


class Window:
    """Scores of each position's window, by chunks of the window's length: each reads its own chunk and the one before.

    ``scores`` [B, T, h, 2W] in the wide dtype, -inf outside the window of W positions.
    """

    def __init__(self, queries: Tensor, kv: Tensor, size: int) -> None:
        self.length, self.size = kv.shape[1], size
        padding = -self.length % size
        self.chunks = (self.length + padding) // size
        chunked = F.pad(kv, (0, 0, 0, padding)).unflatten(1, (self.chunks, size))
        earlier = F.pad(chunked[:, :-1], (0, 0, 0, 0, 1, 0))
        self.keys = torch.cat((earlier, chunked), 2)
        raw = torch.matmul(self._by_chunk(queries), self.keys.transpose(2, 3))
        step = torch.arange(size, device=kv.device)
        distance = step.unsqueeze(1) + size - torch.arange(2 * size, device=kv.device)
        seen = (distance >= 0) & (distance < size)
        first = seen & (torch.arange(2 * size, device=kv.device) >= size)
        visible = torch.cat((first.unsqueeze(0), seen.expand(self.chunks - 1, -1, -1)))
        raw = raw.unflatten(2, (size, -1)).to(wide_dtype(kv.dtype))
        self.scores = raw.masked_fill(~visible.unsqueeze(2), -INFINITY).flatten(1, 2)[:, : self.length]

    def _by_chunk(self, rows: Tensor) -> Tensor:
        """[B, C, W*h, X] of rows [B, T, h, X]."""
        padded = F.pad(rows, (0, 0, 0, 0, 0, self.chunks * self.size - self.length))
        return padded.unflatten(1, (self.chunks, self.size)).flatten(2, 3)

    def collect(self, weights: Tensor) -> Tensor:
        """Weighted sum [B, T, h, D] of the keys, by weights [B, T, h, 2W]."""
        out = torch.matmul(self._by_chunk(weights), self.keys)
        return out.unflatten(2, (self.size, -1)).flatten(1, 2)[:, : self.length]


def gather(rows: Tensor, lists: Tensor) -> Tensor:
    """Rows [B, T, K, D] of [B, G, D] at lists [B, T, K]; a negative entry reads row 0."""
    batch, groups, width = rows.shape
    first = torch.arange(batch, device=rows.device).view(-1, 1, 1) * groups
    flat = (lists.clamp_min(0) + first).flatten()
    return rows.reshape(-1, width).index_select(0, flat).view(*lists.shape, width)


# ---------------------------------------------------------------------------------------------- global rows


def compress(config: ModelConfig, layer: int, values: Values, x: Tensor, shared: Shared) -> None:
    """Global KV and latents [B, G, D] of x [B, T, H] on a KV source, left in ``shared`` (spec 6.3)."""
    prefix, ratio, wide = f"layers.{layer}.attn.compressor.", config.ratio(layer), wide_dtype(x.dtype)
    if ratio == 1:
        pooled = F.linear(x, values[f"{prefix}wkv.weight"])
    else:
        whole = x[:, : x.shape[1] // ratio * ratio].to(wide)
        content = F.linear(whole, values[f"{prefix}wkv.weight"].to(wide)).unflatten(1, (-1, ratio))
        gate = F.linear(whole, values[f"{prefix}wgate.weight"].to(wide)).unflatten(1, (-1, ratio))
        pooled = (torch.softmax(gate, 2) * content).sum(2).to(x.dtype)
    shared.latents = rms_norm(pooled, values[f"{prefix}norm.weight"], config.rms_norm_eps)
    shared.values = shared.rounding.q4k(rotate(shared.latents, _group_turn(shared, ratio, pooled.shape[1])))
    shared.keys = None


def _group_turn(shared: Shared, ratio: int, groups: int) -> Turn:
    """Turns of the first position of each group."""
    return shared.turns[True][: groups * ratio : ratio]


def index_keys(config: ModelConfig, layer: int, values: Values, latents: Tensor, shared: Shared) -> Tensor:
    """Index keys [B, G, d] of latents [B, G, D] of a KV source."""
    prefix = f"layers.{layer}.attn.indexer."
    keys = rms_norm(
        F.linear(latents, values[f"{prefix}wk.weight"]), values[f"{prefix}k_norm.weight"], config.rms_norm_eps
    )
    return shared.rounding.q4i(rotate(keys, _group_turn(shared, config.ratio(layer), latents.shape[1])))


def index_scores(
    config: ModelConfig, layer: int, values: Values, x: Tensor, latent: Tensor, keys: Tensor, shared: Shared
) -> Tensor:
    """Scores [B, T, G] in the wide dtype of every group (spec 6.4)."""
    prefix, heads = f"layers.{layer}.attn.indexer.", config.index_n_heads
    queries = F.linear(latent, values[f"{prefix}wq_b.weight"]).unflatten(-1, (heads, -1))
    queries = shared.rounding.q4i(rotate(queries, shared.turns[True].per_head()))
    weights = F.linear(x, values[f"{prefix}weights_proj.weight"]) * (config.index_head_dim * heads) ** -0.5
    products = torch.matmul(queries.flatten(1, 2), keys.transpose(1, 2)).relu().unflatten(1, (-1, heads))
    scores = torch.matmul(weights.unsqueeze(2), products).squeeze(2)
    return scores.to(wide_dtype(x.dtype))


def visible_groups(config: ModelConfig, layer: int, length: int, groups: int, device: torch.device) -> Tensor:
    """Bool [T, G]: whether a position sees a group."""
    count = (torch.arange(length, device=device) + 1) // config.ratio(layer)
    return torch.arange(groups, device=device) < count.unsqueeze(1)


@torch.no_grad()
def select(config: ModelConfig, layer: int, values: Values, x: Tensor, latent: Tensor, shared: Shared) -> None:
    """The lists [B, T, K] of an index source, and the blocks of the candidate source, left in ``shared``."""
    source = config.kv_source(layer)
    assert shared.latents is not None and source is not None
    if shared.keys is None:
        shared.keys = index_keys(config, source, values, shared.latents, shared)
    scores = index_scores(config, layer, values, x, latent, shared.keys, shared)
    groups = scores.shape[2]
    visible = visible_groups(config, layer, x.shape[1], groups, x.device)
    scores = scores.masked_fill(~visible, -INFINITY)
    if layer == config.candidate_source_layer_id:
        shared.candidates = candidate_mask(config, scores, visible.sum(1))
    elif config.reads_candidates(layer) and not shared.faults.candidates:
        assert shared.candidates is not None
        scores = scores.masked_fill(~shared.candidates, -INFINITY)
    best = torch.topk(scores, min(config.index_topk, groups), -1, sorted=False)
    shared.lists = torch.where(best.values == -INFINITY, -1, best.indices)


def candidate_mask(config: ModelConfig, scores: Tensor, n_visible: Tensor) -> Tensor:
    """Bool [B, T, G]: groups in the published blocks of visible scores [B, T, G] (spec 6.5)."""
    groups, size = scores.shape[2], config.candidate_block_size
    best = F.pad(scores, (0, -groups % size), value=-INFINITY).unflatten(2, (-1, size)).amax(-1)
    newest = (n_visible - 1) // size
    pinned = torch.arange(best.shape[2], device=scores.device) == newest.unsqueeze(1)
    best = best.masked_fill(pinned, INFINITY)
    kept = torch.topk(best, min(config.candidate_topk_blocks, best.shape[2]), -1, sorted=False).indices
    mask = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, kept, True)
    return mask.repeat_interleave(size, 2)[:, :, :groups]


# ---------------------------------------------------------------------------------------------- the indexer's lesson


def lesson(
    config: ModelConfig,
    layer: int,
    values: Values,
    x: Tensor,
    latent: Tensor,
    queries: Tensor,
    window: Window,
    sinks: Tensor,
    shared: Shared,
) -> Tensor:
    """Cross entropy between the dense attention mass over groups and the softmax of the index scores.

    The top-k passes no gradient, so the indexer learns from this alone, and nothing else does: its inputs are detached.
    The mass of a group is its probability among window, sink and *all* visible groups, averaged over heads, so that
    rows and heads that look at no group count little.
    """
    count, source = shared.taught, config.kv_source(layer)
    assert shared.values is not None and shared.latents is not None and source is not None
    with torch.no_grad():
        dense = torch.einsum("bthd,bgd->bthg", queries[:count], shared.values[:count])
        groups = dense.shape[3]
        visible = visible_groups(config, layer, x.shape[1], groups, x.device)
        dense = dense.to(window.scores.dtype).masked_fill(~visible.unsqueeze(1), -INFINITY)
        near = torch.cat((window.scores[:count], _sink_column(sinks, window.scores[:count])), -1)
        total = torch.logaddexp(torch.logsumexp(near, -1), torch.logsumexp(dense, -1))
        mass = torch.exp(dense - total.unsqueeze(-1)).mean(2)
    keys = index_keys(config, source, values, shared.latents[:count].detach(), shared)
    scores = index_scores(config, layer, values, x[:count].detach(), latent[:count].detach(), keys, shared)
    # A finite floor instead of -inf: rows without any visible group have no mass, and 0 times -inf is no number.
    scores = scores.masked_fill(~visible, -1e4)
    return -(mass * torch.log_softmax(scores, -1)).sum(-1).mean()

"""Compressor of the KV sources: pooling groups of positions into latents, keeping open groups, writing both caches.

spec/model.md 6.3. A group is ``ratio`` consecutive positions; the row of its last one closes it.
"""

import torch
from torch import Tensor

from quickseek import formats
from quickseek.ops import rings
from quickseek.ops.cache import CacheView
from quickseek.ops.checks import expect_dtype, expect_shape
from quickseek.ops.compressor import reference
from quickseek.ops.forms import form
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows


def pool(raw: Tensor, open_rows: CacheView, rows: StepRows, ratio: int) -> Tensor:
    """Gated mean over the group that each row closes: [T, D] in raw's dtype; rows that close none hold no meaning.

    ``raw`` [T, 2, D]: values and gate logits of each row, in the wide dtype. ``open_rows``: ring of width 2*D with
    the raw rows of earlier steps, read before ``keep_open_rows`` writes this step's.
    """
    _expect_raw(raw, open_rows, rows)
    out: Tensor = form(__name__, raw).pool(raw, open_rows, rows, ratio)
    return out


def keep_open_rows(raw: Tensor, open_rows: CacheView, rows: StepRows) -> None:
    """Write raw [T, 2, D] into the ring; where a request has more rows than the ring, only its last ones."""
    rings.keep(open_rows, rows, raw.flatten(1))


def pooled_latents(
    raw: Tensor, open_rows: CacheView, rows: StepRows, ratio: int, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Latents [T, D] in ``dtype`` of the groups that the rows close: ``pool``, rounded, and RMSNorm with weight [D].

    Keeps the open rows as well (``keep_open_rows``).
    """
    _expect_raw(raw, open_rows, rows)
    expect_shape("weight", weight, [raw.shape[2]])
    out: Tensor = form(__name__, raw).pooled_latents(raw, open_rows, rows, ratio, weight, eps, dtype)
    return out


def closed_groups(rows: StepRows, ratio: int) -> Tensor:
    """Number of the group that each row closes, int64 [T]; -1 where its group stays open."""
    return reference.closed_groups(rows.positions, ratio)


def write_groups(
    latents: Tensor,
    keys: Tensor,
    key_weight: Tensor,
    eps: float,
    turn: Rotation,
    rows: StepRows,
    ratio: int,
    global_kv: CacheView,
    index_k: CacheView,
    *,
    keep_from: Tensor | None = None,
    fake_quantise: bool = False,
) -> None:
    """Write global KV and index key of the group that each row closes, at the group's number in its cache.

    ``latents`` [T, D] are rotated by ``turn``, the rotation of each group's first position. ``keys`` [T, K], which are
    projections of the latents, go through RMSNorm with ``key_weight`` [K] first. ``keep_from`` int64 [B]: rows before
    that position write nothing. ``fake_quantise``: Q4k and Q4i and back, for caches that hold plain values.
    """
    count = rows.positions.shape[0]
    expect_shape("latents", latents, [count, global_kv.codec.width])
    expect_shape("keys", keys, [count, index_k.codec.width])
    expect_shape("key_weight", key_weight, [keys.shape[1]])
    expect_shape("cos", turn.cos, [count, None])
    expect_shape("sin", turn.sin, turn.cos.shape)
    if keep_from is not None:
        expect_shape("keep_from", keep_from, rows.starts.shape)
        expect_dtype("keep_from", keep_from, torch.int64)
    if fake_quantise:
        for name, x, group in (("latents", latents, formats.GLOBAL_KV_GROUP), ("keys", keys, formats.BLOCK)):
            if x.shape[1] % group:
                raise ValueError(f"{name} has {x.shape[1]} columns: expected a multiple of {group} to quantise them")
    form(__name__, latents).write_groups(
        latents, keys, key_weight, eps, turn, rows, ratio, global_kv, index_k, keep_from, fake_quantise
    )


def _expect_raw(raw: Tensor, open_rows: CacheView, rows: StepRows) -> None:
    expect_shape("raw", raw, [rows.positions.shape[0], 2, None])
    if open_rows.codec.width != 2 * raw.shape[2]:
        raise ValueError(f"open_rows has width {open_rows.codec.width}: expected {2 * raw.shape[2]}")

"""Compression in plain PyTorch; pooling is differentiable."""

import torch
from torch import Tensor

from quickseek.ops import norm_rope, quantize, rings
from quickseek.ops.cache import CacheView
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows


def pool(raw: Tensor, open_rows: CacheView, rows: StepRows, ratio: int) -> Tensor:
    distance = torch.arange(ratio - 1, -1, -1, device=raw.device)
    members = rings.earlier_rows(raw.flatten(1), open_rows, rows, distance).unflatten(-1, raw.shape[1:])
    weights = torch.softmax(members[:, :, 1], 1)
    return (weights * members[:, :, 0]).sum(1)


def pooled_latents(
    raw: Tensor, open_rows: CacheView, rows: StepRows, ratio: int, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    pooled = pool(raw, open_rows, rows, ratio)
    rings.keep(open_rows, rows, raw.flatten(1))
    return norm_rope.rms_norm(pooled.to(dtype), weight, eps)


def closed_groups(positions: Tensor, ratio: int) -> Tensor:
    return torch.where((positions + 1) % ratio == 0, positions // ratio, -1)


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
    keep_from: Tensor | None,
    fake_quantise: bool,
) -> None:
    keys = norm_rope.apply_rope(norm_rope.rms_norm(keys, key_weight, eps), turn)
    values = norm_rope.apply_rope(latents, turn)
    if fake_quantise:
        keys, values = quantize.fake_quantize_q4i(keys), quantize.fake_quantize_q4k(values)
    groups = closed_groups(rows.positions, ratio)
    if keep_from is not None:
        groups = torch.where(rows.positions < keep_from[rows.requests], -1, groups)
    index_k.write(rows.requests, groups, keys)
    global_kv.write(rows.requests, groups, values)

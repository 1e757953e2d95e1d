"""Attention in plain PyTorch: gather the keys of a few rows, then one softmax with sinks; differentiable."""

from dataclasses import replace

import torch
from torch import Tensor

from quickseek.numerics import wide_dtype
from quickseek.ops.cache import CacheView
from quickseek.ops.norm_rope import Rotation, apply_rope
from quickseek.ops.rings import earlier_rows
from quickseek.ops.rows import StepRows

ROWS_AT_ONCE = 128
"""Rows whose gathered keys are held at a time."""


def sink_softmax(queries: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor) -> Tensor:
    """[N, h, D] in the wide dtype from queries [N, h, D], keys [N, K, D], ``seen`` [N, K] and sinks [h]."""
    wide = wide_dtype(queries.dtype)
    keys = keys.to(wide)
    scores = torch.matmul(queries.to(wide), keys.transpose(1, 2)) * queries.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    sink = sinks.to(wide).view(1, -1, 1).expand(scores.shape[0], -1, 1)
    weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
    return torch.matmul(weights, keys)


def sparse_attention(
    queries: Tensor,
    step_kv: Tensor,
    window: CacheView,
    rows: StepRows,
    sinks: Tensor,
    window_size: int,
    oldest: Tensor,
    global_kv: CacheView | None,
    lists: Tensor | None,
    turn: Rotation | None = None,
    queries_last: bool = False,
) -> Tensor:
    queries = queries if turn is None else apply_rope(queries, turn, inverse=False)
    reach = min(window_size, rows.max_length)
    distance = torch.arange(reach - 1, -1, -1, device=queries.device)
    out = []
    for first in range(0, queries.shape[0], ROWS_AT_ONCE):
        span = slice(first, first + ROWS_AT_ONCE)
        requests, positions = rows.requests[span], rows.positions[span]
        keys = _window_keys(step_kv, window, rows, span, distance)
        seen = positions.unsqueeze(1) - distance >= oldest[requests].clamp_min(0).unsqueeze(1)
        keys = keys.masked_fill(~seen.unsqueeze(-1), 0.0)
        if global_kv is not None and lists is not None:
            chosen = lists[span]
            keys = torch.cat((keys, global_kv.gather(requests.unsqueeze(1), chosen, step_kv.dtype)), 1)
            seen = torch.cat((seen, chosen >= 0), 1)
        out.append(sink_softmax(queries[span], keys, seen, sinks))
    attended = torch.cat(out).to(queries.dtype)
    return attended if turn is None else apply_rope(attended, turn, inverse=True)


def _window_keys(step_kv: Tensor, window: CacheView, rows: StepRows, span: slice, distance: Tensor) -> Tensor:
    """Keys [rows of span, len(distance), D] at ``position - distance``; this step's from ``step_kv``."""
    part = replace(rows, positions=rows.positions[span], requests=rows.requests[span])
    return earlier_rows(step_kv, window, part, distance, offset=span.start)


def block_attention(
    queries: Tensor,
    block_kv: Tensor,
    window: CacheView,
    requests: Tensor,
    last: Tensor,
    sinks: Tensor,
    window_size: int,
    turn: Rotation | None = None,
    queries_last: bool = False,
) -> Tensor:
    if turn is not None:
        queries = apply_rope(queries.flatten(0, 1), turn, inverse=False).view(queries.shape)
    blocks, count, heads, _ = queries.shape
    distance = torch.arange(window_size - 1, -1, -1, device=queries.device)
    positions = last.unsqueeze(1) - distance
    context = window.gather(requests.unsqueeze(1), window.ring_rows(positions), block_kv.dtype)
    keys = torch.cat((context, block_kv), 1)
    seen = torch.cat((positions >= 0, torch.ones(blocks, count, dtype=torch.bool, device=queries.device)), 1)
    out = sink_softmax(queries.flatten(1, 2), keys, seen, sinks.repeat(count))
    attended = out.unflatten(1, (count, heads)).to(queries.dtype)
    if turn is not None:
        attended = apply_rope(attended.flatten(0, 1), turn, inverse=True).view(attended.shape)
    return attended

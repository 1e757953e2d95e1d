"""Engram in plain PyTorch; the injection is differentiable."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quickseek import formats
from quickseek.numerics import wide_dtype
from quickseek.ops.cache import CacheView
from quickseek.ops.linear import Weight
from quickseek.ops.rings import earlier_rows
from quickseek.ops.rows import StepRows

if TYPE_CHECKING:
    from quickseek.ops.engram import HashConstants

GATE_FLOOR = 1e-6
"""Least magnitude under the square root of the gate (spec 8.4)."""
DEAD = -1
"""Compressed id of a position inside an image span, and of one before the sequence."""


def token_windows(
    ids: Tensor, history: CacheView | None, rows: StepRows, lookback: int, given: Tensor | None
) -> Tensor:
    distance = torch.arange(lookback + 1, device=ids.device)
    target = rows.positions.unsqueeze(-1) - distance
    if given is None:
        assert history is not None
        found = earlier_rows(ids.unsqueeze(-1), history, rows, distance).squeeze(-1)
    else:
        step = torch.arange(ids.shape[0], device=ids.device).unsqueeze(-1)
        starts = rows.starts[rows.requests].unsqueeze(-1)
        old = given[rows.requests.unsqueeze(-1), (starts - 1 - target).clamp(0, lookback - 1)]
        found = torch.where(target >= starts, ids[(step - distance).clamp_min(0)], old)
    return torch.where(target < 0, DEAD, found)


def hash_ngrams(windows: Tensor, constants: "HashConstants") -> Tensor:
    blocked = (windows == DEAD).to(torch.int64).cumsum(-1) > 0
    tokens = torch.where(blocked, constants.pad, windows)
    products = tokens * constants.multipliers
    orders = products.shape[1] - 1
    primes = constants.primes.view(orders, -1)
    mixed, columns = products[:, 0], []
    for order in range(orders):
        mixed = mixed ^ products[:, order + 1]
        columns.append(mixed.unsqueeze(1) % primes[order])
    return torch.cat(columns, 1) + constants.offsets


def gather_rows(table: Weight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(table, Tensor):
        return table[rows].flatten(1).to(dtype)
    # Bytes are gathered, not values: an indexed read of a mapped table touches these rows alone.
    codes = table.codes.view(torch.uint8)[rows]
    return formats.dequantize_a8(codes, table.scales[rows], dtype).flatten(1)


def inject(streams: Tensor, key_value: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor, eps: float) -> Tensor:
    n, hidden = streams.shape[1:]
    wide = wide_dtype(streams.dtype)
    x = streams.to(wide)
    keys = key_value[:, : n * hidden].unflatten(1, (n, hidden)).to(wide)
    value = key_value[:, n * hidden :].to(wide).unsqueeze(1)
    scale = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps) * hidden**-0.5
    d = (x * q_weight.to(wide) * k_weight.to(wide) * keys).sum(-1) * scale
    gate = torch.sigmoid(torch.sign(d) * torch.sqrt(d.abs().clamp_min(GATE_FLOOR)))
    gate = gate.masked_fill(dead.unsqueeze(1), 0.0).unsqueeze(-1)
    return torch.where(dead.view(-1, 1, 1), streams, (x + gate * value).to(streams.dtype))

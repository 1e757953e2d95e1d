"""Engram: hashing n-grams, gathering table rows, gated injection into the streams (spec/model.md 8)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quickseek.formats import BLOCK
from quickseek.ops.cache import CacheView
from quickseek.ops.checks import expect_dtype, expect_shape
from quickseek.ops.engram.host_table import HostTable as HostTable
from quickseek.ops.engram.reference import DEAD as DEAD
from quickseek.ops.forms import form
from quickseek.ops.linear import Weight
from quickseek.ops.rows import StepRows


@dataclass(frozen=True)
class HashConstants:
    """Of one layer, int64: ``multipliers`` [N], ``primes`` and ``offsets`` [(N-1)*heads]; ``pad``: a compressed id."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    pad: int


def token_windows(
    ids: Tensor, history: CacheView | None, rows: StepRows, lookback: int, given: Tensor | None = None
) -> Tensor:
    """Compressed ids at p, p-1, .. p-lookback of each row: int64 [T, lookback + 1], DEAD before position 0.

    ``ids`` int64 [T], DEAD inside image spans. Ids before the step come from ``history``, a ring of width 1, or from
    ``given`` int64 [B, lookback]: the ids before each request's first row, nearest first.
    """
    expect_dtype("ids", ids, torch.int64)
    expect_shape("ids", ids, rows.positions.shape)
    if history is None and given is None:
        raise ValueError("history and given are both None: expected one of them")
    if given is not None:
        expect_shape("given", given, [rows.starts.shape[0], lookback])
    return form(__name__, ids).token_windows(ids, history, rows, lookback, given)


def hash_ngrams(windows: Tensor, constants: HashConstants) -> Tensor:
    """Table rows int64 [T, (N-1)*heads] of token windows [T, N] (spec 8.3)."""
    orders = constants.multipliers.shape[0] - 1
    expect_shape("windows", windows, [None, orders + 1])
    if orders < 1 or constants.primes.shape[0] % orders:
        raise ValueError(f"primes has shape {tuple(constants.primes.shape)}: expected a multiple of {orders} orders")
    expect_shape("offsets", constants.offsets, constants.primes.shape)
    return form(__name__, windows).hash_ngrams(windows, constants)


def gather_rows(table: Weight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Concatenated rows [T, columns * width] in ``dtype`` of a table [R, width] at ``rows`` [T, columns] (spec 8.4).

    A packed table is E4M3 with one E8M0 byte per row and 32 columns; only the rows asked for are read. Where ``rows``
    are on a GPU the table must be what a ``HostTable`` gives: memory that kernels can read.
    """
    expect_shape("rows", rows, [None, None])
    if not isinstance(table, Tensor):
        expect_shape("table.scales", table.scales, [table.shape[0], table.shape[1] // BLOCK])
    return form(__name__, rows).gather_rows(table, rows, dtype)


def inject(streams: Tensor, key_value: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor, eps: float) -> Tensor:
    """Streams [T, n, H] plus the gated value (spec 8.4).

    ``key_value`` [T, (n+1)*H]: a key per stream, then the value. ``q_weight``, ``k_weight`` [n, H]. Rows where
    ``dead`` [T] is set are left as they are.
    """
    count, n, hidden = streams.shape
    expect_shape("key_value", key_value, [count, (n + 1) * hidden])
    expect_shape("q_weight", q_weight, [n, hidden])
    expect_shape("k_weight", k_weight, [n, hidden])
    expect_shape("dead", dead, [count])
    return form(__name__, streams).inject(streams, key_value, q_weight, k_weight, dead, eps)

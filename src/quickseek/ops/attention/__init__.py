"""Sparse attention over a window ring, selected global rows and sinks (spec/model.md 6.6); draft blocks (10.3)."""

import torch
from torch import Tensor

from quickseek.ops.cache import CacheView
from quickseek.ops.checks import expect_dtype, expect_shape
from quickseek.ops.forms import form
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows


def sparse_attention(
    queries: Tensor,
    step_kv: Tensor,
    window: CacheView,
    rows: StepRows,
    sinks: Tensor,
    *,
    window_size: int,
    oldest: Tensor,
    global_kv: CacheView | None = None,
    lists: Tensor | None = None,
    turn: Rotation | None = None,
    queries_last: bool = False,
) -> Tensor:
    """Attention output [T, h, D] in queries' dtype.

    ``queries`` [T, h, D]; ``step_kv`` [T, D]: this step's window KV, not yet in ``window``, whose ring holds earlier
    positions. A row at position p sees window positions max(``oldest`` of its request, p - window_size + 1) .. p and
    the rows of ``global_kv`` named by ``lists`` int64 [T, k] (-1: none). Key and value are the same vector; the
    softmax scale is D^-0.5; ``sinks`` [h] enter the denominator unscaled. ``oldest`` int64 [B]. With ``turn``, the
    rotation of the T rows, queries come unrotated, and the output is rotated back (spec 6.1, 6.6); each is rounded
    between the two as if it were an operation of its own. ``queries_last`` promises that the kernel launched last made
    the queries and nothing else that is read here, that it waits for all before it before it lets the next one start
    (ops/triton_chain.py; no collective does), and that nothing was joined since: a GPU then reads all but the queries
    while these are being made.
    """
    count, _, width = queries.shape
    expect_shape("queries", queries, [rows.positions.shape[0], None, None])
    expect_shape("step_kv", step_kv, [count, width])
    expect_shape("oldest", oldest, rows.starts.shape)
    expect_shape("sinks", sinks, [queries.shape[1]])
    if (global_kv is None) != (lists is None):
        raise ValueError("global_kv and lists come together")
    if lists is not None:
        expect_shape("lists", lists, [count, None])
        expect_dtype("lists", lists, torch.int64)
    _expect_turn(turn, count)
    return form(__name__, queries).sparse_attention(
        queries, step_kv, window, rows, sinks, window_size, oldest, global_kv, lists, turn, queries_last
    )


def block_attention(
    queries: Tensor,
    block_kv: Tensor,
    window: CacheView,
    requests: Tensor,
    last: Tensor,
    sinks: Tensor,
    *,
    window_size: int,
    turn: Rotation | None = None,
    queries_last: bool = False,
) -> Tensor:
    """Attention of draft blocks [B, r, h, D]: bidirectional inside the block (spec 10.3).

    ``queries`` [B, r, h, D], ``block_kv`` [B, r, D]. Every row of block b sees the ring positions
    ``last[b] - window_size + 1 .. last[b]`` of request ``requests[b]`` and all r rows of its block. ``turn``: the
    rotation of the B * r rows, and ``queries_last``, as in ``sparse_attention``.
    """
    expect_shape("queries", queries, [requests.shape[0], None, None, window.codec.width])
    expect_shape("block_kv", block_kv, [*queries.shape[:2], queries.shape[3]])
    expect_shape("last", last, requests.shape)
    expect_shape("sinks", sinks, [queries.shape[2]])
    _expect_turn(turn, queries.shape[0] * queries.shape[1])
    return form(__name__, queries).block_attention(
        queries, block_kv, window, requests, last, sinks, window_size, turn, queries_last
    )


def _expect_turn(turn: Rotation | None, rows: int) -> None:
    if turn is not None:
        expect_shape("turn.cos", turn.cos, [rows, None])
        expect_shape("turn.sin", turn.sin, turn.cos.shape)

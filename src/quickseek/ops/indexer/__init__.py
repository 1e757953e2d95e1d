"""Indexer: scores of compressed groups, candidate blocks, exact top-k lists (spec/model.md 6.4, 6.5)."""

import torch
from torch import Tensor

from quickseek.ops.cache import CacheView
from quickseek.ops.checks import expect_dtype, expect_shape
from quickseek.ops.forms import form
from quickseek.ops.indexer.reference import Selection as Selection
from quickseek.ops.rows import StepRows


def select(
    queries: Tensor,
    weights: Tensor,
    keys: CacheView,
    rows: StepRows,
    *,
    ratio: int,
    top_k: int,
    block_size: int,
    publish_blocks: int = 0,
    candidates: Tensor | None = None,
    weight_scale: float = 1.0,
) -> Selection:
    """The groups that each row attends to, and the candidate blocks when ``publish_blocks`` is above 0.

    ``queries`` [T, h, d], ``weights`` [T, h] in any float dtype, to be taken times ``weight_scale`` (the product may
    be negative), ``keys``: index-key rows of width d. A row at position p sees groups below (p + 1) // ratio.
    ``candidates`` int64 [T, blocks] (-1: none) restricts the groups to these blocks of ``block_size``. Ties go to the
    lowest group. Lists are int64 [T, up to top_k], -1 where there is no further group; their order means nothing.
    """
    expect_shape("weights", weights, queries.shape[:2])
    expect_shape("queries", queries, [rows.positions.shape[0], None, keys.codec.width])
    if candidates is not None:
        expect_shape("candidates", candidates, [queries.shape[0], None])
        expect_dtype("candidates", candidates, torch.int64)
    found: Selection = form(__name__, queries).select(
        queries, weights, keys, rows, ratio, top_k, block_size, publish_blocks, candidates, weight_scale
    )
    return found

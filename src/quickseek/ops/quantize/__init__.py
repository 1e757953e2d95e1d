"""Quantisation of activations and cached rows: codes and scales, the values they stand for, and packed records."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quickseek import formats
from quickseek.ops.checks import expect_shape
from quickseek.ops.forms import form

if TYPE_CHECKING:
    from quickseek.ops.cache import Codec

SCALE_TILE_ROWS = 128
SCALE_TILE_COLUMNS = 4


def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [..., K] and E8M0 bytes uint8 [..., K/32] of x [..., K] (spec/model.md 4, A8)."""
    _expect_groups(x, formats.BLOCK)
    codes, scales = form(__name__, x).quantize_a8(x)
    return codes, scales


def fake_quantize_a8(x: Tensor) -> Tensor:
    """x [..., K] after A8 and back, in x's dtype; K a multiple of 32 (spec/model.md 4)."""
    _expect_groups(x, formats.BLOCK)
    out: Tensor = form(__name__, x).fake_quantize_a8(x)
    return out


def fake_quantize_q4i(x: Tensor) -> Tensor:
    """x [..., K] after Q4i and back, in x's dtype; K a multiple of 32 (spec/model.md 4)."""
    _expect_groups(x, formats.BLOCK)
    out: Tensor = form(__name__, x).fake_quantize_q4i(x)
    return out


def fake_quantize_q4k(x: Tensor) -> Tensor:
    """x [..., K] after Q4k and back, in x's dtype; K a multiple of 16 (spec/model.md 4)."""
    _expect_groups(x, formats.GLOBAL_KV_GROUP)
    out: Tensor = form(__name__, x).fake_quantize_q4k(x)
    return out


def mxfp8_scale_bytes(rows: int, hidden: int) -> int:
    """Bytes of the swizzled 128x4 scales of [rows, hidden] values (spec/decode.md B.6.1)."""
    columns = hidden // formats.BLOCK
    tiles = -(-rows // SCALE_TILE_ROWS) * -(-columns // SCALE_TILE_COLUMNS)
    return tiles * SCALE_TILE_ROWS * SCALE_TILE_COLUMNS


def swizzle_scales(scales: Tensor) -> Tensor:
    """Scale bytes uint8 [rows, K/32] in the 128x4 layout: uint8 [mxfp8_scale_bytes], zero where there is no row."""
    out: Tensor = form(__name__, scales).swizzle_scales(scales)
    return out


# ---------------------------------------------------------------------------------------------- records of a cache


def write_records(
    storage: Tensor, table: Tensor, codec: "Codec", requests: Tensor, rows: Tensor, values: Tensor
) -> None:
    """Pack values [N, width] into ``storage`` at ``rows`` int64 [N] of ``requests`` int64 [N].

    ``storage`` and ``table``: those of a ``CacheView``. A negative row is not kept: it touches scratch at most.
    """
    expect_shape("values", values, [rows.shape[0], codec.width])
    expect_shape("requests", requests, rows.shape)
    form(__name__, storage).write_records(storage, table, codec, requests, rows, values)


def keep_records(
    storage: Tensor, table: Tensor, codec: "Codec", requests: Tensor, positions: Tensor, ends: Tensor, values: Tensor
) -> None:
    """Pack values [N, width] of absolute ``positions`` [N] into rings, whose row is the position modulo their rows.

    ``ends`` int64 [B]: one past the last position of each request; what a later position replaces is not stored.
    """
    expect_shape("values", values, [positions.shape[0], codec.width])
    expect_shape("requests", requests, positions.shape)
    expect_shape("ends", ends, [table.shape[0]])
    form(__name__, storage).keep_records(storage, table, codec, requests, positions, ends, values)


def read_records(
    storage: Tensor, table: Tensor, codec: "Codec", requests: Tensor, rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """Values [*rows.shape, width] in ``dtype`` at ``rows`` of ``requests`` (broadcastable); zeros at negative rows."""
    out: Tensor = form(__name__, storage).read_records(storage, table, codec, requests, rows, dtype)
    return out


def _expect_groups(x: Tensor, group: int) -> None:
    if x.shape[-1] % group:
        raise ValueError(f"x has {x.shape[-1]} channels: expected a multiple of {group}")

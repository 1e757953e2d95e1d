"""Activation quantisation: A8 codes and scales, plain or in the swizzled layout of block-scaled GEMMs."""

from torch import Tensor

from quickseek import formats
from quickseek.ops.quantize import reference

SCALE_TILE_ROWS = 128
SCALE_TILE_COLUMNS = 4


def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [..., K] and E8M0 bytes uint8 [..., K/32] of x [..., K] (spec/model.md 4, A8)."""
    return formats.quantize_a8(x)


def mxfp8_scale_bytes(rows: int, hidden: int) -> int:
    """Bytes of the swizzled 128x4 scales of [rows, hidden] values (spec/decode.md B.6.1)."""
    columns = hidden // formats.BLOCK
    tiles = -(-rows // SCALE_TILE_ROWS) * -(-columns // SCALE_TILE_COLUMNS)
    return tiles * SCALE_TILE_ROWS * SCALE_TILE_COLUMNS


def swizzle_scales(scales: Tensor) -> Tensor:
    """Scale bytes uint8 [rows, K/32] in the 128x4 layout: uint8 [mxfp8_scale_bytes], zero where there is no row."""
    return reference.swizzle_scales(scales)

"""The door of activation quantisation and the swizzled scale layout (spec/decode.md B.6.1)."""

import pytest
import torch
from torch import Tensor

from compare import assert_bits
from op_cases import assert_nan_stays, normal
from quickseek import formats
from quickseek.ops import quantize


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """The definition read backwards: tiles of 128 rows by 4 columns, rows r, r + 32, r + 64, r + 96 side by side."""
    across = -(-columns // 4)
    tiles = flat.view(-1, across, 32, 4, 4)
    whole = tiles.permute(0, 3, 2, 1, 4).reshape(-1, across * 4)
    return whole[:rows, :columns]


@pytest.mark.parametrize(("rows", "hidden"), [(1, 32), (3, 128), (128, 160), (129, 96), (300, 5120)])
def test_swizzled_scales_hold_every_byte_once_and_zeros_elsewhere(rows: int, hidden: int) -> None:
    columns = hidden // 32
    scales = (torch.arange(rows * columns) % 255 + 1).to(torch.uint8).view(rows, columns)
    flat = quantize.swizzle_scales(scales)
    assert flat.shape == (quantize.mxfp8_scale_bytes(rows, hidden),)
    assert_bits(unswizzle(flat, rows, columns), scales)
    assert int((flat != 0).sum()) == rows * columns


def test_an_unswizzled_copy_is_told_from_a_swizzled_one() -> None:
    scales = (torch.arange(64) + 1).to(torch.uint8).view(16, 4)
    with pytest.raises(AssertionError):
        assert_bits(quantize.swizzle_scales(scales)[:64].view(16, 4), scales)


def test_the_door_gives_the_codes_of_the_format() -> None:
    x = normal(5, 96, dtype=torch.bfloat16)
    for ours, theirs in zip(quantize.quantize_a8(x), formats.quantize_a8(x), strict=True):
        assert_bits(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_a_nan_row_leaves_the_codes_and_scales_of_other_rows_alone() -> None:
    x = normal(4, 64, dtype=torch.float32)
    assert_nan_stays(lambda x: formats.dequantize_a8(*quantize.quantize_a8(x), torch.float32), x, 2)

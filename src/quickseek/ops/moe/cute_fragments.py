"""Where the operands of the products in ``cute_products.py`` lie: plain arithmetic on ints or tensors.

One tensor-core product takes weights A [16 outputs, 16 k] and activations B [16 k, 8 columns], FP32 [16, 8] comes out.
Lane = 4 * line + quarter holds A's rows ``line`` and ``line + 8`` and B's column ``line``, each at four k of its
quarter; of the result it holds columns 2 * quarter and 2 * quarter + 1 of these rows.

The four quarters of k are given to four *groups* of 32 inputs, a *chunk*, so that a lane reads 16 packed bytes of a
weight at once: a whole group. Column 2 * group + row holds activation row ``row`` of two in its group's quarter and
zeros elsewhere, so that each group has a sum of its own. A word of eight codes takes two products: elements 0, 4, 1, 5
of its eight, then 2, 6, 3, 7.
"""

from collections.abc import Callable
from typing import Any

GROUP = 32
"""Inputs that share a scale: 16 packed bytes."""
CHUNK = 4
"""Groups of one product."""
LINES = 16
"""Outputs of one product."""
PAIR = 2
"""Activation rows of one product."""
MOST_ROWS = 4
"""Activation rows of a tile: few, for few registers. An expert with more has two tiles, which read its weights both."""
WEIGHT_SHIFT = 14
"""Weight codes are read as FP16 values 2^-14 of their own: sums are multiplied by 2^14 at the end."""


def code_place(element: Any) -> Any:
    """Where the code of element 0..31 of a group of activations is stored: each eight as 0, 4, 1, 5, 2, 6, 3, 7."""
    return (element & 24) + ((element & 3) << 1) + ((element & 7) >> 2)


def code_bytes(word: Any, constant: Callable[[int], Any] = int) -> tuple[Any, Any]:
    """The codes in the low and in the high nibbles of four bytes, as upper bytes of FP16: 2^-14 of their values."""
    low = ((word << constant(4)) & constant(0x80808080)) | ((word << constant(1)) & constant(0x0E0E0E0E))
    high = (word & constant(0x80808080)) | ((word >> constant(3)) & constant(0x0E0E0E0E))
    return low, high


def scale_bits(byte: Any, constant: Callable[[int], Any] = int) -> Any:
    """FP32 bits of 2^(byte - 127) of an E8M0 byte; 255 is NaN, 0 counts as zero."""
    return (byte << constant(23)) | ((byte * constant(1 << 14) + constant(1 << 14)) & constant(0x00400000))


def lane_of(output: Any, row: Any) -> Any:
    """The lane that has the sum over all groups of a product's output 0..15 and row 0..1 (``kept``)."""
    return output % 8 * 4 + output // 8 * 2 + row


def kept(lane: Any) -> tuple[Any, Any]:
    """(output, row) of which a lane has the sum once the four lanes of a quad have exchanged theirs."""
    return lane // 4 + lane % 4 // 2 * 8, lane % 2

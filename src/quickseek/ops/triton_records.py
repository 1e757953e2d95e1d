"""Rows of a cache inside Triton kernels: where they lie and how their records are packed (spec/model.md 6.10).

A row of ``WIDTH`` channels is a block of ``PADDED`` values, the next power of two; what lies beyond means nothing.
``KIND`` is the codec's: "plain", "a8" (window KV), "q4k" (global KV) or "q4i" (index keys). Offsets are int64: pools
pass 2^31 bytes. The bytes are those of the codecs of ``quickseek.ops.cache``.
"""

import triton
import triton.language as tl

from quickseek.ops import triton_math as math


@triton.jit
def locate(table, table_stride, block_stride, row_stride, block_rows, request, row):
    """Element offset (int64) of ``row`` of ``request``: scalars or blocks; a negative row lies in scratch."""
    clamped = tl.maximum(row, 0).to(tl.int64)
    block = tl.load(table + request * table_stride + clamped // block_rows).to(tl.int64)
    return tl.where(row < 0, 0, block) * block_stride + clamped % block_rows * row_stride


@triton.jit
def store_record(x, record, live, KIND: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Pack x [PADDED] (FP32 unless plain) at the pointer ``record``; nothing is stored where ``live`` is false."""
    limit = tl.where(live, WIDTH, 0)
    if KIND == "plain":
        channel = tl.arange(0, PADDED)
        tl.store(record + channel, x.to(record.dtype.element_ty), mask=channel < limit)
    elif KIND == "a8":
        place = tl.arange(0, PADDED // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
        group = tl.arange(0, PADDED // 32)
        groups = tl.reshape(x, [PADDED // 32, 32])
        exponent = math.a8_exponent(groups)
        tl.store(record + place, math.a8_bytes(groups, exponent), mask=place < limit)
        tl.store(record + WIDTH + group, exponent.to(tl.uint8), mask=group < limit // 32)
    else:
        GROUP: tl.constexpr = 32 if KIND == "q4i" else 16
        groups = tl.reshape(x, [PADDED // GROUP, GROUP])
        if KIND == "q4i":
            exponent = math.q4i_exponent(groups)
            codes = math.q4i_codes(groups, exponent)
            scale = tl.where(math.has_nan(groups), 255, exponent)
        else:
            byte = math.q4k_scale(groups)
            codes = math.q4k_codes(groups, byte)
            scale = tl.where(math.has_nan(groups), 0x7F, byte.to(tl.int32))
        low, high = tl.split(tl.reshape(codes, [PADDED // 2, 2]))
        place, group = tl.arange(0, PADDED // 2), tl.arange(0, PADDED // GROUP)
        tl.store(record + place, (low | (high << 4)).to(tl.uint8), mask=place < limit // 2)
        tl.store(record + WIDTH // 2 + group, scale.to(tl.uint8), mask=group < limit // GROUP)


@triton.jit
def load_record(record, live, KIND: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Values [PADDED] at the pointer ``record``, FP32 or as stored if plain; zeros where ``live`` is false."""
    limit = tl.where(live, WIDTH, 0)
    if KIND == "plain":
        channel = tl.arange(0, PADDED)
        return tl.load(record + channel, mask=channel < limit, other=0)
    elif KIND == "a8":
        place = tl.arange(0, PADDED // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
        group = tl.arange(0, PADDED // 32)
        codes = tl.load(record + place, mask=place < limit, other=0)
        scale = tl.load(record + WIDTH + group, mask=group < limit // 32, other=0)
        return tl.reshape(math.e4m3_value(codes) * math.e8m0_value(scale)[:, None], [PADDED])
    else:
        GROUP: tl.constexpr = 32 if KIND == "q4i" else 16
        place, group = tl.arange(0, PADDED // 2), tl.arange(0, PADDED // GROUP)
        bytes_ = tl.load(record + place, mask=place < limit // 2, other=0).to(tl.int32)
        scale = tl.load(record + WIDTH // 2 + group, mask=group < limit // GROUP, other=0)
        values = tl.join(math.e2m1_value(bytes_ & 15), math.e2m1_value(bytes_ >> 4))
        value = math.e8m0_value(scale) if KIND == "q4i" else math.e4m3_value(scale)
        return tl.reshape(tl.reshape(values, [PADDED // GROUP, GROUP]) * value[:, None], [PADDED])

"""Kernels around the shared device functions: 4 groups a row, one program a row."""

import triton
import triton.language as tl

from quickseek.ops import triton_math as math


@triton.jit
def a8(x, codes, scales):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * 128 + tl.arange(0, 4)[:, None] * 32 + tl.arange(0, 32)[None, :]
    groups = tl.load(x + place)
    exponent = math.a8_exponent(groups)
    tl.store(codes + place, math.a8_bytes(groups, exponent))
    tl.store(scales + tl.program_id(0) * 4 + tl.arange(0, 4), exponent.to(tl.uint8))


@triton.jit
def q4i(x, codes, scales):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * 128 + tl.arange(0, 4)[:, None] * 32 + tl.arange(0, 32)[None, :]
    groups = tl.load(x + place)
    exponent = math.q4i_exponent(groups)
    tl.store(codes + place, math.q4i_codes(groups, exponent).to(tl.uint8))
    tl.store(
        scales + tl.program_id(0) * 4 + tl.arange(0, 4), tl.where(math.has_nan(groups), 255, exponent).to(tl.uint8)
    )


@triton.jit
def q4k(x, codes, scales):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * 64 + tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
    groups = tl.load(x + place)
    scale = math.q4k_scale(groups)
    tl.store(codes + place, math.q4k_codes(groups, scale).to(tl.uint8))
    tl.store(
        scales + tl.program_id(0) * 4 + tl.arange(0, 4),
        tl.where(math.has_nan(groups), 0x7F, scale.to(tl.int32)).to(tl.uint8),
    )


@triton.jit
def values(codes, out):  # type: ignore[no-untyped-def]
    index = tl.arange(0, 256)
    code = tl.load(codes + index)
    tl.store(out + index, math.e8m0_value(code))
    tl.store(out + 256 + index, math.e4m3_value(code))
    tl.store(out + 512 + index, math.e2m1_value(code & 15))

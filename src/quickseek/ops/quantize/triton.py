"""Quantisation kernels: each reads its values once and writes once, in one launch.

``_fake``: groups after quantisation and back (2 bytes in, 2 out a BF16 value). ``_a8``: E4M3 bytes and E8M0 bytes.
``_swizzle``: scale bytes into tiles, zeros where there is no row. Nothing is read before a predecessor's output.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek import formats
from quickseek.ops import triton_math as math
from quickseek.ops.checks import expect_dtype

VALUES = tl.constexpr(1024)
"""Values of a program: 16 bytes of BF16 for each of 128 threads."""


@triton.jit
def _offsets(GROUP: tl.constexpr):
    """Offsets of this program's values, [groups, GROUP]."""
    first = tl.program_id(0).to(tl.int64) * VALUES
    return first + tl.arange(0, VALUES // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit(do_not_specialize=["size"])
def _fake(x, out, size, KIND: tl.constexpr, GROUP: tl.constexpr):
    offsets = _offsets(GROUP)
    groups = tl.load(x + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    if KIND == "a8":
        values = math.fake_quantize_a8(groups)
    elif KIND == "q4i":
        values = math.fake_quantize_q4i(groups)
    else:
        values = math.fake_quantize_q4k(groups)
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=offsets < size)


@triton.jit(do_not_specialize=["size"])
def _a8(x, codes, scales, size):
    offsets = _offsets(32)
    groups = tl.load(x + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    exponent = math.a8_exponent(groups)
    tl.store(codes + offsets, math.a8_bytes(groups, exponent), mask=offsets < size)
    group = tl.program_id(0).to(tl.int64) * (VALUES // 32) + tl.arange(0, VALUES // 32)
    tl.store(scales + group, exponent.to(tl.uint8), mask=group * 32 < size)


@triton.jit(do_not_specialize=["rows", "columns", "size"])
def _swizzle(scales, out, rows, columns, size):
    place = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    across = (columns + 3) // 4
    tile, inside = place // 512, place % 512
    row = tile // across * 128 + inside // 16 + inside % 16 // 4 * 32
    column = tile % across * 4 + inside % 4
    byte = tl.load(scales + row.to(tl.int64) * columns + column, mask=(row < rows) & (column < columns), other=0)
    tl.store(out + place, byte, mask=place < size)


def _run_fake(x: Tensor, kind: str, group: int) -> Tensor:
    expect_dtype("x", x, torch.bfloat16, torch.float32)
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _fake[(triton.cdiv(x.numel(), VALUES.value),)](x, out, x.numel(), KIND=kind, GROUP=group, num_warps=4)
    return out


def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    expect_dtype("x", x, torch.bfloat16, torch.float32)
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // formats.BLOCK, dtype=torch.uint8, device=x.device)
    if x.numel():
        _a8[(triton.cdiv(x.numel(), VALUES.value),)](x, codes, scales, x.numel(), num_warps=4)
    return codes.view(torch.float8_e4m3fn), scales


def fake_quantize_a8(x: Tensor) -> Tensor:
    return _run_fake(x, "a8", formats.BLOCK)


def fake_quantize_q4i(x: Tensor) -> Tensor:
    return _run_fake(x, "q4i", formats.BLOCK)


def fake_quantize_q4k(x: Tensor) -> Tensor:
    return _run_fake(x, "q4k", formats.GLOBAL_KV_GROUP)


def swizzle_scales(scales: Tensor) -> Tensor:
    expect_dtype("scales", scales, torch.uint8)
    rows, columns = scales.shape
    out = torch.empty(-(-rows // 128) * -(-columns // 4) * 512, dtype=torch.uint8, device=scales.device)
    _swizzle[(triton.cdiv(out.numel(), 1024),)](scales.contiguous(), out, rows, columns, out.numel(), num_warps=4)
    return out

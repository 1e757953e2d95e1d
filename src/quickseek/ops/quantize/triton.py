"""Quantisation kernels: each reads its values once and writes once, in one launch.

``_fake``: groups after quantisation and back (2 bytes in, 2 out a BF16 value). ``_a8``: E4M3 bytes and E8M0 bytes.
``_swizzle``: scale bytes into tiles, zeros where there is no row. ``_write``, ``_read``: records of a cache, a program
a row. All of them read what their predecessors wrote, so nothing can be fetched early.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek import formats
from quickseek.ops import triton_math as math
from quickseek.ops import triton_records as records
from quickseek.ops.cache import CacheView, Codec
from quickseek.ops.checks import expect_dtype
from quickseek.ops.triton_chain import begin, chained
from quickseek.ops.triton_launch import padded, warps

VALUES = tl.constexpr(1024)
"""Values of a program: 16 bytes of BF16 for each of 128 threads."""
FLOAT_VALUES = (torch.bfloat16, torch.float32)
PLAIN_VALUES = (*FLOAT_VALUES, torch.int32, torch.int64)


@triton.jit
def _places(GROUP: tl.constexpr):
    """Numbers of this program's groups, [groups], and offsets of their values, [groups, GROUP]."""
    group = tl.program_id(0).to(tl.int64) * (VALUES // GROUP) + tl.arange(0, VALUES // GROUP)
    return group, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@chained
@triton.jit(do_not_specialize=["count"])
def _fake(x, out, count, KIND: tl.constexpr, GROUP: tl.constexpr):
    begin()
    group, offsets = _places(GROUP)
    inside = (group < count)[:, None]
    groups = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if KIND == "a8":
        values = math.fake_quantize_a8(groups)
    elif KIND == "q4i":
        values = math.fake_quantize_q4i(groups)
    else:
        values = math.fake_quantize_q4k(groups)
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=inside)


@chained
@triton.jit(do_not_specialize=["count"])
def _a8(x, codes, scales, count):
    begin()
    group, offsets = _places(32)
    inside = (group < count)[:, None]
    groups = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    exponent = math.a8_exponent(groups)
    tl.store(codes + offsets, math.a8_bytes(groups, exponent), mask=inside)
    tl.store(scales + group, exponent.to(tl.uint8), mask=group < count)


@chained
@triton.jit(do_not_specialize=["rows", "columns", "size"])
def _swizzle(scales, out, rows, columns, size):
    begin()
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
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _fake[(triton.cdiv(x.numel(), VALUES.value),)](x, out, x.numel() // group, KIND=kind, GROUP=group, num_warps=4)
    return out


def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    expect_dtype("x", x, torch.bfloat16, torch.float32)
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // formats.BLOCK, dtype=torch.uint8, device=x.device)
    if x.numel():
        _a8[(triton.cdiv(x.numel(), VALUES.value),)](x, codes, scales, scales.numel(), num_warps=4)
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


# ---------------------------------------------------------------------------------------------- records of a cache


@chained
@triton.jit
def _write(
    values, storage, table, requests, rows, ends, value_stride, table_stride, block_stride, row_stride, block_rows,
    KIND: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    begin()
    number = tl.program_id(0).to(tl.int64)
    request, row = tl.load(requests + number), tl.load(rows + number)
    if RING:
        row = tl.where(row >= tl.load(ends + request) - block_rows, row % block_rows, -1)
    place = records.locate(table, table_stride, block_stride, row_stride, block_rows, request, row)
    channel = tl.arange(0, PADDED)
    x = tl.load(values + number * value_stride + channel, mask=channel < tl.where(row >= 0, WIDTH, 0), other=0)
    if KIND != "plain":
        x = x.to(tl.float32)
    records.store_record(x, storage + place, row >= 0, KIND, WIDTH, PADDED)


@chained
@triton.jit
def _read(
    storage, out, table, requests, rows, columns, request_stride, request_step, table_stride, block_stride,
    row_stride, block_rows, KIND: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    begin()
    number = tl.program_id(0).to(tl.int64)
    request = tl.load(requests + number // columns * request_stride + number % columns * request_step)
    row = tl.load(rows + number)
    place = records.locate(table, table_stride, block_stride, row_stride, block_rows, request, row)
    x = records.load_record(storage + place, row >= 0, KIND, WIDTH, PADDED)
    channel = tl.arange(0, PADDED)
    tl.store(out + number * WIDTH + channel, x.to(out.dtype.element_ty), mask=channel < WIDTH)


def _shape(codec: Codec) -> dict[str, int | str]:
    """What a kernel is compiled for."""
    values = padded(codec.width, 1 if codec.kind == "plain" else formats.BLOCK)
    return {"KIND": codec.kind, "WIDTH": codec.width, "PADDED": values, "num_warps": warps(values, 8)}


def _expect_records(storage: Tensor, table: Tensor, codec: Codec, requests: Tensor, rows: Tensor) -> None:
    CacheView(storage, table, codec).expect_whole("storage", "record")
    for name, x in (("requests", requests), ("rows", rows)):
        expect_dtype(name, x, torch.int64)


def _write_rows(
    storage: Tensor,
    table: Tensor,
    codec: Codec,
    requests: Tensor,
    rows: Tensor,
    ends: Tensor | None,
    values: Tensor,
) -> None:
    _expect_records(storage, table, codec, requests, rows)
    expect_dtype("values", values, *(PLAIN_VALUES if codec.kind == "plain" else FLOAT_VALUES))
    if rows.shape[0] == 0:
        return
    values = values if values.stride(1) == 1 else values.contiguous()
    _write[(rows.shape[0],)](
        values, storage, table, requests.contiguous(), rows.contiguous(), rows if ends is None else ends.contiguous(),
        values.stride(0), table.stride(0), storage.stride(0), storage.stride(1), storage.shape[1],
        RING=ends is not None, **_shape(codec),
    )  # fmt: skip


def write_records(storage: Tensor, table: Tensor, codec: Codec, requests: Tensor, rows: Tensor, values: Tensor) -> None:
    _write_rows(storage, table, codec, requests, rows, None, values)


def keep_records(
    storage: Tensor, table: Tensor, codec: Codec, requests: Tensor, positions: Tensor, ends: Tensor, values: Tensor
) -> None:
    expect_dtype("ends", ends, torch.int64)
    _write_rows(storage, table, codec, requests, positions, ends, values)


def read_records(
    storage: Tensor, table: Tensor, codec: Codec, requests: Tensor, rows: Tensor, dtype: torch.dtype
) -> Tensor:
    _expect_records(storage, table, codec, requests, rows)
    shape = torch.broadcast_shapes(requests.shape, rows.shape)
    out = torch.empty(*shape, codec.width, dtype=dtype, device=storage.device)
    expect_dtype("values", out, *(PLAIN_VALUES if codec.kind == "plain" else FLOAT_VALUES))
    # Requests vary along the first dimension at most in every use here, so their copy is rare.
    requests, rows = requests.expand(shape), rows.expand(shape).contiguous()
    if len(shape) == 2:
        columns, stride, step = shape[1], requests.stride(0), requests.stride(1)
    else:
        columns, stride, step, requests = 1, 1, 0, requests.contiguous()
    if rows.numel():
        _read[(rows.numel(),)](
            storage, out, table, requests, rows, columns, stride, step, table.stride(0), storage.stride(0),
            storage.stride(1), storage.shape[1], **_shape(codec),
        )  # fmt: skip
    return out

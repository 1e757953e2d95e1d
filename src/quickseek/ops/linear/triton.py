"""Linear kernels on weights as stored: codes become 16-bit floats in registers, tensor cores multiply, sums are FP32.

Up to 8 rows of an FP8 weight are ``cute.py``'s where there is the CuTe DSL. Else, and for other weights, ``_few`` (up
to 16 rows, one launch): a program has 16 or 32 outputs, each of its warps a part of K; it reads its weights once, and
the activations, which it quantises itself. ``_held`` (up to 8 rows, where ``held_shape`` has a shape for the weight) is
``_few`` with all weights of a program in registers before it waits for its predecessor. ``_many`` (up to
``library_rows`` of a packed weight, and any number on FP4): tiles of outputs and rows; where they are too few for the
GPU, K is split and the last program of a tile adds the parts in order. ``_prepare_rows`` runs before it (a second
launch) where rows are to be quantised or parts to be counted. More rows are PyTorch's to multiply, after
``_prepare_rows`` and ``_values``, which makes a packed weight BF16. ``_plain`` (one launch): products with an FP32
side, without tensor cores. Bytes: the weight as stored, and rows in and out.

E8M0 scales multiply values before they are rounded to BF16, which is exact for scales within 2^100 of one; codes on
both sides are multiplied in FP16, where they are exact, and scaled in FP32. ``_few`` asks for its weights before it
waits, ``_held`` reads them (``triton_chain``); all else is read after.
"""

from types import ModuleType
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek.formats import BLOCK
from quickseek.ops import triton_math as math
from quickseek.ops.checks import expect_dtype
from quickseek.ops.forms import cute_form
from quickseek.ops.triton_chain import begin, chained, fetch, fetched_bytes
from quickseek.ops.triton_launch import multiprocessors

if TYPE_CHECKING:
    from quickseek.ops.linear import QuantizedRows, Weight

MOST_CUTE_ROWS = 8
"""Rows up to which the kernel of ``cute.py`` multiplies with FP8 weights of up to MOST_CUTE_BYTES."""
MOST_CUTE_BYTES = 1 << 25
FEW_ROWS = 16
"""Rows up to which one launch without tiles of rows is used."""
MOST_SPLITS = 16
LARGE_WEIGHT = 1 << 26
"""Values of a weight that PyTorch multiplies with more rows only: writing and reading them takes that long."""
WIDE_BF16 = (32, 4, 128, 3)
"""What ``few_shape`` gives for BF16 weights of many outputs."""
HELD_BYTES = 320
"""Bytes of an FP8 weight that a thread holds at most: with more, a program leaves no room for the next kernel's."""
PREPARED = 1024
"""Values of a program of ``_prepare_rows``."""
COLUMNS = 256
"""Columns of a program of ``_values``."""


@triton.jit
def _fp4_values(codes, scales, SHAPE: tl.constexpr, GROUPS: tl.constexpr):
    """BF16 values [..., K] (SHAPE) of packed codes [..., K/2] and E8M0 bytes [..., K/32] (GROUPS: its shape and 32)."""
    nibbles = tl.join(codes & 15, codes >> 4)
    values = tl.reshape(math.e2m1_value(nibbles), GROUPS) * tl.expand_dims(math.e8m0_value(scales), -1)
    return tl.reshape(values, SHAPE).to(tl.bfloat16)


@triton.jit
def _a8_codes(groups):
    """E4M3 codes and biased exponents (int32) of FP32 groups [..., 32], as A8 has them where a group holds no NaN.

    A NaN keeps its own code, which spoils its row whatever the group's exponent is.
    """
    amax = tl.maximum(tl.max(tl.abs(groups), -1), 1e-4)
    exponent = tl.minimum(math.pow2ceil_exponent(amax * 0.002232142857142857), 254)  # 1 / 448
    inverse = math.e8m0_value(tl.maximum(254 - exponent, 0))
    return (groups * tl.expand_dims(inverse, -1)).to(tl.float8e4nv), exponent


@triton.jit
def _power(exponent):
    """FP32 2^exponent, 0 below the normal numbers, infinity above the finite ones."""
    bits = tl.minimum(tl.maximum(exponent + 127, 0), 255) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _fp8_step(sums, codes, scale, taken, exponent, INPUT: tl.constexpr):
    """sums [parts, outputs, rows] plus the products of FP8 ``codes`` [parts, outputs, columns] and rows ``taken``.

    ``scale``: biased exponents [parts, 1, groups] of the weight (int32). taken [parts, given, columns]: BF16, plain or
    to be quantised, or E4M3 bytes with biased exponents ``exponent`` [parts, given, groups]; one row stands for all.
    """
    PARTS: tl.constexpr = taken.shape[0]
    GIVEN: tl.constexpr = taken.shape[1]
    PART: tl.constexpr = taken.shape[2]
    ROWS: tl.constexpr = sums.shape[2]
    if INPUT == "plain":
        groups = tl.reshape(taken.to(tl.float32), (PARTS, GIVEN, PART // 32, 32))
        groups *= tl.expand_dims(math.e8m0_value(scale), -1)
        values = tl.broadcast_to(tl.reshape(groups, (PARTS, GIVEN, PART)).to(tl.bfloat16), (PARTS, ROWS, PART))
        sums = tl.dot(math.e4m3_value(codes).to(tl.bfloat16), tl.permute(values, (0, 2, 1)), sums)
    else:
        if INPUT == "a8":
            numbers, exponent = _a8_codes(tl.reshape(taken.to(tl.float32), (PARTS, GIVEN, PART // 32, 32)))
        else:
            numbers = tl.reshape(taken, (PARTS, GIVEN, PART // 32, 32)).to(tl.float8e4nv, bitcast=True)
        # A row's largest block scale multiplies the sum, what is left of the others' the codes. These are multiples of
        # 2^-9, so FP16 holds them exactly unless scales differ by more than 2^15; beyond it cuts off below 2^-33 of the
        # largest term (a group under A8's floor needs weights that far apart).
        nan = tl.max(((exponent == 255) | (scale == 255)).to(tl.int32), 2)
        exponent += scale
        largest = tl.max(exponent, 2)
        rest = _power(exponent - largest[:, :, None]).to(tl.float16)
        numbers = tl.reshape(numbers.to(tl.float16) * tl.expand_dims(rest, -1), (PARTS, GIVEN, PART))
        numbers = tl.permute(tl.broadcast_to(numbers, (PARTS, ROWS, PART)), (0, 2, 1))
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        factor = tl.where(nan != 0, float("nan"), _power(largest - 254))
        sums += tl.dot(values, numbers) * factor[:, None, :]
    return sums


@triton.jit
def _store_sums(out, sums, rows, outputs, outs, weight_row):
    """Sums [parts, outputs, rows], added up over the parts, to out [rows, ...]; ``weight_row``: the column of each."""
    row = tl.arange(0, sums.shape[2])[None, :]
    place = out + row.to(tl.int64) * (outputs * tl.num_programs(1)) + weight_row[:, None]
    tl.store(place, tl.sum(sums, 0).to(out.dtype.element_ty), mask=(outs < outputs)[:, None] & (row < rows))


@chained
@triton.jit(do_not_specialize=["rows"])
def _held(
    x, x_scales, weight, weight_scales, out,
    rows, outputs, inner, x_stride, x_group, x_scales_stride, weight_stride, scales_stride,
    KIND: tl.constexpr, INPUT: tl.constexpr, GIVEN: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """``_few`` for an FP8 or BF16 weight of STEPS steps: a program has all of its part in registers before it waits.

    The rows of AHEAD steps are loaded ahead of the products.
    """
    group, first = tl.program_id(1), tl.program_id(0) * OUT
    outs, row = first + tl.arange(0, OUT), tl.arange(0, GIVEN)
    weight_row = (group * outputs + outs).to(tl.int64)
    here, there = outs < outputs, row < rows
    GROUPS: tl.constexpr = PART // 32
    # A tile of outputs lies in one block row of an FP8 weight.
    block_row = weight_scales + (group * outputs + first).to(tl.int64) // 32 * scales_stride
    place = weight + weight_row[None, :, None] * weight_stride
    part = tl.arange(0, PARTS)[:, None]
    codes = ()
    scales = ()
    for step in tl.static_range(STEPS):
        k = (step * PARTS + part)[:, :, None] * PART + tl.arange(0, PART)[None, None, :]
        blocks = (step * PARTS + part) * GROUPS + tl.arange(0, GROUPS)[None, :]
        codes += (tl.load(place + k, mask=here[None, :, None] & (k < inner), other=0),)  # type: ignore[assignment]
        if KIND == "fp8":
            scales += (tl.load(block_row + blocks, mask=blocks * 32 < inner, other=0).to(tl.int32)[:, None, :],)  # type: ignore[assignment]
    begin()
    x_rows = x + group.to(tl.int64) * x_group + row.to(tl.int64)[None, :, None] * x_stride
    sums = tl.zeros((PARTS, OUT, ROWS), tl.float32)
    taken = ()
    exponents = ()
    for turn in tl.static_range(STEPS + AHEAD):
        if turn < STEPS:
            k = (turn * PARTS + part)[:, :, None] * PART + tl.arange(0, PART)[None, None, :]
            taken += (tl.load(x_rows + k, mask=there[None, :, None] & (k < inner), other=0),)  # type: ignore[assignment]
            if INPUT == "codes":
                blocks = ((turn * PARTS + part) * GROUPS + tl.arange(0, GROUPS)[None, :])[:, None, :]
                of_rows = x_scales + row[None, :, None] * x_scales_stride + blocks
                loaded = tl.load(of_rows, mask=there[None, :, None] & (blocks * 32 < inner), other=0)
                exponents += (loaded.to(tl.int32),)  # type: ignore[assignment]
            else:
                exponents += (0,)  # type: ignore[assignment]
        if turn >= AHEAD:
            if KIND == "fp8":
                sums = _fp8_step(
                    sums, codes[turn - AHEAD], scales[turn - AHEAD], taken[turn - AHEAD], exponents[turn - AHEAD], INPUT
                )
            else:
                values = tl.broadcast_to(taken[turn - AHEAD], (PARTS, ROWS, PART))
                sums = tl.dot(codes[turn - AHEAD], tl.permute(values, (0, 2, 1)), sums)
    _store_sums(out, sums, rows, outputs, outs, weight_row)


@chained
@triton.jit(do_not_specialize=["rows", "fetched"])
def _few(
    x, x_scales, weight, weight_scales, out,
    rows, outputs, inner, x_stride, x_group, x_scales_stride, weight_stride, scales_stride, fetched,
    KIND: tl.constexpr, INPUT: tl.constexpr,
    GIVEN: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """out[t, g, o] for OUT outputs o of group g: each of PARTS warps multiplies PART of every PARTS * PART of K.

    GIVEN rows of x are read; a single one is repeated, since a product takes ROWS. The first ``fetched`` bytes of each
    of its weight rows are on their way before it waits.
    """
    group, first = tl.program_id(1), tl.program_id(0) * OUT
    outs, row = first + tl.arange(0, OUT), tl.arange(0, GIVEN)
    weight_row = (group * outputs + outs).to(tl.int64)
    here, there = outs < outputs, row < rows
    fetched_row = (group * outputs + tl.minimum(outs, outputs - 1)).to(tl.int64)
    fetch((weight + fetched_row * weight_stride).to(tl.int64), fetched, 32 * PARTS // OUT)
    begin()
    GROUPS: tl.constexpr = PART // 32
    x_rows = x + group.to(tl.int64) * x_group + row.to(tl.int64)[None, :, None] * x_stride
    # A tile of outputs lies in one block row of an FP8 weight.
    block_row = weight_scales + (group * outputs + first).to(tl.int64) // 32 * scales_stride
    sums = tl.zeros((PARTS, OUT, ROWS), tl.float32)
    # Scales are single bytes, which the pipeline's asynchronous copies cannot take: they are loaded a step ahead here.
    first_blocks = tl.arange(0, PARTS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    if KIND == "fp8":
        next_scales = tl.load(block_row + first_blocks, mask=first_blocks * 32 < inner, other=0)
    if INPUT == "codes":
        x_scales_rows = x_scales + row[None, :, None] * x_scales_stride
        place, inside = x_scales_rows + first_blocks[:, None, :], (first_blocks * 32 < inner)[:, None, :]
        next_exponents = tl.load(place, mask=there[None, :, None] & inside, other=0)
    for start in range(0, inner, PARTS * PART):
        begins = start + tl.arange(0, PARTS) * PART
        k = begins[:, None, None] + tl.arange(0, PART)[None, None, :]
        blocks = begins[:, None] // 32 + tl.arange(0, GROUPS)[None, :]
        taken = tl.load(x_rows + k, mask=there[None, :, None] & (k < inner), other=0)
        if KIND == "fp4":
            pair = begins[:, None, None] // 2 + tl.arange(0, PART // 2)[None, None, :]
            place = weight + weight_row[None, :, None] * weight_stride + pair
            codes = tl.load(place, mask=here[None, :, None] & (pair * 2 < inner), other=0)
            place = weight_scales + weight_row[None, :, None] * scales_stride + blocks[:, None, :]
            scales = tl.load(place, mask=here[None, :, None] & (blocks * 32 < inner)[:, None, :], other=0)
            values = _fp4_values(codes, scales, (PARTS, OUT, PART), (PARTS, OUT, GROUPS, 32))
            taken = tl.broadcast_to(taken, (PARTS, ROWS, PART))
            sums = tl.dot(values, tl.permute(taken, (0, 2, 1)), sums)
        else:
            place = weight + weight_row[None, :, None] * weight_stride + k
            codes = tl.load(place, mask=here[None, :, None] & (k < inner), other=0)
            if KIND == "bf16":
                taken = tl.broadcast_to(taken, (PARTS, ROWS, PART))
                sums = tl.dot(codes, tl.permute(taken, (0, 2, 1)), sums)
            else:
                ahead = blocks + PARTS * GROUPS
                scale = next_scales.to(tl.int32)[:, None, :]
                next_scales = tl.load(block_row + ahead, mask=ahead * 32 < inner, other=0)
                exponent = 0
                if INPUT == "codes":
                    exponent = next_exponents.to(tl.int32)
                    place, inside = x_scales_rows + ahead[:, None, :], (ahead * 32 < inner)[:, None, :]
                    next_exponents = tl.load(place, mask=there[None, :, None] & inside, other=0)
                sums = _fp8_step(sums, codes, scale, taken, exponent, INPUT)
    _store_sums(out, sums, rows, outputs, outs, weight_row)


@chained
@triton.jit(do_not_specialize=["rows", "steps", "splits"])
def _many(
    x, weight, weight_scales, out, parts, arrived,
    rows, outputs, inner, steps, splits, x_stride, x_group, weight_stride, scales_stride, block_rows,
    KIND: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out[t, g, o] for a tile of rows t and outputs o; a program sums ``steps`` steps of K. x is BF16.

    With SPLIT it leaves its sums in parts[split, t, g, o] and adds 1 to the tile's number ``arrived``: the last of the
    ``splits`` programs to come adds all parts, in order.
    """
    begin()
    group, split = tl.program_id(2) // splits, tl.program_id(2) % splits
    outs, row = tl.program_id(1) * OUT + tl.arange(0, OUT), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    weight_row = (group * outputs + outs).to(tl.int64)
    here, there = outs < outputs, row < rows
    GROUPS: tl.constexpr = STEP // 32
    x_rows = x + group.to(tl.int64) * x_group + row.to(tl.int64) * x_stride
    codes_rows = weight + weight_row * weight_stride
    scale_rows = weight_scales + weight_row // block_rows * scales_stride
    sums = tl.zeros((OUT, ROWS), tl.float32)
    for step in range(split * steps, tl.minimum((split + 1) * steps, tl.cdiv(inner, STEP))):
        start = step * STEP
        k = start + tl.arange(0, STEP)
        blocks = start // 32 + tl.arange(0, GROUPS)
        scales = tl.load(
            scale_rows[:, None] + blocks[None, :], mask=here[:, None] & (blocks * 32 < inner)[None, :], other=0
        )
        if KIND == "fp4":
            pair = start // 2 + tl.arange(0, STEP // 2)
            codes = tl.load(
                codes_rows[:, None] + pair[None, :], mask=here[:, None] & (pair * 2 < inner)[None, :], other=0
            )
            values = _fp4_values(codes, scales, (OUT, STEP), (OUT, GROUPS, 32))
        else:
            codes = tl.load(codes_rows[:, None] + k[None, :], mask=here[:, None] & (k < inner)[None, :], other=0)
            scaled = tl.reshape(math.e4m3_value(codes), (OUT, GROUPS, 32)) * math.e8m0_value(scales)[:, :, None]
            values = tl.reshape(scaled, (OUT, STEP)).to(tl.bfloat16)
        taken = tl.load(x_rows[:, None] + k[None, :], mask=there[:, None] & (k < inner)[None, :], other=0.0)
        sums = tl.dot(values, tl.trans(taken), sums)
    width = outputs * (tl.num_programs(2) // splits)
    mask = here[:, None] & there[None, :]
    place = row[None, :].to(tl.int64) * width + weight_row[:, None]
    if SPLIT:
        size = rows.to(tl.int64) * width
        tl.store(parts + split * size + place, sums, mask=mask)
        # Every thread's part must be out before the program's arrival is.
        tl.debug_barrier()
        tile = (group * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before == splits - 1:
            sums = tl.zeros((OUT, ROWS), tl.float32)
            for one in range(splits):
                sums += tl.load(parts + one * size + place, mask=mask, other=0.0)
            tl.store(out + place, sums.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=mask)


@chained
@triton.jit(do_not_specialize=["size", "tiles"])
def _prepare_rows(x, scales, out, arrived, size, tiles, INPUT: tl.constexpr, WIDTH: tl.constexpr):
    """BF16 values of rows after A8 ("a8"), of codes and E8M0 bytes ("codes"), or none; and zeros in ``arrived``."""
    begin()
    index = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    tl.store(arrived + index, tl.zeros((WIDTH,), tl.int32), mask=index < tiles)
    if INPUT != "plain":
        group = tl.program_id(0).to(tl.int64) * (WIDTH // 32) + tl.arange(0, WIDTH // 32)
        place = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        mask = (group * 32 < size)[:, None]
        taken = tl.load(x + place, mask=mask, other=0)
        if INPUT == "a8":
            values = math.fake_quantize_a8(taken.to(tl.float32))
        else:
            scale = math.e8m0_value(tl.load(scales + group, mask=group * 32 < size, other=0))
            values = math.e4m3_value(taken) * scale[:, None]
        tl.store(out + place, values.to(tl.bfloat16), mask=mask)


@chained
@triton.jit
def _values(codes, scales, out, outputs, inner, stride, scales_stride, COLUMNS: tl.constexpr):
    """out [outputs, inner]: BF16 values of FP8 codes, a block row of 32 outputs and COLUMNS columns a program."""
    begin()
    block = tl.program_id(0).to(tl.int64)
    row, column = block * 32 + tl.arange(0, 32), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(1) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    inside = (row < outputs)[:, None] & (column < inner)[None, :]
    taken = math.e4m3_value(tl.load(codes + row[:, None] * stride + column[None, :], mask=inside, other=0))
    scale = math.e8m0_value(tl.load(scales + block * scales_stride + group, mask=group * 32 < inner, other=0))
    values = tl.reshape(tl.reshape(taken, (32, COLUMNS // 32, 32)) * scale[None, :, None], (32, COLUMNS))
    tl.store(out + row[:, None] * inner + column[None, :], values.to(tl.bfloat16), mask=inside)


@chained
@triton.jit
def _plain(
    x, weight, out, outputs, inner, x_stride, weight_stride, OUT: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """out[t, o] of row t and OUT outputs o; both sides are promoted to FP32."""
    begin()
    row = tl.program_id(1).to(tl.int64)
    outs = tl.program_id(0) * OUT + tl.arange(0, OUT)
    sums = tl.zeros((OUT, STEP), tl.float32)
    for start in range(0, inner, STEP):
        k = start + tl.arange(0, STEP)
        taken = tl.load(x + row * x_stride + k, mask=k < inner, other=0.0).to(tl.float32)
        place = weight + outs[:, None].to(tl.int64) * weight_stride + k[None, :]
        values = tl.load(place, mask=(outs < outputs)[:, None] & (k < inner)[None, :], other=0.0).to(tl.float32)
        sums += values * taken[None, :]
    tl.store(out + row * outputs + outs, tl.sum(sums, 1), mask=outs < outputs)


# ---------------------------------------------------------------------------------------------- launches


def linear(x: "Tensor | QuantizedRows", weight: "Weight", quantize_input: bool = True) -> Tensor:
    if not isinstance(x, Tensor):
        expect_dtype("x.codes", x.codes, torch.float8_e4m3fn)
        codes = _rows(x.codes.view(torch.uint8))
        out = _product(codes, _rows(x.scales), weight, "codes", torch.bfloat16)
        return out.view(*x.shape[:-1], weight.shape[-2])
    expect_dtype("x", x, torch.bfloat16)
    given = "plain" if isinstance(weight, Tensor) or not quantize_input else "a8"
    return _product(_rows(x), None, weight, given, torch.bfloat16).view(*x.shape[:-1], weight.shape[-2])


def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    expect_dtype("x", x, torch.bfloat16, torch.float32)
    expect_dtype("weight", weight, torch.bfloat16, torch.float32)
    rows = _rows(x)
    if x.dtype == weight.dtype == torch.bfloat16:
        out = _product(rows, None, weight, "plain", torch.float32)
    else:
        weight = _whole("weight", weight)
        out = torch.empty(rows.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
        if out.numel():
            grid = (triton.cdiv(weight.shape[0], 16), rows.shape[0])
            sizes = (*weight.shape, rows.stride(0), weight.stride(0))
            _plain[grid](rows, weight, out, *sizes, OUT=16, STEP=128, num_warps=4)
    return out.view(*x.shape[:-1], weight.shape[0])


def grouped_linear(x: Tensor, weight: "Weight") -> Tensor:
    expect_dtype("x", x, torch.bfloat16)
    return _product(x if x.stride(-1) == 1 else x.contiguous(), None, weight, "plain", torch.bfloat16)


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as [T, K] whose values lie side by side."""
    flat = x.reshape(x.numel() // x.shape[-1], x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _product(x: Tensor, scales: Tensor | None, weight: "Weight", given: str, dtype: torch.dtype) -> Tensor:
    """[T, O] in ``dtype`` of x [T, K], or [T, G, K] for a block-diagonal weight.

    ``given``: x is "plain" BF16, BF16 that goes through "a8", or "codes" (bytes) with ``scales``.
    """
    kind, codes, weight_scales = _stored(weight)
    rows, inner = x.shape[0], x.shape[-1]
    groups = x.shape[1] if x.dim() == 3 else 1
    outputs = codes.shape[0] // groups
    out = torch.empty(rows, codes.shape[0], dtype=dtype, device=x.device)
    if not out.numel():
        return out
    if rows > library_rows(kind, codes.numel()):
        return _multiplied(x, scales, (kind, codes, weight_scales), given, out, groups)
    tiled = rows > FEW_ROWS or (kind == "fp4" and given != "plain")
    if (form := few_rows(x, kind, codes, outputs, dtype)) is not None:
        form.product_of(x, scales, (codes, weight_scales), given, out)
        return out
    # _few needs tiles of outputs that lie in one block row of scales.
    if tiled or (kind == "fp8" and groups > 1 and outputs % BLOCK):
        return _tiled(x, scales, (kind, codes, weight_scales), given, out, outputs, groups)
    fitting, processors = 8 if rows <= 8 else 16, multiprocessors(x.device)
    shape = {"KIND": kind, "INPUT": given, "GIVEN": 1 if rows == 1 else fitting, "ROWS": fitting}
    operands = (
        x, x if scales is None else scales, codes, weight_scales, out,
        rows, outputs, inner, x.stride(0), x.stride(1) if groups > 1 else 0,
        0 if scales is None else scales.stride(0), codes.stride(0), weight_scales.stride(0),
    )  # fmt: skip
    if (held := held_shape(kind, given, rows, outputs, inner, groups, processors)) is not None:
        tile, parts, part, ahead, warps = held
        steps = triton.cdiv(inner, parts * part)
        _held[(triton.cdiv(outputs, tile), groups)](
            *operands, **shape, OUT=tile, PARTS=parts, PART=part, STEPS=steps, AHEAD=min(ahead, steps), num_warps=warps
        )
        return out
    tile, parts, part, stages = few_shape(kind, given, rows, outputs, inner, groups, processors)
    _few[(triton.cdiv(outputs, tile), groups)](
        *operands, fetched_bytes(codes), **shape,
        OUT=tile, PARTS=parts, PART=part, num_warps=parts, num_stages=stages,
    )  # fmt: skip
    return out


def few_rows(x: Tensor, kind: str, codes: Tensor, outputs: int, dtype: torch.dtype) -> ModuleType | None:
    """The kernels that take a product of few rows instead of the ones here: on a GPU, where sizes fit."""
    few = x.shape[0] <= MOST_CUTE_ROWS and codes.numel() <= MOST_CUTE_BYTES
    if not (few and x.is_cuda and kind == "fp8" and dtype == torch.bfloat16):
        return None
    kernels = cute_form("quickseek.ops.linear")
    return kernels if kernels is not None and kernels.fits(x, codes, outputs) else None


def held_shape(
    kind: str, given: str, rows: int, outputs: int, inner: int, groups: int, processors: int
) -> tuple[int, int, int, int, int] | None:
    """Outputs and parts of a program of ``_held``, columns of a part, steps of x ahead, warps; None: ``_few`` it is.

    The best of a few on an H200, as in ``few_shape``.
    """
    if kind == "bf16" and rows <= 8 and inner <= 512:
        return (32, 4, 64, 1, 2) if inner <= 256 else (16, 4, 128, 1, 4)
    if kind == "bf16" and rows == 1 and outputs <= 512 and inner <= 5120:
        return 16, 16, 64, 8, 8
    if kind != "fp8" or rows > 8 or given == "plain" or (given == "codes" and inner >= 4096):
        return None
    if inner >= 4096:
        shape = 16, 8, 128, 8, 8
    elif rows == 1:
        shape = 16, 8, 128, 8, 4
    elif given == "codes" and inner >= 1024:
        shape = 16, 4, 256, 1, 4
    elif given == "codes" or triton.cdiv(outputs, 32) * groups >= 3 * processors // 2:
        shape = 32, 4, 128, 1, 4
    else:
        shape = 16, 8, 128, 1, 4
    return shape if shape[0] * inner <= HELD_BYTES * 32 * shape[4] else None


def few_shape(
    kind: str, given: str, rows: int, outputs: int, inner: int, groups: int, processors: int
) -> tuple[int, int, int, int]:
    """Outputs and warps of a program of ``_few``, columns of a warp at a time, stages: the best of a few on an H200."""
    tiles = triton.cdiv(outputs, 32) * groups
    # Two programs of 32 outputs for most multiprocessors; or one, where each of them quantises several rows.
    if tiles >= (processors if rows > 1 and given == "a8" else 3 * processors // 2):
        return WIDE_BF16 if kind == "bf16" else (32, 4, 128, 3)
    if kind == "bf16":
        return 16, 4, 128, 4
    if inner < 1024:
        return 16, 4, 64, 4
    if rows == 1:
        return 16, 4, 256, 3 if inner >= 4096 else 2
    if inner >= 4096:
        return 16, 8, 128, 3
    return (16, 4, 256, 2) if given == "codes" and rows <= 8 else (16, 4, 128, 3)


def library_rows(kind: str, size: int) -> int:
    """The most rows that kernels of ours multiply with a weight of ``size`` values (one H200)."""
    if kind == "bf16":
        return FEW_ROWS
    if kind == "fp4":
        return 1 << 31
    return 192 if size > LARGE_WEIGHT else 64


def _multiplied(
    x: Tensor, scales: Tensor | None, stored: tuple[str, Tensor, Tensor], given: str, out: Tensor, groups: int
) -> Tensor:
    """``out`` by PyTorch's own product of BF16 values, sums in FP32."""
    kind, values, weight_scales = stored
    if kind == "fp8":
        codes, values = values, torch.empty(values.shape, dtype=torch.bfloat16, device=out.device)
        outputs, inner = codes.shape
        _values[(triton.cdiv(outputs, BLOCK), triton.cdiv(inner, COLUMNS))](
            codes, weight_scales, values, outputs, inner, codes.stride(0), weight_scales.stride(0),
            COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    if given != "plain":
        x = _prepared(x, scales, given, out, 0)
    if x.dim() == 2:
        return _mm(x, values, out)
    for one, rows, part in zip(x.unbind(1), values.chunk(groups), out.chunk(groups, 1), strict=True):
        _mm(one, rows, part)
    return out


def _mm(x: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """out [T, O], BF16 or FP32, of BF16 x [T, K] and values [O, K]."""
    if not out.is_cuda:
        return out.copy_(x.float() @ values.float().T)
    if out.dtype == torch.float32:
        return torch.mm(x, values.T, out_dtype=torch.float32, out=out)
    flags = torch.backends.cuda.matmul
    usual = flags.allow_bf16_reduced_precision_reduction
    try:
        flags.allow_bf16_reduced_precision_reduction = False
        return torch.mm(x, values.T, out=out)
    finally:
        flags.allow_bf16_reduced_precision_reduction = usual


def _prepared(x: Tensor, scales: Tensor | None, given: str, arrived: Tensor, tiles: int) -> Tensor:
    """BF16 values of rows after ``given``, and zeros in ``tiles`` words of ``arrived``."""
    if given != "plain":
        x, scales = x.contiguous(), None if scales is None else scales.contiguous()
    out = x if given == "plain" else torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    _prepare_rows[(triton.cdiv(max(tiles, x.numel() if given != "plain" else 0), PREPARED),)](
        x, x if scales is None else scales, out, arrived, x.numel(), tiles, INPUT=given, WIDTH=PREPARED, num_warps=4
    )
    return out


def _tiled(
    x: Tensor, scales: Tensor | None, stored: tuple[str, Tensor, Tensor], given: str, out: Tensor,
    outputs: int, groups: int,
) -> Tensor:  # fmt: skip
    kind, codes, weight_scales = stored
    rows, inner = x.shape[0], x.shape[-1]
    # Two programs of 4 warps fit on a multiprocessor, or one of 8.
    tile_rows, tile, step, warps, each = (64, 64, 128, 4, 2) if rows <= 64 else (128, 128, 64, 8, 1)
    room = each * multiprocessors(x.device)
    grid = (triton.cdiv(rows, tile_rows), triton.cdiv(outputs, tile))
    tiles = grid[0] * grid[1] * groups
    splits = max(1, min(MOST_SPLITS, room // tiles, inner // 512))
    steps = triton.cdiv(triton.cdiv(inner, step), splits)
    splits = triton.cdiv(triton.cdiv(inner, step), steps)
    parts = arrived = out
    if splits > 1:
        parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
        arrived = torch.empty(tiles, dtype=torch.int32, device=out.device)
    if given != "plain" or splits > 1:
        x = _prepared(x, scales, given, arrived, tiles if splits > 1 else 0)
    _many[(*grid, groups * splits)](
        x, codes, weight_scales, out, parts, arrived,
        rows, outputs, inner, steps, splits, x.stride(0), x.stride(1) if groups > 1 else 0,
        codes.stride(0), weight_scales.stride(0), BLOCK if kind == "fp8" else 1,
        KIND=kind, SPLIT=splits > 1, ROWS=tile_rows, OUT=tile, STEP=step, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


def _stored(weight: "Weight") -> tuple[str, Tensor, Tensor]:
    """How a weight is stored, its codes as bytes (or its values) and its scales (or the values again)."""
    if isinstance(weight, Tensor):
        expect_dtype("weight", weight, torch.bfloat16)
        return "bf16", _whole("weight", weight), weight
    expect_dtype("weight.codes", weight.codes, torch.float8_e4m3fn, torch.uint8)
    expect_dtype("weight.scales", weight.scales, torch.uint8)
    kind = "fp8" if weight.codes.dtype == torch.float8_e4m3fn else "fp4"
    codes = _whole("weight.codes", weight.codes.view(torch.uint8))
    return kind, codes, _whole("weight.scales", weight.scales)


def _whole(name: str, part: Tensor) -> Tensor:
    """``part`` [O, ...], refused where the values of an output do not lie side by side: no step may copy a weight."""
    if part.stride(-1) != 1 and part.shape[-1] > 1:
        raise ValueError(f"{name} has strides {part.stride()}: expected the values of an output side by side")
    return _rows(part)

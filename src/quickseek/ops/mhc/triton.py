"""mHC on a GPU (spec/model.md 5).

``coefficients`` is two launches. ``_project`` multiplies a tile of rows with a range of the channels, every program its
own part of ``fn``: up to 64 rows the ranges are short, so that the 2 MB of ``fn`` come through many programs at once;
beyond that they are long and the rows are what is read. The parts are summed in a fixed order by ``_mix``, a warp
a row, which loads them all at once and makes Sinkhorn's iterations in scalars, without a word between threads. Within
either regime a row's bits depend on no other row and not on their number. ``_post`` and ``_collapse`` are one launch
each.

Bytes: ``coefficients`` reads fn (FP32) and the streams; ``post`` reads n + 1 and writes n rows of H, ``collapse`` and
``stream_mean`` read n and write one. Weights that no kernel of a step writes: fn, scale, base.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek.ops import triton_math as math
from quickseek.ops.checks import expect_dtype
from quickseek.ops.mhc.reference import Mixes
from quickseek.ops.mhc.reference import first_streams as first_streams  # a view and a constant: nothing to compute
from quickseek.ops.triton_chain import begin, chained

_COPIES = 4
_FEW_ROWS = 64
"""Up to this many rows the weight is what is read; above it the streams are."""
_SHORT_RANGE, _LONG_RANGE = 256, 1280
"""Channels of a program: all of them at once where rows are few."""


@triton.jit
def _weights(fn, column, k, channels):
    """FP32 weights [k, 32] of channels k; zeros beyond the 24 outputs and the channels."""
    inside = (column < 24)[None, :] & (k < channels)[:, None]
    return tl.load(fn + column[None, :] * channels + k[:, None], mask=inside, other=0.0)


@triton.jit
def _multiply(values, weight, products):
    """products [t, 32] plus BF16 values [t, k] times FP32 weights [k, 32], exact but for the sums."""
    # An FP32 weight is exactly the sum of three BF16 numbers, and a product of BF16 numbers is exact in FP32.
    high = weight.to(tl.bfloat16)
    rest = weight - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    products = tl.dot(values, low, products)
    products = tl.dot(values, middle, products)
    return tl.dot(values, high, products)


@chained
@triton.jit(do_not_specialize=["rows", "splits"])
def _project(x, fn, parts, rows, channels, length, splits, block_t: tl.constexpr, block_k: tl.constexpr,
             single: tl.constexpr):  # fmt: skip
    """parts [rows, splits, 32]: the 24 products of each row over one range of channels, and its sum of squares.

    A ``single`` block of channels has its weights before the wait.
    """
    split = tl.program_id(0)
    row = tl.program_id(1) * block_t + tl.arange(0, block_t)
    column = tl.arange(0, 32)
    if single:
        weight = _weights(fn, column, split * length + tl.arange(0, block_k), channels)
    begin()
    products = tl.zeros((block_t, 32), tl.float32)
    squares = tl.zeros((block_t,), tl.float32)
    for start in range(split * length, tl.minimum((split + 1) * length, channels), block_k):
        k = start + tl.arange(0, block_k)
        place = x + row[:, None].to(tl.int64) * channels + k[None, :]
        values = tl.load(place, mask=(row < rows)[:, None] & (k < channels)[None, :], other=0.0)
        if not single:
            weight = _weights(fn, column, k, channels)
        wide = values.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        products = _multiply(values, weight, products)
    place = parts + (row.to(tl.int64) * splits + split)[:, None] * 32 + column[None, :]
    tl.store(place, tl.where((column == 24)[None, :], squares[:, None], products), mask=(row < rows)[:, None])


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softmax_row(logits, first, eps):
    """Softmax of four neighbouring logits from number ``first`` on, plus epsilon."""
    number = tl.arange(0, 32)
    a = tl.sum(tl.where(number == first, logits, 0.0))
    b = tl.sum(tl.where(number == first + 1, logits, 0.0))
    c = tl.sum(tl.where(number == first + 2, logits, 0.0))
    d = tl.sum(tl.where(number == first + 3, logits, 0.0))
    largest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - largest), tl.exp(b - largest), tl.exp(c - largest), tl.exp(d - largest)
    inverse = 1.0 / ((a + b) + (c + d))
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


@triton.jit
def _reciprocal(x):
    """1 / x of a positive FP32 number, to a unit in the last place."""
    if math.INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _rescaled(rate, a, b, c, d, of_a, of_b, of_c, of_d, eps):
    """The rate of a row (or column) a to d that makes its sum one, given its rate and those of the columns (rows)."""
    total = (a * of_a + b * of_b) + (c * of_c + d * of_d)
    return rate * _reciprocal(rate * total + eps)


@triton.jit
def _store_row(place, rate, a, b, c, d, of_a, of_b, of_c, of_d):
    tl.store(place, a * rate * of_a)
    tl.store(place + 1, b * rate * of_b)
    tl.store(place + 2, c * rate * of_c)
    tl.store(place + 3, d * rate * of_d)


@chained
@triton.jit(do_not_specialize=["splits", "iterations"])
def _mix(parts, scale, base, pre, post, comb, channels, splits, norm_eps, hc_eps, iterations, block: tl.constexpr):
    """The coefficients of one row from the parts of its projections; a row of comb is a source (spec 5.2).

    Sinkhorn's iterations change four rates of rows and four of columns, and the matrix once, at the end.
    """
    number = tl.arange(0, 32)
    # The first four columns are those of pre, the next four those of post, the others those of comb.
    scales = tl.load(scale + tl.where(number < 4, 0, tl.where(number < 8, 1, 2)))
    bases = tl.load(base + number, mask=number < 24, other=0.0)
    begin()
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, block)[:, None]
    own = tl.load(parts + (row * splits + split) * 32 + number[None, :], mask=split < splits, other=0.0)
    totals = tl.sum(own, 0)
    rho = tl.rsqrt(tl.sum(tl.where(number == 24, totals, 0.0)) / channels + norm_eps)
    logits = totals * (scales * rho) + bases
    gates = _sigmoid(logits)
    tl.store(pre + row * 4 + number, gates + hc_eps, mask=number < 4)
    tl.store(post + row * 4 + number - 4, 2.0 * gates, mask=(number >= 4) & (number < 8))
    a0, a1, a2, a3 = _softmax_row(logits, 8, hc_eps)
    b0, b1, b2, b3 = _softmax_row(logits, 12, hc_eps)
    c0, c1, c2, c3 = _softmax_row(logits, 16, hc_eps)
    d0, d1, d2, d3 = _softmax_row(logits, 20, hc_eps)
    ra, rb, rc, rd = 1.0, 1.0, 1.0, 1.0
    r0 = _rescaled(1.0, a0, b0, c0, d0, 1.0, 1.0, 1.0, 1.0, hc_eps)
    r1 = _rescaled(1.0, a1, b1, c1, d1, 1.0, 1.0, 1.0, 1.0, hc_eps)
    r2 = _rescaled(1.0, a2, b2, c2, d2, 1.0, 1.0, 1.0, 1.0, hc_eps)
    r3 = _rescaled(1.0, a3, b3, c3, d3, 1.0, 1.0, 1.0, 1.0, hc_eps)
    for _ in range(iterations - 1):
        ra = _rescaled(ra, a0, a1, a2, a3, r0, r1, r2, r3, hc_eps)
        rb = _rescaled(rb, b0, b1, b2, b3, r0, r1, r2, r3, hc_eps)
        rc = _rescaled(rc, c0, c1, c2, c3, r0, r1, r2, r3, hc_eps)
        rd = _rescaled(rd, d0, d1, d2, d3, r0, r1, r2, r3, hc_eps)
        r0 = _rescaled(r0, a0, b0, c0, d0, ra, rb, rc, rd, hc_eps)
        r1 = _rescaled(r1, a1, b1, c1, d1, ra, rb, rc, rd, hc_eps)
        r2 = _rescaled(r2, a2, b2, c2, d2, ra, rb, rc, rd, hc_eps)
        r3 = _rescaled(r3, a3, b3, c3, d3, ra, rb, rc, rd, hc_eps)
    place = comb + row * 16
    _store_row(place, ra, a0, a1, a2, a3, r0, r1, r2, r3)
    _store_row(place + 4, rb, b0, b1, b2, b3, r0, r1, r2, r3)
    _store_row(place + 8, rc, c0, c1, c2, c3, r0, r1, r2, r3)
    _store_row(place + 12, rd, d0, d1, d2, d3, r0, r1, r2, r3)


@chained
@triton.jit
def _post(streams, output, post, comb, out, hidden, copies: tl.constexpr, block: tl.constexpr):
    """One range of channels of one row, all copies."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    source = tl.arange(0, copies)
    inside = channel < hidden
    place = (row * copies + source)[:, None] * hidden + channel[None, :]
    x = tl.load(streams + place, mask=inside[None, :], other=0.0).to(tl.float32)
    y = tl.load(output + row * hidden + channel, mask=inside, other=0.0).to(tl.float32)
    for target in tl.static_range(copies):
        weight = tl.load(comb + (row * copies + source) * copies + target)
        value = tl.load(post + row * copies + target) * y + tl.sum(weight[:, None] * x, 0)
        tl.store(out + (row * copies + target) * hidden + channel, value.to(out.dtype.element_ty), mask=inside)


@chained
@triton.jit
def _collapse(streams, pre, out, hidden, copies: tl.constexpr, mean: tl.constexpr, block: tl.constexpr):
    """One range of channels of one row: the weighted sum over copies, or their mean."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    source = tl.arange(0, copies)
    inside = channel < hidden
    place = (row * copies + source)[:, None] * hidden + channel[None, :]
    x = tl.load(streams + place, mask=inside[None, :], other=0.0).to(tl.float32)
    weight = 1.0 / copies
    if not mean:
        weight = tl.load(pre + row * copies + source)[:, None]
    value = tl.sum(x * weight, 0)
    tl.store(out + row * hidden + channel, value.to(out.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------------------------------------- launches


def coefficients(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float, iterations: int, n: int
) -> Mixes:
    expect_dtype("streams", streams, torch.bfloat16)
    for name, value in (("fn", fn), ("scale", scale), ("base", base)):
        expect_dtype(name, value, torch.float32)
        # A copy made here would be read before it is whole: they are read before the wait.
        if not value.is_contiguous():
            raise ValueError(f"{name} has strides {value.stride()}: expected it contiguous")
    if hc_eps <= 0:
        raise ValueError(f"hc_eps = {hc_eps}: expected more than 0, which keeps the rates of rows and columns finite")
    if n != _COPIES:
        raise NotImplementedError(f"mHC coefficients of {n} copies on a GPU: kernels exist for {_COPIES}")
    rows, channels = streams.shape[0], fn.shape[1]
    empty = partial(torch.empty, dtype=torch.float32, device=streams.device)
    mixes = Mixes(empty(rows, n), empty(rows, n), empty(rows, n, n))
    if rows == 0:
        return mixes
    few = rows <= _FEW_ROWS
    length, block_t, block_k, warps = (_SHORT_RANGE, 16, 256, 8) if few else (_LONG_RANGE, 32, 64, 8)
    splits = triton.cdiv(channels, length)
    parts = empty(rows, splits, 32)
    _project[(splits, triton.cdiv(rows, block_t))](
        streams.contiguous(), fn, parts, rows, channels, length, splits, block_t, block_k, few,
        num_warps=warps, num_stages=1 if few else 3,  # a short range is a single step
    )  # fmt: skip
    block = triton.next_power_of_2(splits)
    _mix[(rows,)](
        parts, scale, base, mixes.pre, mixes.post, mixes.comb,
        channels, splits, norm_eps, hc_eps, iterations, block,
        num_warps=1,
    )  # fmt: skip
    return mixes


def post(streams: Tensor, output: Tensor, mixes: Mixes) -> Tensor:
    expect_dtype("streams", streams, torch.bfloat16)
    expect_dtype("output", output, torch.bfloat16)
    expect_dtype("mixes.comb", mixes.comb, torch.float32)
    rows, copies, hidden = streams.shape
    out = torch.empty(rows, copies, hidden, dtype=streams.dtype, device=streams.device)
    if rows:
        block = _channels_of_a_program(hidden)
        _post[(rows, triton.cdiv(hidden, block))](
            streams.contiguous(), output.contiguous(), mixes.post.contiguous(), mixes.comb.contiguous(), out,
            hidden, _power_of_two(copies), block,
        )  # fmt: skip
    return out


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    expect_dtype("pre", pre, torch.float32)
    return _over_copies(streams, pre.contiguous(), mean=False)


def stream_mean(streams: Tensor) -> Tensor:
    return _over_copies(streams, None, mean=True)


def _over_copies(streams: Tensor, pre: Tensor | None, *, mean: bool) -> Tensor:
    expect_dtype("streams", streams, torch.bfloat16)
    rows, copies, hidden = streams.shape
    out = torch.empty(rows, hidden, dtype=streams.dtype, device=streams.device)
    if rows:
        block = _channels_of_a_program(hidden)
        _collapse[(rows, triton.cdiv(hidden, block))](
            streams.contiguous(), pre, out, hidden, _power_of_two(copies), mean, block
        )
    return out


def _channels_of_a_program(hidden: int) -> int:
    """16 bytes a thread."""
    return min(1024, triton.next_power_of_2(hidden))


def _power_of_two(copies: int) -> int:
    if copies & (copies - 1):
        raise NotImplementedError(f"mHC of {copies} copies on a GPU: expected a power of two")
    return copies

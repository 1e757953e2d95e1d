"""mHC on a GPU (spec/model.md 5).

``coefficients`` is two launches. ``_project`` multiplies a tile of rows with a range of the channels, every program its
own part of ``fn``: up to 64 rows the ranges are short, so that the 2 MB of ``fn`` come through many programs at once;
beyond that they are long and the rows are what is read. The parts are summed in a fixed order by ``_mix``, a program
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

from quickseek.ops.checks import expect_dtype
from quickseek.ops.mhc.reference import Mixes
from quickseek.ops.mhc.reference import first_streams as first_streams  # a view and a constant: nothing to compute
from quickseek.ops.triton_chain import begin, chained, fetch

_COPIES = 4
_FEW_ROWS = 64
"""Up to this many rows the weight is what is read; above it the streams are."""
_SHORT_RANGE, _LONG_RANGE = 128, 1280
"""Channels of a program: all of them at once where rows are few."""


@chained
@triton.jit(do_not_specialize=["rows", "splits"])
def _project(x, fn, parts, rows, channels, length, splits, block_t: tl.constexpr, block_k: tl.constexpr):
    """parts [rows, splits, 32]: the 24 products of each row over one range of channels, and its sum of squares."""
    split = tl.program_id(0)
    row = tl.program_id(1) * block_t + tl.arange(0, block_t)
    column = tl.arange(0, 32)
    place = (fn + tl.minimum(column, 23) * channels + split * length).to(tl.int64)
    fetch(place, 4 * tl.minimum(length, channels - split * length), 4)
    begin()
    products = tl.zeros((block_t, 32), tl.float32)
    squares = tl.zeros((block_t,), tl.float32)
    for start in range(split * length, tl.minimum((split + 1) * length, channels), block_k):
        k = start + tl.arange(0, block_k)
        inside = k < channels
        values = tl.load(
            x + row[:, None].to(tl.int64) * channels + k[None, :],
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        weight = tl.load(
            fn + column[None, :] * channels + k[:, None], mask=(column < 24)[None, :] & inside[:, None], other=0.0
        )
        wide = values.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        # An FP32 weight is exactly the sum of three BF16 numbers, and a product of BF16 numbers is exact in FP32.
        high = weight.to(tl.bfloat16)
        rest = weight - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        products = tl.dot(values, low, products)
        products = tl.dot(values, middle, products)
        products = tl.dot(values, high, products)
    place = parts + (row.to(tl.int64) * splits + split)[:, None] * 32 + column[None, :]
    tl.store(place, tl.where((column == 24)[None, :], squares[:, None], products), mask=(row < rows)[:, None])


@triton.jit
def _logit(totals, number, factor, base):
    product = tl.sum(tl.where(tl.arange(0, 32) == number, totals, 0.0))
    return product * factor + tl.load(base + number)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softmax_row(totals, number, factor, base, eps):
    """Softmax of four neighbouring logits, plus epsilon."""
    a = _logit(totals, number, factor, base)
    b = _logit(totals, number + 1, factor, base)
    c = _logit(totals, number + 2, factor, base)
    d = _logit(totals, number + 3, factor, base)
    largest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - largest), tl.exp(b - largest), tl.exp(c - largest), tl.exp(d - largest)
    inverse = 1.0 / ((a + b) + (c + d))
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


@triton.jit
def _normalise(a, b, c, d, eps):
    inverse = 1.0 / ((a + b) + (c + d) + eps)
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def _columns(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, eps):
    a0, b0, c0, d0 = _normalise(a0, b0, c0, d0, eps)
    a1, b1, c1, d1 = _normalise(a1, b1, c1, d1, eps)
    a2, b2, c2, d2 = _normalise(a2, b2, c2, d2, eps)
    a3, b3, c3, d3 = _normalise(a3, b3, c3, d3, eps)
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


@triton.jit
def _store_row(place, a, b, c, d):
    tl.store(place, a)
    tl.store(place + 1, b)
    tl.store(place + 2, c)
    tl.store(place + 3, d)


@chained
@triton.jit(do_not_specialize=["splits", "iterations"])
def _mix(parts, scale, base, pre, post, comb, channels, splits, norm_eps, hc_eps, iterations, block: tl.constexpr):
    """The coefficients of one row from the parts of its projections; a row of comb is a source (spec 5.2)."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    split, number = tl.arange(0, block)[:, None], tl.arange(0, 32)
    own = tl.load(parts + (row * splits + split) * 32 + number[None, :], mask=split < splits, other=0.0)
    totals = tl.sum(own, 0)
    rho = tl.rsqrt(tl.sum(tl.where(number == 24, totals, 0.0)) / channels + norm_eps)
    # The first four columns are those of pre, the next four those of post.
    rates = tl.where(number < 4, tl.load(scale), tl.load(scale + 1)) * rho
    gates = _sigmoid(totals * rates + tl.load(base + number, mask=number < 8, other=0.0))
    tl.store(pre + row * 4 + number, gates + hc_eps, mask=number < 4)
    tl.store(post + row * 4 + number - 4, 2.0 * gates, mask=(number >= 4) & (number < 8))
    factor = rho * tl.load(scale + 2)
    a0, a1, a2, a3 = _softmax_row(totals, 8, factor, base, hc_eps)
    b0, b1, b2, b3 = _softmax_row(totals, 12, factor, base, hc_eps)
    c0, c1, c2, c3 = _softmax_row(totals, 16, factor, base, hc_eps)
    d0, d1, d2, d3 = _softmax_row(totals, 20, factor, base, hc_eps)
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = _columns(
        a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, hc_eps
    )
    for _ in range(iterations - 1):
        a0, a1, a2, a3 = _normalise(a0, a1, a2, a3, hc_eps)
        b0, b1, b2, b3 = _normalise(b0, b1, b2, b3, hc_eps)
        c0, c1, c2, c3 = _normalise(c0, c1, c2, c3, hc_eps)
        d0, d1, d2, d3 = _normalise(d0, d1, d2, d3, hc_eps)
        a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = _columns(
            a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, hc_eps
        )
    place = comb + row * 16
    _store_row(place, a0, a1, a2, a3)
    _store_row(place + 4, b0, b1, b2, b3)
    _store_row(place + 8, c0, c1, c2, c3)
    _store_row(place + 12, d0, d1, d2, d3)


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
    if n != _COPIES:
        raise NotImplementedError(f"mHC coefficients of {n} copies on a GPU: kernels exist for {_COPIES}")
    rows, channels = streams.shape[0], fn.shape[1]
    empty = partial(torch.empty, dtype=torch.float32, device=streams.device)
    mixes = Mixes(empty(rows, n), empty(rows, n), empty(rows, n, n))
    if rows == 0:
        return mixes
    few = rows <= _FEW_ROWS
    length, block_t, block_k, warps = (_SHORT_RANGE, 16, 128, 4) if few else (_LONG_RANGE, 32, 64, 8)
    splits = triton.cdiv(channels, length)
    parts = empty(rows, splits, 32)
    _project[(splits, triton.cdiv(rows, block_t))](
        streams.contiguous(), fn.contiguous(), parts, rows, channels, length, splits, block_t, block_k,
        num_warps=warps, num_stages=1 if few else 3,  # a short range is a single step
    )  # fmt: skip
    block = triton.next_power_of_2(splits)
    _mix[(rows,)](
        parts, scale.contiguous(), base.contiguous(), mixes.pre, mixes.post, mixes.comb,
        channels, splits, norm_eps, hc_eps, iterations, block,
        num_warps=4,
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

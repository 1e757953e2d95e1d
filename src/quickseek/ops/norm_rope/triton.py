"""Kernels of RMSNorm and rotation: BF16 or FP32 values, FP32 inside, rounded where the reference rounds; one launch.

``_norm``: a program a row; moves x and the result once, and the weight. ``_latents``: a program for a row's query
latent, another for its KV. ``_rope``: pairs of channels, all of them into a new tensor or the rotated ones in place.
``_rotation``: FP32 products of position and frequency, then cos and sin through FP64, right at any position. Weights
and frequencies are all that could be fetched before a predecessor is done.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek import formats
from quickseek.ops import triton_math as math
from quickseek.ops.checks import expect_dtype, expect_shape
from quickseek.ops.norm_rope.reference import Rotation
from quickseek.ops.triton_chain import begin, chained
from quickseek.ops.triton_launch import padded, warps

FLOAT_VALUES = (torch.bfloat16, torch.float32)
PAIRS_AT_ONCE = tl.constexpr(512)
"""Pairs of channels of a program of ``_rope``: 16 bytes of BF16 for each of 128 threads."""
MOST_WARPS = 16
"""Of a row."""
ANGLES_AT_ONCE = tl.constexpr(256)


@chained
@triton.jit
def _norm(x, weight, out, stride, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, PADDED)
    inside = channel < WIDTH
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * stride + channel, mask=inside, other=0.0).to(tl.float32)
    out_values = math.rms_norm(values, scale, eps, WIDTH)
    tl.store(out + row * WIDTH + channel, out_values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _kv_row(
    x, weight, out, cos, sin, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """One KV row: norm, rotation and, with QUANTISE, A8 and back."""
    channel = tl.arange(0, PADDED)
    inside = channel < WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    values = math.rms_norm(values, scale, eps, WIDTH).to(dtype).to(tl.float32)
    values = math.rotate_tail(values, cos, sin, WIDTH, PADDED, PAIRS)
    if QUANTISE:
        groups = tl.reshape(values.to(dtype).to(tl.float32), [PADDED // 32, 32])
        values = tl.reshape(math.fake_quantize_a8(groups), [PADDED])
    tl.store(out + channel, values.to(dtype), mask=inside)


@chained
@triton.jit
def _latents(
    x, q_weight, kv_weight, latent, kv, cos, sin, stride, eps,
    Q_WIDTH: tl.constexpr, Q_PADDED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PAIRS: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    if tl.program_id(1) == 0:
        _kv_row(
            x + Q_WIDTH, kv_weight, kv + row * WIDTH, cos + row * PAIRS, sin + row * PAIRS, eps,
            WIDTH, PADDED, PAIRS, QUANTISE,
        )  # fmt: skip
    else:
        channel = tl.arange(0, Q_PADDED)
        inside = channel < Q_WIDTH
        scale = tl.load(q_weight + channel, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
        values = math.rms_norm(values, scale, eps, Q_WIDTH)
        tl.store(latent + row * Q_WIDTH + channel, values.to(latent.dtype.element_ty), mask=inside)


@chained
@triton.jit
def _kv(
    x, weight, out, cos, sin, stride, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64)
    _kv_row(
        x + row * stride, weight, out + row * WIDTH, cos + row * PAIRS, sin + row * PAIRS, eps,
        WIDTH, PADDED, PAIRS, QUANTISE,
    )  # fmt: skip


@chained
@triton.jit
def _rope(
    x, out, cos, sin, heads, stride,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Pairs FIRST and on of every head of a row; x and out may be the same memory."""
    begin()
    COUNT: tl.constexpr = WIDTH // 2 - FIRST
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * PAIRS_AT_ONCE + tl.arange(0, PAIRS_AT_ONCE)
    inside = number < heads * COUNT
    pair = number % COUNT + (FIRST + PAIRS - WIDTH // 2)
    place = number // COUNT * WIDTH + (FIRST + number % COUNT) * 2
    place = place[:, None] + tl.arange(0, 2)[None, :]
    even, odd = tl.split(tl.load(x + row * stride + place, mask=inside[:, None], other=0.0).to(tl.float32))
    turned = inside & (pair >= 0)
    c = tl.load(cos + row * PAIRS + pair, mask=turned, other=1.0)
    s = tl.load(sin + row * PAIRS + pair, mask=turned, other=0.0)
    if INVERSE:
        s = -s
    first, second = math.rotate_pairs(even, odd, c, s)
    values = tl.join(tl.where(turned, first, even), tl.where(turned, second, odd))
    tl.store(out + row * heads * WIDTH + place, values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def cos_sin(angle):
    """cos and sin in FP32 of FP32 angles below 10^6: the nearest quarter turn is taken off exactly, in two parts."""
    x = angle.to(tl.float64)
    turns = tl.floor(x * 0.6366197723675814 + 0.5)
    # The first part of pi / 2 has 33 bits, so that its product with a whole number of 20 bits is exact.
    r = (x - turns * 1.5707963267341256) - turns * 6.077100506506192e-11
    z = r * r
    sin = 1.0 + z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880 + z * (-1 / 39916800)))))
    sin = r * sin
    cos = -1 / 720 + z * (1 / 40320 + z * (-1 / 3628800 + z * (1 / 479001600)))
    cos = 1.0 + z * (-1 / 2 + z * (1 / 24 + z * cos))
    quarter = turns.to(tl.int32) & 3
    swapped = (quarter & 1) != 0
    c, s = tl.where(swapped, sin, cos), tl.where(swapped, cos, sin)
    c = tl.where((quarter == 1) | (quarter == 2), -c, c)
    s = tl.where(quarter >= 2, -s, s)
    return c.to(tl.float32), s.to(tl.float32)


@chained
@triton.jit(do_not_specialize=["size"])
def _rotation(positions, frequencies, cos, sin, size, PAIRS: tl.constexpr):
    begin()
    number = tl.program_id(0).to(tl.int64) * ANGLES_AT_ONCE + tl.arange(0, ANGLES_AT_ONCE)
    inside = number < size
    position = tl.load(positions + number // PAIRS, mask=inside, other=0).to(tl.float32)
    c, s = cos_sin(position * tl.load(frequencies + number % PAIRS, mask=inside, other=0.0))
    tl.store(cos + number, c, mask=inside)
    tl.store(sin + number, s, mask=inside)


# ---------------------------------------------------------------------------------------------- launches


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    expect_dtype("x", x, *FLOAT_VALUES)
    expect_dtype("weight", weight, *FLOAT_VALUES)
    width = x.shape[-1]
    x = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        values = padded(width)
        stride = x.stride(0) if x.dim() == 2 else width
        _norm[(x.numel() // width,)](
            x, weight.contiguous(), out, stride, eps, WIDTH=width, PADDED=values, num_warps=warps(values, MOST_WARPS)
        )
    return out


def rotation(positions: Tensor, frequencies: Tensor) -> Rotation:
    expect_dtype("positions", positions, torch.int64)
    expect_dtype("frequencies", frequencies, torch.float32)
    pairs = frequencies.shape[0]
    cos, sin = torch.empty(2, *positions.shape, pairs, dtype=torch.float32, device=positions.device).unbind(0)
    if cos.numel():
        _rotation[(triton.cdiv(cos.numel(), ANGLES_AT_ONCE.value),)](
            positions.contiguous(), frequencies.contiguous(), cos, sin, cos.numel(), PAIRS=pairs, num_warps=4
        )
    return Rotation(cos, sin)


def apply_rope(x: Tensor, turn: Rotation, inverse: bool) -> Tensor:
    x = x.contiguous()
    return _run_rope(x, torch.empty(x.shape, dtype=x.dtype, device=x.device), turn, inverse)


def apply_rope_over(x: Tensor, turn: Rotation, inverse: bool) -> Tensor:
    return _run_rope(x, x, turn, inverse) if x.is_contiguous() else apply_rope(x, turn, inverse)


def _run_rope(x: Tensor, out: Tensor, turn: Rotation, inverse: bool) -> Tensor:
    expect_dtype("x", x, *FLOAT_VALUES)
    cos, sin, pairs = _turn(turn, x.shape[-1])
    width, rows = x.shape[-1], x.shape[0]
    if not x.numel():
        return out
    heads = x.numel() // (rows * width)
    first = width // 2 - pairs if out is x else 0
    chunks = triton.cdiv(heads * (width // 2 - first), PAIRS_AT_ONCE.value)
    _rope[(rows, chunks)](
        x, out, cos, sin, heads, x.stride(0), WIDTH=width, PAIRS=pairs, FIRST=first, INVERSE=inverse, num_warps=4
    )
    return out


def normalised_latents(
    projected: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float, turn: Rotation, quantise: bool
) -> tuple[Tensor, Tensor]:
    expect_dtype("projected", projected, *FLOAT_VALUES)
    expect_dtype("q_weight", q_weight, *FLOAT_VALUES)
    rows, q_width = projected.shape[0], q_weight.shape[0]
    width, shape = _kv_shape(kv_weight, turn, quantise)
    projected = projected if projected.stride(1) == 1 else projected.contiguous()
    latent = torch.empty(rows, q_width, dtype=projected.dtype, device=projected.device)
    kv = torch.empty(rows, width, dtype=projected.dtype, device=projected.device)
    cos, sin, _ = _turn(turn, width)
    if rows:
        values = padded(q_width)
        _latents[(rows, 2)](
            projected, q_weight.contiguous(), kv_weight.contiguous(), latent, kv, cos, sin, projected.stride(0), eps,
            Q_WIDTH=q_width, Q_PADDED=values, num_warps=warps(values, MOST_WARPS), **shape,
        )  # fmt: skip
    return latent, kv


def normalised_kv(kv: Tensor, weight: Tensor, eps: float, turn: Rotation, quantise: bool) -> Tensor:
    expect_dtype("kv", kv, *FLOAT_VALUES)
    width, shape = _kv_shape(weight, turn, quantise)
    kv = kv if kv.stride(1) == 1 else kv.contiguous()
    out = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    cos, sin, _ = _turn(turn, width)
    if kv.shape[0]:
        _kv[(kv.shape[0],)](
            kv, weight.contiguous(), out, cos, sin, kv.stride(0), eps,
            num_warps=warps(shape["PADDED"], MOST_WARPS), **shape,
        )  # fmt: skip
    return out


def _kv_shape(weight: Tensor, turn: Rotation, quantise: bool) -> tuple[int, dict[str, int]]:
    """Width of a KV row, and what a kernel of it is compiled for."""
    expect_dtype("weight of the KV norm", weight, *FLOAT_VALUES)
    width = weight.shape[0]
    if quantise and width % formats.BLOCK:
        raise ValueError(f"KV rows have {width} channels: expected a multiple of {formats.BLOCK} to quantise them")
    return width, {
        "WIDTH": width,
        "PADDED": padded(width, formats.BLOCK),
        "PAIRS": turn.cos.shape[-1],
        "QUANTISE": quantise,
    }


def _turn(turn: Rotation, width: int) -> tuple[Tensor, Tensor, int]:
    """cos, sin and how many pairs they turn, of rows of ``width`` channels."""
    expect_dtype("cos", turn.cos, torch.float32)
    expect_shape("sin", turn.sin, turn.cos.shape)
    pairs = turn.cos.shape[-1]
    if width % 2 or 2 * pairs > width:
        raise ValueError(f"rows have {width} channels: expected an even number, at least the {2 * pairs} that turn")
    return turn.cos.contiguous(), turn.sin.contiguous(), pairs

"""Engram on a GPU (spec/model.md 8): windows of ids, hashes, table rows, injection; one launch each.

``_windows`` reads ids of the step and the history ring. ``_hash`` makes exact 64-bit products and remainders.
``_gather`` decodes table rows where they lie, in device memory or in host memory that the driver has registered: 264
bytes a row of 256. ``_inject`` is one program for each row and copy, which holds its channels in registers: streams are
read once and written once. Table, constants and norm weights are written by no kernel of a step; the history ring is
read before the step's own ids are kept in it.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek.ops import triton_math as math
from quickseek.ops.cache import CacheView
from quickseek.ops.checks import expect_dtype
from quickseek.ops.engram.reference import DEAD, GATE_FLOOR
from quickseek.ops.linear import Fp8Weight, Weight
from quickseek.ops.rows import StepRows
from quickseek.ops.triton_chain import begin, chained

if TYPE_CHECKING:
    from quickseek.ops.engram import HashConstants

_DEAD = tl.constexpr(DEAD)
_GATE_FLOOR = tl.constexpr(GATE_FLOOR)
_ROWS = 32
"""Rows of a program that works on ids."""


@chained
@triton.jit(do_not_specialize=["rows", "earlier_rows", "lookback"])
def _windows(
    ids, positions, requests, starts, earlier, table, table_stride, out, rows, earlier_rows, lookback,
    given: tl.constexpr, block_t: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """out [rows, lookback + 1]; ``earlier``: a ring [blocks, earlier_rows], or ``given`` ids [B, lookback]."""
    begin()
    row = (tl.program_id(0) * block_t + tl.arange(0, block_t)).to(tl.int64)
    live = row < rows
    distance = tl.arange(0, block)[None, :]
    position = tl.load(positions + row, mask=live, other=0)
    request = tl.load(requests + row, mask=live, other=0)
    start = tl.load(starts + request, mask=live, other=0)
    target = position[:, None] - distance
    wanted = live[:, None] & (distance <= lookback) & (target >= 0)
    inside = target >= start[:, None]
    now = tl.load(ids + row[:, None] - distance, mask=wanted & inside, other=_DEAD)
    if given:
        number = tl.minimum(start[:, None] - 1 - target, lookback - 1)
        place = request[:, None] * lookback + number
    else:
        place = tl.load(table + request * table_stride, mask=live, other=0)[:, None] * earlier_rows
        place += target % earlier_rows
    before = tl.load(earlier + place, mask=wanted & (target < start[:, None]), other=_DEAD).to(tl.int64)
    found = tl.where(wanted, tl.where(inside, now, before), _DEAD)
    tl.store(out + row[:, None] * (lookback + 1) + distance, found, mask=live[:, None] & (distance <= lookback))


@chained
@triton.jit(do_not_specialize=["rows", "pad"])
def _hash(
    windows, multipliers, primes, offsets, out, rows, pad,
    orders: tl.constexpr, heads: tl.constexpr, block_t: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """out [rows, orders * heads]: walking back, everything behind the first dead id is the pad (spec 8.3)."""
    begin()
    row = (tl.program_id(0) * block_t + tl.arange(0, block_t)).to(tl.int64)
    live = row < rows
    head = tl.arange(0, block)
    real = head < heads
    token = tl.load(windows + row * (orders + 1), mask=live, other=0)
    blocked = token == _DEAD
    mixed = tl.where(blocked, pad, token) * tl.load(multipliers)
    for order in tl.static_range(orders):
        token = tl.load(windows + row * (orders + 1) + order + 1, mask=live, other=0)
        blocked = blocked | (token == _DEAD)
        mixed = mixed ^ (tl.where(blocked, pad, token) * tl.load(multipliers + order + 1))
        column = order * heads + head
        prime = tl.load(primes + column, mask=real, other=1)
        number = mixed[:, None] % prime[None, :] + tl.load(offsets + column, mask=real, other=0)[None, :]
        tl.store(out + row[:, None] * (orders * heads) + column[None, :], number, mask=live[:, None] & real[None, :])


@chained
@triton.jit
def _gather(codes, scales, numbers, out, width, packed: tl.constexpr, block: tl.constexpr):
    """One table row: E4M3 codes with an E8M0 byte for 32 of them, or values as they are."""
    begin()
    number = tl.load(numbers + tl.program_id(0))
    channel = tl.arange(0, block)
    inside = channel < width
    stored = tl.load(codes + number * width + channel, mask=inside, other=0)
    if packed:
        scale = tl.load(scales + number * (width // 32) + channel // 32, mask=inside, other=0)
        value = math.e4m3_value(stored) * math.e8m0_value(scale)
    else:
        value = stored.to(tl.float32)
    place = tl.program_id(0).to(tl.int64) * width + channel
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@chained
@triton.jit
def _inject(streams, key_value, q_weight, k_weight, dead, out, hidden, copies, eps, block: tl.constexpr):
    """One copy of one row: gate from the norms and the weighted dot product, then the gated value (spec 8.4)."""
    begin()
    row, copy = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, block)
    inside = channel < hidden
    place = (row * copies + copy) * hidden + channel
    memory = key_value + row * (copies + 1) * hidden + channel
    stream = tl.load(streams + place, mask=inside, other=0.0)
    key = tl.load(memory + copy * hidden, mask=inside, other=0.0).to(tl.float32)
    q = tl.load(q_weight + copy * hidden + channel, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_weight + copy * hidden + channel, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(memory + copies * hidden, mask=inside, other=0.0).to(tl.float32)
    is_dead = tl.load(dead + row) != 0
    x = stream.to(tl.float32)
    width = hidden.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps) * tl.rsqrt(tl.sum(key * key) / width + eps)
    dot = tl.sum(x * q * k * key) * scale * tl.rsqrt(width)
    sign = tl.where(dot > 0, 1.0, tl.where(dot < 0, -1.0, dot))  # 0 and NaN stay
    size = tl.abs(dot)
    gate = 1.0 / (1.0 + tl.exp(-sign * tl.sqrt(tl.where(size < _GATE_FLOOR, _GATE_FLOOR, size))))
    added = (x + gate * value).to(out.dtype.element_ty)
    tl.store(out + place, tl.where(is_dead, stream, added), mask=inside)


# ---------------------------------------------------------------------------------------------- launches


def token_windows(
    ids: Tensor, history: CacheView | None, rows: StepRows, lookback: int, given: Tensor | None
) -> Tensor:
    count = ids.shape[0]
    out = torch.empty(count, lookback + 1, dtype=torch.int64, device=ids.device)
    if given is not None:
        expect_dtype("given", given, torch.int64)
        earlier, table, stride, length = given.contiguous(), given, 0, lookback
    else:
        assert history is not None
        expect_dtype("history.storage", history.storage, torch.int32)
        if history.storage.shape[2] != 1 or not history.storage.is_contiguous():
            raise ValueError(f"history.storage has shape {tuple(history.storage.shape)}: expected a ring of width 1")
        earlier, table, length = history.storage, history.table, history.block_rows
        stride = table.stride(0)
    if count:
        _windows[(triton.cdiv(count, _ROWS),)](
            ids.contiguous(), rows.positions, rows.requests, rows.starts, earlier, table, stride, out, count, length,
            lookback, given is not None, _ROWS, triton.next_power_of_2(lookback + 1), num_warps=1,
        )  # fmt: skip
    return out


def hash_ngrams(windows: Tensor, constants: "HashConstants") -> Tensor:
    orders, columns = windows.shape[1] - 1, constants.primes.shape[0]
    out = torch.empty(windows.shape[0], columns, dtype=torch.int64, device=windows.device)
    if windows.shape[0]:
        heads = columns // orders
        _hash[(triton.cdiv(windows.shape[0], _ROWS),)](
            windows.contiguous(), constants.multipliers.contiguous(), constants.primes.contiguous(),
            constants.offsets.contiguous(), out, windows.shape[0],
            constants.pad, orders, heads, _ROWS, triton.next_power_of_2(heads),
        )  # fmt: skip
    return out


def gather_rows(table: Weight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    expect_dtype("rows", rows, torch.int64)
    codes = table if isinstance(table, Tensor) else table.codes
    packed = isinstance(table, Fp8Weight)
    scales = table.scales if isinstance(table, Fp8Weight) else codes
    for name, part in (("table", codes), ("table.scales", scales)):
        if rows.is_cuda and not (part.is_cuda or part.is_pinned()):
            raise ValueError(f"{name} lies in host memory that kernels cannot read: expected what HostTable gives")
        if not part.is_contiguous():
            raise ValueError(f"{name} has strides {part.stride()}: expected whole rows one after the other")
    width = codes.shape[1]
    if packed and width % 32:
        raise ValueError(f"table has rows of {width}: expected a multiple of 32")
    out = torch.empty(rows.shape[0], rows.shape[1] * width, dtype=dtype, device=rows.device)
    if rows.numel():
        _gather[(rows.numel(),)](
            codes.view(torch.uint8) if packed else codes, scales, rows.contiguous(), out, width, packed,
            triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
    return out


def inject(streams: Tensor, key_value: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor, eps: float) -> Tensor:
    for name, value in (
        ("streams", streams), ("key_value", key_value), ("q_weight", q_weight), ("k_weight", k_weight)
    ):  # fmt: skip
        expect_dtype(name, value, torch.bfloat16)
    expect_dtype("dead", dead, torch.bool)
    rows, copies, hidden = streams.shape
    out = torch.empty(rows, copies, hidden, dtype=streams.dtype, device=streams.device)
    if rows:
        _inject[(rows, copies)](
            streams.contiguous(), key_value.contiguous(), q_weight.contiguous(), k_weight.contiguous(),
            dead.contiguous().view(torch.uint8), out,
            hidden, copies, eps, triton.next_power_of_2(hidden), num_warps=8 if hidden > 2048 else 4,
        )  # fmt: skip
    return out

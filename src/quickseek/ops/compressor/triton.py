"""Compressor kernels: a program a row, one launch each; FP32 inside, rounded where the reference rounds.

``_pool``: the group of each row from this step's raw rows and the ring; with NORM also the rounding and RMSNorm of the
latent. With KEEP it writes the step's raw rows into the ring as well, which is legal only if no row of the step falls
on a ring row that the step still reads; longer steps keep theirs in a second launch. ``_write_groups``: a program for
the global KV of a row and one for its index key, from the projection to the packed record in the cache.
Only the norms' weights could be fetched before a predecessor is done.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek import formats
from quickseek.ops import rings
from quickseek.ops import triton_math as math
from quickseek.ops import triton_records as records
from quickseek.ops.cache import CacheView
from quickseek.ops.checks import expect_dtype
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows
from quickseek.ops.triton_chain import begin, chained
from quickseek.ops.triton_launch import padded


@chained
@triton.jit
def _pool(
    raw, ring, table, requests, positions, starts, ends, weight, out,
    table_stride, block_stride, row_stride, ring_rows, eps,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64)
    request, position = tl.load(requests + row), tl.load(positions + row)
    start = tl.load(starts + request)
    block = ring + tl.load(table + request * table_stride) * block_stride
    channel = tl.arange(0, PADDED)
    largest = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    pooled = tl.zeros([PADDED], tl.float32)
    for member in tl.static_range(RATIO):
        distance = RATIO - 1 - member
        target = position - distance
        fresh = tl.where(target >= start, WIDTH, 0)
        old = tl.where((target < start) & (target >= 0), WIDTH, 0)
        here = raw + (row - distance) * (2 * WIDTH) + channel
        there = block + tl.maximum(target, 0) % ring_rows * row_stride + channel
        value = tl.load(here, mask=channel < fresh, other=0.0) + tl.load(there, mask=channel < old, other=0.0)
        gate = tl.load(here + WIDTH, mask=channel < fresh, other=0.0)
        gate += tl.load(there + WIDTH, mask=channel < old, other=0.0)
        above = tl.maximum(largest, gate)
        # Members with a gate of -inf weigh nothing, the first one too.
        base = tl.where(above == float("-inf"), 0.0, above)
        shrink, weight_ = tl.exp(largest - base), tl.exp(gate - base)
        pooled = pooled * shrink + value * weight_
        total = total * shrink + weight_
        largest = above
    pooled = pooled / total
    if NORM:
        pooled = tl.where(channel < WIDTH, pooled.to(out.dtype.element_ty).to(tl.float32), 0.0)
        scale = tl.load(weight + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
        pooled = math.rms_norm(pooled, scale, eps, WIDTH)
    tl.store(out + row * WIDTH + channel, pooled.to(out.dtype.element_ty), mask=channel < WIDTH)
    if KEEP:
        limit = tl.where(position >= tl.load(ends + request) - ring_rows, WIDTH, 0)
        mine = block + position % ring_rows * row_stride + channel
        own = raw + row * (2 * WIDTH) + channel
        tl.store(mine, tl.load(own, mask=channel < limit), mask=channel < limit)
        tl.store(mine + WIDTH, tl.load(own + WIDTH, mask=channel < limit), mask=channel < limit)


@triton.jit
def _group_row(
    x, weight, eps, cos, sin, record, live, FAKE: tl.constexpr, KIND: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """The row at the pointer x, through the key norm if KEY, rotated and packed at the pointer ``record``."""
    channel = tl.arange(0, PADDED)
    dtype: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    if KEY:
        scale = tl.load(weight + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
        values = math.rms_norm(values, scale, eps, WIDTH).to(dtype).to(tl.float32)
    values = math.rotate_tail(values, cos, sin, WIDTH, PADDED, PAIRS).to(dtype).to(tl.float32)
    if FAKE and KEY:
        values = tl.reshape(math.fake_quantize_q4i(tl.reshape(values, [PADDED // 32, 32])), [PADDED])
    elif FAKE:
        values = tl.reshape(math.fake_quantize_q4k(tl.reshape(values, [PADDED // 16, 16])), [PADDED])
    records.store_record(values, record, live, KIND, WIDTH, PADDED)


@chained
@triton.jit
def _write_groups(
    latents, keys, key_weight, cos, sin, requests, positions, keep_from, eps,
    kv, kv_table, kv_table_stride, kv_block_stride, kv_row_stride, kv_rows,
    index, index_table, index_table_stride, index_block_stride, index_row_stride, index_rows,
    RATIO: tl.constexpr, PAIRS: tl.constexpr, FAKE: tl.constexpr, KEEP_FROM: tl.constexpr,
    KV_KIND: tl.constexpr, KV_WIDTH: tl.constexpr, KV_PADDED: tl.constexpr,
    KEY_KIND: tl.constexpr, KEY_WIDTH: tl.constexpr, KEY_PADDED: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64)
    request, position = tl.load(requests + row), tl.load(positions + row)
    group = tl.where((position + 1) % RATIO == 0, position // RATIO, -1)
    if KEEP_FROM:
        group = tl.where(position < tl.load(keep_from + request), -1, group)
    cos += row * PAIRS
    sin += row * PAIRS
    if tl.program_id(1) == 0:
        place = records.locate(kv_table, kv_table_stride, kv_block_stride, kv_row_stride, kv_rows, request, group)
        _group_row(
            latents + row * KV_WIDTH, key_weight, eps, cos, sin, kv + place, group >= 0, FAKE, KV_KIND,
            KV_WIDTH, KV_PADDED, PAIRS, False,
        )  # fmt: skip
    else:
        place = records.locate(
            index_table, index_table_stride, index_block_stride, index_row_stride, index_rows, request, group
        )
        _group_row(
            keys + row * KEY_WIDTH, key_weight, eps, cos, sin, index + place, group >= 0, FAKE, KEY_KIND,
            KEY_WIDTH, KEY_PADDED, PAIRS, True,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- launches


def pool(raw: Tensor, open_rows: CacheView, rows: StepRows, ratio: int) -> Tensor:
    return _run_pool(raw, open_rows, rows, ratio, None, 0.0, torch.float32, keep=False)


def pooled_latents(
    raw: Tensor, open_rows: CacheView, rows: StepRows, ratio: int, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    keep = rows.max_rows + ratio - 1 <= open_rows.block_rows
    out = _run_pool(raw, open_rows, rows, ratio, weight, eps, dtype, keep=keep)
    if not keep:
        rings.keep(open_rows, rows, raw.flatten(1))
    return out


def _run_pool(
    raw: Tensor,
    open_rows: CacheView,
    rows: StepRows,
    ratio: int,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    *,
    keep: bool,
) -> Tensor:
    expect_dtype("raw", raw, torch.float32)
    expect_dtype("open_rows", open_rows.storage, torch.float32)
    raw, width = raw.contiguous(), raw.shape[2]
    out = torch.empty(raw.shape[0], width, dtype=dtype, device=raw.device)
    if weight is not None:
        expect_dtype("weight", weight, torch.bfloat16, torch.float32)
        expect_dtype("dtype of the latents", out, torch.bfloat16, torch.float32)
    storage, table, *strides = _address("open_rows", open_rows)
    if raw.shape[0]:
        _pool[(raw.shape[0],)](
            raw, storage, table, rows.requests, rows.positions, rows.starts, rows.ends,
            raw if weight is None else weight.contiguous(), out,
            *strides, eps,
            RATIO=ratio, WIDTH=width, PADDED=triton.next_power_of_2(width),
            NORM=weight is not None, KEEP=keep, num_warps=4,
        )  # fmt: skip
    return out


def write_groups(
    latents: Tensor,
    keys: Tensor,
    key_weight: Tensor,
    eps: float,
    turn: Rotation,
    rows: StepRows,
    ratio: int,
    global_kv: CacheView,
    index_k: CacheView,
    keep_from: Tensor | None,
    fake_quantise: bool,
) -> None:
    expect_dtype("latents", latents, torch.bfloat16, torch.float32)
    expect_dtype("keys", keys, latents.dtype)
    expect_dtype("key_weight", key_weight, torch.bfloat16, torch.float32)
    expect_dtype("cos", turn.cos, torch.float32)
    if not latents.shape[0]:
        return
    kv, index = global_kv.codec, index_k.codec
    _write_groups[(latents.shape[0], 2)](
        latents.contiguous(), keys.contiguous(), key_weight.contiguous(), turn.cos.contiguous(), turn.sin.contiguous(),
        rows.requests, rows.positions, rows.positions if keep_from is None else keep_from.contiguous(), eps,
        *_address("global_kv", global_kv), *_address("index_k", index_k),
        RATIO=ratio, PAIRS=turn.cos.shape[-1], FAKE=fake_quantise, KEEP_FROM=keep_from is not None,
        KV_KIND=kv.kind, KV_WIDTH=kv.width, KV_PADDED=padded(kv.width, formats.BLOCK),
        KEY_KIND=index.kind, KEY_WIDTH=index.width, KEY_PADDED=padded(index.width, formats.BLOCK), num_warps=4,
    )  # fmt: skip


def _address(name: str, view: CacheView) -> tuple[Tensor, Tensor, int, int, int, int]:
    """What a kernel needs to find a row."""
    view.expect_whole(name, "record")
    storage, table = view.storage, view.table
    return storage, table, table.stride(0), storage.stride(0), storage.stride(1), storage.shape[1]

"""Selection on a GPU: scores of packed keys, then exact lists by a tree of small ones (spec/model.md 6.4, 6.5).

Two launches, three where candidate blocks are published, one (or two) where scores cannot matter:

- ``score_groups``: FP32 scores of every group that a row sees. A program turns a tile of packed keys (68 bytes each at
  width 128) into BF16 once and uses it for all rows of the request that see it; Q4i values and their products are
  exact in BF16, sums are FP32. Or ``score_candidates``: only the groups of each row's candidate blocks are read.
- ``choose``: a node of the tree keeps the k best of CHUNK scores, the last of its siblings to arrive keeps the k best
  of theirs, and so on to the root. Every node searches for the k-th largest key by counting, so that sets are exact:
  ties go to the lowest group, NaN ranks above everything as in a descending sort, -inf is never chosen.
- ``every_visible``: the lists when no more groups exist than a list holds.

Bytes that must move: the packed keys of the visible groups, once a request (once a row inside candidate blocks), and
four bytes a score, written and read. Queries, weights and positions are the predecessor's; caches and tables may have
been written by this step too, so nothing is read early.

A row's scores and list do not depend on the other rows or on how the rows are divided among programs. Lists ascend,
or keep the order of the candidates, so that a call has the same bits every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek.ops import triton_math as math
from quickseek.ops.cache import CacheView, IndexKeyCodec
from quickseek.ops.checks import expect_dtype
from quickseek.ops.indexer.reference import Selection
from quickseek.ops.rows import StepRows
from quickseek.ops.triton_chain import begin, chained
from quickseek.ops.triton_launch import multiprocessors

SCRATCH_BYTES = 256 << 20
"""Scores and survivors of as many rows as fit in this are in memory at a time."""
GUESSES = tl.constexpr(12)
"""Steps of a search by interpolation, before it goes on by halves."""
CHUNK = 8192
"""Scores of a leaf of the selection tree; at least four times the members that a node keeps."""
KEYS = 64
"""Keys that a program scores at a time."""
MOST_ROWS = 65535
"""Programs of a grid's second dimension."""
PROGRAMS = 8
"""Programs of a multiprocessor that a launch aims at, beyond which each takes several tiles."""

EVERY, BLOCKS, CANDIDATES = 0, 1, 2
"""What the leaves of a tree choose among: visible groups, blocks of them, or groups of candidate blocks."""


# ---------------------------------------------------------------------------------------------- scores


@triton.jit
def visible_groups(positions, row, ratio, groups):
    """How many groups a row sees, int32; at most ``groups``, which the host knows."""
    return tl.minimum((tl.load(positions + row).to(tl.int32) + 1) // ratio, groups)


@triton.jit
def unpacked(codes, scales):
    """BF16 of the even and of the odd elements of E2M1 pairs (bytes [n, g, 16]) times E8M0 bytes [n, g]: exact."""
    bits = scales.to(tl.int16) << 7
    bits = tl.where(scales == 0, 0x0040, tl.where(scales == 255, 0x7FC0, bits)).to(tl.int16)
    scale = tl.broadcast_to(tl.expand_dims(bits.to(tl.bfloat16, bitcast=True), -1), codes.shape)
    return math.e2m1_pairs(codes, scale, SMALL=False)


@triton.jit
def key_tile(storage, table, group, inside, BLOCK_ROWS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """BF16 keys [n, WIDTH] of groups [n] behind one request's row of the block table; 0 where not ``inside``."""
    blocks = tl.load(table + group // BLOCK_ROWS, mask=inside, other=0)
    # Neighbours may lie in blocks apart, and records of 17 or 68 bytes are multiples of no more than 4: Triton 3.6
    # takes them for multiples of 8 unless it is told.
    places = tl.multiple_of(tl.max_contiguous(blocks * BLOCK_ROWS + group % BLOCK_ROWS, 1), 1)
    if PACKED:
        PARTS: tl.constexpr = WIDTH // 32
        records = (storage + places * (16 * PARTS + PARTS))[:, None]
        part = tl.arange(0, PARTS)[None, :]
        scales = tl.load(records + 16 * PARTS + part, mask=inside[:, None], other=0)
        pairs = tl.load(records + tl.arange(0, 16 * PARTS)[None, :], mask=inside[:, None], other=0)
        even, odd = unpacked(tl.reshape(pairs, (group.shape[0], PARTS, 16)), scales)
        keys = tl.reshape(tl.join(even, odd), (group.shape[0], WIDTH))
    else:
        keys = tl.load(
            storage + places[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask=inside[:, None], other=0.0
        )
    return keys


@triton.jit
def score_tile(
    keys, queries, weights, weight_scale, row, last, HEADS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):
    """FP32 scores [n, ROWS] of BF16 keys [n, WIDTH] for the rows from ``row`` on that are below ``last``."""
    column, channel = tl.arange(0, ROWS * PADDED), tl.arange(0, keys.shape[1])
    offset = column // PADDED * HEADS + column % PADDED
    real = (column % PADDED < HEADS) & (row + column // PADDED < last)
    start = tl.cast(row, tl.int64) * HEADS
    weight = tl.load(weights + start + offset, mask=real, other=0.0).to(tl.float32) * weight_scale
    places = queries + start * keys.shape[1] + offset[:, None] * keys.shape[1] + channel[None, :]
    query = tl.load(places, mask=real[:, None], other=0.0)
    products = tl.maximum(tl.dot(keys, tl.trans(query)), 0.0, propagate_nan=tl.PropagateNan.ALL)
    terms = tl.where(real[None, :], products * weight[None, :], 0.0)
    return tl.sum(tl.reshape(terms, (keys.shape[0], ROWS, PADDED)), 2)


@triton.jit
def clear(counters, count):
    """All programs of a launch together set ``count`` counters to 0."""
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    for start in range(program * 256, count, programs * 256):
        index = start + tl.arange(0, 256)
        tl.store(counters + index, tl.zeros_like(index), mask=index < count)


@chained
@triton.jit(
    do_not_specialize=[*("rows", "row_begin", "row_end", "groups", "table_stride", "stride", "counters", "ratio")]
)
def score_groups(
    queries, weights, storage, table, positions, first_rows, scores, arrivals,
    rows, row_begin, row_end, groups, table_stride, stride, counters, ratio, weight_scale,
    HEADS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``scores`` [row_end - row_begin, stride] at every visible group; grid (tiles, requests, shares of the rows)."""
    begin()
    clear(arrivals, counters)
    request = tl.program_id(1)
    first = tl.maximum(tl.load(first_rows + request).to(tl.int32), row_begin)
    last = rows
    if request + 1 < tl.num_programs(1):
        last = tl.load(first_rows + request + 1).to(tl.int32)
    last = tl.minimum(last, row_end)
    if first < last:
        start = tl.load(positions + first).to(tl.int32)
        newest = visible_groups(positions, last - 1, ratio, groups)
        table += request.to(tl.int64) * table_stride
        for tile in range(tl.program_id(0), tl.cdiv(newest, KEYS), tl.num_programs(0)):
            group = tile * KEYS + tl.arange(0, KEYS)
            keys = key_tile(storage, table, group, group < newest, BLOCK_ROWS, WIDTH, PACKED)
            # Rows before this one see nothing of the tile.
            seeing = first + tl.maximum((tile * KEYS + 1) * ratio - 1 - start, 0)
            for row in range(seeing + tl.program_id(2) * ROWS, last, tl.num_programs(2) * ROWS):
                score = score_tile(keys, queries, weights, weight_scale, row, last, HEADS, PADDED, ROWS)
                these = row + tl.arange(0, ROWS)
                position = tl.load(positions + these, mask=these < last, other=-1).to(tl.int32)
                inside = group[:, None] < tl.minimum((position + 1) // ratio, groups)[None, :]
                places = (these - row_begin).to(tl.int64)[None, :] * stride + group[:, None]
                tl.store(scores + places, score, mask=inside)


@triton.jit
def candidate_groups(candidates, slot, slots, block_size):
    """Groups [n] at slots [n] of a row's candidate blocks; -1: none."""
    block = tl.load(candidates + slot // block_size, mask=slot < slots, other=-1).to(tl.int32)
    return tl.where(block >= 0, block * block_size + slot % block_size, -1)


@chained
@triton.jit(do_not_specialize=["row_begin", "groups", "slots", "table_stride", "counters", "ratio"])
def score_candidates(
    queries, weights, storage, table, positions, requests, candidates, scores, arrivals,
    row_begin, groups, slots, table_stride, counters, ratio, weight_scale,
    HEADS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """``scores`` [rows, slots] at every slot of the rows' candidate blocks, -inf where none; grid (tiles, rows)."""
    begin()
    clear(arrivals, counters)
    row = row_begin + tl.program_id(1)
    visible = visible_groups(positions, row, ratio, groups)
    table += tl.load(requests + row) * table_stride
    candidates += row.to(tl.int64) * (slots // BLOCK_SIZE)
    scores += tl.program_id(1).to(tl.int64) * slots
    for tile in range(tl.program_id(0), tl.cdiv(slots, KEYS), tl.num_programs(0)):
        slot = tile * KEYS + tl.arange(0, KEYS)
        group = candidate_groups(candidates, slot, slots, BLOCK_SIZE)
        inside = (group >= 0) & (group < visible)
        keys = key_tile(storage, table, group, inside, BLOCK_ROWS, WIDTH, PACKED)
        score = tl.reshape(score_tile(keys, queries, weights, weight_scale, row, row + 1, HEADS, PADDED, 1), (KEYS,))
        tl.store(scores + slot, tl.where(inside, score, float("-inf")), mask=slot < slots)


# ---------------------------------------------------------------------------------------------- selection


@triton.jit
def order_bits(value):
    """uint32 that order FP32 values as a descending sort does: NaN above all, -0 as +0, and 0 for -inf: none."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.uint32, bitcast=True)
    bits = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    # One below the largest, so that there is a number above every key.
    bits = tl.where(value != value, 0xFFFFFFFE, bits)
    return tl.where(value == float("-inf"), 0, bits).to(tl.uint32)


@triton.jit
def best(key, group, k):
    """Which of the items [n] with a key are the k best, ties to the lowest group (groups differ)."""
    # At least k keys reach ``low``, fewer than k reach ``high``.
    found = tl.sum((key != 0).to(tl.int32), 0)
    low = tl.min(tl.where(key == 0, 0xFFFFFFFF, key).to(tl.uint32), 0)
    high = tl.max(key, 0) + 1
    above = found * 0
    turn = found * 0
    while (found > k) & (high - low > 1):
        # Where the k-th key would be if keys were spread evenly; by halves when that does not end soon.
        width = high - low
        guess = width.to(tl.float32) * ((found - k).to(tl.float32) / (found - above).to(tl.float32))
        step = tl.minimum(guess, 2147483648.0).to(tl.uint32)
        step = tl.where(turn < GUESSES, step, width >> 1)
        trial = low + tl.minimum(tl.maximum(step, 1), width - 1)
        count = tl.sum((key >= trial).to(tl.int32), 0)
        reached = count >= k
        low, found = tl.where(reached, trial, low), tl.where(reached, count, found)
        high, above = tl.where(reached, high, trial), tl.where(reached, above, count)
        turn += 1
    border = tl.full((), 0x7FFFFFFF, tl.int32)
    if found > k:
        # Only ``low`` is left between: as many of its lowest groups as still have room.
        room = k - above
        border = found * 0
        step = tl.full((), 0x40000000, tl.int32)
        below = found * 0
        while (step != 0) & (below < room):
            count = tl.sum(((key == low) & (group < border + step)).to(tl.int32), 0)
            fits = count <= room
            border, below = tl.where(fits, border + step, border), tl.where(fits, count, below)
            step = step >> 1
    return (key != 0) & ((key > low) | ((key == low) & (group < border)))


@triton.jit
def leaf(scores, candidates, item, items, visible, block_size, MODE: tl.constexpr):
    """Keys and groups (or blocks) of the items [n] of a row; key 0 where there is none."""
    inside = item < items
    if MODE == 1:
        value = tl.full(item.shape, float("-inf"), tl.float32)
        for member in range(block_size):
            group = item * block_size + member
            score = tl.load(scores + group, mask=inside & (group < visible), other=float("-inf"))
            value = tl.maximum(value, score, propagate_nan=tl.PropagateNan.ALL)
        value = tl.where(item == (visible - 1) // block_size, float("inf"), value)
        number = item
    else:
        value = tl.load(scores + item, mask=inside, other=float("-inf"))
        number = item
        if MODE == 2:
            number = candidate_groups(candidates, item, items, block_size)
    return tl.where(inside, order_bits(value), 0).to(tl.uint32), number


@chained
@triton.jit(do_not_specialize=["row_begin", "groups", "slots", "stride", "nodes_of_row", "k", "ratio"])
def choose(
    scores, candidates, positions, arrivals, kept_keys, kept_groups, out,
    row_begin, groups, slots, stride, nodes_of_row, k, ratio, block_size,
    MODE: tl.constexpr, CHUNK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """``out`` [T, k]: the k best of each row's items, then -1; grid (leaves, rows).

    ``kept_keys``, ``kept_groups`` [rows, nodes_of_row, KEPT] and zeroed ``arrivals`` [rows, nodes_of_row] hold what
    goes up the tree; a level's nodes follow those of the level below. ``nodes_of_row`` of 1 uses none of them.
    """
    begin()
    FAN: tl.constexpr = CHUNK // KEPT
    index = tl.program_id(1)
    row = row_begin + index
    visible = visible_groups(positions, row, ratio, groups)
    items = visible
    if MODE == 1:
        items = tl.cdiv(visible, block_size)
    if MODE == 2:
        items = slots
        candidates += row.to(tl.int64) * (slots // block_size)
    leaves = tl.maximum(tl.cdiv(items, CHUNK), 1)
    scores += index.to(tl.int64) * stride
    out += row.to(tl.int64) * k
    before_row = index.to(tl.int64) * nodes_of_row
    slot = tl.arange(0, KEPT)
    # One item a lane at a time: scattered stores want that, and changing between layouts costs more than it gains.
    inner = tl.max_contiguous(tl.arange(0, CHUNK), 1)
    for first_node in range(tl.program_id(0), leaves, tl.num_programs(0)):
        key, group = leaf(scores, candidates, first_node * CHUNK + inner, items, visible, block_size, MODE)
        node, width, level = first_node, leaves, leaves * 0
        climbing = leaves > 0
        while climbing:
            chosen = best(key, group, k)
            place = tl.cumsum(chosen.to(tl.int32), 0) - 1
            count = tl.sum(chosen.to(tl.int32), 0)
            if width == 1:
                tl.store(out + place, group.to(tl.int64), mask=chosen)
                tl.store(out + slot, tl.full((KEPT,), -1, tl.int64), mask=(slot >= count) & (slot < k))
                climbing = leaves < 0
            else:
                kept = (before_row + level + node) * KEPT
                tl.store(kept_keys + kept + place, key.to(tl.int32, bitcast=True), mask=chosen)
                tl.store(kept_groups + kept + place, group, mask=chosen)
                tl.store(kept_keys + kept + slot, tl.full((KEPT,), 0, tl.int32), mask=slot >= count)
                parent = node // FAN
                siblings = tl.minimum(width - parent * FAN, FAN)
                # Every thread has stored before one of them tells so.
                tl.debug_barrier()
                counter = arrivals + before_row + level + width + parent
                earlier = tl.atomic_add(counter, 1, sem="acq_rel")
                climbing = earlier == siblings - 1
                if climbing:
                    kept = (before_row + level + parent * FAN) * KEPT
                    there = inner < siblings * KEPT
                    # Past the first-level cache, which other SMs do not write.
                    key = tl.load(kept_keys + kept + inner, mask=there, other=0, cache_modifier=".cg")
                    key = key.to(tl.uint32, bitcast=True)
                    group = tl.load(kept_groups + kept + inner, mask=there, other=0, cache_modifier=".cg")
                    level += width
                    width = tl.cdiv(width, FAN)
                    node = parent


@chained
@triton.jit(do_not_specialize=["groups", "count", "slots", "ratio", "unit"])
def every_visible(positions, candidates, out, groups, count, slots, ratio, unit,
                  RESTRICTED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """``out`` [T, count]: every unit of ``unit`` groups that holds a visible one, or the visible groups of candidates.

    Grid (rows,). Restricted: ``unit`` is the size of a candidate block, and group g stands at place g.
    """
    begin()
    row = tl.program_id(0)
    visible = visible_groups(positions, row, ratio, groups)
    out += row.to(tl.int64) * count
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        shown = index < tl.cdiv(visible, unit)
        if RESTRICTED:
            shown = index < 0
        tl.store(out + index, tl.where(shown, index, -1).to(tl.int64), mask=index < count)
    if RESTRICTED:
        candidates += row.to(tl.int64) * (slots // unit)
        tl.debug_barrier()
        for start in range(0, slots, BLOCK):
            group = candidate_groups(candidates, start + tl.arange(0, BLOCK), slots, unit)
            tl.store(out + group, group.to(tl.int64), mask=(group >= 0) & (group < visible))


# ---------------------------------------------------------------------------------------------- launches


class Choice:
    """One selection for every row: ``out`` [T, k] of at most ``items``, and the shape of its tree.

    ``kept``: places of a node, a power of two. ``chunk``: items of a leaf. ``nodes``: of a row, all levels.
    """

    def __init__(self, out: Tensor, items: int, mode: int) -> None:
        self.out, self.items, self.mode = out, items, mode
        self.kept = triton.next_power_of_2(out.shape[1])
        self.chunk = max(CHUNK, 4 * self.kept)
        self.leaves = self.nodes = width = -(-items // self.chunk)
        while width > 1:
            width = -(-width // (self.chunk // self.kept))
            self.nodes += width

    @property
    def row_bytes(self) -> int:
        """Scratch of a row."""
        return self.nodes * (8 * self.kept + 4)

    def counters(self, rows: int) -> int:
        """Arrivals of ``rows`` rows that the scoring kernel clears, a multiple of 16 bytes; none where a leaf is the
        root."""
        return -(-rows * self.nodes // 4) * 4 if self.leaves > 1 else 0


def select(
    queries: Tensor,
    weights: Tensor,
    keys: CacheView,
    rows: StepRows,
    ratio: int,
    top_k: int,
    block_size: int,
    publish_blocks: int,
    candidates: Tensor | None,
    weight_scale: float,
) -> Selection:
    """As the reference, of BF16 ``queries``, BF16 or FP32 ``weights`` and packed or BF16 ``keys``."""
    _check(queries, weights, keys)
    candidates = None if candidates is None else candidates.contiguous()
    if publish_blocks and candidates is not None:
        shared = (queries, weights, keys, rows, ratio, top_k, block_size)
        published = select(*shared, publish_blocks, None, weight_scale).candidates
        return Selection(select(*shared, 0, candidates, weight_scale).lists, published)
    count, groups = queries.shape[0], rows.max_length // ratio
    blocks = -(-groups // block_size)
    lists = torch.empty(count, min(top_k, groups), dtype=torch.int64, device=queries.device)
    published = None
    if publish_blocks:
        published = torch.empty(count, min(publish_blocks, blocks), dtype=torch.int64, device=queries.device)
    if groups == 0:
        return Selection(lists, published)
    if groups <= top_k and blocks <= (publish_blocks or blocks):
        _every_visible(lists, rows, ratio, groups, 1 if candidates is None else block_size, candidates)
        if published is not None:
            _every_visible(published, rows, ratio, groups, block_size, None)
        return Selection(lists, published)
    choices = [Choice(lists, groups, EVERY)]
    if published is not None:
        choices.append(Choice(published, blocks, BLOCKS))
    if candidates is not None:
        choices = [Choice(lists, candidates.shape[1] * block_size, CANDIDATES)]
    stride = groups if candidates is None else choices[0].items
    row_bytes = 4 * stride + sum(choice.row_bytes for choice in choices)
    step = min(max(SCRATCH_BYTES // row_bytes, 1), MOST_ROWS)
    for first in range(0, count, step):
        chunk = range(first, min(first + step, count))
        scores = torch.empty(len(chunk), stride, dtype=torch.float32, device=queries.device)
        counts = [choice.counters(len(chunk)) for choice in choices]
        arrivals = torch.empty(sum(counts), dtype=torch.int32, device=queries.device)
        _score(
            scores, arrivals, chunk, queries, weights, keys, rows, ratio, groups, block_size, candidates, weight_scale
        )
        for choice, counters in zip(choices, arrivals.split(counts), strict=True):
            _choose(choice, counters, scores, chunk, rows, ratio, groups, block_size, candidates)
    return Selection(lists, published)


def _check(queries: Tensor, weights: Tensor, keys: CacheView) -> None:
    expect_dtype("queries", queries, torch.bfloat16)
    expect_dtype("weights", weights, torch.bfloat16, torch.float32)
    expect_dtype("keys", keys.storage, torch.uint8 if _packed(keys) else torch.bfloat16)
    width = keys.codec.width
    if width < 32 or width & (width - 1):
        raise ValueError(f"keys have width {width}: expected a power of two of at least 32")
    keys.expect_whole("keys", "storage")
    for name, x in {"queries": queries, "weights": weights}.items():
        if not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()}: expected contiguous memory")


def _packed(keys: CacheView) -> bool:
    return isinstance(keys.codec, IndexKeyCodec)


def _every_visible(out: Tensor, rows: StepRows, ratio: int, groups: int, unit: int, candidates: Tensor | None) -> None:
    slots = 0 if candidates is None else candidates.shape[1] * unit
    every_visible[(out.shape[0],)](
        rows.positions, candidates, out, groups, out.shape[1], slots, ratio, unit,
        RESTRICTED=candidates is not None, BLOCK=1024,
    )  # fmt: skip


def _score(
    scores: Tensor,
    arrivals: Tensor,
    chunk: range,
    queries: Tensor,
    weights: Tensor,
    keys: CacheView,
    rows: StepRows,
    ratio: int,
    groups: int,
    block_size: int,
    candidates: Tensor | None,
    weight_scale: float,
) -> None:
    count, heads, width = queries.shape
    stride = scores.shape[1]
    tiles, most = -(-stride // KEYS), PROGRAMS * multiprocessors(queries.device)
    padded = max(triton.next_power_of_2(heads), 16)
    shape = {"HEADS": heads, "PADDED": padded, "WIDTH": width, "PACKED": _packed(keys), "BLOCK_ROWS": keys.block_rows}
    if candidates is not None:
        grid = (min(tiles, -(-most // len(chunk))), len(chunk))
        score_candidates[grid](
            queries, weights, keys.storage, keys.table, rows.positions, rows.requests, candidates, scores, arrivals,
            chunk.start, groups, stride, keys.table.stride(0), arrivals.numel(), ratio, weight_scale,
            **shape, KEYS=KEYS, BLOCK_SIZE=block_size,
        )  # fmt: skip
        return
    requests = rows.first_rows.shape[0]
    programs = min(tiles, -(-most // requests))
    together = min(rows.max_rows, 2)
    shares = min(-(-rows.max_rows // together), max(most // (2 * programs * requests), 1))
    score_groups[(programs, requests, shares)](
        queries, weights, keys.storage, keys.table, rows.positions, rows.first_rows, scores, arrivals,
        count, chunk.start, chunk.stop, groups, keys.table.stride(0), stride, arrivals.numel(), ratio, weight_scale,
        **shape, KEYS=KEYS, ROWS=together,
    )  # fmt: skip


def _choose(
    choice: Choice,
    arrivals: Tensor,
    scores: Tensor,
    chunk: range,
    rows: StepRows,
    ratio: int,
    groups: int,
    block_size: int,
    candidates: Tensor | None,
) -> None:
    kept = (len(chunk), choice.nodes, choice.kept) if choice.leaves > 1 else (0,)
    kept_keys, kept_groups = (torch.empty(kept, dtype=torch.int32, device=scores.device) for _ in range(2))
    most = PROGRAMS * multiprocessors(scores.device)
    grid = (min(choice.leaves, -(-most // len(chunk))), len(chunk))
    choose[grid](
        scores, candidates, rows.positions, arrivals, kept_keys, kept_groups, choice.out,
        chunk.start, groups, choice.items, scores.shape[1], choice.nodes, choice.out.shape[1], ratio, block_size,
        MODE=choice.mode, CHUNK=choice.chunk, KEPT=choice.kept, num_warps=16 if choice.chunk > 2048 else 8,
    )  # fmt: skip

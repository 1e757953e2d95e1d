"""Attention on a GPU: packed or plain records are decoded in the kernel, a row's keys split over programs.

Both operations are one kernel over the keys of a row, in tiles: first the window's (ring records, then rows of this
step), then the entries of its list. With many rows a program takes all tiles of a row and writes the output: one
launch. With few, each takes some of them and leaves maximum, sum and mixed values in FP32; a second launch adds
these up in a fixed order. The split depends on the number of rows alone, so a row's bits do not depend on other rows.

Must move: 528 bytes a window record, 288 a listed row, queries and outputs 2 h D bytes a row. The FP32 parts of a split
row, 4 h D bytes a split, are written and read again (from the L2 cache).

Everything that is read (caches, lists, tables, this step's rows) was written by earlier launches of the step, all but
the queries by older ones than the last where the caller says so; sinks alone by none of them. Probabilities enter the
second product as two BF16 parts, so that they keep 16 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek.ops import triton_math as math
from quickseek.ops.cache import CacheView
from quickseek.ops.checks import expect_dtype
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows
from quickseek.ops.triton_chain import begin, chained
from quickseek.ops.triton_launch import multiprocessors

KINDS = {"plain": 0, "a8": 1, "q4k": 2}
"""Numbers of the kinds of records in the kernel."""
TILES = ((4, 16, 4), (64, 32, 8), (1 << 31, 64, 8))
"""Up to how many rows times groups of heads which tile of keys (the rows of one product) and which warps are used.

Where rows are few, smaller tiles let more programs share the keys of one.
"""
ADD_UP = ((8, 32, 1), (1 << 31, 128, 4))
"""Up to how many rows times groups of heads a program that adds up parts takes which channels and warps."""
MOST_HEADS = 32
"""Query heads of a program: their FP32 sums of D channels stay in registers."""


# ---------------------------------------------------------------------------------------------- device functions


@triton.jit
def _scaled_e4m3(codes, scale):
    """BF16 of E4M3 bytes [n, g, 32] times BF16 powers of two [n, g, 1]."""
    if math.INTERPRETED:
        return (math.e4m3_value(codes) * scale.to(tl.float32)).to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b16 first, second, a, b, c, d;
        .reg .b32 low, high;
        .reg .f32 w, x, y, z;
        mov.b32 {first, second}, $2;
        cvt.rn.f16x2.e4m3x2 low, first;
        cvt.rn.f16x2.e4m3x2 high, second;
        mov.b32 {a, b}, low;
        mov.b32 {c, d}, high;
        cvt.f32.f16 w, a;
        cvt.f32.f16 x, b;
        cvt.f32.f16 y, c;
        cvt.f32.f16 z, d;
        cvt.rn.bf16x2.f32 low, x, w;
        cvt.rn.bf16x2.f32 high, z, y;
        mul.rn.bf16x2 $0, low, $3;
        mul.rn.bf16x2 $1, high, $4;
        }
        """,
        "=&r,=&r,r,r,r",
        [codes, tl.broadcast_to(scale, codes.shape)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _records(
    storage, base, seen, width: tl.constexpr, padded: tl.constexpr, kind: tl.constexpr, cache: tl.constexpr
):  # fmt: skip
    """BF16 values [n, padded] of the records that begin at elements ``base`` int64 [n]; zeros where not ``seen``."""
    start = storage + base[:, None]
    if kind == 0:
        channel = tl.arange(0, padded)[None, :]
        return tl.load(start + channel, mask=seen[:, None] & (channel < width), other=0.0, cache_modifier=cache)
    elif kind == 1:
        channel = tl.arange(0, padded)[None, :]
        group = tl.arange(0, padded // 32)[None, :]
        codes = tl.load(start + channel, mask=seen[:, None] & (channel < width), other=0, cache_modifier=cache)
        inside = seen[:, None] & (group < width // 32)
        scales = tl.load(start + width + group, mask=inside, other=0, cache_modifier=cache)
        scales = math.e8m0_value(scales).to(tl.bfloat16)[:, :, None]
        values = _scaled_e4m3(tl.reshape(codes, (base.shape[0], padded // 32, 32)), scales)
        return tl.reshape(values, (base.shape[0], padded))
    else:
        pair = tl.arange(0, padded // 2)[None, :]
        group = tl.arange(0, padded // 16)[None, :]
        pairs = tl.load(start + pair, mask=seen[:, None] & (pair < width // 2), other=0, cache_modifier=cache)
        inside = seen[:, None] & (group < width // 16)
        scales = tl.load(start + width // 2 + group, mask=inside, other=0, cache_modifier=cache)
        scales = math.e4m3_value(scales).to(tl.bfloat16)[:, :, None]
        pairs = tl.reshape(pairs, (base.shape[0], padded // 16, 8))
        even, odd = math.e2m1_pairs(pairs, tl.broadcast_to(scales, pairs.shape), SMALL=False)
        return tl.reshape(tl.join(even, odd), (base.shape[0], padded))


@triton.jit
def _fold(keys, seen, queries, largest, total, mixed, scale):
    """Take keys BF16 [n, D] into the softmax of queries BF16 [D, h]: maximum and sum [h], weighted sum [D, h], FP32."""
    scores = tl.dot(keys, queries) * scale
    scores = tl.where(seen[:, None], scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 0))
    # While no key has been seen the maximum is -inf, and -inf - -inf would be a NaN.
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp(scores - base[None, :])
    shrink = tl.exp(largest - base)
    high = weights.to(tl.bfloat16)
    low = (weights - high.to(tl.float32)).to(tl.bfloat16)
    values = tl.trans(keys)
    mixed = tl.dot(values, high, mixed * shrink[None, :])
    mixed = tl.dot(values, low, mixed)
    return new, total * shrink + tl.sum(weights, 0), mixed


@triton.jit
def _angles(cos, sin, first, count: tl.constexpr, width: tl.constexpr, pairs: tl.constexpr):
    """cos and sin [1, count] of the pairs of channels from channel ``first`` on, and which of them turn: the last.

    ``cos``, ``sin``: pointers to [pairs]; heads have ``width`` channels.
    """
    pair = first // 2 + tl.arange(0, count) - (width // 2 - pairs)
    turned = (pair >= 0) & (pair < pairs)
    c = tl.load(cos + pair, mask=turned, other=1.0)
    s = tl.load(sin + pair, mask=turned, other=0.0)
    return c[None, :], s[None, :], turned[None, :]


@triton.jit
def _turned(x, c, s, turned):
    """FP32 x [h, 2 n] rotated by ``_angles``; channels that do not turn keep their bits, NaN and infinity included."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    one, other = math.rotate_pairs(even, odd, c, s)
    return tl.reshape(tl.join(tl.where(turned, one, even), tl.where(turned, other, odd)), x.shape)


@triton.jit
def _rotated(x, cos, sin, first, width: tl.constexpr, pairs: tl.constexpr, inverse: tl.constexpr):
    """FP32 x [h, c], channels ``first`` and on of heads of ``width``, its share of their last ``pairs`` pairs rotated.

    ``cos``, ``sin``: pointers to [pairs]. The other channels keep their bits, NaN and infinity included.
    """
    c, s, turned = _angles(cos, sin, first, x.shape[1] // 2, width, pairs)
    return _turned(x, c, -s if inverse else s, turned)


@triton.jit
def _tile(
    tile, ring, ring_base, ring_first, ring_end, ring_rows, step_kv, step_first, step_count, pages, pages_row, listed,
    list_width, pages_stride, pages_rows, ring_tiles, step_tiles, width: tl.constexpr, padded: tl.constexpr,
    tile_size: tl.constexpr, ring_kind: tl.constexpr, pages_kind: tl.constexpr, cache: tl.constexpr,
):  # fmt: skip
    """Keys BF16 [tile_size, padded] of a tile, which of them the row sees, and whether it may see any."""
    ring_record: tl.constexpr = width + width // 32 if ring_kind == 1 else width
    pages_record: tl.constexpr = width // 2 + width // 16 if pages_kind == 2 else width
    place_in_tile = tl.arange(0, tile_size)
    if tile < ring_tiles:
        target = ring_first + tile * tile_size + place_in_tile
        ready = ring_first + tile * tile_size < ring_end
        seen = target < ring_end
        record = tl.where(seen, target, 0).to(tl.int32) % ring_rows
        base = ring_base + record.to(tl.int64) * ring_record
        keys = _records(ring, base, seen, width, padded, ring_kind, cache)
    elif tile < ring_tiles + step_tiles:
        slot = (tile - ring_tiles) * tile_size + place_in_tile
        ready = (tile - ring_tiles) * tile_size < step_count
        seen = slot < step_count
        keys = _records(step_kv, (step_first + slot) * width, seen, width, padded, 0, cache)
    else:
        slot = (tile - ring_tiles - step_tiles) * tile_size + place_in_tile
        number = tl.load(listed + slot, mask=slot < list_width, other=-1, cache_modifier=cache).to(tl.int32)
        seen = number >= 0
        ready = tl.max(number, 0) >= 0
        number = tl.where(seen, number, 0)
        page = tl.load(pages_row + number // pages_rows, mask=seen, other=0, cache_modifier=cache)
        record = page * pages_stride + (number % pages_rows).to(tl.int64) * pages_record
        keys = _records(pages, record, seen, width, padded, pages_kind, cache)
    return keys, seen, ready


@triton.jit
def _sent():
    """The assembler moves no load from before this behind what waits for another one."""
    if not math.INTERPRETED:
        tl.debug_barrier()


# ---------------------------------------------------------------------------------------------- kernels


@chained
@triton.jit(do_not_specialize=["heads", "tiles", "ring_tiles", "step_tiles", "window_size", "block_rows"])
def _attend(
    queries, step_kv, positions, requests, starts, oldest, ring, ring_table, pages, pages_table, lists, sinks,
    cos, sin, out, part_largest, part_total, part_mixed,
    heads, tiles, ring_tiles, step_tiles, list_width, window_size, block_rows, scale,
    ring_stride, ring_rows, ring_table_stride, pages_stride, pages_rows, pages_table_stride,
    width: tl.constexpr, padded: tl.constexpr, head_block: tl.constexpr, tile_size: tl.constexpr,
    ring_kind: tl.constexpr, pages_kind: tl.constexpr, in_blocks: tl.constexpr, split: tl.constexpr,
    pairs: tl.constexpr, queries_last: tl.constexpr,
):  # fmt: skip
    """Tiles ``tiles * program_id(1)`` and on of row program_id(0), for ``head_block`` heads.

    ``ring_tiles`` of window positions in the ring, ``step_tiles`` of rows of this step, then those of the list; tiles
    in which the row sees nothing are skipped. Not ``in_blocks``: a step's row, which sees itself and what is before it.
    Else: a row of a draft block of ``block_rows``, which sees the window up to its request's last position, and all
    rows of its block. The last ``pairs`` pairs of channels are rotated in the query, and rotated back in the output.
    With ``queries_last`` the first tile's keys are in registers before the wait, which is for the queries alone: the
    kernel before made these and nothing else, and this one started after that one's own wait for all that is older.
    """
    early: tl.constexpr = ".cg" if queries_last else ""
    if not queries_last:
        begin()
    row = tl.program_id(0).to(tl.int64)
    if not in_blocks:
        request = tl.load(requests + row, cache_modifier=early)
        position = tl.load(positions + row, cache_modifier=early)
        start = tl.load(starts + request, cache_modifier=early)
        lowest = tl.maximum(tl.load(oldest + request, cache_modifier=early), position - window_size + 1)
        lowest = tl.maximum(lowest, 0)
        ring_first, ring_end = lowest, start
        step_count = position - tl.maximum(lowest, start) + 1
        step_first = row + 1 - step_count
    else:
        block = row // block_rows
        request = tl.load(requests + block, cache_modifier=early)
        position = tl.load(positions + block, cache_modifier=early)
        ring_first, ring_end = tl.maximum(position - window_size + 1, 0), position + 1
        step_count = tl.cast(block_rows, tl.int64)
        step_first = block * block_rows
    ring_base = tl.load(ring_table + request * ring_table_stride, cache_modifier=early) * ring_stride
    first = tl.program_id(1) * tiles
    last = tl.minimum(first + tiles, ring_tiles + step_tiles + (list_width + tile_size - 1) // tile_size)
    keys, seen, ready = _tile(
        first, ring, ring_base, ring_first, ring_end, ring_rows, step_kv, step_first, step_count,
        pages, pages_table + request * pages_table_stride, lists + row * list_width, list_width, pages_stride,
        pages_rows, ring_tiles, step_tiles, width, padded, tile_size, ring_kind, pages_kind, early,
    )  # fmt: skip
    if queries_last:
        begin()

    head = tl.program_id(2) * head_block + tl.arange(0, head_block)
    channel = tl.arange(0, padded)
    at_head = (head[:, None] < heads) & (channel[None, :] < width)
    place = (row * heads + head[:, None]) * width + channel[None, :]
    query = tl.load(queries + place, mask=at_head, other=0.0)
    if pairs > 0:
        query = _rotated(query.to(tl.float32), cos + row * pairs, sin + row * pairs, 0, width, pairs, False)
        query = query.to(tl.bfloat16)
    query = tl.trans(query)
    largest = tl.full((head_block,), float("-inf"), tl.float32)
    total = tl.zeros((head_block,), tl.float32)
    mixed = tl.zeros((padded, head_block), tl.float32)
    # Keys are decoded at the end of an iteration and used in the next: a value that the loop carries is laid out for
    # both products once, in shared memory. Else the compiler decodes it twice, and in every warp that needs it.
    for tile in range(first, last):
        if ready:
            largest, total, mixed = _fold(keys, seen, query, largest, total, mixed, scale)
        if tile + 1 < last:
            keys, seen, ready = _tile(
                tile + 1, ring, ring_base, ring_first, ring_end, ring_rows, step_kv, step_first, step_count,
                pages, pages_table + request * pages_table_stride, lists + row * list_width, list_width, pages_stride,
                pages_rows, ring_tiles, step_tiles, width, padded, tile_size, ring_kind, pages_kind, "",
            )  # fmt: skip

    if split:
        part = (row * tl.num_programs(1) + tl.program_id(1)) * heads + head
        tl.store(part_largest + part, largest, mask=head < heads)
        tl.store(part_total + part, total, mask=head < heads)
        # A part that has seen no key is not read, so it is not written.
        written = at_head & (largest != float("-inf"))[:, None]
        tl.store(part_mixed + part[:, None] * width + channel[None, :], tl.trans(mixed), mask=written)
    else:
        sink = tl.load(sinks + head, mask=head < heads, other=0.0)
        top = tl.maximum(largest, sink)
        share = tl.exp(largest - top)
        mixed = mixed * (share / (total * share + tl.exp(sink - top)))[None, :]
        value = tl.trans(mixed)
        if pairs > 0:
            value = _rotated(math.rounded(value), cos + row * pairs, sin + row * pairs, 0, width, pairs, True)
        tl.store(out + place, value.to(tl.bfloat16), mask=at_head)


@chained
@triton.jit(do_not_specialize=["heads", "parts"])
def _add_up(
    part_largest, part_total, part_mixed, sinks, cos, sin, out, heads, parts,
    width: tl.constexpr, channels: tl.constexpr, part_block: tl.constexpr, pairs: tl.constexpr,
):  # fmt: skip
    """``channels`` channels of one head of a row from its ``parts`` parts, in ascending order.

    The product that follows brings its weights while ``_attend`` still runs.
    """
    begin(NEXT_FIRST=True)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.program_id(2) * channels
    channel = first + tl.arange(0, channels)
    part = tl.arange(0, part_block)
    place = part * heads
    base = row * parts * heads + head
    # All loads are sent before anything waits for one; what no program wrote may be NaN, and is not taken.
    here = (part[:, None] < parts) & (channel[None, :] < width)
    mixed = tl.load(part_mixed + base * width + (place[:, None] * width + channel[None, :]), mask=here, other=0.0)
    c, s, turned = _angles(cos + row * pairs, sin + row * pairs, first, channels // 2, width, pairs)
    _sent()
    largest = tl.load(part_largest + base + place, mask=part < parts, other=float("-inf"))
    total = tl.load(part_total + base + place, mask=part < parts, other=0.0)
    sink = tl.load(sinks + head)
    top = tl.maximum(tl.max(largest, 0), sink)
    share = tl.exp(largest - top)
    mixed = tl.where((largest != float("-inf"))[:, None], mixed * share[:, None], 0.0)
    value = tl.sum(mixed, 0) / (tl.sum(total * share, 0) + tl.exp(sink - top))
    if pairs > 0:
        value = math.rounded(tl.reshape(value, [1, channels]))
        value = tl.reshape(_turned(value, c, -s, turned), [channels])
    tl.store(out + (row * heads + head) * width + channel, value.to(tl.bfloat16), mask=channel < width)


# ---------------------------------------------------------------------------------------------- launches


def sparse_attention(
    queries: Tensor,
    step_kv: Tensor,
    window: CacheView,
    rows: StepRows,
    sinks: Tensor,
    window_size: int,
    oldest: Tensor,
    global_kv: CacheView | None,
    lists: Tensor | None,
    turn: Rotation | None = None,
    queries_last: bool = False,
) -> Tensor:
    return _launch(
        queries, step_kv, window, sinks, window_size, rows.positions, rows.requests, rows.starts, oldest,
        global_kv, lists, min(window_size, rows.max_rows), block_rows=0, turn=turn, queries_last=queries_last,
    )  # fmt: skip


def block_attention(
    queries: Tensor,
    block_kv: Tensor,
    window: CacheView,
    requests: Tensor,
    last: Tensor,
    sinks: Tensor,
    window_size: int,
    turn: Rotation | None = None,
    queries_last: bool = False,
) -> Tensor:
    out = _launch(
        queries.flatten(0, 1), block_kv.flatten(0, 1), window, sinks, window_size, last, requests, last, last,
        None, None, queries.shape[1], block_rows=queries.shape[1], turn=turn,
        queries_last=queries_last and block_kv.is_contiguous(),  # else a copy of them is what was launched last
    )  # fmt: skip
    return out.view(queries.shape)


def tiles_of_a_program(programs: int, tiles: int, most: int) -> int:
    """How many of a row's ``tiles`` one program takes: the fewest with which there are no more than ``most`` programs.

    ``programs``: rows times head groups, which is how many there are if each takes all tiles. ``most``: one for each
    multiprocessor; as long as there are fewer, rows are split further.
    """
    count = 1
    while count < tiles and programs * triton.cdiv(tiles, count) > most:
        count += 1
    return count


def _launch(
    queries: Tensor,
    step_kv: Tensor,
    window: CacheView,
    sinks: Tensor,
    window_size: int,
    positions: Tensor,
    requests: Tensor,
    starts: Tensor,
    oldest: Tensor,
    pages: CacheView | None,
    lists: Tensor | None,
    step_rows: int,
    block_rows: int,
    turn: Rotation | None,
    queries_last: bool,
) -> Tensor:
    expect_dtype("queries", queries, torch.bfloat16)
    expect_dtype("step_kv", step_kv, torch.bfloat16)
    expect_dtype("sinks", sinks, torch.float32)
    count, heads, width = queries.shape
    ring_kind = _kind("window", window, width, "a8")
    # A call without global KV runs the same kernel, with empty lists.
    pages_kind = 2 * ring_kind if pages is None else _kind("global_kv", pages, width, "q4k")
    read_early = [step_kv, positions, requests, starts, oldest, *([] if lists is None else [lists])]
    queries_last = queries_last and queries.is_contiguous() and all(x.is_contiguous() for x in read_early)
    queries, step_kv, sinks = queries.contiguous(), step_kv.contiguous(), sinks.contiguous()
    positions, requests, starts, oldest = (x.contiguous() for x in (positions, requests, starts, oldest))
    lists = None if lists is None else lists.contiguous()
    list_width = 0 if lists is None else lists.shape[1]
    head_block = 16 if heads <= 16 else MOST_HEADS
    padded = max(32, triton.next_power_of_2(width))
    groups = triton.cdiv(heads, head_block)
    tile, warps = next((tile, warps) for most, tile, warps in TILES if count * groups <= most)
    ring_tiles, step_tiles = triton.cdiv(window_size, tile), triton.cdiv(step_rows, tile)
    tiles = ring_tiles + step_tiles + triton.cdiv(list_width, tile)
    each = tiles_of_a_program(count * groups, tiles, multiprocessors(queries.device))
    parts = triton.cdiv(tiles, each)
    out = torch.empty(count, heads, width, dtype=torch.bfloat16, device=queries.device)
    pairs, cos, sin = 0, sinks, sinks
    if turn is not None:
        pairs, cos, sin = turn.cos.shape[1], turn.cos.contiguous(), turn.sin.contiguous()
        expect_dtype("turn.cos", cos, torch.float32)
        if width % 2 or 2 * pairs > width:
            raise ValueError(f"heads of {width} channels: expected an even number, at least the {2 * pairs} that turn")
    # Without a split nothing is written to the parts: any tensor will do.
    largest = total = mixed = sinks
    if parts > 1:
        largest = torch.empty(count, parts, heads, dtype=torch.float32, device=queries.device)
        total = torch.empty(count, parts, heads, dtype=torch.float32, device=queries.device)
        mixed = torch.empty(count, parts, heads, width, dtype=torch.float32, device=queries.device)
    other = window if pages is None else pages
    _attend[(count, parts, groups)](
        queries, step_kv, positions, requests, starts, oldest, window.storage, window.table, other.storage,
        other.table, requests if lists is None else lists, sinks, cos, sin, out, largest, total, mixed,
        heads, each, ring_tiles, step_tiles, list_width, window_size, block_rows, width**-0.5,
        window.storage.stride(0), window.block_rows, window.table.stride(0),
        other.storage.stride(0), other.block_rows, other.table.stride(0),
        width=width, padded=padded, head_block=head_block, tile_size=tile,
        ring_kind=ring_kind, pages_kind=pages_kind, in_blocks=block_rows > 0, split=parts > 1,
        pairs=pairs, queries_last=queries_last, num_warps=warps, num_stages=1,
    )  # fmt: skip
    if parts > 1:
        channels, warps = next((channels, warps) for most, channels, warps in ADD_UP if count * groups <= most)
        channels = min(channels, padded)
        _add_up[(count, heads, triton.cdiv(width, channels))](
            largest, total, mixed, sinks, cos, sin, out, heads, parts,
            width=width, channels=channels, part_block=triton.next_power_of_2(parts), pairs=pairs,
            num_warps=warps,
        )  # fmt: skip
    return out


def _kind(name: str, cache: CacheView, width: int, packed: str) -> int:
    """The kind of a cache's records, plain ones or ``packed``; a ValueError for a cache that the kernel cannot read."""
    if cache.codec.kind not in ("plain", packed):
        raise ValueError(f"{name} has records of kind {cache.codec.kind}: expected plain or {packed}")
    if cache.codec.width != width:
        raise ValueError(f"{name} has rows of {cache.codec.width} values: expected {width}")
    kind = KINDS[cache.codec.kind]
    expect_dtype(name, cache.storage, torch.uint8 if kind else torch.bfloat16)
    cache.expect_whole(name, "block")
    return kind

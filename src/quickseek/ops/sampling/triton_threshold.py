"""Which ids of a row are the largest, or hold a share of its weight: thresholds without a sort and without the host.

A key is a logit's bits as an integer of the same order, NaN above all. What is kept of a row are the keys above a
border and, of those that tie with it, the ids up to a last one.

Each range of a row counts its ids by level, the distance from the row's largest logit in steps of an eighth of its
power of two (``count_levels``). From all counts ``list_levels`` knows how many levels hold what is wanted, and lists
their ids: usually a few dozen, at most as many as there is room for. One program a row then moves the ends of an
interval of keys to listed ones until they meet (``search``) and counts ties in the order of ids (``last_tie``). Where
the list falls short (equal logits, flat distributions at a high temperature), the same program does the same with the
whole row: exact too, but every move of an end reads the row again, 64 dependent loads of about 0.7 us at 129,280 ids,
and there are ten or so.

Sums are FP64 in an order that depends on the row alone.
"""

import triton
import triton.language as tl

from quickseek.ops.triton_chain import begin, chained

LEVELS = tl.constexpr(128)
"""Levels of a row: eight for each power of two of the distance from its largest logit, from 2^-7 to 2^9."""
FIRST_LEVEL = tl.constexpr((127 - 7) * 8)
LOWEST_TEMPERATURE = tl.constexpr(1e-6)


# ---------------------------------------------------------------------------------------------- keys


@triton.jit
def order_key(x):
    """uint32 or uint64 keys in the order of FP32 or FP64 values; the zeros are equal, NaN is the largest."""
    x = tl.where(x == 0.0, 0.0, x)
    if x.dtype == tl.float64:
        bits = x.to(tl.uint64, bitcast=True)
        key = tl.where((bits >> 63) != 0, ~bits, bits | 0x8000000000000000)
        key = tl.where(x != x, 0xFFF8000000000000, key).to(tl.uint64)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        key = tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)
        key = tl.where(x != x, 0xFFC00000, key).to(tl.uint32)
    return key


@triton.jit
def key_value(key):
    """FP32 or FP64 value of a key."""
    if key.dtype == tl.uint64:
        bits = tl.where((key >> 63) != 0, key ^ 0x8000000000000000, ~key)
        value = bits.to(tl.float64, bitcast=True)
    else:
        bits = tl.where((key >> 31) != 0, key ^ 0x80000000, ~key)
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def row_logits(logits, row, index, vocabulary):
    """FP32 or FP64 logits of a row; NaN keys beyond its end are for the caller to leave out."""
    x = tl.load(logits + row * vocabulary + index, mask=index < vocabulary, other=0.0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    return x


@triton.jit
def best_of_row(keys, ids, row, ranges, block_r: tl.constexpr):
    """Key of a row's largest logit, its first id (0 if the row has a NaN), and 1 if the row holds a choice."""
    part = tl.arange(0, block_r)
    real = part < ranges
    stored = tl.load(keys + row * ranges + part, mask=real, other=0)
    KEY: tl.constexpr = tl.uint64 if stored.dtype == tl.int64 else tl.uint32
    key = stored.to(KEY, bitcast=True)
    number = tl.load(ids + row * ranges + part, mask=real, other=0)
    largest = tl.max(tl.where(real, key, 0), 0)
    first = tl.min(tl.where(real & (key == largest), number, 0x7FFFFFFFFFFFFFFF), 0)
    value = key_value(largest)
    return largest, tl.where(value != value, 0, first), (tl.abs(value) < float("inf")).to(tl.int32)


@triton.jit
def limits(top_k, count, top_p, temperature, row, vocabulary):
    """How many ids a row asks for (0 if it does not) and whether it does; the same of a share of its weight."""
    limit = count
    if top_k is not None:
        limit = tl.load(top_k + row)
    share = tl.full((), 1.0, tl.float64)
    if top_p is not None:
        share = tl.load(top_p + row).to(tl.float64)
    by_count, by_mass = (limit > 0) & (limit < vocabulary), share < 1.0
    if temperature is not None:
        # One id is left at temperature 0.
        sampled = tl.load(temperature + row) != 0.0
        by_count, by_mass = by_count & sampled, by_mass & sampled
    return tl.where(by_count, limit, 0).to(tl.int32), by_count, share, by_mass


@triton.jit
def scale_of(temperature, row):
    """FP64 temperature of a row to divide by; at 0 its quotients are not used."""
    return tl.maximum(tl.load(temperature + row).to(tl.float64), LOWEST_TEMPERATURE)


# ---------------------------------------------------------------------------------------------- levels


@triton.jit
def level_of(x, largest):
    """int32 levels [n] of logits: 0 for the largest (given as its key), never lower for a smaller one.

    In a row with a NaN all but the largest have the same level, whichever it is.
    """
    distance = (key_value(largest) - x).to(tl.float32)
    level = (distance.to(tl.int32, bitcast=True) >> 20) - FIRST_LEVEL
    return tl.where(order_key(x) == largest, 0, tl.minimum(tl.maximum(level, 0), LEVELS - 1))


@triton.jit
def count_levels(levels, x, largest, inside, row, part, ranges):
    """levels [T, ranges, LEVELS] int32 of one range."""
    counts = tl.histogram(level_of(x, largest), LEVELS, mask=inside)
    tl.store(levels + (row * ranges + part) * LEVELS + tl.arange(0, LEVELS), counts)


@chained
@triton.jit
def spread(logits, keys, ids, levels, vocabulary, ranges, block: tl.constexpr, block_r: tl.constexpr):
    """``levels`` of every range; grid (rows, ranges)."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest, _, _ = best_of_row(keys, ids, row, ranges, block_r)
    index = part * block + tl.arange(0, block)
    count_levels(levels, row_logits(logits, row, index, vocabulary), largest, index < vocabulary, row, part, ranges)


@triton.jit
def levels_of_mass(counts, share, scale):
    """The first level [of ``counts`` ids] below which there is no more than the rest of the weight after ``share``.

    Weights lie between those at the ends of a level; what is below is taken for heavy, the whole row for light.
    """
    level = tl.arange(0, LEVELS)
    # Above the bits of a level FP32 has its sign, within them the three highest of the mantissa.
    near = tl.where(level > 0, ((level + FIRST_LEVEL) << 20).to(tl.float32, bitcast=True), 0.0)
    far = ((level + 1 + FIRST_LEVEL) << 20).to(tl.float32, bitcast=True)
    far = tl.where(level < LEVELS - 1, far, float("inf"))
    most = counts * tl.exp(-near.to(tl.float64) / scale)
    least = counts * tl.exp(-far.to(tl.float64) / scale)
    below = tl.sum(most, 0) - tl.cumsum(most, 0)
    return tl.sum((below > (1.0 - share) * tl.sum(least, 0)).to(tl.int32), 0)


@chained
@triton.jit(do_not_specialize=["count", "room"])
def list_levels(
    logits, keys, ids, levels, top_k, count, top_p, temperature, listing, listed, vocabulary, ranges, room,
    block: tl.constexpr, block_r: tl.constexpr,
):  # fmt: skip
    """listing [T, room]: the ids of as many first levels as are wanted and have room, ``listed`` [T], ascending.

    Rows that ask for nothing are left out. Grid (rows, ranges).
    """
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit, by_count, share, by_mass = limits(top_k, count, top_p, temperature, row, vocabulary)
    if by_count | by_mass:
        other, level = tl.arange(0, block_r), tl.arange(0, LEVELS)
        place = (row * ranges + other[:, None]) * LEVELS + level[None, :]
        counts = tl.load(levels + place, mask=(other < ranges)[:, None], other=0)
        total = tl.sum(counts, 0)
        reached = tl.cumsum(total, 0)
        border = tl.sum((reached < limit).to(tl.int32), 0)
        if top_p is not None:
            border = tl.where(by_count, border, levels_of_mass(total, share, scale_of(temperature, row)))
        border = tl.minimum(border, tl.sum((reached <= room).to(tl.int32), 0) - 1)
        wanted = level <= border
        if part == 0:
            tl.store(listed + row, tl.sum(tl.where(wanted, total, 0), 0))
        earlier = tl.sum(tl.sum(tl.where((other < part)[:, None] & wanted[None, :], counts, 0), 1), 0)
        largest, _, _ = best_of_row(keys, ids, row, ranges, block_r)
        index = part * block + tl.arange(0, block)
        near = (index < vocabulary) & (level_of(row_logits(logits, row, index, vocabulary), largest) <= border)
        slot = earlier + tl.cumsum(near.to(tl.int32), 0) - 1
        tl.store(listing + row * room + slot, index, mask=near)


# ---------------------------------------------------------------------------------------------- search


@triton.jit
def members(logits, weights, listing, listed, start, items, border, last, block: tl.constexpr):
    """Ids, keys and weights of a row's items from ``start`` on: listed ids, or all.

    Members are the keys above ``border`` and ids up to ``last`` with that key; others weigh 0. Without weights, 1.
    """
    index = start + tl.arange(0, block)
    inside = index < items
    if listed:
        index = tl.load(listing + index, mask=inside, other=0)
    x = tl.load(logits + index, mask=inside, other=0.0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    key = order_key(x)
    weight = tl.full((block,), 1.0, tl.float64)
    if weights is not None:
        weight = tl.load(weights + index, mask=inside, other=0.0)
    member = inside & ((key > border) | ((key == border) & (index <= last)))
    return index, key, tl.where(member, weight, 0.0)


@triton.jit
def split(logits, weights, listing, listed, items, border, last, trial, block: tl.constexpr):
    """What members with keys from ``trial`` on weigh, their lowest key, and the highest of those below."""
    weighs = tl.zeros((block,), tl.float64)
    below = tl.zeros((block,), border.dtype)
    reached = ~below
    for start in range(0, items, block):
        _, key, weight = members(logits, weights, listing, listed, start, items, border, last, block)
        high = key >= trial
        weighs += tl.where(high, weight, 0.0)
        reached = tl.minimum(reached, tl.where(high & (weight > 0.0), key, ~tl.zeros((block,), border.dtype)))
        below = tl.maximum(below, tl.where(high | (weight == 0.0), 0, key).to(border.dtype))
    return tl.sum(weighs, 0), tl.min(reached, 0), tl.max(below, 0)


@triton.jit
def search(logits, weights, listing, listed, items, border, last, low, top, found, target, block: tl.constexpr):
    """The highest key from which on members weigh at least ``target``, and what those above it and from it on weigh.

    All members weigh ``found``, the lowest has key ``low``, none a key above ``top``. Every other trial goes where the
    key would be if weights were spread evenly, the others halve; ends move to the next member. Where the target is met
    exactly all ties are wanted, and what is above may be found too low.
    """
    above = found * 0.0
    turn = items * 0
    while (low < top) & (found > target):
        width = top - low
        guess = width.to(tl.float64) * ((found - target) / (found - above))
        step = tl.where(turn % 2 == 0, guess.to(border.dtype), width >> 1)
        trial = low + tl.minimum(tl.maximum(step, 1), width)
        weighs, reached, below = split(logits, weights, listing, listed, items, border, last, trial, block)
        enough = weighs >= target
        low, found = tl.where(enough, reached, low), tl.where(enough, weighs, found)
        top, above = tl.where(enough, top, below), tl.where(enough, above, weighs)
        turn += 1
    return low, above, found


@triton.jit
def last_tie(logits, weights, listing, listed, items, border, last, key, ties, block: tl.constexpr):
    """The id of the member that is number ``ties`` of those with ``key``; the last one, if there are fewer."""
    found = items * 0 - 1
    seen = items * 0
    start = items * 0
    while (start < items) & (seen < ties):
        index, keys, weight = members(logits, weights, listing, listed, start, items, border, last, block)
        tie = (weight > 0.0) & (keys == key)
        rank = seen + tl.cumsum(tie.to(tl.int32), 0)
        found = tl.maximum(found, tl.max(tl.where(tie & (rank <= ties), index, -1), 0))
        seen += tl.sum(tie.to(tl.int32), 0)
        start += block
    return found


@triton.jit
def largest_of(logits, listing, listed, items, limit, largest, block: tl.constexpr):
    """Border and last id of the ``limit`` largest; ``largest``: the row's largest key."""
    border, last = largest * 0, limit * 0 - 1
    found, low, _ = split(logits, None, listing, listed, items, border, last, border, block)
    target = limit.to(tl.float64)
    key, above, _ = search(logits, None, listing, listed, items, border, last, low, largest, found, target, block)
    ties = limit - above.to(tl.int32)
    return key, last_tie(logits, None, listing, listed, items, border, last, key, ties, block)

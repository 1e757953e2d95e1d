"""Which ids of a row are the largest, or hold a share of its weight: thresholds without a sort and without the host.

A key is a logit's bits as an integer of the same order, NaN above all. What is kept of a row are the keys above a
border and, of those that tie with it, the ids up to a last one.

Each range of a row counts its ids by level, the distance from the row's largest logit in steps of an eighth of its
power of two (``count_levels``). From all counts follows which levels may hold what is looked for:

* the ``count`` largest ids themselves: ``list_levels`` lists as many first levels as hold them;
* the borders of top_k and top_p: ``narrow`` finds the levels between which they lie and counts their ids again by
  ``LEVELS`` equal parts of that distance; ``list_window`` lists the ids of the parts between which they lie, and sums
  up the weight of all ids above. Counts give the part of a top_k exactly; what ids of a part weigh is known to the
  width of the part, so that a top_p takes one to three parts: some hundred ids of the flattest rows.

One program a row then moves the ends of an interval of keys to listed ones until they meet (``search``) and counts ties
in the order of ids (``last_tie``). Where a list has no room, the same program does the same with the whole row: exact
too, but every move of an end reads the row again, 64 dependent loads of about 1 us at 129,280 ids, and there are ten or
so. Rows without room: more than that many ids are wanted (``list_levels``), lie between the borders of a top_k and of a
top_p, or are in the parts around a border, such as a hundred thousand equal logits, or those of -inf at a temperature
of hundreds.

Sums are FP64 in an order that depends on the row alone.
"""

import triton
import triton.language as tl

from quickseek.ops.triton_chain import begin, chained

LEVELS = tl.constexpr(128)
"""Levels of a row: eight for each power of two of the distance from its largest logit, from 2^-7 to 2^9."""
FIRST_LEVEL = tl.constexpr((127 - 7) * 8)
SLACK = tl.constexpr(1e-6)
"""Of distances: levels and parts are those of rounded FP32 distances, weights those of exact ones."""
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
def limits(top_k, top_p, temperature, row, vocabulary):
    """How many ids a row asks for (0 if it does not) and whether it does; the same of a share of its weight."""
    limit = vocabulary * 0
    if top_k is not None:
        limit = tl.load(top_k + row)
    share = tl.load(top_p + row).to(tl.float64)
    # One id is left at temperature 0.
    sampled = tl.load(temperature + row) != 0.0
    by_count, by_mass = (limit > 0) & (limit < vocabulary) & sampled, (share < 1.0) & sampled
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
def counts_of_row(levels, row, ranges, block_r: tl.constexpr):
    """int32 [block_r, LEVELS]: ``levels`` of a row's ranges."""
    part = tl.arange(0, block_r)[:, None]
    return tl.load(levels + (row * ranges + part) * LEVELS + tl.arange(0, LEVELS)[None, :], mask=part < ranges, other=0)


@triton.jit
def earlier_ids(counts, chosen, part, block_r: tl.constexpr):
    """How many ids of chosen levels (bool [LEVELS]) the ranges before one have: ``counts`` [block_r, LEVELS]."""
    before = tl.arange(0, block_r)[:, None] < part
    return tl.sum(tl.sum(tl.where(before & chosen[None, :], counts, 0), 1), 0)


@chained
@triton.jit(do_not_specialize=["count", "room"])
def list_levels(
    logits, keys, ids, levels, listing, listed, vocabulary, ranges, count, room,
    block: tl.constexpr, block_r: tl.constexpr,
):  # fmt: skip
    """listing [T, room]: the ids of as many first levels as hold ``count`` and have room, ``listed`` [T], ascending.

    Grid (rows, ranges).
    """
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    counts = counts_of_row(levels, row, ranges, block_r)
    total = tl.sum(counts, 0)
    reached = tl.cumsum(total, 0)
    border = tl.minimum(tl.sum((reached < count).to(tl.int32), 0), tl.sum((reached <= room).to(tl.int32), 0) - 1)
    wanted = tl.arange(0, LEVELS) <= border
    if part == 0:
        tl.store(listed + row, tl.sum(tl.where(wanted, total, 0), 0))
    largest, _, _ = best_of_row(keys, ids, row, ranges, block_r)
    index = part * block + tl.arange(0, block)
    near = (index < vocabulary) & (level_of(row_logits(logits, row, index, vocabulary), largest) <= border)
    slot = earlier_ids(counts, wanted, part, block_r) + tl.cumsum(near.to(tl.int32), 0) - 1
    tl.store(listing + row * room + slot, index, mask=near)


# ---------------------------------------------------------------------------------------------- windows


@triton.jit
def start_of(level):
    """FP32 distance from the largest logit at which levels (int32) start; the one after the last starts at 2^9."""
    # Above the bits of a level FP32 has its sign, within them the three highest of the mantissa.
    return tl.where(level > 0, ((level + FIRST_LEVEL) << 20).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def part_of(x, largest, first, last):
    """int32 [n]: in which of LEVELS parts of the levels ``first`` to ``last`` logits are; -1 above, LEVELS below."""
    near, level = start_of(first), level_of(x, largest)
    distance = (key_value(largest) - x).to(tl.float32) - near
    part = tl.minimum(distance * (LEVELS / (start_of(last + 1) - near)), LEVELS - 1.0).to(tl.int32)
    return tl.where(level < first, -1, tl.where(level > last, LEVELS, tl.maximum(part, 0)))


@triton.jit
def window(counts, near, far, skipped, over, inside, total, limit, by_count, share, by_mass, min_p, scale):
    """The first and the last of LEVELS levels or parts in which the borders of a row may be.

    Of these, [LEVELS]: ``counts`` of ids and the FP64 distances ``near`` and ``far`` between which they are; ``inside``
    is what their ids weigh. ``skipped`` ids that weigh ``over`` are above. ``total``: weight of the row.
    """
    most = counts * tl.exp(-near * (1.0 - SLACK) / scale)
    least = tl.exp(-far * (1.0 + SLACK) / scale)
    # Lighter ids weigh nothing.
    least = counts * tl.where(least >= min_p, least, 0.0)
    summed_most, summed_least = tl.cumsum(most, 0), tl.cumsum(least, 0)
    sum_most, sum_least = tl.sum(most, 0), tl.sum(least, 0)
    rest = over + inside - share * total
    by_weight = tl.minimum(tl.sum((sum_most - summed_most > rest).to(tl.int32), 0), LEVELS - 1)
    last = tl.where(by_count, tl.sum((skipped + tl.cumsum(counts, 0) < limit).to(tl.int32), 0), by_weight)
    ahead = over + tl.sum(tl.where(tl.arange(0, LEVELS) < last, least, 0.0), 0)
    goal = share * tl.where(by_count, ahead, total)
    reached = over + tl.minimum(summed_most, inside - (sum_least - summed_least))
    first = tl.where(by_mass, tl.sum((reached < goal).to(tl.int32), 0), last)
    return tl.minimum(first, last), last


@triton.jit
def weight_of_row(sums, row, ranges, block_r: tl.constexpr):
    """FP64 sum over a row's ranges, in their order."""
    part = tl.arange(0, block_r)
    return tl.sum(tl.load(sums + row * ranges + part, mask=part < ranges, other=0.0), 0)


@triton.jit
def min_p_of(min_p, row):
    """FP64 part of the largest weight below which ids of a row weigh nothing."""
    value = tl.full((), 0.0, tl.float64)
    if min_p is not None:
        value = tl.load(min_p + row).to(tl.float64)
    return value


@chained
@triton.jit
def narrow(
    logits, keys, ids, temperature, top_k, top_p, min_p, weights, sums, levels, windows, skipped, over, inside, parts,
    vocabulary, ranges, block: tl.constexpr, block_r: tl.constexpr,
):  # fmt: skip
    """windows [T, 2]: first and last level in which the borders may be, ``skipped`` [T] the count of ids above.

    Of each range [T, ranges]: FP64 weights of ids above (``over``) and ``inside`` the window, int32 [LEVELS] of its
    ``parts``. Rows that ask for nothing or weigh nothing are left out. Grid (rows, ranges).
    """
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit, by_count, share, by_mass = limits(top_k, top_p, temperature, row, vocabulary)
    total = weight_of_row(sums, row, ranges, block_r)
    if (by_count | by_mass) & (total > 0.0):
        largest, _, _ = best_of_row(keys, ids, row, ranges, block_r)
        index = part * block + tl.arange(0, block)
        x = row_logits(logits, row, index, vocabulary)  # on its way while the window is found
        counts, level = tl.sum(counts_of_row(levels, row, ranges, block_r), 0), tl.arange(0, LEVELS)
        near, far = start_of(level).to(tl.float64), start_of(level + 1).to(tl.float64)
        far = tl.where(level < LEVELS - 1, far, float("inf"))
        nothing = total * 0.0
        first, last = window(
            counts, near, far, 0, nothing, total, total, limit, by_count, share, by_mass, min_p_of(min_p, row),
            scale_of(temperature, row),
        )  # fmt: skip
        if part == 0:
            tl.store(windows + row * 2, first)
            tl.store(windows + row * 2 + 1, last)
            tl.store(skipped + row, tl.sum(tl.where(level < first, counts, 0), 0))
        place = part_of(x, largest, first, last)
        place = tl.where(index < vocabulary, place, LEVELS)
        weight = tl.load(weights + row * vocabulary + index, mask=place < LEVELS, other=0.0)
        own = row * ranges + part
        tl.store(over + own, tl.sum(tl.where(place < 0, weight, 0.0), 0))
        tl.store(inside + own, tl.sum(tl.where(place >= 0, weight, 0.0), 0))
        held = tl.histogram(place, LEVELS, mask=(place >= 0) & (place < LEVELS))
        tl.store(parts + own * LEVELS + level, held)


@chained
@triton.jit(do_not_specialize=["room"])
def list_window(
    logits, keys, ids, temperature, top_k, top_p, min_p, weights, sums, windows, skipped, over, inside, parts, listing,
    listed, ahead, above, vocabulary, ranges, room, block: tl.constexpr, block_r: tl.constexpr,
):  # fmt: skip
    """listing [T, room]: the ids of the parts in which the borders may be, ``listed`` [T], ascending; -1 without room.

    ``ahead`` [T]: how many ids lie above these; ``above`` [T, ranges]: the FP64 weight of those of each range. Rows as
    in ``narrow``. Grid (rows, ranges).
    """
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit, by_count, share, by_mass = limits(top_k, top_p, temperature, row, vocabulary)
    total = weight_of_row(sums, row, ranges, block_r)
    if (by_count | by_mass) & (total > 0.0):
        largest, _, _ = best_of_row(keys, ids, row, ranges, block_r)
        index = part * block + tl.arange(0, block)
        x = row_logits(logits, row, index, vocabulary)  # on its way while the window is found
        first, last = tl.load(windows + row * 2), tl.load(windows + row * 2 + 1)
        counts, level = counts_of_row(parts, row, ranges, block_r), tl.arange(0, LEVELS)
        held, before = tl.sum(counts, 0), tl.load(skipped + row)
        start = start_of(first).to(tl.float64)
        step = (start_of(last + 1).to(tl.float64) - start) / LEVELS
        far = tl.where((level < LEVELS - 1) | (last < LEVELS - 1), start + (level + 1) * step, float("inf"))
        from_part, to_part = window(
            held, start + level * step, far, before, weight_of_row(over, row, ranges, block_r),
            weight_of_row(inside, row, ranges, block_r), total, limit, by_count, share, by_mass, min_p_of(min_p, row),
            scale_of(temperature, row),
        )  # fmt: skip
        wanted = (level >= from_part) & (level <= to_part)
        length = tl.sum(tl.where(wanted, held, 0), 0)
        if part == 0:
            tl.store(listed + row, tl.where(length <= room, length, -1))
            tl.store(ahead + row, before + tl.sum(tl.where(level < from_part, held, 0), 0))
        place = part_of(x, largest, first, last)
        place = tl.where(index < vocabulary, place, LEVELS)
        weight = tl.load(weights + row * vocabulary + index, mask=place < from_part, other=0.0)
        tl.store(above + row * ranges + part, tl.sum(weight, 0))
        near = (place >= from_part) & (place <= tl.where(length <= room, to_part, -1))
        slot = earlier_ids(counts, wanted, part, block_r) + tl.cumsum(near.to(tl.int32), 0) - 1
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
def extent(logits, weights, listing, listed, items, border, last, block: tl.constexpr):
    """What members weigh, and their lowest and highest key."""
    weighs = tl.zeros((block,), tl.float64)
    highest = tl.zeros((block,), border.dtype)
    lowest = ~highest
    for start in range(0, items, block):
        _, key, weight = members(logits, weights, listing, listed, start, items, border, last, block)
        weighs += weight
        lowest = tl.minimum(lowest, tl.where(weight > 0.0, key, ~tl.zeros((block,), border.dtype)))
        highest = tl.maximum(highest, tl.where(weight > 0.0, key, 0).to(border.dtype))
    return tl.sum(weighs, 0), tl.min(lowest, 0), tl.max(highest, 0)


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

    All members weigh ``found``, their keys are from ``low`` to ``top``. Every other trial goes where the key would be
    if weights were spread evenly, the others halve; ends move to the next member. Where the target is met
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
def largest_of(logits, listing, listed, items, limit, border, block: tl.constexpr):
    """Border and last id of the ``limit`` largest; all keys are above ``border``."""
    last = limit * 0 - 1
    found, low, top = extent(logits, None, listing, listed, items, border, last, block)
    target = limit.to(tl.float64)
    key, above, _ = search(logits, None, listing, listed, items, border, last, low, top, found, target, block)
    ties = limit - above.to(tl.int32)
    return key, last_tie(logits, None, listing, listed, items, border, last, key, ties, block)

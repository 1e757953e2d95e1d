"""Choosing tokens on a GPU, without a sort and without the host.

A row of the vocabulary is cut into ranges of up to 4096 ids, one program each; what ranges find is combined in the
order of ranges, so the same row gives the same bits in any batch. ``greedy``: a launch for ranges, one for rows.

Selections (top_k, top_p, the most likely ids) look for a threshold key. A key is the logit's bits as an integer of the
same order, NaN above all. Each of the 8 launches of ``_narrow`` settles 4 bits of it (16 launches for float64): for the
16 values of the next digit it adds up how many ids of a range have them or how much these weigh, and the next launch
takes the largest digit that reaches the target. Ids that tie at the threshold are taken in their own order.

``probabilities``: the ranges' largest keys, top_k's digits, ``_weigh`` (unnormalised probabilities in float64 after
temperature, min_p and top_k), top_p's digits, ``_normalise``: 19 launches, of which those for top_k are left out where
no request can ask for it, and programs of rows that do not ask return at once. ``draw``: two launches. Accepting drafts
(``verify_reference``) and adjusting logits (``adjust_reference``) are elementwise torch code on any device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek.ops.checks import expect_dtype
from quickseek.ops.sampling.parameters import LogProbabilities, SparseDistribution, Verified
from quickseek.ops.sampling.reference import valid as valid  # two launches without a sort
from quickseek.ops.triton_chain import begin, chained

_LARGEST_RANGE, _SMALLEST_RANGE, _MOST_RANGES = 4096, 64, 32
_LOWEST_TEMPERATURE = tl.constexpr(1e-6)
_FLOATS = (torch.bfloat16, torch.float32, torch.float64)
_ORDER_BLOCK = 64


# ---------------------------------------------------------------------------------------------- keys


@triton.jit
def _key(x):
    """uint64 keys in the order of FP32 or FP64 values; the zeros are equal, NaN is the largest."""
    x = tl.where(x == 0.0, 0.0, x)
    if x.dtype == tl.float64:
        bits = x.to(tl.uint64, bitcast=True)
        key = tl.where((bits >> 63) != 0, ~bits, bits | 0x8000000000000000)
        key = tl.where(x != x, 0xFFFFFFFFFFFFFFFF, key)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        key = tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000).to(tl.uint64)
        key = tl.where(x != x, 0xFFFFFFFF, key)
    return key.to(tl.uint64)


@triton.jit
def _value(key, wide: tl.constexpr):
    """FP64 value of a key; ``wide``: of an FP64 key."""
    if wide:
        bits = tl.where((key >> 63) != 0, key ^ 0x8000000000000000, ~key)
        value = bits.to(tl.float64, bitcast=True)
    else:
        word = key.to(tl.uint32)
        bits = tl.where((word >> 31) != 0, word ^ 0x80000000, ~word)
        value = bits.to(tl.float32, bitcast=True).to(tl.float64)
    return value


@triton.jit
def _logits(logits, row, index, vocabulary):
    """FP32 or FP64 logits of a row; NaN keys beyond its end are for the caller to leave out."""
    x = tl.load(logits + row * vocabulary + index, mask=index < vocabulary, other=0.0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    return x


@chained
@triton.jit
def _largest(logits, keys, ids, vocabulary, ranges, block: tl.constexpr):
    """keys and ids [T, ranges]: the largest key of each range, and the first id that has it."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = part * block + tl.arange(0, block)
    inside = index < vocabulary
    key = tl.where(inside, _key(_logits(logits, row, index, vocabulary)), 0)
    largest = tl.max(key, 0)
    first = tl.min(tl.where(inside & (key == largest), index, vocabulary), 0)
    tl.store(keys + row * ranges + part, largest.to(tl.int64, bitcast=True))
    tl.store(ids + row * ranges + part, first.to(tl.int64))


@triton.jit
def _best(keys, ids, row, ranges, block_r: tl.constexpr, wide: tl.constexpr):
    """Key of a row's largest logit, its first id (0 if the row has a NaN), and 1 if the row holds a choice."""
    part = tl.arange(0, block_r)
    real = part < ranges
    key = tl.load(keys + row * ranges + part, mask=real, other=0).to(tl.uint64, bitcast=True)
    number = tl.load(ids + row * ranges + part, mask=real, other=0)
    largest = tl.max(tl.where(real, key, 0), 0)
    first = tl.min(tl.where(real & (key == largest), number, 0x7FFFFFFFFFFFFFFF), 0)
    value = _value(largest, wide)
    return largest, tl.where(value != value, 0, first), (tl.abs(value) < float("inf")).to(tl.int32)


@chained
@triton.jit
def _choose(keys, ids, chosen, ranges, block_r: tl.constexpr, wide: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    _, first, _ = _best(keys, ids, row, ranges, block_r, wide)
    tl.store(chosen + row, first)


# ---------------------------------------------------------------------------------------------- thresholds


@triton.jit
def _target(limits, count, sums, row, vocabulary, ranges, block_r: tl.constexpr, weighted: tl.constexpr):
    """What the members must reach, and whether the row asks for it: so many ids, or a share of the row's sum."""
    if weighted:
        part = tl.arange(0, block_r)
        share = tl.load(limits + row).to(tl.float64)
        total = tl.sum(tl.load(sums + row * ranges + part, mask=part < ranges, other=0.0), 0)
        # Above 0, so that the first id always stays.
        target, asked = tl.maximum(share * total, 1e-300), share < 1.0
    else:
        limit = count
        if limits is not None:
            limit = tl.load(limits + row)
        target, asked = limit.to(tl.float64), (limit > 0) & (limit < vocabulary)
    return target, asked


@triton.jit
def _settle(parts, prefixes, aboves, row, rows, ranges, number, target, block_r: tl.constexpr):
    """After launch ``number``: the digits so far, what lies above them, and what has exactly these digits."""
    part, digit = tl.arange(0, block_r), tl.arange(0, 16)
    place = ((number * rows + row) * ranges + part[:, None]) * 16 + digit[None, :]
    totals = tl.sum(tl.load(parts + place, mask=(part < ranges)[:, None], other=0.0), 0)
    above = tl.load(aboves + number * rows + row)
    reached = tl.minimum(tl.sum((above + tl.cumsum(totals, 0) < target).to(tl.int32), 0), 15)
    prefix = tl.load(prefixes + number * rows + row).to(tl.uint64, bitcast=True)
    prefix = prefix * 16 + (15 - reached).to(tl.uint64)
    above += tl.sum(tl.where(digit < reached, totals, 0.0), 0)
    return prefix, above, tl.sum(tl.where(digit == reached, totals, 0.0), 0)


@chained
@triton.jit(do_not_specialize=["count", "number", "rows"])
def _narrow(
    logits, weights, limits, count, sums, parts, prefixes, aboves, vocabulary, rows, ranges, number,
    passes: tl.constexpr, weighted: tl.constexpr, block: tl.constexpr, block_r: tl.constexpr,
):  # fmt: skip
    """parts [passes, T, ranges, 16]: what ids with the settled digits weigh by their next one, the largest first."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target, asked = _target(limits, count, sums, row, vocabulary, ranges, block_r, weighted)
    if asked:
        prefix = target.to(tl.uint64) * 0
        above = target * 0.0
        if number > 0:
            prefix, above, _ = _settle(parts, prefixes, aboves, row, rows, ranges, number - 1, target, block_r)
        if part == 0:
            tl.store(prefixes + number * rows + row, prefix.to(tl.int64, bitcast=True))
            tl.store(aboves + number * rows + row, above)
        index = part * block + tl.arange(0, block)
        inside = index < vocabulary
        key = _key(_logits(logits, row, index, vocabulary)) >> ((passes - 1 - number) * 4).to(tl.uint64)
        member = inside & ((key >> 4) == prefix)
        digit = (key & 15).to(tl.int32)
        weight = tl.full((block,), 1.0, tl.float64)
        if weighted:
            weight = tl.load(weights + row * vocabulary + index, mask=inside, other=0.0)
        place = parts + ((number * rows + row) * ranges + part) * 16
        for value in tl.static_range(16):
            tl.store(place + value, tl.sum(tl.where(member & (digit == 15 - value), weight, 0.0), 0))


@triton.jit
def _before(parts, row, rows, ranges, part, number, digit, block_r: tl.constexpr):
    """What earlier ranges hold with ``digit`` of launch ``number``."""
    other = tl.arange(0, block_r)
    place = ((number * rows + row) * ranges + other) * 16 + digit
    return tl.sum(tl.load(parts + place, mask=(other < ranges) & (other < part), other=0.0), 0)


# ---------------------------------------------------------------------------------------------- distributions


@triton.jit
def _scale(temperature, row):
    return tl.maximum(tl.load(temperature + row).to(tl.float64), _LOWEST_TEMPERATURE)


@chained
@triton.jit(do_not_specialize=["rows"])
def _weigh(
    logits, keys, ids, temperature, min_p, top_k, parts, prefixes, aboves, weights, sums, vocabulary, rows, ranges,
    passes: tl.constexpr, wide: tl.constexpr, block: tl.constexpr, block_r: tl.constexpr,
):  # fmt: skip
    """weights [T, V]: probabilities over the largest one after min_p and top_k, and their sums [T, ranges]."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest, best, choice = _best(keys, ids, row, ranges, block_r, wide)
    index = part * block + tl.arange(0, block)
    inside = index < vocabulary
    x = _logits(logits, row, index, vocabulary)
    weight = tl.exp((x.to(tl.float64) - _value(largest, wide)) / _scale(temperature, row))
    if min_p is not None:
        weight = tl.where(weight >= tl.load(min_p + row).to(tl.float64), weight, 0.0)
    if top_k is not None:
        target, asked = _target(top_k, 0, None, row, vocabulary, ranges, block_r, False)
        if asked:
            border, above, _ = _settle(parts, prefixes, aboves, row, rows, ranges, passes - 1, target, block_r)
            key = _key(x)
            tie = inside & (key == border)
            earlier = _before(parts, row, rows, ranges, part, passes - 1, 15 - (border & 15).to(tl.int32), block_r)
            rank = tl.cumsum(tie.to(tl.int32), 0).to(tl.float64) + earlier
            weight = tl.where((key > border) | (tie & (rank <= target - above)), weight, 0.0)
    if tl.load(temperature + row) == 0.0:
        weight = tl.where(index == best, 1.0, 0.0).to(tl.float64)
    weight = tl.where(inside & (choice != 0), weight, 0.0)
    tl.store(weights + row * vocabulary + index, weight, mask=inside)
    tl.store(sums + row * ranges + part, tl.sum(weight, 0))


@chained
@triton.jit(do_not_specialize=["rows"])
def _normalise(
    logits, keys, ids, temperature, top_p, parts, prefixes, aboves, weights, sums, vocabulary, rows, ranges,
    passes: tl.constexpr, wide: tl.constexpr, block: tl.constexpr, block_r: tl.constexpr,
):  # fmt: skip
    """In place: the weights that top_p leaves, over their sum."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = part * block + tl.arange(0, block)
    inside = index < vocabulary
    weight = tl.load(weights + row * vocabulary + index, mask=inside, other=0.0)
    other = tl.arange(0, block_r)
    kept = tl.sum(tl.load(sums + row * ranges + other, mask=other < ranges, other=0.0), 0)
    target, asked = _target(top_p, 0, sums, row, vocabulary, ranges, block_r, True)
    if asked:
        border, above, mass = _settle(parts, prefixes, aboves, row, rows, ranges, passes - 1, target, block_r)
        largest, _, _ = _best(keys, ids, row, ranges, block_r, wide)
        each = tl.exp((_value(border, wide) - _value(largest, wide)) / _scale(temperature, row))
        each = tl.where((each > 0.0) & (mass > 0.0), each, 1.0)
        # Ties stay while what is before them has not reached the target. All of them weigh the same.
        ties = tl.maximum(tl.ceil((target - above) / each), tl.where(above > 0.0, 0.0, 1.0))
        digit = 15 - (border & 15).to(tl.int32)
        earlier = tl.floor(_before(parts, row, rows, ranges, part, passes - 1, digit, block_r) / each + 0.5)
        key = _key(_logits(logits, row, index, vocabulary))
        tie = inside & (key == border)
        rank = tl.cumsum(tie.to(tl.int32), 0).to(tl.float64) + earlier
        weight = tl.where((key > border) | (tie & (rank <= ties)), weight, 0.0)
        kept = above + tl.minimum(ties * each, mass)
    weight = tl.where(kept > 0.0, weight / kept, 0.0)
    tl.store(weights + row * vocabulary + index, weight, mask=inside)


@chained
@triton.jit
def _range_sums(probability, sums, vocabulary, ranges, block: tl.constexpr):
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = part * block + tl.arange(0, block)
    weight = tl.load(probability + row * vocabulary + index, mask=index < vocabulary, other=0.0).to(tl.float64)
    tl.store(sums + row * ranges + part, tl.sum(weight, 0))


@chained
@triton.jit
def _pick(probability, uniform, sums, chosen, vocabulary, ranges, block: tl.constexpr, block_r: tl.constexpr):
    """The first id at which the sum of ranges and ids before exceeds the number; one of probability 0 never is."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, block_r)
    total = tl.load(sums + row * ranges + part, mask=part < ranges, other=0.0)
    summed = tl.cumsum(total, 0)
    whole = tl.sum(tl.where(part == ranges - 1, summed, 0.0), 0)
    number = tl.load(uniform + row).to(tl.float64) * whole
    holds = total > 0.0
    last_range = tl.max(tl.where(holds, part, 0), 0)
    found = tl.minimum(tl.min(tl.where(holds & (summed > number), part, block_r), 0), last_range)
    before = tl.sum(tl.where(part == found - 1, summed, 0.0), 0)
    index = found * block + tl.arange(0, block)
    weight = tl.load(probability + row * vocabulary + index, mask=index < vocabulary, other=0.0).to(tl.float64)
    possible = weight > 0.0
    last = tl.max(tl.where(possible, index, 0), 0)
    exceeds = possible & (before + tl.cumsum(weight, 0) > number)
    tl.store(chosen + row, tl.minimum(tl.min(tl.where(exceeds, index, vocabulary), 0), last).to(tl.int64))


# ---------------------------------------------------------------------------------------------- the most likely


@chained
@triton.jit(do_not_specialize=["rows", "count"])
def _collect(
    logits, parts, prefixes, aboves, found, vocabulary, rows, ranges, count,
    passes: tl.constexpr, block: tl.constexpr, block_r: tl.constexpr,
):  # fmt: skip
    """found [T, count]: the ids above the threshold, then those that tie with it, each in their own order."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = part * block + tl.arange(0, block)
    inside = index < vocabulary
    slot, taken = index, inside  # every id, where all are wanted
    if count < vocabulary:
        target = count.to(tl.float64)
        border, above, _ = _settle(parts, prefixes, aboves, row, rows, ranges, passes - 1, target, block_r)
        other, digit = tl.arange(0, block_r), tl.arange(0, 16)
        earlier_above = above * 0.0
        for number in tl.static_range(passes):
            settled = 15 - ((border >> ((passes - 1 - number) * 4)) & 15).to(tl.int32)
            place = ((number * rows + row) * ranges + other[:, None]) * 16 + digit[None, :]
            wanted = ((other < ranges) & (other < part))[:, None] & (digit < settled)[None, :]
            earlier_above += tl.sum(tl.load(parts + place, mask=wanted, other=0.0))
        earlier_ties = _before(parts, row, rows, ranges, part, passes - 1, 15 - (border & 15).to(tl.int32), block_r)
        key = _key(_logits(logits, row, index, vocabulary))
        greater, tie = inside & (key > border), inside & (key == border)
        greater_slot = earlier_above.to(tl.int32) + tl.cumsum(greater.to(tl.int32), 0) - 1
        tie_slot = (above + earlier_ties).to(tl.int32) + tl.cumsum(tie.to(tl.int32), 0) - 1
        slot = tl.where(greater, greater_slot, tie_slot)
        taken = greater | (tie & (tie_slot < count))
    tl.store(found + row * count + slot, index.to(tl.int64), mask=taken)


@chained
@triton.jit(do_not_specialize=["count"])
def _order(logits, found, offsets, ids, values, vocabulary, count, block: tl.constexpr):
    """ids and values [T, count] in falling order; ``offsets`` [T] are taken from the values."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < count
    number = tl.load(found + row * count + place, mask=inside, other=0)
    x = _logits(logits, row, number, vocabulary)
    key = _key(x)
    rank = tl.zeros((block,), tl.int32)
    for start in range(0, count, block):
        other = start + tl.arange(0, block)
        rival = tl.load(found + row * count + other, mask=other < count, other=0)
        theirs = _key(_logits(logits, row, rival, vocabulary))[None, :]
        ahead = (theirs > key[:, None]) | ((theirs == key[:, None]) & (other[None, :] < place[:, None]))
        rank += tl.sum((ahead & (other < count)[None, :]).to(tl.int32), 1)
    value = x.to(tl.float64)
    if offsets is not None:
        value -= tl.load(offsets + row)
    tl.store(ids + row * count + rank, number, mask=inside)
    tl.store(values + row * count + rank, value.to(values.dtype.element_ty), mask=inside)


@chained
@triton.jit(do_not_specialize=["count"])
def _draft(values, temperature, probability, count, block: tl.constexpr):
    """Softmax of ``count`` ordered logits over the temperature; one-hot at 0, zeros in a row without a choice."""
    begin()
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside = place < count
    x = tl.load(values + row * count + place, mask=inside, other=float("-inf"))
    largest = tl.load(values + row * count)
    weight = tl.where(inside, tl.exp((x - largest) / _scale(temperature, row)), 0.0)
    weight = weight / tl.sum(weight, 0)
    if tl.load(temperature + row) == 0.0:
        weight = tl.where(place == 0, 1.0, 0.0).to(tl.float64)
    weight = tl.where(tl.abs(largest) < float("inf"), weight, 0.0)
    tl.store(probability + row * count + place, weight, mask=inside)


@chained
@triton.jit
def _log_sums(logits, keys, ids, tokens, sums, ahead, vocabulary, ranges, wide: tl.constexpr, block: tl.constexpr,
              block_r: tl.constexpr):  # fmt: skip
    """Of each range: the sum of exponentials over the largest, and how many logits exceed the token's."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest, _, _ = _best(keys, ids, row, ranges, block_r, wide)
    index = part * block + tl.arange(0, block)
    inside = index < vocabulary
    x = _logits(logits, row, index, vocabulary)
    own = _key(_logits(logits, row, tl.load(tokens + row), vocabulary))
    weight = tl.where(inside, tl.exp(x.to(tl.float64) - _value(largest, wide)), 0.0)
    tl.store(sums + row * ranges + part, tl.sum(weight, 0))
    tl.store(ahead + row * ranges + part, tl.sum((inside & (_key(x) > own)).to(tl.int32), 0))


@chained
@triton.jit
def _log_chosen(logits, keys, ids, tokens, sums, ahead, offsets, chosen, rank, vocabulary, ranges, wide: tl.constexpr,
                block_r: tl.constexpr):  # fmt: skip
    """offsets [T]: the logarithm of the sum of exponentials; of the token: its log-probability and its rank."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, block_r)
    largest, _, choice = _best(keys, ids, row, ranges, block_r, wide)
    total = tl.sum(tl.load(sums + row * ranges + part, mask=part < ranges, other=0.0), 0)
    offset = _value(largest, wide) + tl.log(total)
    x = _logits(logits, row, tl.load(tokens + row), vocabulary).to(tl.float64)
    count = tl.sum(tl.load(ahead + row * ranges + part, mask=part < ranges, other=0), 0).to(tl.int64)
    tl.store(offsets + row, offset)
    tl.store(chosen + row, (x - offset).to(tl.float32))
    tl.store(rank + row, tl.where(choice != 0, count, 0) + 1)


# ---------------------------------------------------------------------------------------------- small ones


@chained
@triton.jit(do_not_specialize=["count", "purpose"])
def _philox(seeds, positions, out, count, purpose, block: tl.constexpr):
    """Philox4x32-10; 53 bits of its first two words over 2^53."""
    begin()
    index = tl.program_id(0) * block + tl.arange(0, block)
    live = index < count
    seed = tl.load(seeds + index, mask=live, other=0)
    position = tl.load(positions + index, mask=live, other=0)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c2 = tl.zeros((block,), tl.uint32) + purpose.to(tl.uint32)
    c3 = tl.zeros((block,), tl.uint32)
    m0, m1 = tl.full((block,), 0xD2511F53, tl.uint32), tl.full((block,), 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0, high1, low1 = tl.umulhi(c0, m0), c0 * m0, tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full((block,), 0x9E3779B9, tl.uint32)
        k1 += tl.full((block,), 0xBB67AE85, tl.uint32)
    bits = (c0.to(tl.int64) << 21) | (c1.to(tl.int64) >> 11)
    tl.store(out + index, bits.to(tl.float64) * 1.1102230246251565e-16, mask=live)


@chained
@triton.jit(do_not_specialize=["drafts"])
def _match(chosen, draft_tokens, draft_counts, accepted, tokens, drafts, block: tl.constexpr):
    begin()
    request, place = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    own = tl.load(chosen + request * (drafts + 1) + place, mask=place <= drafts, other=-1)
    theirs = tl.load(draft_tokens + request * drafts + place, mask=place < drafts, other=-2)
    stands = (own == theirs) & (place < tl.load(draft_counts + request)) & (place < drafts)
    count = tl.min(tl.where(stands, block, place), 0)
    tl.store(accepted + request, count.to(tl.int64))
    tl.store(tokens + request * (drafts + 1) + place, tl.where(place <= count, own, -1), mask=place <= drafts)


# ---------------------------------------------------------------------------------------------- launches


class _Rows:
    """Logits [T, V] cut into ranges, and what launches over them have in common."""

    def __init__(self, logits: Tensor) -> None:
        expect_dtype("logits", logits, *_FLOATS)
        self.logits = logits.contiguous()
        self.rows, self.vocabulary = logits.shape
        self.device = logits.device
        self.block, self.ranges = _cut(self.vocabulary)
        self.block_r = triton.next_power_of_2(self.ranges)
        self.grid = (self.rows, self.ranges)
        self.wide = logits.dtype == torch.float64
        self.passes = 16 if self.wide else 8

    def empty(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def largest(self) -> tuple[Tensor, Tensor]:
        keys, ids = (self.empty(self.rows, self.ranges, dtype=torch.int64) for _ in range(2))
        _largest[self.grid](self.logits, keys, ids, self.vocabulary, self.ranges, self.block)
        return keys, ids

    def threshold(
        self, limits: Tensor | None, count: int = 0, weights: Tensor | None = None, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the key that so many ids, or such a share of the weights, reach: ``_narrow``'s parts, digits and sums."""
        parts = self.empty(self.passes, self.rows, self.ranges, 16)
        prefixes = self.empty(self.passes, self.rows, dtype=torch.int64)
        aboves = self.empty(self.passes, self.rows)
        for number in range(self.passes):
            _narrow[self.grid](
                self.logits, weights, limits, count, sums, parts, prefixes, aboves, self.vocabulary, self.rows,
                self.ranges, number, self.passes, weights is not None, self.block, self.block_r,
            )  # fmt: skip
        return parts, prefixes, aboves

    def most_likely(self, count: int, offsets: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The ``count`` largest ids in falling order, and their logits less ``offsets`` [T]."""
        ids, values = self.empty(self.rows, count, dtype=torch.int64), self.empty(self.rows, count, dtype=dtype)
        if count and self.rows:
            found = torch.empty_like(ids)
            held = self.threshold(None, count)
            _collect[self.grid](
                self.logits, *held, found, self.vocabulary, self.rows, self.ranges, count, self.passes, self.block,
                self.block_r,
            )  # fmt: skip
            _order[(self.rows, triton.cdiv(count, _ORDER_BLOCK))](
                self.logits, found, offsets, ids, values, self.vocabulary, count, _ORDER_BLOCK
            )
        return ids, values


def _cut(vocabulary: int) -> tuple[int, int]:
    """Ids of a range, a power of two, and how many ranges there are: they depend on the vocabulary alone."""
    size = triton.next_power_of_2(triton.cdiv(vocabulary, _MOST_RANGES))
    block = min(_LARGEST_RANGE, max(_SMALLEST_RANGE, size))
    return block, triton.cdiv(vocabulary, block)


def uniform(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    expect_dtype("seeds", seeds, torch.int64)
    expect_dtype("positions", positions, torch.int64)
    count = seeds.shape[0]
    out = torch.empty(count, dtype=torch.float64, device=seeds.device)
    if count:
        _philox[(triton.cdiv(count, 128),)](seeds.contiguous(), positions.contiguous(), out, count, purpose, 128)
    return out


def greedy(logits: Tensor) -> Tensor:
    of = _Rows(logits)
    chosen = of.empty(of.rows, dtype=torch.int64)
    if of.rows:
        keys, ids = of.largest()
        _choose[(of.rows,)](keys, ids, chosen, of.ranges, of.block_r, of.wide, num_warps=1)
    return chosen


def probabilities(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor | None = None, min_p: Tensor | None = None
) -> Tensor:
    of = _Rows(logits)
    weights = of.empty(of.rows, of.vocabulary)
    if not of.rows:
        return weights
    temperature, top_p = temperature.contiguous(), top_p.contiguous()
    top_k, min_p = (x if x is None else x.contiguous() for x in (top_k, min_p))
    keys, ids = of.largest()
    held = (None, None, None) if top_k is None else of.threshold(top_k)
    sums = of.empty(of.rows, of.ranges)
    shape = (of.vocabulary, of.rows, of.ranges, of.passes, of.wide, of.block, of.block_r)
    _weigh[of.grid](of.logits, keys, ids, temperature, min_p, top_k, *held, weights, sums, *shape)
    held = of.threshold(top_p, weights=weights, sums=sums)
    _normalise[of.grid](of.logits, keys, ids, temperature, top_p, *held, weights, sums, *shape)
    return weights


def most_likely(logits: Tensor, temperature: Tensor, count: int) -> SparseDistribution:
    of = _Rows(logits)
    ids, values = of.most_likely(count, None, torch.float64)
    chances = torch.empty_like(values)
    if of.rows:
        _draft[(of.rows,)](values, temperature.contiguous(), chances, count, triton.next_power_of_2(count), num_warps=1)
    return SparseDistribution(ids, chances)


def draw(probability: Tensor, uniform: Tensor) -> Tensor:
    rows, vocabulary = probability.shape
    block, ranges = _cut(vocabulary)
    probability = probability.contiguous()
    chosen = torch.empty(rows, dtype=torch.int64, device=probability.device)
    sums = torch.empty(rows, ranges, dtype=torch.float64, device=probability.device)
    if rows:
        _range_sums[(rows, ranges)](probability, sums, vocabulary, ranges, block)
        _pick[(rows,)](
            probability, uniform.contiguous(), sums, chosen, vocabulary, ranges, block, triton.next_power_of_2(ranges)
        )
    return chosen


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> LogProbabilities:
    of = _Rows(logits)
    chosen, rank = of.empty(of.rows, dtype=torch.float32), of.empty(of.rows, dtype=torch.int64)
    offsets = of.empty(of.rows)
    if of.rows:
        keys, ids = of.largest()
        sums, ahead = of.empty(of.rows, of.ranges), of.empty(of.rows, of.ranges, dtype=torch.int32)
        tokens = tokens.contiguous()
        _log_sums[of.grid](
            of.logits, keys, ids, tokens, sums, ahead, of.vocabulary, of.ranges, of.wide, of.block, of.block_r
        )
        _log_chosen[(of.rows,)](
            of.logits, keys, ids, tokens, sums, ahead, offsets, chosen, rank, of.vocabulary, of.ranges, of.wide,
            of.block_r, num_warps=1,
        )  # fmt: skip
    return LogProbabilities(chosen, rank, *of.most_likely(top, offsets, torch.float32))


def match(chosen: Tensor, draft_tokens: Tensor, draft_counts: Tensor) -> Verified:
    batch, drafts = draft_tokens.shape
    accepted = torch.empty(batch, dtype=torch.int64, device=chosen.device)
    tokens = torch.empty(batch, drafts + 1, dtype=torch.int64, device=chosen.device)
    if batch:
        _match[(batch,)](
            chosen.contiguous(), draft_tokens.contiguous(), draft_counts.contiguous(), accepted, tokens, drafts,
            triton.next_power_of_2(drafts + 2), num_warps=1,
        )  # fmt: skip
    return Verified(accepted, tokens)

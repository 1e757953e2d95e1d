"""Choosing tokens on a GPU, without a sort and without the host.

A row of the vocabulary is cut into ranges of up to 4096 ids, one program each; what ranges find is combined in the
order of ranges, so the same row gives the same bits in any batch. ``greedy``: a launch for ranges, one for rows.

Selections (top_k, top_p, the most likely ids) are ``triton_threshold``'s. Counted: a chained launch is 2 us; besides,
passes over ranges wait for 0.5 MB a row from memory or the L2 cache (1 us), those that list or narrow for 16 KB of
counts too, and the one program a row of ``_limit`` and ``_collect`` for two dependent loads (1.4 us) and some ten reads
of the listed ids of 0.4 us for each limit.

- ``probabilities``: ``_largest``, ``_weigh`` (unnormalised probabilities in float64 after temperature and min_p, 1 MB a
  row written), ``narrow``, ``list_window``, ``_limit`` (top_k, then top_p), ``_normalise``: 6 launches. ``draw``: 2, of
  few ids 1.
- ``most_likely``: ``_largest``, ``spread``, ``list_levels``, ``_collect``, ``_order``, ``_draft``: 6 launches.
- ``log_probabilities``: ``_largest``, ``_log_sums``, ``_log_chosen``, then ``list_levels``, ``_collect`` and ``_order``
  for the likeliest ids: 6 launches.

Accepting drafts (``verify_reference``) and adjusting logits (``adjust_reference``) are elementwise torch code on any
device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek.ops.checks import expect_dtype
from quickseek.ops.sampling.parameters import LogProbabilities, SparseDistribution, Verified
from quickseek.ops.sampling.reference import valid as valid  # two launches without a sort
from quickseek.ops.sampling.triton_threshold import (
    LEVELS,
    best_of_row,
    count_levels,
    extent,
    key_value,
    largest_of,
    last_tie,
    limits,
    list_levels,
    list_window,
    members,
    min_p_of,
    narrow,
    order_key,
    row_logits,
    scale_of,
    search,
    spread,
    weight_of_row,
)
from quickseek.ops.triton_chain import begin, chained

_LARGEST_RANGE, _SMALLEST_RANGE, _MOST_RANGES = 4096, 64, 32
_ROOM = 16384
"""Ids of a row that are searched without reading the row again."""
_SEARCHED = 2048
"""Ids that a searching program looks at together."""
_FLOATS = (torch.bfloat16, torch.float32, torch.float64)
_ORDER_BLOCK = 64


# ---------------------------------------------------------------------------------------------- the largest


@chained
@triton.jit
def _largest(logits, keys, ids, vocabulary, ranges, block: tl.constexpr):
    """keys and ids [T, ranges]: the largest key of each range, and the first id that has it."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = part * block + tl.arange(0, block)
    inside = index < vocabulary
    key = tl.where(inside, order_key(row_logits(logits, row, index, vocabulary)), 0)
    largest = tl.max(key, 0)
    first = tl.min(tl.where(inside & (key == largest), index, vocabulary), 0)
    tl.store(keys + row * ranges + part, largest.to(keys.dtype.element_ty, bitcast=True))
    tl.store(ids + row * ranges + part, first.to(tl.int64))


@chained
@triton.jit
def _choose(keys, ids, chosen, ranges, block_r: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    _, first, _ = best_of_row(keys, ids, row, ranges, block_r)
    tl.store(chosen + row, first)


# ---------------------------------------------------------------------------------------------- distributions


@chained
@triton.jit
def _weigh(
    logits, keys, ids, temperature, min_p, weights, sums, levels, vocabulary, ranges,
    block: tl.constexpr, block_r: tl.constexpr,
):  # fmt: skip
    """weights [T, V]: probabilities over the largest one after min_p, their sums [T, ranges], and ``levels``."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest, best, choice = best_of_row(keys, ids, row, ranges, block_r)
    index = part * block + tl.arange(0, block)
    inside = index < vocabulary
    x = row_logits(logits, row, index, vocabulary)
    count_levels(levels, x, largest, inside, row, part, ranges)
    weight = tl.exp((x.to(tl.float64) - key_value(largest).to(tl.float64)) / scale_of(temperature, row))
    weight = tl.where(weight >= min_p_of(min_p, row), weight, 0.0)
    if tl.load(temperature + row) == 0.0:
        weight = tl.where(index == best, 1.0, 0.0).to(tl.float64)
    weight = tl.where(inside & (choice != 0), weight, 0.0)
    tl.store(weights + row * vocabulary + index, weight, mask=inside)
    tl.store(sums + row * ranges + part, tl.sum(weight, 0))


@chained
@triton.jit(do_not_specialize=["room"])
def _limit(
    logits, keys, ids, temperature, top_k, top_p, weights, sums, listing, listed, ahead, above, borders, lasts, kept,
    vocabulary, ranges, room, block: tl.constexpr, block_r: tl.constexpr,
):  # fmt: skip
    """What top_k and top_p leave of each row: keys above ``borders``, ids up to ``lasts`` with that key; its weight."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    limit, by_count, share, by_mass = limits(top_k, top_p, temperature, row, vocabulary)
    total = weight_of_row(sums, row, ranges, block_r)
    largest, _best, _choice = best_of_row(keys, ids, row, ranges, block_r)
    lowest, last = largest * 0, vocabulary * 0 - 1
    border = lowest
    logits += row * vocabulary
    weights += row * vocabulary
    listing += row * room
    if (by_count | by_mass) & (total > 0.0):
        length = tl.load(listed + row)
        use = length >= 0
        items = tl.where(use, length, vocabulary)
        over = tl.where(use, weight_of_row(above, row, ranges, block_r), 0.0)
        if by_count:
            limit -= tl.where(use, tl.load(ahead + row), 0)
            border, last = largest_of(logits, listing, use, items, limit, lowest, block)
        mass, low, top = extent(logits, weights, listing, use, items, border, last, block)
        if by_count:
            total = over + mass
        if by_mass:
            # Above 0, so that the first id always stays.
            target = tl.maximum(share * total, 1e-300)
            if use & ((over >= target) | (over + mass < target)):
                use, items, over = length < 0, vocabulary * 1, over * 0.0
                mass, low, top = extent(logits, weights, listing, use, items, border, last, block)
            target -= over
            key, before, found = search(
                logits, weights, listing, use, items, border, last, low, top, mass, target, block
            )
            distance = key_value(key).to(tl.float64) - key_value(largest).to(tl.float64)
            each = tl.exp(distance / scale_of(temperature, row))
            # Ties stay while what is before them has not reached the target. All of them weigh the same.
            ties = tl.minimum(tl.ceil((target - before) / each), 1.0 * vocabulary)
            last = last_tie(logits, weights, listing, use, items, border, last, key, ties.to(tl.int32), block)
            border, total = key, over + before + tl.minimum(ties * each, found - before)
    tl.store(borders + row, border.to(borders.dtype.element_ty, bitcast=True))
    tl.store(lasts + row, last)
    tl.store(kept + row, total)


@chained
@triton.jit
def _normalise(logits, weights, borders, lasts, kept, vocabulary, block: tl.constexpr):
    """In place: the weights that are kept, over their sum."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * block + tl.arange(0, block)
    weight = tl.load(weights + row * vocabulary + index, mask=index < vocabulary, other=0.0)
    key, total = order_key(row_logits(logits, row, index, vocabulary)), tl.load(kept + row)
    border = tl.load(borders + row).to(key.dtype, bitcast=True)
    member = (key > border) | ((key == border) & (index <= tl.load(lasts + row)))
    weight = tl.where(member, weight, 0.0) / tl.where(total > 0.0, total, 1.0)
    tl.store(weights + row * vocabulary + index, weight, mask=index < vocabulary)


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
    """The first id at which the sum of ranges and ids before exceeds the number; one of probability 0 never is.

    Without ``sums`` there is one range.
    """
    begin()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, block_r)
    if sums is None:
        only = tl.arange(0, block)
        weight = tl.load(probability + row * vocabulary + only, mask=only < vocabulary, other=0.0).to(tl.float64)
        total = tl.full((block_r,), 0.0, tl.float64) + tl.sum(weight, 0)
    else:
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
@triton.jit(do_not_specialize=["count", "room"])
def _collect(
    logits, keys, ids, listing, listed, found, vocabulary, ranges, count, room,
    block: tl.constexpr, block_r: tl.constexpr,
):  # fmt: skip
    """found [T, count]: the ids of the ``count`` largest logits, ascending."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    largest, _best, _choice = best_of_row(keys, ids, row, ranges, block_r)
    lowest, last = largest * 0, vocabulary * 0 - 1
    border, use, items = lowest, vocabulary < 0, vocabulary * 1
    logits += row * vocabulary
    listing += row * room
    if count < vocabulary:
        length = tl.load(listed + row)
        use = length >= count
        items = tl.where(use, length, vocabulary)
        border, last = largest_of(logits, listing, use, items, count, lowest, block)
    taken = items * 0
    for start in range(0, items, block):
        index, _key, member = members(logits, None, listing, use, start, items, border, last, block)
        slot = taken + tl.cumsum(member.to(tl.int32), 0) - 1
        tl.store(found + row * count + slot, index.to(tl.int64), mask=member > 0.0)
        taken += tl.sum(member.to(tl.int32), 0)


@chained
@triton.jit(do_not_specialize=["count"])
def _order(logits, found, offsets, ids, values, vocabulary, count, block: tl.constexpr):
    """ids and values [T, count] in falling order; ``offsets`` [T] are taken from the values."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < count
    number = tl.load(found + row * count + place, mask=inside, other=0)
    x = row_logits(logits, row, number, vocabulary)
    key = order_key(x)
    rank = tl.zeros((block,), tl.int32)
    for start in range(0, count, block):
        other = start + tl.arange(0, block)
        rival = tl.load(found + row * count + other, mask=other < count, other=0)
        theirs = order_key(row_logits(logits, row, rival, vocabulary))[None, :]
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
    weight = tl.where(inside, tl.exp((x - largest) / scale_of(temperature, row)), 0.0)
    weight = weight / tl.sum(weight, 0)
    if tl.load(temperature + row) == 0.0:
        weight = tl.where(place == 0, 1.0, 0.0).to(tl.float64)
    weight = tl.where(tl.abs(largest) < float("inf"), weight, 0.0)
    tl.store(probability + row * count + place, weight, mask=inside)


@chained
@triton.jit
def _log_sums(logits, keys, ids, tokens, sums, ahead, levels, vocabulary, ranges, block: tl.constexpr,
              block_r: tl.constexpr):  # fmt: skip
    """Of each range: the sum of exponentials over the largest, how many logits exceed the token's, and ``levels``."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest, _, _ = best_of_row(keys, ids, row, ranges, block_r)
    index = part * block + tl.arange(0, block)
    inside = index < vocabulary
    x = row_logits(logits, row, index, vocabulary)
    own = order_key(row_logits(logits, row, tl.load(tokens + row), vocabulary))
    if levels is not None:
        count_levels(levels, x, largest, inside, row, part, ranges)
    weight = tl.where(inside, tl.exp(x.to(tl.float64) - key_value(largest).to(tl.float64)), 0.0)
    tl.store(sums + row * ranges + part, tl.sum(weight, 0))
    tl.store(ahead + row * ranges + part, tl.sum((inside & (order_key(x) > own)).to(tl.int32), 0))


@chained
@triton.jit
def _log_chosen(logits, keys, ids, tokens, sums, ahead, offsets, chosen, rank, vocabulary, ranges,
                block_r: tl.constexpr):  # fmt: skip
    """offsets [T]: the logarithm of the sum of exponentials; of the token: its log-probability and its rank."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, block_r)
    largest, _, choice = best_of_row(keys, ids, row, ranges, block_r)
    total = tl.sum(tl.load(sums + row * ranges + part, mask=part < ranges, other=0.0), 0)
    offset = key_value(largest).to(tl.float64) + tl.log(total)
    x = row_logits(logits, row, tl.load(tokens + row), vocabulary).to(tl.float64)
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
        self.room = min(_ROOM, self.vocabulary)
        self.searched = min(_SEARCHED, triton.next_power_of_2(self.vocabulary))
        self.key_dtype = torch.int64 if logits.dtype == torch.float64 else torch.int32

    def empty(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def largest(self) -> tuple[Tensor, Tensor]:
        keys, ids = (self.empty(self.rows, self.ranges, dtype=dtype) for dtype in (self.key_dtype, torch.int64))
        _largest[self.grid](self.logits, keys, ids, self.vocabulary, self.ranges, self.block)
        return keys, ids

    def levels(self) -> Tensor:
        return self.empty(self.rows, self.ranges, LEVELS.value, dtype=torch.int32)

    def listed(self, keys: Tensor, ids: Tensor, levels: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Ids of each row that hold its ``count`` largest, and how many there are (``list_levels``)."""
        listing, listed = self.empty(self.rows, self.room, dtype=torch.int32), self.empty(self.rows, dtype=torch.int32)
        list_levels[self.grid](
            self.logits, keys, ids, levels, listing, listed, self.vocabulary, self.ranges, count, self.room, self.block,
            self.block_r,
        )  # fmt: skip
        return listing, listed

    def bordering(
        self, keys: Tensor, ids: Tensor, asked: tuple[Tensor | None, ...], weights: Tensor, sums: Tensor, levels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids around the borders that ``asked`` (temperature, top_k, top_p, min_p) give, and what is above them.

        The listing and how many ids it has, how many are above, and what those of each range weigh (``list_window``).
        """
        windows, parts = self.empty(self.rows, 2, dtype=torch.int32), torch.empty_like(levels)
        over, inside, above = (torch.empty_like(sums) for _ in range(3))
        skipped, listed, ahead = (self.empty(self.rows, dtype=torch.int32) for _ in range(3))
        listing = self.empty(self.rows, self.room, dtype=torch.int32)
        narrow[self.grid](
            self.logits, keys, ids, *asked, weights, sums, levels, windows, skipped, over, inside, parts,
            self.vocabulary, self.ranges, self.block, self.block_r,
        )  # fmt: skip
        list_window[self.grid](
            self.logits, keys, ids, *asked, weights, sums, windows, skipped, over, inside, parts, listing, listed,
            ahead, above, self.vocabulary, self.ranges, self.room, self.block, self.block_r,
        )  # fmt: skip
        return listing, listed, ahead, above

    def most_likely(
        self, keys: Tensor, ids: Tensor, levels: Tensor, count: int, offsets: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The ``count`` largest ids in falling order, and their logits less ``offsets`` [T]."""
        found = self.empty(self.rows, count, dtype=torch.int64)
        ordered, values = torch.empty_like(found), self.empty(self.rows, count, dtype=dtype)
        _collect[(self.rows,)](
            self.logits, keys, ids, *self.listed(keys, ids, levels, count), found, self.vocabulary, self.ranges, count,
            self.room, self.searched, self.block_r, num_warps=_warps(self.searched),
        )  # fmt: skip
        _order[(self.rows, triton.cdiv(count, _ORDER_BLOCK))](
            self.logits, found, offsets, ordered, values, self.vocabulary, count, _ORDER_BLOCK
        )
        return ordered, values


def _warps(block: int) -> int:
    """Of a searching program: four ids a thread, because it runs each instruction few times and has to fetch them."""
    return max(1, min(16, block // 128))


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
        _choose[(of.rows,)](keys, ids, chosen, of.ranges, of.block_r, num_warps=1)
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
    sums, levels = of.empty(of.rows, of.ranges), of.levels()
    _weigh[of.grid](
        of.logits, keys, ids, temperature, min_p, weights, sums, levels, of.vocabulary, of.ranges, of.block, of.block_r
    )
    bordering = of.bordering(keys, ids, (temperature, top_k, top_p, min_p), weights, sums, levels)
    borders, lasts, kept = (of.empty(of.rows, dtype=dtype) for dtype in (of.key_dtype, torch.int32, torch.float64))
    _limit[(of.rows,)](
        of.logits, keys, ids, temperature, top_k, top_p, weights, sums, *bordering, borders, lasts, kept, of.vocabulary,
        of.ranges, of.room, of.searched, of.block_r, num_warps=_warps(of.searched),
    )  # fmt: skip
    _normalise[of.grid](of.logits, weights, borders, lasts, kept, of.vocabulary, of.block)
    return weights


def most_likely(logits: Tensor, temperature: Tensor, count: int) -> SparseDistribution:
    of = _Rows(logits)
    if not of.rows:
        return SparseDistribution(of.empty(0, count, dtype=torch.int64), of.empty(0, count))
    keys, ids = of.largest()
    levels = of.levels()
    spread[of.grid](of.logits, keys, ids, levels, of.vocabulary, of.ranges, of.block, of.block_r)
    ordered, values = of.most_likely(keys, ids, levels, count, None, torch.float64)
    chances = torch.empty_like(values)
    _draft[(of.rows,)](values, temperature.contiguous(), chances, count, triton.next_power_of_2(count), num_warps=1)
    return SparseDistribution(ordered, chances)


def draw(probability: Tensor, uniform: Tensor) -> Tensor:
    rows, vocabulary = probability.shape
    block, ranges = _cut(vocabulary)
    probability = probability.contiguous()
    chosen = torch.empty(rows, dtype=torch.int64, device=probability.device)
    sums = torch.empty(rows, ranges, dtype=torch.float64, device=probability.device) if ranges > 1 else None
    if rows:
        if sums is not None:
            _range_sums[(rows, ranges)](probability, sums, vocabulary, ranges, block)
        _pick[(rows,)](
            probability, uniform.contiguous(), sums, chosen, vocabulary, ranges, block, triton.next_power_of_2(ranges)
        )
    return chosen


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> LogProbabilities:
    of = _Rows(logits)
    chosen, rank = of.empty(of.rows, dtype=torch.float32), of.empty(of.rows, dtype=torch.int64)
    offsets, likely = of.empty(of.rows), (of.empty(of.rows, top, dtype=torch.int64), chosen.new_empty(of.rows, top))
    if of.rows:
        keys, ids = of.largest()
        sums, ahead = of.empty(of.rows, of.ranges), of.empty(of.rows, of.ranges, dtype=torch.int32)
        levels, tokens = of.levels() if top else None, tokens.contiguous()
        _log_sums[of.grid](
            of.logits, keys, ids, tokens, sums, ahead, levels, of.vocabulary, of.ranges, of.block, of.block_r
        )
        _log_chosen[(of.rows,)](
            of.logits, keys, ids, tokens, sums, ahead, offsets, chosen, rank, of.vocabulary, of.ranges, of.block_r,
            num_warps=1,
        )  # fmt: skip
        if levels is not None:
            likely = of.most_likely(keys, ids, levels, top, offsets, torch.float32)
    return LogProbabilities(chosen, rank, *likely)


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

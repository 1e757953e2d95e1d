"""Mixture of experts on a GPU in Triton: packed experts are read as they are, nothing of the routing reaches the host.

Launches, in order:

* ``route``: ``router_parts`` (partial logits; reads the router's weight once per 16 or 64 rows), ``choose`` (sums
  them in a fixed order, top-k, weights).
* ``routed_experts``: ``prepare`` (A8 of x; the record: which sorted row each slot has, and tiles of up to ROWS sorted
  rows of one expert), ``gate_up`` (w13, SwiGLU, A8), ``down`` (w2). A step of few rows has a tile for each slot, of
  which those that do not begin a tile leave at once; a long one has ``slots // ROWS + experts`` tiles, so that the
  grid is known to the host. Bytes that must move: the packed weights and scales of every expert that was chosen. The
  two products of few rows are those of ``cute.py`` where ``few_rows`` finds it, else the ones here.
* ``shared_expert``: the linear operation twice, ``swiglu`` between them.
* ``finalize``: one launch; reads k rows and the shared one, writes one.

Products here take BF16 values, which hold A8 activations and FP4 weights exactly, and accumulate in FP32; between these
kernels activations are kept 2^63 times as large, and weights are taken 2^-63 times (why: ``fp4_values``). Weights are
the left operand, so that 8 rows of a step are enough to fill a tile. The packed byte b holds the elements 2b and
2b + 1: the activations of these products are stored with all even elements before all odd ones, and each half of a
byte has a product of its own.
"""

from types import ModuleType
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickseek.formats import BLOCK
from quickseek.ops import linear as linear_op
from quickseek.ops import triton_math as math
from quickseek.ops.checks import expect_dtype, expect_shape
from quickseek.ops.forms import cute_form
from quickseek.ops.linear import Fp4Weight, QuantizedRows, Weight
from quickseek.ops.moe.reference import WEIGHT_FLOOR, Routing, UnfinalizedMoE
from quickseek.ops.moe.triton_record import for_fp4, prepare
from quickseek.ops.triton_chain import begin, chained, fetch

if TYPE_CHECKING:
    from quickseek.ops.moe import ExpertWeights

FEW_SLOTS = 512
"""Up to so many (row, expert) pairs each pair has a tile of its own; above, experts have them."""
MOST_CUTE_SLOTS = 288
"""Up to so many pairs take the kernels of ``cute.py`` (FEW_SLOTS at most)."""
TILE_ROWS = ((2, 8), (10, 16))
"""Rows of a tile by the mean rows of an expert: 8 up to 2, 16 up to 10, beyond 64."""
GATE_UP_FEW = {8: (32, 64, 4, 3), 16: (32, 64, 4, 3)}
"""By the rows of a tile: pairs of outputs of a program, packed bytes of a warp at a time, warps, stages."""
DOWN_ONE, DOWN = (64, 128, 4, 2), (128, 64, 4, 3)
"""Outputs of a program, packed bytes of a step, warps, stages: for the tiles of a row or two, and for more."""
CHOOSE_WARPS = 4
"""Warps that choose the experts of a row."""
MOST_FETCHED_ITEMS = 16
"""Tiles of which the L2 cache keeps the down projections that are asked for ahead."""


# ---------------------------------------------------------------------------------------------- router


@triton.jit
def router_score(logit):
    """sqrt(softplus(logit)) of FP32 values; below -20 softplus is exp, whose root does not underflow."""
    u = tl.exp(-tl.abs(logit))
    one_more = 1.0 + u
    # log1p: the quotient cancels the rounding of 1 + u.
    log1p = tl.where(one_more == 1.0, u, tl.log(one_more) * (u / tl.where(one_more == 1.0, 1.0, one_more - 1.0)))
    softplus = tl.maximum(logit, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p
    return tl.where(logit < -20.0, tl.exp(0.5 * logit), tl.sqrt(softplus))


@chained
@triton.jit(do_not_specialize=["rows", "experts", "chunks"])
def router_parts(x, weight, parts, rows, experts, hidden, chunks, LINES: tl.constexpr, ROWS: tl.constexpr):
    """parts [splits, rows, experts]: products over ``chunks`` times 64 columns of x and weight."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    first = tl.program_id(2) * chunks * 64
    place = (weight + tl.minimum(line, experts - 1).to(tl.int64) * hidden + first).to(tl.int64)
    fetch(place, 2 * tl.minimum(chunks * 64, hidden - first), 4)
    begin()
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    x_row = x + row.to(tl.int64)[None, :] * hidden
    weight_line = weight + line.to(tl.int64)[:, None] * hidden
    total = tl.zeros((LINES, ROWS), tl.float32)
    for chunk in tl.range(0, chunks):
        column = (split * chunks + chunk) * 64 + tl.arange(0, 64)
        inside = column < hidden
        a = tl.load(weight_line + column[None, :], mask=(line < experts)[:, None] & inside[None, :], other=0.0)
        b = tl.load(x_row + column[:, None], mask=(row < rows)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
    place = parts + (split.to(tl.int64) * rows + row.to(tl.int64)[None, :]) * experts + line[:, None]
    tl.store(place, total, mask=(line < experts)[:, None] & (row < rows)[None, :])


@triton.jit
def either(key, expert, score, other_key, other_expert, other_score):
    """Of two candidates, of which one at most is there, that one; the expert of none is -1."""
    there = expert >= 0
    return tl.where(there, key, other_key), tl.where(there, expert, other_expert), tl.where(there, score, other_score)


# A lane that loads several experts at once would take them from other warps: no alignment of the biases is known.
@chained
@triton.jit(
    do_not_specialize=["rows", "experts", "scale", "temperature", "weight_floor"],
    do_not_specialize_on_alignment=["bias", "image_bias"],
)
def choose(
    parts, bias, image_bias, image_rows, chosen, weights, rows, experts, scale, temperature, weight_floor,
    SPLITS: tl.constexpr, TOP: tl.constexpr, TOP_BLOCK: tl.constexpr, WARPS: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    """The experts and weights of one row: TOP times the largest biased score; a NaN is above every number.

    Each warp lists the best of its own 32 * REPEATS experts, then every warp finds the TOP best of all lists: maxima
    of 32 bits within a warp are one instruction, and warps wait for each other only between the two.
    """
    NOTHING: tl.constexpr = -0x80000000
    MOST: tl.constexpr = 0x7FFFFFFF
    fetch((bias + tl.zeros((1,), tl.int32)).to(tl.int64), experts * 4, 32)
    if image_bias is not None:
        fetch((image_bias + tl.zeros((1,), tl.int32)).to(tl.int64), experts * 4, 32)
    begin()
    row = tl.program_id(0)
    # [REPEATS * WARPS, 32]: a row is a warp's.
    expert = tl.arange(0, REPEATS * WARPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    exists = expert < experts
    place = parts + row.to(tl.int64) * experts + expert
    # All before the first sum, so that all are on their way at once.
    split_logits = ()
    for _ in tl.static_range(SPLITS):
        split_logits += (tl.load(place, mask=exists, other=0.0),)  # type: ignore[assignment]
        place += rows.to(tl.int64) * experts
    added = tl.load(bias + expert, mask=exists, other=0.0)
    if image_bias is not None:
        of_image = tl.load(image_bias + expert, mask=exists, other=0.0)
        added = tl.where(tl.load(image_rows + row) != 0, of_image, added)
    logit = tl.zeros(expert.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        logit += split_logits[split]
    if temperature != 1.0:
        logit = tl.div_rn(logit, tl.full(expert.shape, 1.0, tl.float32) * temperature)
    score = router_score(logit)
    biased = score + added
    bits = tl.where(biased != biased, float("inf"), biased).to(tl.int32, bitcast=True)
    # Integers in the order of the biased scores.
    key = tl.where(exists, bits ^ ((bits >> 31) & 0x7FFFFFFF), NOTHING)
    key = tl.reshape(key, (REPEATS, WARPS, 32))
    expert = tl.reshape(expert, (REPEATS, WARPS, 32))
    score_bits = tl.reshape(score.to(tl.int32, bitcast=True), (REPEATS, WARPS, 32))
    LISTED: tl.constexpr = min(TOP, REPEATS * 32)
    # [WARPS, lists of all warps]: a warp's own list, and none elsewhere.
    column = tl.arange(0, WARPS * TOP_BLOCK)[None, :]
    first = tl.arange(0, WARPS)[:, None] * TOP_BLOCK
    keys = tl.full((WARPS, WARPS * TOP_BLOCK), NOTHING, tl.int32)
    listed = tl.full((WARPS, WARPS * TOP_BLOCK), -1, tl.int32)
    scores = tl.full((WARPS, WARPS * TOP_BLOCK), 0, tl.int32)
    for turn in tl.static_range(LISTED):
        best = tl.max(tl.max(key, 0), 1)
        lowest = tl.min(tl.min(tl.where(key == best[None, :, None], expert, MOST), 0), 1)
        taken = expert == lowest[None, :, None]
        key = tl.where(taken, NOTHING, key)
        here = column == first + turn
        keys = tl.where(here, best[:, None], keys)
        listed = tl.where(here, lowest[:, None], listed)
        scores = tl.where(here, tl.max(tl.max(tl.where(taken, score_bits, NOTHING), 0), 1)[:, None], scores)
    keys, listed, scores = tl.reduce((keys, listed, scores), 0, either)
    slot = tl.arange(0, TOP_BLOCK)
    experts_chosen = tl.zeros((TOP_BLOCK,), tl.int32)
    scores_chosen = tl.zeros((TOP_BLOCK,), tl.int32)
    for turn in tl.static_range(TOP):
        lowest = tl.min(tl.where(keys == tl.max(keys, 0), listed, MOST), 0)
        # More than once in the list of a warp with fewer experts than TOP: behind all that exist, with the same score.
        taken = listed == lowest
        keys = tl.where(taken, NOTHING, keys)
        experts_chosen = tl.where(slot == turn, lowest, experts_chosen)
        scores_chosen = tl.where(slot == turn, tl.max(tl.where(taken, scores, NOTHING), 0), scores_chosen)
    scores_chosen = scores_chosen.to(tl.float32, bitcast=True)
    total = tl.sum(scores_chosen, 0) + weight_floor
    found = tl.div_rn(scores_chosen, tl.full((TOP_BLOCK,), 1.0, tl.float32) * total) * scale
    place = row.to(tl.int64) * TOP + slot
    tl.store(chosen + place, experts_chosen.to(tl.int64), mask=slot < TOP)
    tl.store(weights + place, found, mask=slot < TOP)


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    scale: float,
    temperature: float,
    image_bias: Tensor | None,
    image_rows: Tensor | None,
) -> Routing:
    expect_dtype("x", x, torch.bfloat16)
    expect_dtype("weight", weight, torch.bfloat16)
    expect_dtype("bias", bias, torch.float32)
    rows, hidden = x.shape
    experts = weight.shape[0]
    if not 0 < top_k <= experts:
        raise ValueError(f"top_k = {top_k}: expected 1 to the {experts} experts")
    if image_bias is None or image_rows is None:
        image_bias = image_rows = None
    else:
        expect_dtype("image_bias", image_bias, torch.float32)
        expect_dtype("image_rows", image_rows, torch.bool)
    x, weight = x.contiguous(), weight.contiguous()
    per_row_tile = 16 if rows <= 16 else 64
    splits = 16 if rows <= 64 else 4 if rows <= 512 else 1
    chunks = triton.cdiv(triton.cdiv(hidden, splits), 64)
    splits = triton.cdiv(hidden, chunks * 64)
    parts = torch.empty(splits, rows, experts, dtype=torch.float32, device=x.device)
    chosen = torch.empty(rows, top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
    if rows:
        grid = (triton.cdiv(experts, 32), triton.cdiv(rows, per_row_tile), splits)
        # A decode step's program has all of its five chunks in flight.
        router_parts[grid](
            x, weight, parts, rows, experts, hidden, chunks, LINES=32, ROWS=per_row_tile,
            num_warps=4, num_stages=6 if rows <= 16 else 4,
        )  # fmt: skip
        choose[(rows,)](
            parts, bias, image_bias, image_rows, chosen, weights, rows, experts, scale, temperature, WEIGHT_FLOOR,
            SPLITS=splits, TOP=top_k, TOP_BLOCK=triton.next_power_of_2(top_k), WARPS=CHOOSE_WARPS,
            REPEATS=triton.next_power_of_2(triton.cdiv(experts, 32 * CHOOSE_WARPS)), num_warps=CHOOSE_WARPS,
        )  # fmt: skip
    return Routing(chosen, weights)


# ---------------------------------------------------------------------------------------------- formats


@triton.jit
def fp4_values(codes, scales, SCALE_SHAPE: tl.constexpr):
    """2^-63 of the values of the even and of the odd elements of packed bytes: BF16, an E8M0 byte for every 16 of them.

    SCALE_SHAPE: the shape of ``scales`` with a dimension of 16 behind it. Exact for scales of 2^-62 to 2^64; a larger
    one gives NaN. The activations that they are multiplied with are 2^63 times too large.
    """
    bits = tl.where(scales < 192, (scales.to(tl.int16) + 63) << 7, 0x7FC0).to(tl.int16)
    scale = tl.expand_dims(bits.to(tl.bfloat16, bitcast=True), -1)
    scale = tl.reshape(tl.broadcast_to(scale, SCALE_SHAPE), codes.shape)
    # A product less for each pair: the codes are 2^-126 of their values, the scale 2^63 times too large.
    return math.e2m1_pairs(codes, scale, SMALL=True)


@triton.jit
def clamped_swiglu(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in FP32; NaN stays NaN."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-gate)) * up


# ---------------------------------------------------------------------------------------------- products


@triton.jit
def store_hidden(hidden, gate, up, limit, first, count, pair_tile, inner, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """A8 of the SwiGLU of FP32 products [PAIRS, ROWS], stored as even columns before odd ones."""
    gate = gate.to(tl.bfloat16).to(tl.float32)
    up = up.to(tl.bfloat16).to(tl.float32)
    value = tl.trans(clamped_swiglu(gate, up, limit).to(tl.bfloat16).to(tl.float32))
    groups = tl.reshape(value, (ROWS, PAIRS // 32, 32))
    values = for_fp4(math.fake_quantize_a8(groups))
    even, odd = tl.split(tl.reshape(values, (ROWS, PAIRS // 2, 2)))
    column = pair_tile * (PAIRS // 2) + tl.arange(0, PAIRS // 2)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    place = hidden + (first + row).to(tl.int64) * inner + column
    inside = (row < count) & (column < inner // 2)
    tl.store(place, even, mask=inside)
    tl.store(place + inner // 2, odd, mask=inside)


@chained
@triton.jit
def gate_up_few(
    x, tokens, tiles, codes, scales, hidden, width, groups, inner, limit,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """hidden: A8 of the SwiGLU of w13 x for a tile's rows. Each warp takes its own slices of the ``width`` bytes."""
    begin()
    tile = tiles + tl.program_id(1) * 3
    expert = tl.load(tile)
    if expert < 0:
        return
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    column = tl.arange(0, ROWS)
    token = tl.load(tokens + first + column, mask=column < count, other=0)
    x_row = x + (token.to(tl.int64) * (2 * width))[None, None, :]
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    line = (expert.to(tl.int64) * (2 * inner) + tl.minimum(pair, inner - 1))[None, :, None]
    slices = tl.arange(0, SLICES)[:, None, None] * BYTES
    GROUPS: tl.constexpr = BYTES // 16
    group_slices = tl.arange(0, SLICES)[:, None, None] * GROUPS
    gate = tl.zeros((SLICES, PAIRS, ROWS), tl.float32)
    up = tl.zeros((SLICES, PAIRS, ROWS), tl.float32)
    for start in tl.range(0, width, SLICES * BYTES):
        byte = start + slices + tl.arange(0, BYTES)[None, None, :]
        group = start // 16 + group_slices + tl.arange(0, GROUPS)[None, None, :]
        gate_place = codes + line * width + byte
        gate_codes = tl.load(gate_place, mask=byte < width, other=0)
        up_codes = tl.load(gate_place + inner.to(tl.int64) * width, mask=byte < width, other=0)
        gate_place = scales + line * groups + group
        gate_scales = tl.load(gate_place, mask=group < groups, other=0)
        up_scales = tl.load(gate_place + inner.to(tl.int64) * groups, mask=group < groups, other=0)
        byte = start + slices + tl.arange(0, BYTES)[None, :, None]
        wanted = (byte < width) & (column < count)[None, None, :]
        even = tl.load(x_row + byte, mask=wanted, other=0.0)
        odd = tl.load(x_row + width + byte, mask=wanted, other=0.0)
        gate_even, gate_odd = fp4_values(gate_codes, gate_scales, (SLICES, PAIRS, GROUPS, 16))
        up_even, up_odd = fp4_values(up_codes, up_scales, (SLICES, PAIRS, GROUPS, 16))
        gate = tl.dot(gate_even, even, gate)
        gate = tl.dot(gate_odd, odd, gate)
        up = tl.dot(up_even, even, up)
        up = tl.dot(up_odd, odd, up)
    store_hidden(hidden, tl.sum(gate, 0), tl.sum(up, 0), limit, first, count, tl.program_id(0), inner, PAIRS, ROWS)


@chained
@triton.jit
def gate_up_many(
    x, tokens, tiles, codes, scales, hidden, width, groups, inner, limit,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """As ``gate_up_few``, all warps together on the same bytes."""
    begin()
    tile = tiles + tl.program_id(1) * 3
    expert = tl.load(tile)
    if expert < 0:
        return
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    column = tl.arange(0, ROWS)
    token = tl.load(tokens + first + column, mask=column < count, other=0)
    x_row = x + (token.to(tl.int64) * (2 * width))[None, :]
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    line = expert.to(tl.int64) * (2 * inner) + tl.minimum(pair, inner - 1)
    line = line[:, None]
    GROUPS: tl.constexpr = BYTES // 16
    gate = tl.zeros((PAIRS, ROWS), tl.float32)
    up = tl.zeros((PAIRS, ROWS), tl.float32)
    for start in tl.range(0, width, BYTES):
        byte = start + tl.arange(0, BYTES)
        group = start // 16 + tl.arange(0, GROUPS)[None, :]
        inside = (byte < width)[None, :]
        gate_place = codes + line * width + byte[None, :]
        gate_codes = tl.load(gate_place, mask=inside, other=0)
        up_codes = tl.load(gate_place + inner.to(tl.int64) * width, mask=inside, other=0)
        gate_place = scales + line * groups + group
        gate_scales = tl.load(gate_place, mask=group < groups, other=0)
        up_scales = tl.load(gate_place + inner.to(tl.int64) * groups, mask=group < groups, other=0)
        wanted = (byte < width)[:, None] & (column < count)[None, :]
        even = tl.load(x_row + byte[:, None], mask=wanted, other=0.0)
        odd = tl.load(x_row + width + byte[:, None], mask=wanted, other=0.0)
        gate_even, gate_odd = fp4_values(gate_codes, gate_scales, (PAIRS, GROUPS, 16))
        up_even, up_odd = fp4_values(up_codes, up_scales, (PAIRS, GROUPS, 16))
        gate = tl.dot(gate_even, even, gate)
        gate = tl.dot(gate_odd, odd, gate)
        up = tl.dot(up_even, even, up)
        up = tl.dot(up_odd, odd, up)
    store_hidden(hidden, gate, up, limit, first, count, tl.program_id(0), inner, PAIRS, ROWS)


@chained
@triton.jit
def down(
    hidden, tiles, codes, scales, out, width, groups, outputs, ahead,
    LINES: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """out [slots, outputs]: w2 of the rows of hidden, for a tile's rows and LINES outputs.

    ``tiles`` is older than the kernel before: ``ahead``, the tile's weights are asked for before the wait.
    """
    tile = tiles + tl.program_id(1) * 3
    # Not from the L1 cache, which may hold the tiles of an earlier layer in the same memory until the wait.
    expert = tl.load(tile, cache_modifier=".cg")
    output = tl.program_id(0) * LINES + tl.arange(0, LINES)
    line = tl.maximum(expert, 0).to(tl.int64) * outputs + tl.minimum(output, outputs - 1)
    early = (expert >= 0) & (ahead != 0)
    fetch((codes + line * width).to(tl.int64), tl.where(early, width, 0), 2)
    fetch((scales + line * groups).to(tl.int64), tl.where(early, groups, 0), 1)
    begin()
    if expert < 0:
        return
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    column = tl.arange(0, ROWS)
    row = (first + column).to(tl.int64)
    line = line[:, None]
    GROUPS: tl.constexpr = BYTES // 16
    total = tl.zeros((LINES, ROWS), tl.float32)
    for start in tl.range(0, width, BYTES):
        byte = start + tl.arange(0, BYTES)
        group = start // 16 + tl.arange(0, GROUPS)[None, :]
        tile_codes = tl.load(codes + line * width + byte[None, :], mask=(byte < width)[None, :], other=0)
        tile_scales = tl.load(scales + line * groups + group, mask=group < groups, other=0)
        place = hidden + (row * (2 * width))[None, :] + byte[:, None]
        wanted = (byte < width)[:, None] & (column < count)[None, :]
        even = tl.load(place, mask=wanted, other=0.0)
        odd = tl.load(place + width, mask=wanted, other=0.0)
        even_values, odd_values = fp4_values(tile_codes, tile_scales, (LINES, GROUPS, 16))
        total = tl.dot(even_values, even, total)
        total = tl.dot(odd_values, odd, total)
    place = out + (row * outputs)[None, :] + output[:, None]
    tl.store(place, total.to(tl.bfloat16), mask=(output < outputs)[:, None] & (column < count)[None, :])


def expect_experts(name: str, weight: Weight, shape: list[int]) -> Fp4Weight:
    """``weight`` is packed, contiguous and of this shape [experts, outputs, inputs]."""
    if not isinstance(weight, Fp4Weight):
        raise ValueError(f"{name} is {type(weight).__name__}: expected Fp4Weight, experts are read packed")
    for part, size in ((weight.codes, 2), (weight.scales, BLOCK)):
        expect_dtype(name, part, torch.uint8)
        expect_shape(name, part, [*shape[:-1], shape[-1] // size])
        if not part.is_contiguous():
            raise ValueError(f"{name} has strides {part.stride()}: expected contiguous codes and scales")
    return weight


def few_rows(x: Tensor, slots: int, inner: int, *packed: Tensor) -> ModuleType | None:
    """The kernels that take the products instead of the ones here: for few slots, on a GPU, where sizes fit."""
    if not x.is_cuda or slots > MOST_CUTE_SLOTS:
        return None
    kernels = cute_form("quickseek.ops.moe")
    return kernels if kernels is not None and kernels.fits(x.shape[1], inner, *packed) else None


def routed_experts(
    x: Tensor, routing: Routing, weights: "ExpertWeights", limit: float, routed_weight: str
) -> UnfinalizedMoE:
    expect_dtype("x", x, torch.bfloat16)
    if routed_weight != "after":
        raise ValueError(f"routed_weight = {routed_weight!r}: expected 'after', the only place that kernels know")
    expect_dtype("routing.experts", routing.experts, torch.int64)
    rows, hidden = x.shape
    experts, inner = weights.w2.shape[0], weights.w2.shape[-1]
    if hidden % BLOCK or inner % BLOCK:
        raise ValueError(f"x has {hidden} columns and w2 {inner}: expected multiples of {BLOCK}")
    w13 = expect_experts("w13", weights.w13, [experts, 2 * inner, hidden])
    w2 = expect_experts("w2", weights.w2, [experts, hidden, inner])
    chosen = routing.experts.contiguous()
    top_k = chosen.shape[1]
    slots = rows * top_k
    few = slots <= FEW_SLOTS
    form = few_rows(x, slots, inner, w13.codes, w13.scales, w2.codes, w2.scales)
    tile_rows = next((size for mean, size in TILE_ROWS if slots <= mean * experts), 64)
    if form is not None:
        tile_rows = form.tile_rows(rows)
    recorders = slots if few else experts
    items = slots if few else slots // tile_rows + experts

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=x.device)

    index = empty(rows, top_k, dtype=torch.int32)
    out = empty(slots, hidden, dtype=torch.bfloat16)
    if not slots:
        return UnfinalizedMoE(out, routing.weights, index)
    tokens = empty(slots, dtype=torch.int32)
    tiles = empty(items, 3, dtype=torch.int32)
    activations = torch.bfloat16 if form is None else torch.uint8
    quantized, between = empty(rows, hidden, dtype=activations), empty(slots, inner, dtype=activations)
    factors = None if form is None else empty(rows, hidden // BLOCK, dtype=torch.float32)
    chunks = triton.cdiv(hidden, 1024)
    prepare[(recorders + rows * chunks,)](
        x.contiguous(), chosen, quantized, factors, index, tokens, tiles, slots, top_k, experts, hidden, recorders,
        chunks, BY_EXPERT=not few, ROWS=tile_rows, num_warps=4,
    )  # fmt: skip
    if form is not None:
        between_factors = empty(slots, inner // BLOCK, dtype=torch.float32)
        record = (chosen, tokens, tiles)
        form.gate_up(quantized, factors, record, (w13.codes, w13.scales), between, between_factors, limit)
        form.down(between, between_factors, tiles, (w2.codes, w2.scales), out, rows)
        return UnfinalizedMoE(out, routing.weights, index)
    operands = (quantized, tokens, tiles, w13.codes, w13.scales, between, hidden // 2, hidden // BLOCK, inner, limit)
    if tile_rows <= 16:
        pairs, bytes_, warps, stages = GATE_UP_FEW[tile_rows]
        gate_up_few[(triton.cdiv(inner, pairs), items)](
            *operands, PAIRS=pairs, ROWS=tile_rows, BYTES=bytes_, SLICES=warps, num_warps=warps, num_stages=stages
        )
    else:
        gate_up_many[(triton.cdiv(inner, 64), items)](
            *operands, PAIRS=64, ROWS=tile_rows, BYTES=64, num_warps=4, num_stages=3
        )
    lines, bytes_, warps, stages = DOWN_ONE if items <= MOST_FETCHED_ITEMS else DOWN
    down[(triton.cdiv(hidden, lines), items)](
        between, tiles, w2.codes, w2.scales, out, inner // 2, inner // BLOCK, hidden, items <= MOST_FETCHED_ITEMS,
        LINES=lines, ROWS=tile_rows, BYTES=bytes_, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return UnfinalizedMoE(out, routing.weights, index)


# ---------------------------------------------------------------------------------------------- shared, finalisation


@chained
@triton.jit
def swiglu(gate_up, out, scales, inner, limit, QUANTIZE: tl.constexpr):
    """SwiGLU of gate_up [rows, 2 * inner], 1,024 columns of a row: BF16 values, or A8's bytes and scales."""
    begin()
    group = tl.program_id(1) * 32 + tl.arange(0, 32)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    row = tl.program_id(0).to(tl.int64)
    inside = column < inner
    gate = tl.load(gate_up + row * (2 * inner) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * inner) + inner + column, mask=inside, other=0.0).to(tl.float32)
    value = clamped_swiglu(gate, up, limit).to(tl.bfloat16)
    if QUANTIZE:
        groups = value.to(tl.float32)
        exponent = math.a8_exponent(groups)
        tl.store(out + row * inner + column, math.a8_bytes(groups, exponent), mask=inside)
        tl.store(scales + row * (inner // 32) + group, exponent.to(tl.uint8), mask=group < inner // 32)
    else:
        tl.store(out + row * inner + column, value, mask=inside)


def expert(x: Tensor, w13: Weight, w2: Weight, limit: float, weight: Tensor | None = None) -> Tensor:
    expect_dtype("x", x, torch.bfloat16)
    if weight is not None:
        raise ValueError("weight is given: expected None, kernels apply it after the down projection")
    inner = w2.shape[-1]
    packed = not isinstance(w2, Tensor)
    if w13.shape[0] != 2 * inner:
        raise ValueError(f"w13 has {w13.shape[0]} outputs: expected twice the {inner} inputs of w2")
    if packed and inner % BLOCK:
        raise ValueError(f"w2 has {inner} inputs: expected a multiple of {BLOCK} to quantise them")
    gate_up = linear_op.linear(x, w13)
    rows = x.shape[0]
    hidden = torch.empty(rows, inner, dtype=torch.uint8 if packed else x.dtype, device=x.device)
    scales = torch.empty(rows, inner // BLOCK, dtype=torch.uint8, device=x.device) if packed else None
    if rows:
        swiglu[(rows, triton.cdiv(inner, 1024))](gate_up, hidden, scales, inner, limit, QUANTIZE=packed, num_warps=4)
    quantized = hidden if scales is None else QuantizedRows(hidden.view(torch.float8_e4m3fn), scales)
    return linear_op.linear(quantized, w2)


@chained
@triton.jit
def weighted_sum(rows, weights, index, shared, out, columns, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """One row of out: k weighted rows in ascending slot order, then the shared one, in FP32 with one rounding."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP):
        row = tl.load(index + token * TOP + slot).to(tl.int64)
        weight = tl.load(weights + token * TOP + slot)
        there = column < tl.where(row >= 0, columns, 0)
        value = tl.load(rows + row * columns + column, mask=there, other=0.0)
        total += tl.where(row >= 0, value.to(tl.float32) * weight, 0.0)
    total += tl.load(shared + token * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, total.to(tl.bfloat16), mask=inside)


def finalize(routed: UnfinalizedMoE, shared: Tensor) -> Tensor:
    expect_dtype("shared", shared, torch.bfloat16)
    expect_dtype("rows", routed.rows, torch.bfloat16)
    expect_dtype("weights", routed.weights, torch.float32)
    expect_dtype("index", routed.index, torch.int32)
    tokens, columns = shared.shape
    out = torch.empty(tokens, columns, dtype=shared.dtype, device=shared.device)
    if tokens:
        weighted_sum[(tokens, triton.cdiv(columns, 1024))](
            routed.rows.contiguous(), routed.weights.contiguous(), routed.index.contiguous(), shared.contiguous(),
            out, columns, TOP=routed.index.shape[1], BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out

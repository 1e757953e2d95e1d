"""What the routed experts of a step start from: A8 of the rows, and the record of which expert has which of them.

The record: ``index`` int32 [slots], each slot's row once rows are sorted by expert, -1 for none; ``tokens`` int32
[slots], the token of a sorted row; ``tiles`` int32 [tiles, 3], the expert (-1: an empty tile), the first sorted row and
the number of rows of a tile.
"""

import triton
import triton.language as tl

from quickseek.ops import triton_math as math
from quickseek.ops.triton_chain import begin, chained


@triton.jit
def for_fp4(values):
    """BF16 of FP32 activations after A8, 2^63 times as large: the other factor of what ``fp4_values`` gives."""
    return (values * 9.223372036854775808e18).to(tl.bfloat16)


@triton.jit
def quantize_chunk(x, quantized, row, chunk, hidden):
    """A8 of 1,024 columns of a row of x: all even columns of the row first, then all odd ones."""
    column = chunk * 1024 + tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    start = row.to(tl.int64) * hidden
    groups = tl.load(x + start + column, mask=column < hidden, other=0.0).to(tl.float32)
    values = for_fp4(math.fake_quantize_a8(groups))
    even, odd = tl.split(tl.reshape(values, (32, 16, 2)))
    pair = chunk * 512 + tl.arange(0, 32)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(quantized + start + pair, even, mask=pair < hidden // 2)
    tl.store(quantized + start + hidden // 2 + pair, odd, mask=pair < hidden // 2)


@triton.jit
def code_chunk(x, codes, factors, row, chunk, hidden):
    """As ``quantize_chunk`` for ``cute.py``: E4M3 codes in the order of ``code_place``, scales as FP32."""
    group = chunk * 32 + tl.arange(0, 32)
    element = tl.arange(0, 32)[None, :]
    column = group[:, None] * 32 + element
    start = row.to(tl.int64) * hidden
    groups = tl.load(x + start + column, mask=column < hidden, other=0.0).to(tl.float32)
    exponent = math.a8_exponent(groups)
    place = group[:, None] * 32 + (element & 24) + ((element & 3) << 1) + ((element & 7) >> 2)
    tl.store(codes + start + place, math.a8_bytes(groups, exponent), mask=column < hidden)
    place = factors + row.to(tl.int64) * (hidden // 32) + group
    tl.store(place, math.e8m0_value(exponent), mask=group < hidden // 32)


@triton.jit
def record_slot(chosen, slot, index, tokens, tiles, slots, top_k, experts, ROWS: tl.constexpr):
    """The sorted row of one slot, and the tile that begins there, if one does."""
    mine = tl.load(chosen + slot).to(tl.int32)
    before, rank, count = 0, 0, 0
    for start in range(0, slots, 128):
        other = start + tl.arange(0, 128)
        theirs = tl.load(chosen + other, mask=other < slots, other=-1).to(tl.int32)
        before += tl.sum(((theirs >= 0) & (theirs < mine)).to(tl.int32), 0)
        same = (theirs == mine) & (other < slots)
        rank += tl.sum((same & (other < slot)).to(tl.int32), 0)
        count += tl.sum(same.to(tl.int32), 0)
    exists = (mine >= 0) & (mine < experts)
    row = before + rank
    tl.store(index + slot, tl.where(exists, row, -1))
    tl.store(tokens + row, slot // top_k, mask=exists)
    begins = exists & (rank % ROWS == 0)
    tl.store(tiles + slot * 3, tl.where(begins, mine, -1))
    tl.store(tiles + slot * 3 + 1, row)
    tl.store(tiles + slot * 3 + 2, tl.minimum(count - rank, ROWS))


@triton.jit
def record_expert(chosen, expert, index, tokens, tiles, slots, top_k, experts, ROWS: tl.constexpr):
    """The sorted rows of one expert's slots, and its tiles; expert 0 marks the slots of none.

    ``before // ROWS + expert`` is the first of its tiles: the next expert's first is at least as far behind as this
    one has tiles; those that it does not need are empty.
    """
    before, count = 0, 0
    for start in range(0, slots, 1024):
        other = start + tl.arange(0, 1024)
        theirs = tl.load(chosen + other, mask=other < slots, other=-1).to(tl.int32)
        before += tl.sum(((theirs >= 0) & (theirs < expert)).to(tl.int32), 0)
        count += tl.sum((theirs == expert).to(tl.int32), 0)
        absent = ((theirs < 0) | (theirs >= experts)) & (other < tl.where(expert == 0, slots, 0))
        tl.store(index + other, tl.full((1024,), -1, tl.int32), mask=absent)
    first = before // ROWS + expert
    last = (before + count) // ROWS + expert + 1
    # The grid has a tile for every slot; slots of no expert leave the last ones to nobody else.
    last = tl.where(expert == experts - 1, slots // ROWS + experts, last)
    for tile in range(first, last):
        done = (tile - first) * ROWS
        tl.store(tiles + tile * 3, tl.where(done < count, expert, -1))
        tl.store(tiles + tile * 3 + 1, before + done)
        tl.store(tiles + tile * 3 + 2, tl.minimum(count - done, ROWS))
    row = before
    for start in range(0, slots, 1024):
        other = start + tl.arange(0, 1024)
        theirs = tl.load(chosen + other, mask=other < slots, other=-1).to(tl.int32)
        same = (theirs == expert) & (other < slots)
        if tl.max(same.to(tl.int32), 0) != 0:
            place = row + tl.cumsum(same.to(tl.int32), 0) - 1
            tl.store(index + other, place, mask=same)
            tl.store(tokens + place, other // top_k, mask=same)
            row += tl.sum(same.to(tl.int32), 0)


@chained
@triton.jit(do_not_specialize=["slots", "top_k", "experts", "recorders", "chunks"])
def prepare(
    x, chosen, quantized, factors, index, tokens, tiles, slots, top_k, experts, hidden, recorders, chunks,
    BY_EXPERT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The first ``recorders`` programs write the record, the others A8 of ``chunks`` chunks a row.

    With ``factors`` (else None) rows are codes and factors, else BF16 values.
    """
    begin()
    program = tl.program_id(0)
    if program >= recorders:
        part = program - recorders
        if factors is None:
            quantize_chunk(x, quantized, part // chunks, part % chunks, hidden)
        else:
            code_chunk(x, quantized, factors, part // chunks, part % chunks, hidden)
    elif BY_EXPERT:
        record_expert(chosen, program, index, tokens, tiles, slots, top_k, experts, ROWS)
    else:
        record_slot(chosen, program, index, tokens, tiles, slots, top_k, experts, ROWS)

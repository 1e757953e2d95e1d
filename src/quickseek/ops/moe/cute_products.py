"""Products of packed experts and few rows, in CuTe DSL: what ``gate_up`` and ``down`` share (``cute_fragments.py``).

Packed weights go from global memory into registers, where eleven instructions make FP16 of eight codes; activations
are A8 codes in the order of ``code_place`` and their scales in FP32, of a tile's rows, in shared memory. A tile takes a
set of tensor-core products for each two of its rows. (The E4M3 form of ``mma.sync`` would not help: the assembler
makes it of conversions to FP16, products of FP16 and additions on all of these GPUs.)

The sum over a group of 32 inputs is the tensor core's; scaled by powers of two the groups are added in FP32, in an
order that does not depend on the rows. Weight scales are exact from 2^-102 to 2^127; 255 gives NaN, 0 counts as zero.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

from quickseek.ops import ptx
from quickseek.ops.moe.cute_fragments import CHUNK, GROUP, LINES, PAIR, WEIGHT_SHIFT, code_bytes, scale_bits

GROUP_BYTES = GROUP // 2
PADDING = 16
"""Bytes between rows of activations in shared memory: the two rows of a product lie in different banks."""


class Lane(NamedTuple):
    """A thread: itself in the block, its warp, and in the warp its line and quarter."""

    thread: Any
    warp: Any
    line: Any
    quarter: Any


class Record(NamedTuple):
    """A tile: its expert, -1 for none, its first sorted row and how many rows it has.

    ``slots``: bit i stands for slot i after the tile's first, set where that has the same expert; 0 where not known.
    """

    expert: Any
    first: Any
    count: Any
    slots: Any


class Operand(NamedTuple):
    """Shared memory that a lane reads: its codes in chunk 0 for each pair of rows, what a chunk adds, its factors."""

    codes: Any
    step: Any
    factors: Any


# ---------------------------------------------------------------------------------------------- instructions


def copy_or_zero(target: Any, source: Any, size: int, wanted: Any) -> None:
    """Start a copy of 4 or 16 bytes from global into shared memory; zeros where not wanted."""
    cached = "cg" if size == 16 else "ca"
    inline_ptx(
        f"cp.async.{cached}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
        read_only_args=[target, source, ptx.choose(wanted, Int32(size), Int32(0))],
    )


def await_copies() -> None:
    """All copies that this thread started are done."""
    inline_ptx("cp.async.wait_all;")


def clear_shared_word(address: Any) -> None:
    inline_ptx("st.shared.b32 [{$r0}], 0;", read_only_args=[address])


def half_pairs(word: Any) -> list[Any]:
    """FP16 pairs, 2^-14 of the FP4 values of a word of weights: elements (0, 4), (1, 5), (2, 6) and (3, 7)."""
    low, high = code_bytes(word, Uint32)
    return [_lower_bytes(low), _lower_bytes(high), low & Uint32(0xFF00FF00), high & Uint32(0xFF00FF00)]


def _lower_bytes(word: Any) -> Any:
    """Bytes 0 and 2 of a word as the upper bytes of its halves, zeros below."""
    return inline_ptx("prmt.b32 {$w0}, {$r0}, 0, 0x2404;", write_only_types=[Uint32], read_only_args=[word])


def first_bit(word: Any) -> Any:
    """The number of zeros below the lowest bit that is set in 64."""
    return inline_ptx(
        "{ .reg .b64 bit; neg.s64 bit, {$r0}; and.b64 bit, bit, {$r0}; sub.u64 bit, bit, 1; popc.b64 {$w0}, bit; }",
        write_only_types=[Int32],
        read_only_args=[word],
    )


def float_of(instruction: str, *values: Any) -> Any:
    """FP32 result of an instruction on FP32 values."""
    operands = ", ".join(f"{{$r{index}}}" for index in range(len(values)))
    return inline_ptx(
        f"{instruction}.f32 {{$w0}}, {operands};", write_only_types=[Float32], read_only_args=list(values)
    )


def largest_in_warp(word: Any) -> Any:
    """The largest of a warp's unsigned words."""
    return inline_ptx("redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Uint32], read_only_args=[word])


def rounded(value: Any) -> Any:
    """FP32 after a rounding to BF16."""
    return ptx.unpack_bf16(ptx.pack_bf16(value, value))[0]


# ---------------------------------------------------------------------------------------------- products


class FewRows:
    """What both products share: ``inputs`` a multiple of 32, ``parts`` sets of 16 outputs ``apart`` outputs apart.

    ``slices`` warps take the chunks of an output in turns; a warp has ``depth`` chunks of weights on their way. Tiles
    have up to ``rows`` rows, 2 or MOST_ROWS.
    """

    def __init__(self, inputs: int, parts: int, apart: int, rows: int, warps: int, slices: int, depth: int) -> None:
        self.rows, self.pairs = rows, rows // PAIR
        self.inputs, self.width, self.groups = inputs, inputs // 2, inputs // GROUP
        self.chunks = -(-self.groups // CHUNK)
        self.parts, self.apart = parts, apart
        self.threads, self.slices = warps * 32, slices
        self.trips = -(-self.chunks // slices)
        self.depth = min(depth, self.trips)
        self.stride = self.chunks * CHUNK * GROUP + PADDING
        self.zeros = rows * self.stride
        self.factors = self.zeros + 2 * 16
        self.shared = self.factors + self.chunks * CHUNK * rows * 4

    @staticmethod
    def here() -> Lane:
        thread, _, _ = cute.arch.thread_idx()
        return Lane(thread, thread // 32, thread % 32 // 4, thread % 4)

    def weight_rows(self, codes: Any, scales: Any, output: Any) -> Any:
        """Addresses of the codes and scales of an output."""
        return codes + Int64(output) * self.width, scales + Int64(output) * self.groups

    def load(self, words: Any, marks: Any, stage: int, rows: Any, chunk: Any, lane: Lane) -> None:
        """A lane's part of a chunk of weights: a group of two outputs of every part."""
        group = chunk * CHUNK + lane.quarter
        if self.groups % CHUNK:
            # The activations of a group beyond the last are zeros.
            group = ptx.choose(group < Int32(self.groups), group, Int32(self.groups - 1))
        codes, scales = rows[0] + Int64(group) * GROUP_BYTES, rows[1] + Int64(group)
        for part in range(self.parts):
            for half in range(2):
                output = part * self.apart + half * (LINES // 2)
                place = (stage * self.parts + part) * 2 + half
                for word, value in enumerate(ptx.stream_pack(codes + output * self.width)):
                    words[4 * place + word] = value
                marks[place] = ptx.load_byte(scales + output * self.groups)

    def multiply(
        self, words: Any, marks: Any, stage: int, totals: Any, pairs: int, chunk: Any, operand: Operand
    ) -> None:
        """Add the products of a stage's weights and ``pairs`` pairs of rows to totals [parts, pairs, 4]."""
        sums = [[[Float32(0.0)] * 4 for _ in range(pairs)] for _ in range(self.parts)]
        # Of many rows the activations are read for each part anew: registers are few.
        for parts in [range(self.parts)] if pairs == 1 else [[part] for part in range(self.parts)]:
            for two in range(2):
                codes = [ptx.load_shared_words(code + chunk * operand.step + 16 * two, 4) for code in operand.codes]
                for word in range(2):
                    rows = [ptx.halves_of(code[2 * word]) + ptx.halves_of(code[2 * word + 1]) for code in codes]
                    for part in parts:
                        place = 4 * ((stage * self.parts + part) * 2) + 2 * two + word
                        upper, lower = half_pairs(words[place]), half_pairs(words[place + 4])
                        for turn in (0, 2):
                            a = [upper[turn], lower[turn], upper[turn + 1], lower[turn + 1]]
                            for pair in range(pairs):
                                b = rows[pair][turn : turn + 2]
                                sums[part][pair] = ptx.product(sums[part][pair], a, b)
        column = operand.factors + chunk * (CHUNK * self.rows * 4)
        factors = [
            [word.bitcast(Float32) for word in ptx.load_shared_words(column + 8 * pair, 2)] for pair in range(pairs)
        ]
        for part in range(self.parts):
            place = (stage * self.parts + part) * 2
            weights = [scale_bits(marks[place + half], Uint32).bitcast(Float32) for half in range(2)]
            for pair in range(pairs):
                for index in range(4):
                    scaled = ptx.multiply(sums[part][pair][index], weights[index // 2])
                    total = (part * pairs + pair) * 4 + index
                    totals[total] = ptx.fused_multiply_add(scaled, factors[pair][index % 2], totals[total])

    def operand(self, shared: Any, pairs: int, lane: Lane) -> Operand:
        """What a lane reads of the activations: column ``line`` has one group's codes, in that group's quarter."""
        mine = lane.line // PAIR == lane.quarter
        first = shared + lane.line % PAIR * self.stride + lane.quarter * GROUP
        zeros = shared + self.zeros
        codes = [ptx.choose(mine, first + pair * (PAIR * self.stride), zeros) for pair in range(pairs)]
        step = ptx.choose(mine, Int32(CHUNK * GROUP), Int32(0))
        return Operand(codes, step, shared + self.factors + lane.quarter * (self.rows * 4))

    @cute.jit
    def bring(self, given: Any, record: Record, thread: Any, shared: Any) -> None:
        """Copy a tile's activations into shared memory."""
        pieces = self.chunks * (CHUNK * GROUP // 16)
        for index in cutlass.range(thread, record.count * pieces, self.threads, unroll=1):
            row, piece = index // pieces, index % pieces
            inside = piece < Int32(self.inputs // 16)
            column = Int64(ptx.choose(inside, piece, Int32(0))) * 16
            source = given.values + self.source(given, record, row) * self.inputs + column
            copy_or_zero(shared + row * self.stride + piece * 16, source, 16, inside)
        groups = self.chunks * CHUNK
        for index in cutlass.range(thread, record.count * groups, self.threads, unroll=1):
            row, group = index // groups, index % groups
            inside = group < Int32(self.groups)
            column = Int64(ptx.choose(inside, group, Int32(0))) * 4
            source = given.factors + self.source(given, record, row) * (self.groups * 4) + column
            copy_or_zero(shared + self.factors + (group * self.rows + row) * 4, source, 4, inside)
        if thread < Int32(8):
            clear_shared_word(shared + self.zeros + thread * 4)
        await_copies()
        cute.arch.sync_threads()

    def source(self, given: Any, record: Record, row: Any) -> Any:
        """The row of the activations (64-bit) that a tile's row reads: here the sorted rows are stored."""
        return Int64(record.first + row)

    @staticmethod
    def quad_sum(four: Any, quarter: Any) -> Any:
        """The sum over a quad of what its lanes hold of ``kept``'s output and row, weights taken at full size."""
        odd = quarter % 2 == 1
        halves = []
        for upper, lower in ((four[0], four[1]), (four[2], four[3])):
            sent = cute.arch.shuffle_sync_bfly(ptx.choose(odd, upper, lower), offset=1)
            halves.append(ptx.choose(odd, lower, upper) + sent)
        high = quarter // 2 == 1
        sent = cute.arch.shuffle_sync_bfly(ptx.choose(high, halves[0], halves[1]), offset=2)
        return ptx.multiply(ptx.choose(high, halves[1], halves[0]) + sent, Float32(2.0**WEIGHT_SHIFT))

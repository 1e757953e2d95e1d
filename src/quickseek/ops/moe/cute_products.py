"""Products of packed experts and few rows, in CuTe DSL: what ``gate_up`` and ``down`` share (``cute_fragments.py``).

Packed weights are copied into shared memory ahead of their use; in registers eleven instructions make FP16 of eight
codes. Activations are A8 codes in the order of ``code_place`` and their scales in FP32, of a tile's rows, in shared
memory. A tile takes a set of tensor-core products for each two of its rows. (The E4M3 form of ``mma.sync`` would not
help: the assembler makes it of conversions to FP16, products of FP16 and additions on all of these GPUs.)

The sum over a group of 32 inputs is the tensor core's; scaled by powers of two the groups are added in FP32, in an
order that does not depend on the rows. Weight scales are exact from 2^-102 to 2^127; 255 gives NaN, 0 counts as zero.
"""

from collections.abc import Iterator
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
    """Shared memory that a lane reads: its codes in chunk 0 for each pair of rows, what a chunk adds, its factors, and
    the scales of its first output.
    """

    codes: Any
    step: Any
    factors: Any
    scales: Any


# ---------------------------------------------------------------------------------------------- instructions


def copy_pack(target: Any, source: Any) -> None:
    """Start a copy of 16 bytes from global into shared memory, past the L1 cache."""
    inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target, source])


def end_group() -> None:
    """What this thread has started to copy since the last call is a group."""
    inline_ptx("cp.async.commit_group;")


def await_groups(left: int) -> None:
    """All groups of copies of this thread but the last ``left`` are done, and seen by it."""
    inline_ptx(f"cp.async.wait_group {left};")


def clear_shared_word(address: Any) -> None:
    inline_ptx("st.shared.b32 [{$r0}], 0;", read_only_args=[address])


def load_shared_byte(address: Any) -> Any:
    """A byte of shared memory in a word."""
    return inline_ptx("ld.volatile.shared.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


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
    """What both products share: ``inputs`` a multiple of 32, ``parts`` sets of outputs ``apart`` outputs apart.

    A block of ``warps`` has ``lines`` outputs of each part. A warp has up to ``depth`` times ``stage`` bytes of weights
    on their way. Tiles have up to ``rows`` rows, an even number. In shared memory: activations, zeros, factors, the
    block's scales, weights.
    """

    def __init__(
        self, inputs: int, parts: int, apart: int, *, rows: int, warps: int, depth: int, stage: int, lines: int
    ) -> None:
        self.rows, self.pairs = rows, rows // PAIR
        self.inputs, self.width, self.groups = inputs, inputs // 2, inputs // GROUP
        self.chunks = -(-self.groups // CHUNK)
        self.parts, self.apart, self.lines = parts, apart, lines
        self.threads, self.depth, self.stage = warps * 32, depth, stage
        self.stride = self.chunks * CHUNK * GROUP + PADDING
        self.zeros = rows * self.stride
        self.factors = self.zeros + 2 * 16
        self.scales = self.factors + self.chunks * CHUNK * rows * 4
        self.ring = self.scales + parts * lines * self.groups
        self.shared = self.ring + warps * depth * self.stage

    @staticmethod
    def here() -> Lane:
        thread, _, _ = cute.arch.thread_idx()
        return Lane(thread, thread // 32, thread % 32 // 4, thread % 4)

    def slot(self, shared: Any, lane: Lane) -> Any:
        """A warp's first place for weights."""
        return shared + self.ring + lane.warp * (self.depth * self.stage)

    def next_slot(self, slot: Any, first: Any) -> Any:
        return Int32(ptx.choose(slot == first + (self.depth - 1) * self.stage, first, slot + self.stage))

    def words(self, slot: Any, chunk: Any, place: int, lane: Lane) -> list[Any]:
        """The four words of a lane's group of a chunk, of part ``place // 2``, outputs ``line`` or 8 behind."""
        raise NotImplementedError

    def existing(self, group: Any) -> Any:
        return Int32(ptx.choose(group < Int32(self.groups), group, Int32(self.groups - 1)))

    @cute.jit
    def load_scales(self, scales: Any, lines: Any, thread: Any, shared: Any) -> None:
        """Ask for the scales of a block: ``lines`` outputs of every part; ``scales`` is the row of the first one."""
        for part in cutlass.range_constexpr(self.parts):
            source = scales + part * self.apart * self.groups
            target = shared + self.scales + part * self.lines * self.groups
            for piece in cutlass.range(thread, lines * self.groups // 16, self.threads, unroll=1):
                copy_pack(target + piece * 16, source + Int64(piece) * 16)

    def multiply(self, slot: Any, totals: Any, pairs: int, chunk: Any, operand: Operand, lane: Lane) -> None:
        """Add the products of a stage's weights and ``pairs`` pairs of rows to totals [parts, pairs, 4]."""
        sums = [[[Float32(0.0)] * 4 for _ in range(pairs)] for _ in range(self.parts)]
        # Of many rows the activations are read for each part anew: registers are few.
        together = [range(self.parts)] if pairs <= 2 else [range(part, part + 1) for part in range(self.parts)]
        for parts in together:
            words = {part: [self.words(slot, chunk, 2 * part + half, lane) for half in range(2)] for part in parts}
            for two in range(2):
                codes = [ptx.load_shared_words(code + chunk * operand.step + 16 * two, 4) for code in operand.codes]
                for word in range(2):
                    rows = [ptx.halves_of(code[2 * word]) + ptx.halves_of(code[2 * word + 1]) for code in codes]
                    for part in parts:
                        upper, lower = (half_pairs(half[2 * two + word]) for half in words[part])
                        for turn in (0, 2):
                            a = [upper[turn], lower[turn], upper[turn + 1], lower[turn + 1]]
                            for pair in range(pairs):
                                b = rows[pair][turn : turn + 2]
                                sums[part][pair] = ptx.product(sums[part][pair], a, b)
        column = operand.factors + chunk * (CHUNK * self.rows * 4)
        factors = [
            [word.bitcast(Float32) for word in ptx.load_shared_words(column + 8 * pair, 2)] for pair in range(pairs)
        ]
        group = chunk * CHUNK + lane.quarter
        if self.groups % CHUNK:
            group = self.existing(group)
        for part in range(self.parts):
            marks = operand.scales + part * self.lines * self.groups + group
            weights = [
                scale_bits(load_shared_byte(marks + half * (LINES // 2) * self.groups), Uint32).bitcast(Float32)
                for half in range(2)
            ]
            for pair in range(pairs):
                for index in range(4):
                    scaled = ptx.multiply(sums[part][pair][index], weights[index // 2])
                    total = (part * pairs + pair) * 4 + index
                    totals[total] = ptx.fused_multiply_add(scaled, factors[pair][index % 2], totals[total])

    def operand(self, shared: Any, pairs: int, line: Any, lane: Lane) -> Operand:
        """What a lane reads of the activations: column ``line`` has one group's codes, in that group's quarter.

        ``line``: the lane's first output of the block.
        """
        mine = lane.line // PAIR == lane.quarter
        first = shared + lane.line % PAIR * self.stride + lane.quarter * GROUP
        zeros = shared + self.zeros
        codes = [ptx.choose(mine, first + pair * (PAIR * self.stride), zeros) for pair in range(pairs)]
        step = ptx.choose(mine, Int32(CHUNK * GROUP), Int32(0))
        factors = shared + self.factors + lane.quarter * (self.rows * 4)
        return Operand(codes, step, factors, shared + self.scales + line * self.groups)

    @cute.jit
    def bring(self, given: Any, record: Record, thread: Any, shared: Any) -> None:
        """Copy a tile's activations into shared memory, and wait until the block's scales are there too."""
        if cutlass.const_expr(self.pairs == 1):
            self.bring_rows(PAIR, given, record, thread, shared)
        else:
            if record.count <= Int32(PAIR):
                self.bring_rows(PAIR, given, record, thread, shared)
            else:
                self.bring_rows(self.rows, given, record, thread, shared)
        if thread < Int32(8):
            clear_shared_word(shared + self.zeros + thread * 4)
        await_groups(self.depth)
        cute.arch.sync_threads()

    def bring_rows(self, rows: int, given: Any, record: Record, thread: Any, shared: Any) -> None:
        """The activations of ``rows`` rows, all on their way at once; a row that the tile lacks repeats its first."""
        sources, stores = self.sources(given, record, rows), []
        packs, padded = self.inputs // 16, self.chunks * (CHUNK * GROUP // 16)
        for row, piece, source in self.tasks(rows, padded, sources, thread):
            inside = piece < Int32(packs)
            place = given.values + (source * packs + Int64(ptx.choose(inside, piece, Int32(0)))) * 16
            words = [ptx.choose(inside, word, Uint32(0)) for word in ptx.load_pack(place)]
            stores.append((row * self.stride + piece * 16, words))
        for row, piece, source in self.tasks(rows, self.chunks * CHUNK, sources, thread):
            inside = piece < Int32(self.groups)
            place = given.factors + (source * self.groups + Int64(ptx.choose(inside, piece, Int32(0)))) * 4
            word = ptx.choose(inside, ptx.load_word(place), Uint32(0))
            stores.append((self.factors + (piece * self.rows + row) * 4, [word]))
        for target, words in stores:
            ptx.store_shared_words(shared + target, words)

    def tasks(self, rows: int, each: int, sources: list[Any], thread: Any) -> Iterator[tuple[Any, Any, Any]]:
        """A thread's share of ``each`` pieces of each row: row, piece and the row's source; the last one repeatedly."""
        last = rows * each - 1
        for start in range(0, rows * each, self.threads):
            index = Int32(ptx.choose(thread + start < Int32(last), thread + start, Int32(last)))
            source = sources[start // each]
            for row in range(start // each + 1, min(start + self.threads - 1, last) // each + 1):
                source = ptx.choose(index >= Int32(row * each), sources[row], source)
            yield index // each, index % each, source

    def sources(self, given: Any, record: Record, rows: int) -> list[Any]:
        """The rows of the activations (64-bit) that a tile's rows read: here the sorted rows are stored."""
        present = [ptx.choose(Int32(row) < record.count, Int32(row), Int32(0)) for row in range(rows)]
        return [Int64(record.first + row) for row in present]

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

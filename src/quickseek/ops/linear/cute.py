"""Products of up to 8 rows with an FP8 weight in CuTe DSL: weights go from memory to the tensor core's registers.

A block has 16 outputs, each of its warps every ``warps``-th piece of 64 inputs. Before it waits a thread has all of its
weights in registers (spec/fetch_first.md): 16 bytes are 16 inputs of one output, as the tensor core wants them when its
inputs are numbered so that the four quarters of a product have 16 in a row each. Activations are quantised by the
warp that multiplies them. Codes of both sides are FP16 values, exactly; of a piece's two groups of 32 inputs the one
with the larger scale (of weight and activation together) scales the piece's sum in FP32, what the other has less its
activations. These are multiples of 2^-9, so nothing is lost up to a ratio of 2^15; beyond it below 2^-33 of the
largest term. Unquantised activations are brought to 2^8 at most by powers of two. Bytes that must move: the weight.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx
from torch import Tensor

from quickseek.ops import ptx
from quickseek.ops.compiled import compiled, current_stream, typed

LINES = 16
"""Outputs of a block."""
PIECE = 64
"""Inputs of four products."""
GROUP = 32
COLUMNS = 8
"""Rows that one product takes."""
COMPILED_COLUMNS = (1, 2, 4, 6, COLUMNS)
"""A step of other rows takes the next larger: every number would be compiled for every weight."""
MOST_PIECES = 10
"""Pieces of a warp: 8 registers each."""
MOST_INPUTS = 8192
SHARED_BYTES = 48 * 1024
PLAIN_TOP = 8
"""Unquantised activations of a piece are below 2^(PLAIN_TOP + 1)."""


class Given(NamedTuple):
    """Addresses: activations and their scale bytes, weight and its scale bytes, results. Rows; elements between rows of
    x and of its scales, between groups of x; between rows of the weight, of its scales and of the results;
    outputs of a group.
    """

    x: Int64
    x_scales: Int64
    weight: Int64
    weight_scales: Int64
    out: Int64
    rows: Int32
    x_stride: Int64
    x_scales_stride: Int64
    x_group: Int64
    weight_stride: Int64
    scales_stride: Int64
    out_stride: Int64
    outputs: Int32


ARGUMENTS = (Given, "i", "i")


class Lane(NamedTuple):
    """A thread: itself in the block, its warp, its number in the warp, and of a product its line and quarter."""

    thread: Any
    warp: Any
    number: Any
    line: Any
    quarter: Any


# ---------------------------------------------------------------------------------------------- instructions


def _word(instruction: str, *values: Any) -> Any:
    operands = ", ".join(f"{{$r{index}}}" for index in range(len(values)))
    return inline_ptx(f"{instruction} {{$w0}}, {operands};", write_only_types=[Uint32], read_only_args=list(values))


def largest_of(words: list[Any]) -> Any:
    """FP32: the largest of what four lanes hold in BF16 pairs without signs; NaN only if there is nothing else."""
    while len(words) > 1:
        words = [_word("max.bf16x2", a, b) for a, b in zip(words[::2], words[1::2], strict=True)]
    most = words[0]
    for distance in (1, 2):
        most = _word("max.bf16x2", most, Uint32(cute.arch.shuffle_sync_bfly(most, offset=distance)))
    return ptx.maximum(*ptx.unpack_bf16(most))


def larger(a: Any, b: Any) -> Any:
    """Of two signed integers."""
    return Int32(ptx.choose(a > b, a, b))


def smaller(a: Any, b: Any) -> Any:
    """Of two signed integers."""
    return Int32(ptx.choose(a < b, a, b))


def power(exponent: Any) -> Any:
    """FP32 2^exponent, 0 below the normal numbers, infinity above the finite ones."""
    return (smaller(larger(exponent + Int32(127), Int32(0)), Int32(255)) << Int32(23)).bitcast(Float32)


def half_power(exponent: Any) -> Any:
    """Two FP16 halves of 2^exponent for exponents up to 0: exact from 2^-24 on, below that 0."""
    normal = (exponent + Int32(15)) << Int32(10)
    tiny = Int32(1) << larger(exponent + Int32(24), Int32(0))
    bits = Int32(ptx.choose(exponent < Int32(-14), ptx.choose(exponent < Int32(-24), Int32(0), tiny), normal))
    return Uint32(bits | (bits << Int32(16)))


# ---------------------------------------------------------------------------------------------- the kernel


class FewRows:
    """out BF16 [rows, groups * outputs] of x and an FP8 weight [groups * outputs, inputs] for up to ``columns`` rows.

    ``given``: x is "plain" BF16, BF16 that goes through "a8", or "codes" with scale bytes. Grid (outputs / 16, groups).
    ``inputs`` is a multiple of 64, ``columns`` 1 to 8, ``warps`` of a block have MOST_PIECES pieces at most.
    """

    def __init__(self, inputs: int, given: str, columns: int, warps: int, blocks: int) -> None:
        self.inputs, self.given, self.columns, self.warps, self.blocks = inputs, given, columns, warps, blocks
        self.pieces = inputs // PIECE
        self.mine = -(-self.pieces // warps)
        assert self.mine <= MOST_PIECES and inputs % PIECE == 0
        # A piece of a row takes 128 bytes and a factor; what does not fit at once comes in passes.
        room = (SHARED_BYTES // warps - 16) // ((PIECE * 2 + 4) * columns)
        self.passes = -(-self.mine // room)
        self.taken = -(-self.mine // self.passes)
        self.codes_bytes = self.taken * columns * PIECE * 2
        self.warp_bytes = self.codes_bytes + -(-self.taken * columns * 4 // 16) * 16
        self.shared = max(self.warp_bytes, 32 * 16) * warps
        # 8 lanes take a piece of a row at a time.
        self.rounds = -(-self.taken * columns // 4)

    @cute.jit
    def __call__(self, given: Given, tiles: Int32, groups: Int32, stream: Any) -> None:
        self.kernel(given).launch(
            grid=(tiles, groups, 1), block=(self.warps * 32, 1, 1), min_blocks_per_mp=self.blocks,
            preferred_smem_carveout=-1, stream=stream, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, given: Given) -> None:
        tile, group, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        number = thread % 32
        lane = Lane(thread, thread // 32, number, number // 4, number % 4)
        shared = cute.arch.alloc_smem(Uint32, self.shared // 4, 16).toint()
        first = Int64(group) * Int64(given.outputs) + Int64(tile * LINES)
        weight = given.weight + (first + Int64(lane.line)) * given.weight_stride
        scales = given.weight_scales + first // GROUP * given.scales_stride
        words = cute.make_rmem_tensor((self.mine * 8,), Uint32)
        words.fill(0)
        for one in cutlass.range_constexpr(self.mine):
            piece = one * self.warps + lane.warp
            if cutlass.const_expr((one + 1) * self.warps <= self.pieces):
                self.load(words, one, piece, weight, given, lane)
            else:
                if piece < Int32(self.pieces):
                    self.load(words, one, piece, weight, given, lane)
        marks = cute.make_rmem_tensor((self.passes * self.rounds,), Uint32)
        for turn in cutlass.range_constexpr(self.passes * self.rounds):
            part = self.part(turn // self.rounds, turn % self.rounds, lane)
            marks[turn] = ptx.load_byte(scales + Int64(part[1] * 2 + lane.number % 8 // 4))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        x = given.x + Int64(group) * given.x_group * (1 if self.given == "codes" else 2)
        own = shared + lane.warp * self.warp_bytes
        totals = cute.make_rmem_tensor((4,), Float32)
        totals.fill(0.0)
        for turn in cutlass.range_constexpr(self.passes):
            if cutlass.const_expr(turn > 0):
                cute.arch.sync_warp()
            for round_ in cutlass.range_constexpr(self.rounds):
                self.bring(given, x, marks[turn * self.rounds + round_], self.part(turn, round_, lane), own, lane)
            cute.arch.sync_warp()
            for place in cutlass.range_constexpr(self.taken):
                one = turn * self.taken + place
                if cutlass.const_expr(one < self.mine):
                    if cutlass.const_expr((one + 1) * self.warps <= self.pieces):
                        self.multiply(words, one, place, totals, own, lane)
                    else:
                        if one * self.warps + lane.warp < Int32(self.pieces):
                            self.multiply(words, one, place, totals, own, lane)
        self.finish(given, totals, first, shared, lane)

    def load(self, words: Any, one: int, piece: Any, weight: Any, given: Given, lane: Lane) -> None:
        """A lane's 16 inputs of a piece, of outputs ``line`` and ``line + 8``."""
        place = weight + Int64(piece * PIECE + lane.quarter * 16)
        for half in range(2):
            for index, word in enumerate(ptx.stream_pack(place + given.weight_stride * (8 * half))):
                words[one * 8 + half * 4 + index] = word

    def part(self, turn: int, round_: int, lane: Lane) -> tuple[Any, Any, Any]:
        """What eight lanes bring in a round: place among the pass's pieces, piece and row, within what there is."""
        task = smaller(round_ * 4 + lane.number // 8, Int32(self.taken * self.columns - 1))
        place, row = task // self.columns, task % self.columns
        piece = smaller((turn * self.taken + place) * self.warps + lane.warp, Int32(self.pieces - 1))
        return place, piece, row

    def bring(self, given: Given, x: Any, mark: Any, part: tuple[Any, Any, Any], own: Any, lane: Lane) -> None:
        """Eight lanes make a piece of a row FP16, of a scale, in their warp's shared memory: 8 inputs each."""
        place, piece, row = part
        eighth = lane.number % 8
        there = Int64(smaller(row, given.rows - Int32(1)))
        column = piece * PIECE + eighth * 8
        scale = Int32(mark)
        if self.given == "codes":
            codes = ptx.load_pair(x + there * given.x_stride + Int64(column))
            exponent = Int32(ptx.load_byte(given.x_scales + there * given.x_scales_stride + Int64(column // GROUP)))
            nan = exponent == Int32(255)
        else:
            taken = ptx.load_pack(x + (there * given.x_stride + Int64(column)) * 2)
            values = [value for word in taken for value in ptx.unpack_bf16(word)]
            most = largest_of([word & Uint32(0x7FFF7FFF) for word in taken])
            if self.given == "a8":
                exponent = ptx.a8_exponent(most)
                inverse = ((Int32(254) - exponent) << Int32(23)).bitcast(Float32)
                scaled = [ptx.multiply(value, inverse) for value in values]
                codes = [ptx.pack_e4m3(scaled[:4]), ptx.pack_e4m3(scaled[4:])]
            else:
                exponent = Int32(most.bitcast(Uint32) >> Uint32(23))
            nan = Int32(0) == Int32(1)
        both = exponent + scale
        largest = larger(both, Int32(cute.arch.shuffle_sync_bfly(both, offset=4)))
        if self.given == "plain":
            # x * 2^shift, whose largest of a piece lies from 2^PLAIN_TOP on.
            shift = both - largest - exponent + Int32(127 + PLAIN_TOP)
            raised = power(smaller(shift, Int32(127)))
            scaled = [ptx.multiply(value, raised) for value in values]
            halves = [_word("cvt.rn.f16x2.f32", scaled[at + 1], scaled[at]) for at in range(0, 8, 2)]
            factor = power(largest - Int32(254 + PLAIN_TOP))
        else:
            rest = half_power(both - largest)
            halves = [_word("mul.rn.f16x2", half, rest) for code in codes for half in ptx.halves_of(code)]
            factor = power(largest - Int32(254))
        bad = Int32(ptx.choose(nan, Int32(1), ptx.choose(scale == Int32(255), Int32(1), Int32(0))))
        bad = bad | Int32(cute.arch.shuffle_sync_bfly(bad, offset=4))
        factor = Float32(ptx.choose(bad != Int32(0), Float32(float("nan")), factor))
        line = place * self.columns + row
        # Rows that are read together lie in different banks.
        ptx.store_shared_words(own + line * (PIECE * 2) + (eighth ^ (row & Int32(1))) * 16, halves)
        ptx.store_shared(own + self.codes_bytes + line * 4, factor)

    def multiply(self, words: Any, one: int, place: int, totals: Any, own: Any, lane: Lane) -> None:
        """Add a piece's products of 16 outputs and all columns to totals [4]."""
        row = lane.line % self.columns
        line = own + (place * self.columns + row) * (PIECE * 2)
        values = []
        for half in range(2):
            chunk = (lane.quarter * 2 + half) ^ (row & Int32(1))
            values += ptx.load_shared_words(line + chunk * 16, 4)
        sums = [Float32(0.0)] * 4
        for index in range(4):
            upper, lower = ptx.halves_of(words[one * 8 + index]), ptx.halves_of(words[one * 8 + 4 + index])
            a = [upper[0], lower[0], upper[1], lower[1]]
            sums = ptx.product(sums, a, values[2 * index : 2 * index + 2])
        factors = own + self.codes_bytes + place * self.columns * 4
        for column in range(2):
            factor = ptx.load_shared(factors + (lane.quarter * 2 + column) % self.columns * 4)
            for half in range(2):
                at = half * 2 + column
                totals[at] = ptx.fused_multiply_add(sums[at], factor, totals[at])

    @cute.jit
    def finish(self, given: Given, totals: Any, first: Any, shared: Any, lane: Lane) -> None:
        """Add the warps' totals in order and store them: a thread for an output of a row."""
        # The activations have been read: their memory takes the sums.
        cute.arch.sync_threads()
        for index in cutlass.range_constexpr(4):
            ptx.store_shared(shared + (lane.thread * 4 + index) * 4, totals[index])
        cute.arch.sync_threads()
        for task in cutlass.range(lane.thread, LINES * self.columns, self.warps * 32, unroll=1):
            output, row = task % LINES, task // LINES
            place = (output % 8 * 4 + row // 2) * 4 + output // 8 * 2 + row % 2
            total = Float32(0.0)
            for warp in cutlass.range_constexpr(self.warps):
                total = total + ptx.load_shared(shared + (warp * 128 + place) * 4)
            if row < given.rows:
                ptx.store_bf16(given.out + (Int64(row) * given.out_stride + first + Int64(output)) * 2, total)


# ---------------------------------------------------------------------------------------------- launch


def settings(rows: int, inputs: int) -> dict[str, int]:
    """Columns of products, warps of a block and blocks of a multiprocessor for a weight of ``inputs`` columns."""
    # One H200: more registers a thread pay more than more blocks, and of long weights, or several rows, more warps.
    columns = next(columns for columns in COMPILED_COLUMNS if rows <= columns)
    warps = 16 if inputs > 4 * MOST_PIECES * PIECE else 8 if rows > 2 and inputs > 1024 else 4
    return {"columns": columns, "warps": warps, "blocks": 1}


def fits(x: Tensor, codes: Tensor, outputs: int) -> bool:
    """Whether a product is one of these: few rows, pieces of 64, tiles of 16, everything aligned to 16 bytes."""
    inputs = x.shape[-1]
    if not 0 < x.shape[0] <= COLUMNS or inputs % PIECE or inputs > MOST_INPUTS or outputs % LINES:
        return False
    size = x.element_size()
    steps = [x.data_ptr(), codes.data_ptr(), codes.stride(0), *(stride * size for stride in x.stride()[:-1])]
    return x.stride(-1) == 1 and all(step % 16 == 0 for step in steps)


def product_of(
    x: Tensor, x_scales: Tensor | None, weight: tuple[Tensor, Tensor], given: str, out: Tensor, **chosen: int
) -> None:
    """``out`` BF16 [rows, groups * outputs] of x [rows, inputs] or [rows, groups, inputs], as in ``FewRows``."""
    codes, scales = weight
    rows, groups = x.shape[0], x.shape[1] if x.dim() == 3 else 1
    outputs = codes.shape[0] // groups
    kernel: Callable[..., Any] = compiled(
        FewRows, ARGUMENTS, x.device, inputs=x.shape[-1], given=given, **(settings(rows, x.shape[-1]) | chosen)
    )
    arguments = typed(
        Given, x.data_ptr(), 0 if x_scales is None else x_scales.data_ptr(), codes.data_ptr(), scales.data_ptr(),
        out.data_ptr(), rows, x.stride(0), 0 if x_scales is None else x_scales.stride(0),
        x.stride(1) if groups > 1 else 0, codes.stride(0), scales.stride(0), out.stride(0),
        outputs,
    )  # fmt: skip
    kernel(arguments, outputs // LINES, groups, current_stream(x.device))

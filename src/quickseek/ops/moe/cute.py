"""Routed experts for few rows in CuTe DSL: ``gate_up`` and ``down`` for tiles of up to MOST_ROWS rows of one expert.

Tiles are those of ``triton_record.prepare``. Bytes that must move: the packed weights and scales of every expert that
was chosen, once. How a product is made: ``cute_products.py``.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64
from torch import Tensor

from quickseek.ops import ptx
from quickseek.ops.compiled import compiled, current_stream, typed
from quickseek.ops.moe.cute_fragments import GROUP, LINES, MOST_ROWS, PAIR, code_place, kept, lane_of
from quickseek.ops.moe.cute_products import (
    FewRows,
    Lane,
    Record,
    first_bit,
    float_of,
    largest_in_warp,
    rounded,
)

LOG2_E = 1.4426950408889634
EARLY_SLOTS = 64
"""Up to so many slots every warp of ``gate_up`` finds its own tile among them, and reads weights before its wait."""
SHARED_BYTES = 48 * 1024


class GateUp(NamedTuple):
    """Addresses: rows and what is known of them, weights, results; slots; limit of the SwiGLU."""

    values: Int64
    factors: Int64
    chosen: Int64
    tokens: Int64
    tiles: Int64
    codes: Int64
    scales: Int64
    out: Int64
    out_factors: Int64
    slots: Int32
    limit: Float32


class Down(NamedTuple):
    """Addresses: rows, the record's tiles, weights, results."""

    values: Int64
    factors: Int64
    tiles: Int64
    codes: Int64
    scales: Int64
    out: Int64


GATE_UP_ARGUMENTS = (GateUp, "i")
DOWN_ARGUMENTS = (Down, "i")


class GateUpKernel(FewRows):
    """A8 of the SwiGLU of w13 x: codes [slots, inner] in the order of ``code_place``, factors [slots, inner / 32].

    Grid (inner / 32, tiles): a block has 32 pairs of outputs, a warp 16 of them and every ``slices``-th chunk.

    ``ahead``: before the wait each warp finds its tile in the routing and asks for its first weights. The kernel
    before is ``prepare``, which lets this one start after its own wait: the routing is older. ``top``: experts of a
    token.
    """

    def __init__(
        self, hidden: int, inner: int, experts: int, top: int,
        *, rows: int, slices: int, depth: int, blocks: int, ahead: bool,
    ) -> None:  # fmt: skip
        super().__init__(hidden, 2, inner, rows, 2 * slices, slices, depth)
        self.inner, self.experts, self.top, self.blocks, self.ahead = inner, experts, top, blocks, ahead
        partials = 2 * slices * self.parts * self.pairs * 32 * 4
        self.shared = max(self.shared, partials)

    @cute.jit
    def __call__(self, given: GateUp, items: Int32, stream: Any) -> None:
        self.kernel(given).launch(
            grid=(self.inner // GROUP, items, 1), block=(self.threads, 1, 1), min_blocks_per_mp=self.blocks,
            preferred_smem_carveout=-1, stream=stream, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, given: GateUp) -> None:
        tile, item, _ = cute.arch.block_idx()
        lane = self.here()
        shared = cute.arch.alloc_smem(Uint32, self.shared // 4, 16).toint()
        if cutlass.const_expr(self.ahead):
            record = self.search(given, item, lane)
            if record.expert < Int32(0):
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
            else:
                self.work(given, record, tile, lane, shared)
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            record = read_record(given.tiles, item)
            if record.expert >= Int32(0):
                self.work(given, record, tile, lane, shared)

    def search(self, given: GateUp, item: Any, lane: Lane) -> Record:
        """The tile that begins at slot ``item``, by the whole warp: as ``triton_record.record_slot``."""
        number = lane.line * 4 + lane.quarter
        mine = ptx.load_volatile_word(given.chosen + Int64(item) * 8).bitcast(Int32)
        before, rank, count, slots = Int32(0), Int32(0), Int32(0), Uint64(0)
        for start in range(0, EARLY_SLOTS, 32):
            slot = start + number
            exists = slot < given.slots
            place = ptx.choose(exists, slot, Int32(0))
            other = ptx.load_volatile_word(given.chosen + Int64(place) * 8).bitcast(Int32)
            other = ptx.choose(exists, other, Int32(-1))
            before = before + self.how_many(ptx.choose(other >= Int32(0), other, mine) < mine)
            rank = rank + self.how_many(ptx.choose(slot < item, other, Int32(-2)) == mine)
            same = Uint32(cute.arch.vote_ballot_sync(other == mine))
            count = count + Int32(cute.arch.popc(same))
            slots = slots | (Uint64(same) << Uint64(start))
        known = ptx.choose(mine < Int32(self.experts), mine, Int32(-1))
        begins = ptx.choose(rank % self.rows == 0, known, Int32(-1))
        left = count - rank
        left = ptx.choose(left < Int32(self.rows), left, Int32(self.rows))
        return Record(begins, before + rank, left, slots >> Uint64(item))

    def source(self, given: GateUp, record: Record, row: Any) -> Any:
        """The token of a tile's row: found among the slots, or read from the record, which is then complete."""
        if not self.ahead:
            return Int64(ptx.load_word(given.tokens + Int64(record.first + row) * 4).bitcast(Int32))
        rest = record.slots
        for passed in range(self.rows - 1):
            rest = ptx.choose(row > Int32(passed), rest & (rest - Uint64(1)), rest)
        _, item, _ = cute.arch.block_idx()
        return Int64((item + first_bit(rest)) // self.top)

    @staticmethod
    def how_many(condition: Any) -> Any:
        """Lanes of the warp in which the condition holds."""
        return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(condition)))

    @cute.jit
    def work(self, given: GateUp, record: Record, tile: Any, lane: Lane, shared: Any) -> None:
        half, slice_ = lane.warp % 2, lane.warp // 2
        output = Int64(record.expert) * (2 * self.inner) + Int64(tile * GROUP + half * LINES + lane.line)
        rows = self.weight_rows(given.codes, given.scales, output)
        words = cute.make_rmem_tensor((self.depth * self.parts * 8,), Uint32)
        marks = cute.make_rmem_tensor((self.depth * self.parts * 2,), Uint32)
        words.fill(0)
        marks.fill(0)
        for stage in cutlass.range_constexpr(self.depth):
            chunk = stage * self.slices + slice_
            if cutlass.const_expr((stage + 1) * self.slices <= self.chunks):
                self.load(words, marks, stage, rows, chunk, lane)
            else:
                if chunk < Int32(self.chunks):
                    self.load(words, marks, stage, rows, chunk, lane)
        if cutlass.const_expr(self.ahead):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        self.bring(given, record, lane.thread, shared)
        if cutlass.const_expr(self.pairs == 1):
            self.sum_up(1, given, record, tile, rows, words, marks, lane, shared)
        else:
            if record.count <= Int32(PAIR):
                self.sum_up(1, given, record, tile, rows, words, marks, lane, shared)
            else:
                self.sum_up(self.pairs, given, record, tile, rows, words, marks, lane, shared)

    @cute.jit
    def sum_up(
        self,
        pairs: cutlass.Constexpr,
        given: GateUp,
        record: Record,
        tile: Any,
        rows: Any,
        words: Any,
        marks: Any,
        lane: Lane,
        shared: Any,
    ) -> None:
        slice_ = lane.warp // 2
        totals = cute.make_rmem_tensor((self.parts * pairs * 4,), Float32)
        totals.fill(0.0)
        operand = self.operand(shared, pairs, lane)
        for start in cutlass.range(0, self.trips, self.depth, unroll=1):
            for stage in cutlass.range_constexpr(self.depth):
                chunk = (start + stage) * self.slices + slice_
                if cutlass.const_expr(self.trips % self.depth == 0 and self.chunks % self.slices == 0):
                    self.multiply(words, marks, stage, totals, pairs, chunk, operand)
                else:
                    if chunk < Int32(self.chunks):
                        self.multiply(words, marks, stage, totals, pairs, chunk, operand)
                if cutlass.const_expr(self.trips > self.depth):
                    following = chunk + self.depth * self.slices
                    if following < Int32(self.chunks):
                        self.load(words, marks, stage, rows, following, lane)
        # The activations have been read: their memory takes the warps' sums.
        cute.arch.sync_threads()
        number = lane.line * 4 + lane.quarter
        for part in cutlass.range_constexpr(self.parts):
            for pair in cutlass.range_constexpr(pairs):
                four = [totals[(part * pairs + pair) * 4 + index] for index in range(4)]
                place = (lane.warp * self.parts + part) * pairs + pair
                ptx.store_shared(shared + (place * 32 + number) * 4, self.quad_sum(four, lane.quarter))
        cute.arch.sync_threads()
        for row in cutlass.range(lane.warp, record.count, 2 * self.slices, unroll=1):
            self.finish(pairs, given, record, tile, row, number, shared)

    @cute.jit
    def finish(
        self, pairs: cutlass.Constexpr, given: GateUp, record: Record, tile: Any, row: Any, number: Any, shared: Any
    ) -> None:
        """SwiGLU and A8 of a row's 32 pairs, one a lane, in the roundings of the reference."""
        place = (number // LINES * (self.parts * pairs) + row // PAIR) * 32 + lane_of(number % LINES, row % PAIR)
        gate, up = Float32(0.0), Float32(0.0)
        for slice_ in cutlass.range_constexpr(self.slices):
            address = shared + (slice_ * (2 * self.parts * pairs * 32) + place) * 4
            gate = gate + ptx.load_shared(address)
            up = up + ptx.load_shared(address + pairs * 32 * 4)
        gate = float_of("min.NaN", rounded(gate), given.limit)
        up = float_of("max.NaN", float_of("min.NaN", rounded(up), given.limit), -given.limit)
        power = float_of("ex2.approx", ptx.multiply(gate, Float32(-LOG2_E)))
        value = rounded(ptx.multiply(float_of("div.full", gate, power + Float32(1.0)), up))
        bits = value.bitcast(Uint32) & Uint32(0x7FFFFFFF)
        bits = ptx.choose(bits > Uint32(0x7F800000), Uint32(0), bits)
        exponent = Uint32(ptx.a8_exponent(largest_in_warp(bits).bitcast(Float32)))
        inverse = ((Uint32(254) - exponent) << Uint32(23)).bitcast(Float32)
        code = ptx.pack_e4m3([ptx.multiply(value, inverse)] + [Float32(0.0)] * 3)
        line = Int64(record.first + row)
        ptx.store_byte(given.out + line * self.inner + Int64(tile * GROUP + code_place(number)), code)
        if number == Int32(0):
            factor = line * (self.inner // GROUP) + Int64(tile)
            ptx.store_word(given.out_factors + factor * 4, exponent << Uint32(23))


class DownKernel(FewRows):
    """out BF16 [slots, hidden]: w2 of the rows of ``values``.

    Grid (blocks, tiles): a warp takes ``each`` times 16 outputs, with all of their inputs.

    Before its wait a warp reads the record and its first weights: ``prepare``, which wrote the record, is older than
    the kernel before, which lets this one start after its own wait.
    """

    def __init__(self, hidden: int, inner: int, *, rows: int, warps: int, each: int, depth: int, blocks: int) -> None:
        super().__init__(inner, 1, 0, rows, warps, 1, depth)
        self.outputs, self.warps, self.each, self.blocks = hidden, warps, each, blocks
        rounds = -(-self.chunks // self.depth)
        self.rounds, self.depth = rounds, -(-self.chunks // rounds)

    @cute.jit
    def __call__(self, given: Down, items: Int32, stream: Any) -> None:
        blocks = -(-self.outputs // (LINES * self.warps * self.each))
        self.kernel(given).launch(
            grid=(blocks, items, 1), block=(self.threads, 1, 1), min_blocks_per_mp=self.blocks,
            preferred_smem_carveout=-1, stream=stream, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, given: Down) -> None:
        block, item, _ = cute.arch.block_idx()
        lane = self.here()
        shared = cute.arch.alloc_smem(Uint32, self.shared // 4, 16).toint()
        record = read_record(given.tiles, item)
        if record.expert < Int32(0):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        else:
            self.work(given, record, block, lane, shared)

    @cute.jit
    def work(self, given: Down, record: Record, block: Any, lane: Lane, shared: Any) -> None:
        words = cute.make_rmem_tensor((self.depth * 8,), Uint32)
        marks = cute.make_rmem_tensor((self.depth * 2,), Uint32)
        words.fill(0)
        marks.fill(0)
        first = block * (self.warps * self.each) + lane.warp
        if first < Int32(self.outputs // LINES):
            rows = self.rows_of(given, record, first, lane)
            for stage in cutlass.range_constexpr(self.depth):
                self.load(words, marks, stage, rows, Int32(stage), lane)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.bring(given, record, lane.thread, shared)
        if cutlass.const_expr(self.pairs == 1):
            self.all_outputs(1, given, record, first, words, marks, lane, shared)
        else:
            if record.count <= Int32(PAIR):
                self.all_outputs(1, given, record, first, words, marks, lane, shared)
            else:
                self.all_outputs(self.pairs, given, record, first, words, marks, lane, shared)

    def rows_of(self, given: Down, record: Record, tile: Any, lane: Lane) -> Any:
        output = Int64(record.expert) * self.outputs + Int64(tile * LINES + lane.line)
        return self.weight_rows(given.codes, given.scales, output)

    @cute.jit
    def all_outputs(
        self,
        pairs: cutlass.Constexpr,
        given: Down,
        record: Record,
        first: Any,
        words: Any,
        marks: Any,
        lane: Lane,
        shared: Any,
    ) -> None:
        operand = self.operand(shared, pairs, lane)
        output, row = kept(lane.line * 4 + lane.quarter)
        last = first + self.each * self.warps
        last = ptx.choose(last < Int32(self.outputs // LINES), last, Int32(self.outputs // LINES))
        for tile in cutlass.range(first, last, self.warps, unroll=1):
            totals = cute.make_rmem_tensor((pairs * 4,), Float32)
            totals.fill(0.0)
            rows = self.rows_of(given, record, tile, lane)
            following = tile + self.warps
            next_rows = self.rows_of(given, record, following, lane)
            for turn in cutlass.range_constexpr(self.rounds):
                for stage in cutlass.range_constexpr(self.depth):
                    chunk = turn * self.depth + stage
                    if cutlass.const_expr(chunk < self.chunks):
                        self.multiply(words, marks, stage, totals, pairs, Int32(chunk), operand)
                    if cutlass.const_expr(chunk + self.depth < self.chunks):
                        self.load(words, marks, stage, rows, Int32(chunk + self.depth), lane)
                    elif cutlass.const_expr(turn == self.rounds - 1 and self.each > 1):
                        if following < last:
                            self.load(words, marks, stage, next_rows, Int32(stage), lane)
            for pair in cutlass.range_constexpr(pairs):
                total = self.quad_sum([totals[pair * 4 + index] for index in range(4)], lane.quarter)
                place = PAIR * pair + row
                if place < record.count:
                    line = Int64(record.first + place) * (self.outputs * 2)
                    ptx.store_bf16(given.out + line + Int64(tile * LINES + output) * 2, total)


def read_record(tiles: Any, item: Any) -> Record:
    """A tile of the record, from memory that the L1 cache may hold older bytes of."""
    expert, first, count = (
        ptx.load_volatile_word(tiles + Int64(item) * 12 + 4 * word).bitcast(Int32) for word in range(3)
    )
    return Record(expert, first, count, Uint64(0))


# ---------------------------------------------------------------------------------------------- launches


def fits(hidden: int, inner: int, *codes: Tensor) -> bool:
    """Whether a tile's activations fit into shared memory, both multiples of 32, and codes begin at 16 bytes."""
    aligned = all(part.data_ptr() % 16 == 0 for part in codes)
    return aligned and all(FewRows(size, 1, 0, MOST_ROWS, 1, 1, 1).shared <= SHARED_BYTES for size in (hidden, inner))


def tile_rows(rows: int) -> int:
    """The most rows of a tile in the record of a step of ``rows`` rows."""
    return PAIR if rows <= PAIR else MOST_ROWS


def gate_up_settings(rows: int, slots: int) -> dict[str, Any]:
    """Rows of a tile, warps that share the inputs of an output, chunks on their way in a warp, blocks of an SM."""
    few, more = {"slices": 8, "depth": 1, "blocks": 1}, {"slices": 4, "depth": 2, "blocks": 2}
    return (few if rows <= PAIR else more) | {"rows": tile_rows(rows), "ahead": slots <= EARLY_SLOTS}


def down_settings(rows: int) -> dict[str, Any]:
    """Rows of a tile, warps of a block, times 16 outputs of a warp, chunks on their way, blocks of an SM."""
    few, more = {"each": 1, "depth": 3, "blocks": 4}, {"each": 2, "depth": 5, "blocks": 3}
    return (few if rows <= PAIR else more) | {"rows": tile_rows(rows), "warps": 4}


def gate_up(
    values: Tensor,
    factors: Tensor,
    record: tuple[Tensor, Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    out: Tensor,
    out_factors: Tensor,
    limit: float,
    **settings: Any,
) -> None:
    """Launch ``GateUpKernel`` for every tile of the record: (routing's experts [rows, top], tokens, tiles)."""
    device, inner, chosen = values.device, out.shape[1], record[0]
    kernel = compiled(
        GateUpKernel, GATE_UP_ARGUMENTS, device,
        hidden=values.shape[1], inner=inner, experts=weight[0].shape[0], top=chosen.shape[1],
        **(gate_up_settings(chosen.shape[0], chosen.numel()) | settings),
    )  # fmt: skip
    tensors = (values, factors, *record, *weight, out, out_factors)
    given = typed(GateUp, *(tensor.data_ptr() for tensor in tensors), chosen.numel(), limit)
    kernel(given, record[2].shape[0], current_stream(device))


def down(
    values: Tensor,
    factors: Tensor,
    tiles: Tensor,
    weight: tuple[Tensor, Tensor],
    out: Tensor,
    rows: int,
    **settings: Any,
) -> None:
    """Launch ``DownKernel`` for every tile of a step of ``rows`` rows."""
    device = values.device
    chosen = down_settings(rows) | settings
    kernel = compiled(DownKernel, DOWN_ARGUMENTS, device, hidden=out.shape[1], inner=values.shape[1], **chosen)
    tensors = (values, factors, tiles, *weight, out)
    kernel(typed(Down, *(tensor.data_ptr() for tensor in tensors)), tiles.shape[0], current_stream(device))

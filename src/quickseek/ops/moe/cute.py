"""Routed experts for few rows in CuTe DSL: ``gate_up`` and ``down`` for tiles of up to MOST_ROWS rows of one expert.

Tiles are those of ``triton_record.prepare``. Bytes that must move: the packed weights and scales of every expert that
was chosen, once. How a product is made: ``cute_products.py``.
"""

from functools import cache
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64
from torch import Tensor

from quickseek.ops import ptx
from quickseek.ops.compiled import compiled, current_stream, typed
from quickseek.ops.moe.cute_fragments import CHUNK, GROUP, LINES, MOST_ROWS, PAIR, code_place, kept, lane_of
from quickseek.ops.moe.cute_products import (
    GROUP_BYTES,
    FewRows,
    Lane,
    Record,
    await_groups,
    copy_pack,
    end_group,
    first_bit,
    float_of,
    largest_in_warp,
    rounded,
)

LOG2_E = 1.4426950408889634
EARLY_SLOTS = 64
"""Up to so many slots every warp of ``gate_up`` finds its own tile among them, and reads weights before its wait."""
LANE_PACKS = 32 * 16
"""Bytes of 16 for each lane of a warp."""
DEEP_INNER = 1152
"""Up to so many inputs ``down`` has the weights of two times 16 outputs of a warp on their way."""
SHARED_BYTES = 227 * 1024
"""Of a block."""


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

    ``ahead``: before the wait each warp finds its tile in the routing and asks for its first weights, of a step of one
    row (``alone``) even before, since few of its slots begin no tile. The kernel before is ``prepare``, which lets this
    one start after its own wait: the routing is older. ``top``: experts of a token.
    """

    def __init__(
        self, hidden: int, inner: int, experts: int, top: int,
        *, rows: int, slices: int, depth: int, blocks: int, ahead: bool, alone: bool,
    ) -> None:  # fmt: skip
        stage = 2 * 2 * LANE_PACKS
        super().__init__(hidden, 2, inner, rows=rows, warps=2 * slices, depth=depth, stage=stage, lines=GROUP)
        self.slices, self.trips = slices, -(-self.chunks // slices)
        self.inner, self.experts, self.top, self.blocks = inner, experts, top, blocks
        self.ahead, self.alone = ahead, alone
        partials = 2 * slices * self.parts * self.pairs * 32 * 4
        self.shared = max(self.shared, partials)

    @cute.jit
    def __call__(self, given: GateUp, items: Int32, stream: Any) -> None:
        self.kernel(given).launch(
            grid=(self.inner // GROUP, items, 1), block=(self.threads, 1, 1), smem=self.shared,
            min_blocks_per_mp=self.blocks, preferred_smem_carveout=-1, stream=stream, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, given: GateUp) -> None:
        tile, item, _ = cute.arch.block_idx()
        lane = self.here()
        shared = cute.arch.get_dyn_smem(Uint32, 16).toint()
        if cutlass.const_expr(self.ahead):
            mine = ptx.load_volatile_word(given.chosen + Int64(item) * 8).bitcast(Int32)
            if cutlass.const_expr(self.alone):
                if self.exists(mine) >= Int32(0):
                    self.ask(given, mine, tile, lane, shared)
            record = self.search(given, item, mine, lane)
            if record.expert < Int32(0):
                await_groups(0)
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

    def exists(self, expert: Any) -> Any:
        """The expert, or -1 if there is none of that number."""
        known = ptx.choose(expert < Int32(self.experts), expert, Int32(-1))
        return Int32(ptx.choose(known >= Int32(0), known, Int32(-1)))

    def search(self, given: GateUp, item: Any, mine: Any, lane: Lane) -> Record:
        """The tile that begins at slot ``item``, whose expert is ``mine``, by the whole warp: as
        ``triton_record.record_slot``.
        """
        number = lane.line * 4 + lane.quarter
        before, rank, count, slots = Int32(0), Int32(0), Int32(0), Uint64(0)
        for start in range(0, self.top if self.alone else EARLY_SLOTS, 32):
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
        begins = ptx.choose(rank % self.rows == 0, self.exists(mine), Int32(-1))
        left = count - rank
        left = ptx.choose(left < Int32(self.rows), left, Int32(self.rows))
        return Record(begins, before + rank, left, slots >> Uint64(item))

    def sources(self, given: GateUp, record: Record, rows: int) -> list[Any]:
        """The tokens of a tile's rows: found among the slots, or read from the record, which is then complete."""
        _, item, _ = cute.arch.block_idx()
        rest, found = record.slots, list[Any]()
        for row in range(rows):
            if self.ahead:
                token = Int64((item + first_bit(rest)) // self.top)
                rest = rest & (rest - Uint64(1))
            else:
                there = ptx.choose(Int32(row) < record.count, Int32(row), Int32(0))
                token = Int64(ptx.load_word(given.tokens + Int64(record.first + there) * 4).bitcast(Int32))
            found.append(ptx.choose(Int32(row) < record.count, token, found[0]) if row else token)
        return found

    @staticmethod
    def how_many(condition: Any) -> Any:
        """Lanes of the warp in which the condition holds."""
        return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(condition)))

    def slot(self, shared: Any, lane: Lane) -> Any:
        """A lane's: it reads what it has copied itself."""
        return super().slot(shared, lane) + lane.thread % 32 * 16

    def load(self, slot: Any, codes: Any, chunk: Any, lane: Lane) -> None:
        """Ask for a lane's part of a chunk of weights: a group of two outputs of every part, of which ``codes`` is the
        first one's row.
        """
        group = chunk * CHUNK + lane.quarter
        if self.groups % CHUNK:
            # The activations of a group beyond the last are zeros.
            group = self.existing(group)
        source = codes + Int64(group) * GROUP_BYTES
        for place in range(2 * self.parts):
            output = place // 2 * self.apart + place % 2 * (LINES // 2)
            copy_pack(slot + place * LANE_PACKS, source + output * self.width)

    def words(self, slot: Any, chunk: Any, place: int, lane: Lane) -> list[Any]:
        return ptx.load_shared_words(slot + place * LANE_PACKS, 4)

    def rows_of(self, given: GateUp, expert: Any, tile: Any, lane: Lane) -> tuple[Any, Any]:
        """The codes of a lane's first output and the scales of the block's."""
        first = Int64(expert) * (2 * self.inner) + Int64(tile * GROUP)
        line = lane.warp % 2 * LINES + lane.line
        return given.codes + (first + Int64(line)) * self.width, given.scales + first * self.groups

    @cute.jit
    def ask(self, given: GateUp, expert: Any, tile: Any, lane: Lane, shared: Any) -> None:
        """Ask for the scales of a block and a warp's first weights."""
        codes, scales = self.rows_of(given, expert, tile, lane)
        self.load_scales(scales, GROUP, lane.thread, shared)
        end_group()
        slot = self.slot(shared, lane)
        for stage in cutlass.range_constexpr(self.depth):
            chunk = stage * self.slices + lane.warp // 2
            if cutlass.const_expr((stage + 1) * self.slices <= self.chunks):
                self.load(slot + stage * self.stage, codes, chunk, lane)
            else:
                if chunk < Int32(self.chunks):
                    self.load(slot + stage * self.stage, codes, chunk, lane)
            end_group()

    @cute.jit
    def work(self, given: GateUp, record: Record, tile: Any, lane: Lane, shared: Any) -> None:
        if cutlass.const_expr(not self.alone):
            self.ask(given, record.expert, tile, lane, shared)
        if cutlass.const_expr(self.ahead):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        codes, _ = self.rows_of(given, record.expert, tile, lane)
        self.bring(given, record, lane.thread, shared)
        if cutlass.const_expr(self.pairs == 1):
            self.sum_up(1, given, record, tile, codes, lane, shared)
        else:
            if record.count <= Int32(PAIR):
                self.sum_up(1, given, record, tile, codes, lane, shared)
            else:
                self.sum_up(self.pairs, given, record, tile, codes, lane, shared)

    @cute.jit
    def sum_up(
        self,
        pairs: cutlass.Constexpr,
        given: GateUp,
        record: Record,
        tile: Any,
        codes: Any,
        lane: Lane,
        shared: Any,
    ) -> None:
        slice_ = lane.warp // 2
        totals = cute.make_rmem_tensor((self.parts * pairs * 4,), Float32)
        totals.fill(0.0)
        operand = self.operand(shared, pairs, lane.warp % 2 * LINES + lane.line, lane)
        first = self.slot(shared, lane)
        slot = first
        for trip in cutlass.range(self.trips, unroll=1):
            chunk = trip * self.slices + slice_
            await_groups(self.depth - 1)
            if cutlass.const_expr(self.chunks % self.slices == 0):
                self.multiply(slot, totals, pairs, chunk, operand, lane)
            else:
                if chunk < Int32(self.chunks):
                    self.multiply(slot, totals, pairs, chunk, operand, lane)
            if cutlass.const_expr(self.trips > self.depth):
                following = chunk + self.depth * self.slices
                if following < Int32(self.chunks):
                    self.load(slot, codes, following, lane)
            end_group()
            slot = self.next_slot(slot, first)
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

    Grid (blocks, tiles): a warp takes ``each`` times 16 outputs, with all of their inputs. Weights of 16 outputs lie
    one behind the other and are copied as they lie: their rows are short and begin within lines.

    Before its wait a warp reads the record and its first weights: ``prepare``, which wrote the record, is older than
    the kernel before, which lets this one start after its own wait.
    """

    def __init__(self, hidden: int, inner: int, *, rows: int, warps: int, each: int, depth: int, blocks: int) -> None:
        chunks = -(-inner // (GROUP * CHUNK))
        # Rows that are read together lie in different banks, 64 bytes apart modulo 128.
        self.pitch = (chunks + 1 - chunks % 2) * CHUNK * GROUP_BYTES
        super().__init__(
            inner, 1, 0, rows=rows, warps=warps, depth=min(depth, each), stage=LINES * self.pitch,
            lines=LINES * warps * each,
        )  # fmt: skip
        self.outputs, self.warps, self.each, self.blocks = hidden, warps, each, blocks

    @cute.jit
    def __call__(self, given: Down, items: Int32, stream: Any) -> None:
        blocks = -(-self.outputs // (LINES * self.warps * self.each))
        self.kernel(given).launch(
            grid=(blocks, items, 1), block=(self.threads, 1, 1), smem=self.shared,
            min_blocks_per_mp=self.blocks, preferred_smem_carveout=-1, stream=stream, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, given: Down) -> None:
        block, item, _ = cute.arch.block_idx()
        lane = self.here()
        shared = cute.arch.get_dyn_smem(Uint32, 16).toint()
        record = read_record(given.tiles, item)
        if record.expert < Int32(0):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        else:
            self.work(given, record, block, lane, shared)

    @cute.jit
    def work(self, given: Down, record: Record, block: Any, lane: Lane, shared: Any) -> None:
        first = block * self.lines
        lines = Int32(self.outputs) - first
        lines = Int32(ptx.choose(lines < Int32(self.lines), lines, Int32(self.lines)))
        origin = Int64(record.expert) * self.outputs + Int64(first)
        self.load_scales(given.scales + origin * self.groups, lines, lane.thread, shared)
        end_group()
        # Of a warp; the next one's 16 outputs follow.
        tiles = (lines // LINES - lane.warp + self.warps - 1) // self.warps
        codes = given.codes + (origin + Int64(lane.warp * LINES)) * self.width
        slot = self.slot(shared, lane)
        for tile in cutlass.range_constexpr(self.depth):
            if Int32(tile) < tiles:
                self.load(slot + tile * self.stage, codes, Int32(tile), lane)
            end_group()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.bring(given, record, lane.thread, shared)
        if cutlass.const_expr(self.pairs == 1):
            self.all_outputs(1, given, record, first, codes, tiles, lane, shared)
        else:
            if record.count <= Int32(PAIR):
                self.all_outputs(1, given, record, first, codes, tiles, lane, shared)
            else:
                self.all_outputs(self.pairs, given, record, first, codes, tiles, lane, shared)

    def load(self, slot: Any, codes: Any, tile: Any, lane: Lane) -> None:
        """Ask for the weights of 16 outputs, the warp's ``tile``th; ``codes``: of its first ones."""
        source = codes + Int64(tile) * (self.warps * LINES * self.width)
        packs, last = self.width // 16, LINES * self.width // 16 - 1
        for start in range(0, last + 1, 32):
            pack = Int32(start) + lane.thread % 32
            if start + 31 > last:
                pack = Int32(ptx.choose(pack < Int32(last), pack, Int32(last)))
            copy_pack(slot + pack // packs * self.pitch + pack % packs * 16, source + Int64(pack) * 16)

    def words(self, slot: Any, chunk: Any, place: int, lane: Lane) -> list[Any]:
        # Beyond the last group there is something or other: the activations are zeros, and every code is finite.
        line = slot + lane.line * self.pitch + lane.quarter * GROUP_BYTES
        return ptx.load_shared_words(line + place * (LINES // 2 * self.pitch) + chunk * (CHUNK * GROUP_BYTES), 4)

    @cute.jit
    def all_outputs(
        self,
        pairs: cutlass.Constexpr,
        given: Down,
        record: Record,
        block_first: Any,
        codes: Any,
        tiles: Any,
        lane: Lane,
        shared: Any,
    ) -> None:
        output, row = kept(lane.line * 4 + lane.quarter)
        first = self.slot(shared, lane)
        slot = first
        for number in cutlass.range(tiles, unroll=1):
            await_groups(self.depth - 1)
            cute.arch.sync_warp()
            totals = cute.make_rmem_tensor((pairs * 4,), Float32)
            totals.fill(0.0)
            tile = number * self.warps + lane.warp
            operand = self.operand(shared, pairs, tile * LINES + lane.line, lane)
            for chunk in cutlass.range(self.chunks, unroll=1):
                self.multiply(slot, totals, pairs, chunk, operand, lane)
            if cutlass.const_expr(self.each > self.depth):
                cute.arch.sync_warp()
                if number + self.depth < tiles:
                    self.load(slot, codes, number + self.depth, lane)
            end_group()
            slot = self.next_slot(slot, first)
            for pair in cutlass.range_constexpr(pairs):
                total = self.quad_sum([totals[pair * 4 + index] for index in range(4)], lane.quarter)
                place = PAIR * pair + row
                if place < record.count:
                    line = Int64(record.first + place) * (self.outputs * 2)
                    ptx.store_bf16(given.out + line + Int64(block_first + tile * LINES + output) * 2, total)


def read_record(tiles: Any, item: Any) -> Record:
    """A tile of the record, from memory that the L1 cache may hold older bytes of."""
    expert, first, count = (
        ptx.load_volatile_word(tiles + Int64(item) * 12 + 4 * word).bitcast(Int32) for word in range(3)
    )
    return Record(expert, first, count, Uint64(0))


# ---------------------------------------------------------------------------------------------- launches


def fits(hidden: int, inner: int, *packed: Tensor) -> bool:
    """Whether what a block needs fits into shared memory, and codes and scales begin at 16 bytes."""
    return all(part.data_ptr() % 16 == 0 for part in packed) and most_shared(hidden, inner) <= SHARED_BYTES


@cache
def most_shared(hidden: int, inner: int) -> int:
    """Bytes of shared memory of the largest block, of steps of any rows."""
    kernels: list[FewRows] = []
    for rows in (1, PAIR, MOST_ROWS):
        kernels.append(GateUpKernel(hidden, inner, 1, 1, **gate_up_settings(rows, rows)))
        kernels.append(DownKernel(hidden, inner, **down_settings(rows, inner)))
    return max(kernel.shared for kernel in kernels)


def tile_rows(rows: int) -> int:
    """The most rows of a tile in the record of a step of ``rows`` rows."""
    return PAIR if rows <= PAIR else MOST_ROWS


def gate_up_settings(rows: int, slots: int) -> dict[str, Any]:
    """Rows of a tile, warps that share the inputs of an output, chunks on their way in a warp, blocks of an SM."""
    few, more = {"slices": 8, "depth": 2, "blocks": 1}, {"slices": 2, "depth": 4, "blocks": 4}
    return (few if rows <= PAIR else more) | {
        "rows": tile_rows(rows),
        "ahead": slots <= EARLY_SLOTS,
        "alone": rows == 1 and slots <= EARLY_SLOTS,
    }


def down_settings(rows: int, inner: int) -> dict[str, Any]:
    """Rows of a tile, warps of a block, times 16 outputs of a warp, how many of these on their way, blocks of an SM."""
    few, more = {"warps": 8, "each": 2, "blocks": 2}, {"warps": 4, "each": 2, "blocks": 4}
    depth = 2 if inner <= DEEP_INNER else 1
    return (few if rows <= PAIR else more) | {"rows": tile_rows(rows), "depth": depth}


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
    inner = values.shape[1]
    chosen = down_settings(rows, inner) | settings
    kernel = compiled(DownKernel, DOWN_ARGUMENTS, device, hidden=out.shape[1], inner=inner, **chosen)
    tensors = (values, factors, tiles, *weight, out)
    kernel(typed(Down, *(tensor.data_ptr() for tensor in tensors)), tiles.shape[0], current_stream(device))

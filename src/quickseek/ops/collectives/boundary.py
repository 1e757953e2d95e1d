"""The boundary kernel: rank sum, mHC post, collapse, RMSNorm and MXFP8 copy (spec/decode.md B.6).

One body, three sources: "collect" polls the one-shot mailbox, "reduced" polls the rows that two-shot owners sent, and
"fused" publishes this rank's contribution itself and needs all its blocks resident. All give the same bits.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from quickseek.ops import ptx
from quickseek.ops.collectives.push import (
    ACTIVE,
    FRAGMENT,
    NEXT,
    SENTINEL,
    Contribution,
    Exchange,
    Turn,
    arrive,
    current_turn,
    depart,
    finalized,
    load_peers,
    load_routes,
    load_rows,
    next_turn,
    push_everywhere,
    rank_sum,
    sanitised,
    slot_offset,
)
from quickseek.ops.collectives.wait import BoundedWait

BYTES = FRAGMENT * 2
A8_FLOOR = 1e-4
A8_RECIPROCAL = float.fromhex("0x1.24924ap-9")
"""FP32 1/448 (bits 0x3B124925)."""
FLOAT32_MAX = float.fromhex("0x1.fffffep127")


class Operands(NamedTuple):
    """Addresses of a boundary's inputs and outputs, 0 for those that its kind lacks, and the epsilon of its norm."""

    residual: Int64
    post: Int64
    comb: Int64
    pre: Int64
    gamma: Int64
    epsilon: Float32
    streams: Int64
    output: Int64
    values: Int64
    scales: Int64


class Place(NamedTuple):
    """Where a thread is: its block in the cluster, itself in the block."""

    block: Any
    thread: Any


def fitting_threads(ranks: int, trips: int) -> int:
    """Threads that the compiled kernel leaves room for on a multiprocessor: 100 or, with peers, 128 registers each.

    With peers 100 would have to spill: 19.3 us instead of 16.9 at 384 rows on two H200s, for all the more clusters.
    """
    return 640 if ranks == 1 and trips == 1 else 512


class BoundaryKernel:
    """Grid (clusters, blocks of a cluster), a thread takes fragments of 8 elements.

    A cluster has one row or, ``looped``, takes rows in strides of the grid and prepares one row ahead.

    Read before the grid wait: the norm weight and the peer table, which no kernel of a step writes. Streams, mixes,
    contributions, generations and mailboxes are read after it, and nothing is written before it.
    """

    def __init__(
        self,
        hidden: int,
        streams: int,
        ranks: int,
        capacity: int,
        threads: int,
        cluster: int,
        *,
        source: str,
        normalise: bool,
        quantize: bool,
        top_k: int,
        form: str,
        looped: bool = False,
        stride: int = 0,
    ) -> None:
        self.hidden, self.streams, self.ranks, self.capacity = hidden, streams, ranks, capacity
        self.threads, self.cluster = threads, cluster
        self.fragments = hidden // FRAGMENT
        self.trips = -(-self.fragments // (threads * cluster))
        self.source, self.normalise, self.quantize, self.top_k = source, normalise, quantize, top_k
        self.form, self.stride, self.looped = form, stride, looped
        self.fused = source == "fused"
        self.sends = self.fused and ranks > 1
        # A multicast store reaches the own mailbox too, where it must be read and cleared like any other.
        self.keeps_own = self.fused and (ranks == 1 or form == "unicast")
        self.slots = cluster * threads // 32
        self.polled = 1 if source == "reduced" else ranks
        self.wait = BoundedWait(ranks, 2 if source == "reduced" else 0, halves=True)

    @cute.jit
    def __call__(
        self,
        given: Contribution,
        operands: Operands,
        exchange: Exchange,
        rows: Int32,
        clusters: Int32,
        stream: Any,
    ) -> None:
        self.kernel(given, operands, exchange, rows, clusters).launch(
            grid=(clusters, self.cluster, 1), block=(self.threads, 1, 1), cluster=(1, self.cluster, 1),
            min_blocks_per_mp=max(1, fitting_threads(self.ranks, self.trips) // self.threads),
            preferred_smem_carveout=0, stream=stream, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, given: Contribution, operands: Operands, exchange: Exchange, rows: Int32, clusters: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        first, block, _ = cute.arch.block_idx()
        here = Place(block, thread)
        cute.arch.griddepcontrol_launch_dependents()
        partials = Int32(0)
        barriers = Int32(0)
        if cutlass.const_expr(self.normalise):
            partials = cute.arch.alloc_smem(Float32, 2 * self.slots, 16).toint()
            if cutlass.const_expr(self.cluster > 1):
                barriers = cute.arch.alloc_smem(Int64, 2, 8).toint()
                if thread == 0:
                    ptx.open_barrier(barriers, 4 * self.slots)
                    ptx.open_barrier(barriers + 8, 4 * self.slots)
                # A block may store into its siblings' shared memory only once they run and expect it.
                cute.arch.cluster_arrive_relaxed()
        peers = load_peers(exchange.table, self.ranks) if cutlass.const_expr(self.sends) else []
        gammas = cute.make_rmem_tensor((4 * self.trips,), Uint32)
        if cutlass.const_expr(self.normalise):
            for trip in cutlass.range_constexpr(self.trips):
                self.load_gamma(gammas, trip, operands.gamma, self.fragment(trip, here))
            if cutlass.const_expr(self.cluster > 1):
                cute.arch.cluster_wait()
        cute.arch.griddepcontrol_wait()

        turn = Turn(Int32(0), Uint32(0))
        if cutlass.const_expr(self.ranks > 1):
            turn = current_turn(exchange, NEXT if self.fused else ACTIVE)
        if cutlass.const_expr(self.quantize):
            self.zero_padding(operands.scales, first, here, rows, clusters)
        mine = cute.make_rmem_tensor((4 * self.trips,), Uint32)
        held = cute.make_rmem_tensor((4 * self.streams * self.trips,), Uint32)
        self.fetch(mine, held, given, operands.residual, first, here)
        arrived = Uint32(0)
        if cutlass.const_expr(self.sends):
            self.send(mine, first, here, turn, exchange, peers)
            # Not before every thread of the block has its generation.
            cute.arch.sync_threads()
            if thread == 0:
                arrived = arrive(exchange)

        own = exchange.rank if cutlass.const_expr(self.keeps_own) else Int32(-1)
        slots = self.capacity * self.hidden * 2
        row = Int32(0)
        for token in cutlass.range(first, rows, clusters, unroll=1):
            base = exchange.mailbox
            base = base + slot_offset(turn.generation, 0, self.polled, token, self.capacity, self.hidden)
            mixes = self.load_mixes(operands, token)
            next_mine = cute.make_rmem_tensor((4 * self.trips,), Uint32)
            next_held = cute.make_rmem_tensor((4 * self.streams * self.trips,), Uint32)
            if cutlass.const_expr(self.looped):
                # One row ahead and no more: stores that a link cannot take yet would hold up the loads behind them.
                following = token + clusters
                if following < rows:
                    self.fetch(next_mine, next_held, given, operands.residual, following, here)
                    if cutlass.const_expr(self.sends):
                        self.send(next_mine, following, here, turn, exchange, peers)
            collapsed = cute.make_rmem_tensor((4 * self.trips,), Uint32)
            collapsed.fill(0)
            for trip in cutlass.range_constexpr(self.trips):
                fragment = self.fragment(trip, here)
                if fragment < self.fragments:
                    # Before the wait, not after it: only x is missing then.
                    blended = cute.make_rmem_tensor((FRAGMENT * self.streams,), Float32)
                    self.blend(blended, held, trip, mixes[1])
                    packs = cute.make_rmem_tensor((4 * self.polled,), Uint32)
                    self.repeat(packs, mine, trip)
                    if cutlass.const_expr(self.ranks > 1):
                        slot = base + Int64(fragment) * BYTES
                        self.wait.poll(packs, slot, slots, self.polled, own, exchange, turn, token, fragment)
                    self.spread(packs, blended, held, trip, mixes, collapsed)

            # The exchange of partial sums is under way while the streams are written.
            buffer = partials + (row & 1) * (4 * self.slots)
            barrier = barriers + (row & 1) * 8
            if cutlass.const_expr(self.normalise):
                self.share(buffer, barrier, self.square_sum(collapsed), here)
            for trip in cutlass.range_constexpr(self.trips):
                fragment = self.fragment(trip, here)
                if fragment < self.fragments:
                    self.store_streams(held, trip, operands.streams, token, fragment)
                    if cutlass.const_expr(self.ranks > 1):
                        for source in cutlass.range_constexpr(self.polled):
                            if source != own:
                                slot = base + Int64(fragment) * BYTES + source * slots
                                ptx.store_pack(slot, [Uint32(SENTINEL)] * 4)
            if cutlass.const_expr(self.normalise):
                self.norm(collapsed, gammas, buffer, barrier, (row >> 1) & 1, operands, token, here)
            if cutlass.const_expr(self.looped):
                self.copy(mine, next_mine, 4 * self.trips)
                self.copy(held, next_held, 4 * self.streams * self.trips)
            row = row + 1
        if cutlass.const_expr(self.ranks > 1):
            self.finish(exchange, turn, arrived, first, here, clusters)

    # ------------------------------------------------------------------------------------------ addresses

    def fragment(self, trip: int, here: Place) -> Any:
        return (trip * self.cluster + here.block) * self.threads + here.thread

    def stream_offset(self, token: Any, lane: int, fragment: Any) -> Any:
        return (Int64(token) * self.streams + lane) * (self.hidden * 2) + Int64(fragment) * BYTES

    @staticmethod
    def copy(target: Any, source: Any, count: int) -> None:
        for word in range(count):
            target[word] = source[word]

    def repeat(self, packs: Any, mine: Any, trip: int) -> None:
        """The own fragment as every source's value, for polls to overwrite."""
        if self.fused:
            for source in range(self.polled):
                self.keep(packs, source, [mine[4 * trip + word] for word in range(4)])

    @staticmethod
    def keep(tensor: Any, index: int, pack: Any) -> None:
        for word in range(4):
            tensor[4 * index + word] = pack[word]

    @cute.jit
    def load_gamma(self, gammas: Any, trip: cutlass.Constexpr, gamma: Any, fragment: Any) -> None:
        if fragment < self.fragments:
            self.keep(gammas, trip, ptx.load_pack(gamma + Int64(fragment) * BYTES))

    def load_mixes(self, operands: Operands, token: Any) -> Any:
        """post [hc], comb [hc][hc] and pre [hc] of the row, FP32 in registers."""
        count = self.streams
        row = Int64(token) * (4 * count)
        spread = [word.bitcast(Float32) for word in ptx.load_words(operands.post + row, count)]
        square = ptx.load_words(operands.comb + row * count, count * count)
        mixing = [word.bitcast(Float32) for word in square]
        collapse = []
        if self.normalise:
            collapse = [word.bitcast(Float32) for word in ptx.load_words(operands.pre + row, count)]
        return spread, mixing, collapse

    # ------------------------------------------------------------------------------------------ steps

    @cute.jit
    def fetch(self, mine: Any, held: Any, given: Contribution, residual: Any, token: Any, here: Place) -> None:
        """A row's streams and, in the fused form, what this rank adds to the sum; every load before the first use."""
        for trip in cutlass.range_constexpr(self.trips):
            fragment = self.fragment(trip, here)
            if fragment < self.fragments:
                column = Int64(fragment) * BYTES
                routed = self.fused and self.top_k > 0
                if cutlass.const_expr(routed):
                    routes = load_routes(given, token, self.top_k)
                elif cutlass.const_expr(self.fused):
                    words = ptx.load_pack(given.x + Int64(token) * (self.hidden * 2) + column)
                for lane in cutlass.range_constexpr(self.streams):
                    address = residual + self.stream_offset(token, lane, fragment)
                    self.keep(held, trip * self.streams + lane, ptx.load_pack(address))
                if cutlass.const_expr(routed):
                    words = finalized(routes, load_rows(given, routes[0], token, column, self.hidden))
                if cutlass.const_expr(self.fused):
                    self.keep(mine, trip, sanitised(words))

    @cute.jit
    def send(self, mine: Any, token: Any, here: Place, turn: Any, exchange: Exchange, peers: Any) -> None:
        """Store the own fragments of a row into the peers' mailboxes."""
        for trip in cutlass.range_constexpr(self.trips):
            fragment = self.fragment(trip, here)
            if fragment < self.fragments:
                own = exchange.rank if cutlass.const_expr(self.keeps_own) else None
                offset = slot_offset(turn.generation, exchange.rank, self.ranks, token, self.capacity, self.hidden)
                offset = offset + Int64(fragment) * BYTES
                pack = [mine[4 * trip + word] for word in range(4)]
                push_everywhere(peers, exchange.multicast, self.form, offset, pack, own=own, stride=self.stride)

    def store_streams(self, held: Any, trip: int, streams: Any, token: Any, fragment: Any) -> None:
        for lane in range(self.streams):
            place = 4 * (trip * self.streams + lane)
            words = [held[place + word] for word in range(4)]
            ptx.store_pack(streams + self.stream_offset(token, lane, fragment), words)

    def blend(self, blended: Any, held: Any, trip: int, comb: Any) -> None:
        """sum_s R[s] * comb[s][t] of one fragment for every stream t: all of mHC post that needs no peer."""
        residual = [
            self.floats([held[4 * (trip * self.streams + lane) + word] for word in range(4)])
            for lane in range(self.streams)
        ]
        for target in range(self.streams):
            for index in range(FRAGMENT):
                value = ptx.multiply(residual[0][index], comb[target])
                for lane in range(1, self.streams):
                    value = ptx.fused_multiply_add(residual[lane][index], comb[lane * self.streams + target], value)
                blended[target * FRAGMENT + index] = value

    def spread(self, packs: Any, blended: Any, held: Any, trip: int, mixes: Any, collapsed: Any) -> None:
        """mHC post of one fragment, in place of the streams held, and its collapse (spec/decode.md 0.1)."""
        post, _, pre = mixes
        reduced = self.floats(rank_sum(packs, self.polled))
        total = [Float32(0.0)] * FRAGMENT
        for target in range(self.streams):
            mixed = [
                ptx.fused_multiply_add(value, post[target], blended[target * FRAGMENT + index])
                for index, value in enumerate(reduced)
            ]
            words = [ptx.pack_bf16(mixed[2 * word], mixed[2 * word + 1]) for word in range(4)]
            self.keep(held, trip * self.streams + target, words)
            if self.normalise:
                total = [
                    ptx.fused_multiply_add(value, pre[target], before)
                    for value, before in zip(self.floats(words), total, strict=True)
                ]
        if self.normalise:
            self.keep(collapsed, trip, [ptx.pack_bf16(total[2 * word], total[2 * word + 1]) for word in range(4)])

    @staticmethod
    def floats(words: Any) -> list[Any]:
        return [half for word in words for half in ptx.unpack_bf16(word)]

    @cute.jit
    def norm(
        self,
        collapsed: Any,
        gammas: Any,
        partials: Any,
        barrier: Any,
        parity: Any,
        operands: Operands,
        token: Any,
        here: Place,
    ) -> None:
        """RMSNorm over the cluster, in an order of additions that the geometry alone fixes.

        Two buffers and two barriers alternate: a sibling can send for row i + 1 while this block still reads row i,
        but for row i + 2 only once every warp here has sent for row i + 1, after its reads of row i.
        """
        if cutlass.const_expr(self.cluster > 1):
            ptx.await_bytes(barrier, parity)
            if here.thread == 0:
                ptx.expect_bytes(barrier, 4 * self.slots)
        else:
            cute.arch.sync_threads()
        total = ptx.load_shared(partials)
        for slot in cutlass.range_constexpr(1, self.slots):
            total = total + ptx.load_shared(partials + 4 * slot)
        inverse = ptx.reciprocal_sqrt(ptx.fused_multiply_add(total, Float32(1.0 / self.hidden), operands.epsilon))
        for trip in cutlass.range_constexpr(self.trips):
            fragment = self.fragment(trip, here)
            if fragment < self.fragments:
                row = Int64(token) * self.hidden
                kept = self.floats([collapsed[4 * trip + word] for word in range(4)])
                weight = self.floats([gammas[4 * trip + word] for word in range(4)])
                scaled = [
                    ptx.multiply(ptx.multiply(value, inverse), gain) for value, gain in zip(kept, weight, strict=True)
                ]
                words = [ptx.pack_bf16(scaled[2 * word], scaled[2 * word + 1]) for word in range(4)]
                ptx.store_pack(operands.output + row * 2 + Int64(fragment) * BYTES, words)
                if cutlass.const_expr(self.quantize):
                    values = operands.values + row + Int64(fragment) * FRAGMENT
                    self.copy_a8(words, values, operands.scales, token, fragment)

    def square_sum(self, collapsed: Any) -> Any:
        """A warp's sum of squares, the same in all its lanes."""
        total = Float32(0.0)
        for value in self.floats([collapsed[word] for word in range(4 * self.trips)]):
            total = ptx.fused_multiply_add(value, value, total)
        return cute.arch.warp_reduction_sum(total)

    @cute.jit
    def share(self, partials: Any, barrier: Any, total: Any, here: Place) -> None:
        """Send a warp's partial sum to every block of the cluster; ``norm`` waits for all of them."""
        lane, slot = here.thread % 32, here.block * (self.threads // 32) + here.thread // 32
        if cutlass.const_expr(self.cluster > 1):
            if lane < self.cluster:
                ptx.send_cluster(partials + 4 * slot, barrier, lane, total)
        else:
            if lane == 0:
                ptx.store_shared(partials + 4 * slot, total)

    @cute.jit
    def copy_a8(self, words: Any, values: Any, scales: Any, token: Any, fragment: Any) -> None:
        """A8 of the rounded output (equality.md 1.2): four neighbouring threads hold the 32 values of a scale."""
        numbers = self.floats(words)
        largest = Float32(0.0)
        for number in numbers:
            largest = ptx.maximum(largest, ptx.maximum(number, -number))
        for distance in (1, 2):
            largest = ptx.maximum(largest, cute.arch.shuffle_sync_bfly(largest, offset=distance))
        largest = ptx.maximum(ptx.minimum(largest, Float32(FLOAT32_MAX)), Float32(A8_FLOOR))
        bits = ptx.multiply(largest, Float32(A8_RECIPROCAL)).bitcast(Uint32)
        exponent = (bits >> Uint32(23)) + ptx.choose((bits & Uint32(0x7FFFFF)) != Uint32(0), Uint32(1), Uint32(0))
        inverse = ((Uint32(254) - exponent) << Uint32(23)).bitcast(Float32)
        scaled = [ptx.multiply(number, inverse) for number in numbers]
        ptx.store_pair(values, [ptx.pack_e4m3(scaled[:4]), ptx.pack_e4m3(scaled[4:])])
        if fragment % 4 == 0:
            ptx.store_byte(scales + self.scale_offset(token, fragment // 4), exponent)

    def scale_offset(self, row: Any, column: Any) -> Any:
        """Byte of a scale in the swizzled 128x4 layout (spec/decode.md B.6.1)."""
        tile = (row // 128) * (self.hidden // 128) + column // 4
        return Int64(tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4)

    @cute.jit
    def zero_padding(self, scales: Any, first: Any, here: Place, rows: Any, clusters: Any) -> None:
        """Zero the scales of rows that fill up the last tile of 128, spread over the whole grid.

        16 bytes hold the four columns of rows j, j + 32, j + 64 and j + 96 of a tile.
        """
        tiles = self.hidden // 128
        start = (first * self.cluster + here.block) * self.threads + here.thread
        last = rows // 128
        end = ((rows + 127) // 128 - last) * (32 * tiles)
        for index in cutlass.range(start, end, clusters * self.cluster * self.threads, unroll=1):
            row = last * 128 + index % 32
            group = scales + Int64(last * tiles + index // 32) * 512 + (index % 32) * 16
            if row >= rows:
                ptx.store_pack(group, [Uint32(0)] * 4)
            else:
                for quarter in cutlass.range_constexpr(1, 4):
                    if row + 32 * quarter >= rows:
                        ptx.store_word(group + 4 * quarter, Uint32(0))

    @cute.jit
    def finish(self, exchange: Exchange, turn: Any, arrived: Any, first: Any, here: Place, clusters: Any) -> None:
        """Give the next call its generation once, in the fused form when every block has read this one."""
        if here.thread == 0:
            if cutlass.const_expr(self.fused):
                depart(exchange, turn, arrived, clusters * self.cluster)
            if first == 0 and here.block == 0:
                if cutlass.const_expr(self.source == "collect"):
                    next_turn(exchange, turn)
                self.wait.report_aborted(exchange, turn)

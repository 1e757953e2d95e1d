"""Publish and owner kernels: the storing half of the two-kernel and the two-shot forms (spec/decode.md B.4, B.5, B.8).

Neither publish kernel ever waits for a peer, so they need no residency together with them.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from quickseek.ops import ptx
from quickseek.ops.collectives.push import (
    ACTIVE,
    FRAGMENT,
    NEXT,
    SENTINEL,
    finalized,
    load_peers,
    load_routes,
    next_generation,
    push_everywhere,
    rank_sum,
    sanitised,
    slot_offset,
)
from quickseek.ops.collectives.wait import BoundedWait

THREADS = 128


class PublishKernel:
    """Stores this rank's contribution into the mailboxes: every rank's (one-shot) or the token owner's (two-shot).

    Grid: (rows, ceil(fragments / 128)). Read before the grid wait: the peer table, which nothing writes. ``top_k`` 0:
    the contribution is x; else it is the finalized MoE output.
    """

    def __init__(
        self, hidden: int, ranks: int, capacity: int, *, top_k: int, two_shot: bool, form: str, stride: int = 0
    ) -> None:
        self.hidden, self.ranks, self.capacity, self.top_k = hidden, ranks, capacity, top_k
        self.two_shot, self.form, self.stride = two_shot, form, stride

    @cute.jit
    def __call__(
        self,
        x: Int64,
        gemm2: Int64,
        weights: Int64,
        indices: Int64,
        table: Int64,
        multicast: Int64,
        state: Int64,
        rank: Int32,
        rows: Int32,
        stream: Any,
    ) -> None:
        blocks = -(-(self.hidden // FRAGMENT) // THREADS)
        self.kernel(x, gemm2, weights, indices, table, multicast, state, rank).launch(
            grid=(rows, blocks, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        gemm2: Int64,
        weights: Int64,
        indices: Int64,
        table: Int64,
        multicast: Int64,
        state: Int64,
        rank: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        token, block, _ = cute.arch.block_idx()
        fragment = block * THREADS + thread
        cute.arch.griddepcontrol_launch_dependents()
        target = table
        if cutlass.const_expr(self.two_shot):
            target = ptx.load_address(table + Int64(token % self.ranks) * 8)
        else:
            peers = load_peers(table, self.ranks)
        cute.arch.griddepcontrol_wait()
        generation = ptx.load_volatile_word(state + NEXT).bitcast(Int32)
        if fragment < self.hidden // FRAGMENT:
            column = Int64(fragment) * (FRAGMENT * 2)
            if cutlass.const_expr(self.top_k > 0):
                routes = load_routes(weights, indices, token, self.top_k)
                words = finalized(routes, gemm2, x, token, column, self.hidden)
            else:
                words = ptx.load_pack(x + Int64(token) * (self.hidden * 2) + column)
            words = sanitised(words)
            if cutlass.const_expr(self.two_shot):
                owner_capacity = -(-self.capacity // self.ranks)
                row = token // self.ranks
                offset = slot_offset(generation, rank, self.ranks, row, owner_capacity, self.hidden) + column
                ptx.push_pack(target + offset, words)
            else:
                offset = slot_offset(generation, rank, self.ranks, token, self.capacity, self.hidden) + column
                push_everywhere(peers, multicast, self.form, offset, words, stride=self.stride)
        if token == 0 and block == 0 and thread == 0:
            ptx.store_word(state + ACTIVE, generation)


class OwnerKernel:
    """Sums the contributions of the tokens this rank owns and stores the sums into every rank's reduced mailbox.

    Grid: (ceil(rows / ranks), ceil(fragments / 128)). It waits for peers' publishes, and clears what it has read.
    """

    def __init__(self, hidden: int, ranks: int, capacity: int, *, form: str, stride: int = 0) -> None:
        self.hidden, self.ranks, self.capacity, self.form, self.stride = hidden, ranks, capacity, form, stride
        self.wait = BoundedWait(ranks, 1, halves=True)

    @cute.jit
    def __call__(
        self,
        contributions: Int64,
        table: Int64,
        multicast: Int64,
        state: Int64,
        control: Int64,
        budget: Int64,
        instance: Int32,
        rank: Int32,
        rows: Int32,
        stream: Any,
    ) -> None:
        blocks = -(-(self.hidden // FRAGMENT) // THREADS)
        self.kernel(contributions, table, multicast, state, control, budget, instance, rank, rows).launch(
            grid=((rows + self.ranks - 1) // self.ranks, blocks, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        contributions: Int64,
        table: Int64,
        multicast: Int64,
        state: Int64,
        control: Int64,
        budget: Int64,
        instance: Int32,
        rank: Int32,
        rows: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, block, _ = cute.arch.block_idx()
        token = row * self.ranks + rank
        fragment = block * THREADS + thread
        cute.arch.griddepcontrol_launch_dependents()
        peers = load_peers(table, self.ranks)
        cute.arch.griddepcontrol_wait()
        generation = ptx.load_volatile_word(state + ACTIVE).bitcast(Int32)
        aborted = ptx.load_volatile_word(control)
        if token < rows and fragment < self.hidden // FRAGMENT:
            owner_capacity = -(-self.capacity // self.ranks)
            stride = owner_capacity * self.hidden * 2
            column = Int64(fragment) * (FRAGMENT * 2)
            first = contributions + column
            first = first + slot_offset(generation, 0, self.ranks, row, owner_capacity, self.hidden)
            packs = cute.make_rmem_tensor((4 * self.ranks,), Uint32)
            self.wait.poll(
                packs, first, stride, self.ranks, Int32(-1),
                aborted, control, budget, instance, rank, generation, token, fragment,
            )  # fmt: skip
            words = sanitised(rank_sum(packs, self.ranks))
            offset = slot_offset(generation, 0, 1, token, self.capacity, self.hidden) + column
            push_everywhere(peers, multicast, self.form, offset, words, stride=self.stride)
            for source in cutlass.range_constexpr(self.ranks):
                ptx.store_pack(first + source * stride, [Uint32(SENTINEL)] * 4)
        if row == 0 and block == 0 and thread == 0:
            if aborted != Uint32(0):
                self.wait.report(control, instance, rank, generation, token, fragment, Uint32(0))
            ptx.store_word(state + NEXT, next_generation(generation))

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
    Contribution,
    Exchange,
    current_turn,
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
    def __call__(self, given: Contribution, exchange: Exchange, rows: Int32, stream: Any) -> None:
        blocks = -(-(self.hidden // FRAGMENT) // THREADS)
        self.kernel(given, exchange).launch(grid=(rows, blocks, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, given: Contribution, exchange: Exchange) -> None:
        thread, _, _ = cute.arch.thread_idx()
        token, block, _ = cute.arch.block_idx()
        fragment = block * THREADS + thread
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.two_shot):
            owner = ptx.load_address(exchange.table + Int64(token % self.ranks) * 8)
        else:
            peers = load_peers(exchange.table, self.ranks)
        cute.arch.griddepcontrol_wait()
        turn = current_turn(exchange, NEXT)
        if fragment < self.hidden // FRAGMENT:
            column = Int64(fragment) * (FRAGMENT * 2)
            if cutlass.const_expr(self.top_k > 0):
                routes = load_routes(given, token, self.top_k)
                words = finalized(routes, load_rows(given, routes[0], token, column, self.hidden))
            else:
                words = ptx.load_pack(given.x + Int64(token) * (self.hidden * 2) + column)
            words = sanitised(words)
            if cutlass.const_expr(self.two_shot):
                owner_capacity = -(-self.capacity // self.ranks)
                row = token // self.ranks
                place = (turn.generation, exchange.rank, self.ranks, row, owner_capacity)
                ptx.push_pack(owner + slot_offset(*place, self.hidden) + column, words)
            else:
                place = (turn.generation, exchange.rank, self.ranks, token, self.capacity)
                offset = slot_offset(*place, self.hidden) + column
                push_everywhere(peers, exchange.multicast, self.form, offset, words, stride=self.stride)
        if token == 0 and block == 0 and thread == 0:
            ptx.store_word(exchange.state + ACTIVE, turn.generation)


class OwnerKernel:
    """Sums the contributions of the tokens this rank owns and stores the sums into every rank's reduced mailbox.

    Grid: (ceil(rows / ranks), ceil(fragments / 128)). It waits for peers' publishes, and clears what it has read. Its
    exchange's ``mailbox`` holds contributions, ``table`` the reduced mailboxes.
    """

    def __init__(self, hidden: int, ranks: int, capacity: int, *, form: str, stride: int = 0) -> None:
        self.hidden, self.ranks, self.capacity, self.form, self.stride = hidden, ranks, capacity, form, stride
        self.wait = BoundedWait(ranks, 1, halves=True)

    @cute.jit
    def __call__(self, exchange: Exchange, rows: Int32, stream: Any) -> None:
        blocks = -(-(self.hidden // FRAGMENT) // THREADS)
        self.kernel(exchange, rows).launch(
            grid=((rows + self.ranks - 1) // self.ranks, blocks, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, exchange: Exchange, rows: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, block, _ = cute.arch.block_idx()
        token = row * self.ranks + exchange.rank
        fragment = block * THREADS + thread
        cute.arch.griddepcontrol_launch_dependents()
        peers = load_peers(exchange.table, self.ranks)
        cute.arch.griddepcontrol_wait()
        turn = current_turn(exchange, ACTIVE)
        if token < rows and fragment < self.hidden // FRAGMENT:
            owner_capacity = -(-self.capacity // self.ranks)
            stride = owner_capacity * self.hidden * 2
            column = Int64(fragment) * (FRAGMENT * 2)
            first = exchange.mailbox + column
            first = first + slot_offset(turn.generation, 0, self.ranks, row, owner_capacity, self.hidden)
            packs = cute.make_rmem_tensor((4 * self.ranks,), Uint32)
            self.wait.poll(packs, first, stride, self.ranks, Int32(-1), exchange, turn, token, fragment)
            words = sanitised(rank_sum(packs, self.ranks))
            offset = slot_offset(turn.generation, 0, 1, token, self.capacity, self.hidden) + column
            push_everywhere(peers, exchange.multicast, self.form, offset, words, stride=self.stride)
            for source in cutlass.range_constexpr(self.ranks):
                ptx.store_pack(first + source * stride, [Uint32(SENTINEL)] * 4)
        if row == 0 and block == 0 and thread == 0:
            self.wait.report_aborted(exchange, turn)
            next_turn(exchange, turn)

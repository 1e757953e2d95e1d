"""``LamportAllGather`` on CUDA: one kernel that publishes its packs and collects everybody's (spec/decode.md C)."""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32
from torch import Tensor

from quickseek.ops import ptx
from quickseek.ops.collectives.push import (
    GENERATIONS,
    NEXT,
    Exchange,
    arrive,
    current_turn,
    depart,
    form_of,
    load_peers,
    push_everywhere,
)
from quickseek.ops.collectives.reference import gather_words
from quickseek.ops.collectives.spec import agree, check_gather
from quickseek.ops.collectives.wait import BoundedWait
from quickseek.ops.compiled import compiled, current_stream, typed
from quickseek.parallel.fabric import Fabric
from quickseek.parallel.watchdog import Watchdog
from quickseek.parallel.world import together

THREADS = 256
MAX_BLOCKS = 64
"""Spinning blocks must all be resident; half an H200's multiprocessors leave room for whatever runs beside them."""
SENTINEL_WORD = -(2**31)
ARGUMENTS = ("a", "a", Exchange, "i", "i")


class GatherKernel:
    """Grid (blocks); a thread takes packs of 16 bytes in strides of the grid. ``rank_packs``: mailbox packs a rank.

    Read before the grid wait: the peer table. Every pack leaves before the first is waited for.
    """

    def __init__(self, ranks: int, rank_packs: int, *, form: str, stride: int = 0) -> None:
        self.ranks, self.rank_packs, self.form, self.stride = ranks, rank_packs, form, stride
        self.wait = BoundedWait(ranks, 3, halves=False)

    @cute.jit
    def __call__(self, x: Int64, output: Int64, exchange: Exchange, packs: Int32, blocks: Int32, stream: Any) -> None:
        self.kernel(x, output, exchange, packs, blocks).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x: Int64, output: Int64, exchange: Exchange, packs: Int32, blocks: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        start, step = block * THREADS + thread, blocks * THREADS
        rank = exchange.rank
        cute.arch.griddepcontrol_launch_dependents()
        peers = load_peers(exchange.table, self.ranks)
        cute.arch.griddepcontrol_wait()
        turn = current_turn(exchange, NEXT)
        base = Int64(turn.generation) * (self.ranks * self.rank_packs * 16)
        own = rank if cutlass.const_expr(self.form == "unicast") else Int32(-1)
        for index in cutlass.range(start, packs, step, unroll=1):
            words = [self.positive(word) for word in ptx.load_pack(x + Int64(index) * 16)]
            offset = base + (Int64(rank) * self.rank_packs + Int64(index)) * 16
            if cutlass.const_expr(self.form == "unicast"):
                push_everywhere(peers, exchange.multicast, self.form, offset, words, own=rank)
                ptx.store_pack(output + (Int64(rank) * Int64(packs) + Int64(index)) * 16, words)
            else:
                push_everywhere(peers, exchange.multicast, self.form, offset, words, stride=self.stride)
        # Not before every thread of the block has its generation.
        cute.arch.sync_threads()
        arrived = Uint32(0)
        if thread == 0:
            arrived = arrive(exchange)
        found = cute.make_rmem_tensor((4 * self.ranks,), Uint32)
        found.fill(0)
        for index in cutlass.range(start, packs, step, unroll=1):
            slot = exchange.mailbox + base + Int64(index) * 16
            self.wait.poll(found, slot, self.rank_packs * 16, self.ranks, own, exchange, turn, index, Int32(0))
            for source in cutlass.range_constexpr(self.ranks):
                if source != own:
                    words = [found[4 * source + word] for word in range(4)]
                    ptx.store_pack(output + (Int64(packs) * source + Int64(index)) * 16, words)
                    ptx.store_pack(slot + source * (self.rank_packs * 16), [Uint32(0x80000000)] * 4)
        if thread == 0:
            depart(exchange, turn, arrived, blocks)
            if block == 0:
                self.wait.report_aborted(exchange, turn)

    @staticmethod
    def positive(word: Any) -> Any:
        return ptx.choose(word == Uint32(0x80000000), Uint32(0), word)


class FusedAllGather:
    """One rank's mailbox, state and launches. Construction is collective.

    Ranks in turns have neither: the kernel would wait, in the launch that publishes, for peers whose turn has not come,
    so they gather over their world.
    """

    def __init__(self, rank_capacity_bytes: int, device: torch.device, fabric: Fabric, timeout_s: float) -> None:
        check_gather(rank_capacity_bytes, timeout_s, fabric.size)
        self.fabric, self.device, self.ranks = fabric, fabric.device, fabric.size
        agree(fabric, (rank_capacity_bytes, timeout_s))
        self.rank_packs = rank_capacity_bytes // 16
        self.watchdog = Watchdog.of(fabric)
        self.instance = self.watchdog.register(self)
        self.blocks = max(1, MAX_BLOCKS // fabric.ranks_on_device)
        self.launches = self.ranks > 1 and fabric.turns is None
        if self.launches:
            self.mailbox = fabric.allocate([GENERATIONS, self.ranks, self.rank_packs, 4], torch.int32)
            self.state = torch.zeros(4, dtype=torch.int32, device=self.device)
            form = form_of(self.mailbox)

            def build() -> Any:
                return compiled(
                    GatherKernel, ARGUMENTS, self.device, ranks=self.ranks, rank_packs=self.rank_packs, **form
                )

            self.kernel = together(fabric, "compiling LamportAllGather", build)
            self.exchange = typed(
                Exchange, self.mailbox.local.data_ptr(), self.mailbox.peer_pointers.data_ptr(),
                self.mailbox.multicast_pointer, self.state.data_ptr(), self.watchdog.control, int(timeout_s * 1e9),
                self.instance, fabric.rank,
            )  # fmt: skip
            self.refill()
        fabric.barrier()

    def refill(self) -> None:
        """Fill the own mailbox with the sentinel and zero the own state (``Watchdog.reset``)."""
        if self.launches:
            self.mailbox.local.fill_(SENTINEL_WORD)
            self.state.zero_()

    def reset(self) -> None:
        """Empty all mailboxes of the fabric. Collective."""
        self.watchdog.reset()

    def __call__(self, x: Tensor) -> Tensor:
        self.watchdog.check()
        if self.fabric.turns is not None:
            return gather_words(x, self.fabric.turns)
        x = x.contiguous()
        if x.data_ptr() % 16:
            x = x.clone()
        output = x.new_empty(x.shape[0] * self.ranks, *x.shape[1:])
        if self.ranks == 1:
            words = x.view(torch.uint8).view(-1).view(torch.int32)
            output.view(torch.uint8).view(-1).view(torch.int32).copy_(words.masked_fill(words == SENTINEL_WORD, 0))
            return output
        packs = x.numel() * x.element_size() // 16
        blocks = min(self.blocks, -(-packs // THREADS))
        self.kernel(x.data_ptr(), output.data_ptr(), self.exchange, packs, blocks, current_stream(self.device))
        return output

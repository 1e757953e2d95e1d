"""The only loops in which a kernel waits for peers, and how they end when a peer does not come (spec/decode.md L.6)."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from quickseek.ops import ptx
from quickseek.ops.collectives.push import Exchange
from quickseek.parallel.watchdog import ABORT, CLAIMED, MAGIC, PEERS, RECORD

POLLS_PER_CLOCK_READ = 128
"""Polls between two looks at the timer and the abort word: some 50 us, so that the usual wait never looks."""


class BoundedWait:
    """Polls slots until no sentinel is left in them, or the budget is over, or another wait gave up.

    ``kind``: a number of ``watchdog.KINDS``. ``halves``: the sentinel is 0x8000 in any half of a word, else the word
    0x80000000.
    """

    def __init__(self, ranks: int, kind: int, *, halves: bool) -> None:
        self.ranks, self.kind, self.halves = ranks, kind, halves

    def is_empty(self, word: Any) -> Any:
        """Whether a word still holds the sentinel."""
        if self.halves:
            return ptx.has_negative_zero(word) != Uint32(0)
        return word == Uint32(0x80000000)

    @cute.jit
    def poll(
        self,
        packs: Any,
        address: Any,
        stride: Any,
        sources: cutlass.Constexpr,
        own: Any,
        exchange: Exchange,
        turn: Any,
        token: Any,
        fragment: Any,
    ) -> None:
        """Fill packs (4 words a source) from ``address + s * stride``; source ``own`` keeps what packs holds.

        What is left in packs is the very load that was found clean: memory is not read again.
        """
        live = ptx.choose(turn.aborted == Uint32(0), Uint32(0xFFFFFFFF), Uint32(0))
        missing = Uint32(1)
        polls = Int32(0)
        deadline = Int64(0)
        while missing != Uint32(0):
            missing = Uint32(0)
            for source in cutlass.range_constexpr(sources):
                if source != own:
                    pack = ptx.load_volatile_pack(address + source * stride)
                    empty = self.is_empty(pack[0]) | self.is_empty(pack[1])
                    empty = empty | self.is_empty(pack[2]) | self.is_empty(pack[3])
                    for word in cutlass.range_constexpr(4):
                        packs[4 * source + word] = pack[word]
                    missing = missing | ptx.choose(empty, Uint32(1 << source), Uint32(0))
            missing = missing & live
            polls += 1
            if polls == POLLS_PER_CLOCK_READ and missing != Uint32(0):
                polls = Int32(0)
                now = cute.arch.globaltimer()
                if deadline == Int64(0):
                    deadline = now + exchange.budget
                stop = ptx.load_volatile_word(exchange.control + ABORT) != Uint32(0)
                if now > deadline:
                    stop = cutlass.Boolean(True)
                    self.abort_peers(exchange)
                if stop:
                    self.report(exchange, turn, token, fragment, missing)
                    missing = Uint32(0)

    @cute.jit
    def abort_peers(self, exchange: Exchange) -> None:
        """Raise the sticky abort flag of every rank, this one included."""
        for peer in cutlass.range_constexpr(self.ranks):
            ptx.push_word(ptx.load_address(exchange.control + PEERS + 8 * peer) + ABORT, Uint32(1))

    @cute.jit
    def report_aborted(self, exchange: Exchange, turn: Any) -> None:
        """Leave a record too where a call found the flag raised: then its results are void as well. For one thread."""
        if turn.aborted != Uint32(0):
            self.report(exchange, turn, Int32(0), Int32(0), Uint32(0))

    @cute.jit
    def report(self, exchange: Exchange, turn: Any, token: Any, fragment: Any, missing: Any) -> None:
        """Leave the record for the host, unless an earlier wait already has."""
        if ptx.atomic_exchange(exchange.control + CLAIMED, Uint32(1)) == Uint32(0):
            record = ptx.load_address(exchange.control + RECORD)
            words = (
                *(exchange.instance, Int32(self.kind), exchange.rank),
                *(turn.generation, token, fragment, missing),
            )
            for index, word in enumerate(words):
                ptx.push_word(record + 4 * (index + 1), word)
            ptx.fence_system()
            ptx.push_word(record, Uint32(MAGIC))

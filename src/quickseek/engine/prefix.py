"""Prefixes that need not be computed again: a hash chain over tokens, and snapshots of slot state (spec/model.md 9).

A snapshot is a slot beyond the request slots that holds a copy of a request's slot state at a committed length; with
the blocks of the rows before it, a request with the same tokens starts there exactly.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quickseek.engine.blocks import BlockPool, SlotPool
from quickseek.engine.request import Request

REWIND = 1
"""Rows before its end at which a snapshot may be used as well: the rings' slack (design.md 4.4) holds the older rows.

It serves a repeated prompt, whose last token has to run again for its logits."""


@dataclass(eq=False)
class Snapshot:
    """Slot state at ``length`` rows in ``slot``, and the blocks that hold these rows.

    ``parent`` names the full blocks before the row ``length - 1`` and ``tail`` holds the tokens after them, 1 up to
    ``block_tokens``. ``used``: the last cycle that copies to or from the slot.
    """

    slot: int
    length: int
    parent: bytes
    tail: tuple[int, ...]
    blocks: list[int]
    used: int


@dataclass(frozen=True)
class Hit:
    """A usable prefix: the first ``length`` rows; ``start``: the first row that has to run.

    ``blocks``: full blocks to share; ``partial``: a block to copy for the rows after them, or None. ``snapshot`` is
    None for a replayed (approximate) hit, whose rows from ``start`` to ``length`` write window state only.
    """

    length: int
    start: int
    blocks: Sequence[int]
    partial: int | None
    snapshot: Snapshot | None


class PrefixCache:
    """Snapshots in ``slots``, found by tokens; least recently used ones make room.

    ``identity``: everything besides tokens and salt that changes a row of a cache (checkpoint, numerics, options).
    ``replay_window``: None for exact reuse only; a number of rows allows the approximate reuse of full blocks by
    replaying as many rows before the end of the hit (spec 9). ``completed``: every cycle up to it has completed.
    """

    def __init__(self, pool: BlockPool, slots: range, identity: str, *, replay_window: int | None = None) -> None:
        self.pool, self.slots = pool, SlotPool(slots)
        self.identity, self.replay_window = identity, replay_window
        self.completed = -1
        self.snapshots: list[Snapshot] = []
        """Least recently used first."""
        self._found: dict[bytes, list[Snapshot]] = {}
        self._held: Counter[int] = Counter()

    # ------------------------------------------------------------------------------------------ names

    def names(self, request: Request, blocks: int) -> list[bytes]:
        """Names of a request's prefixes of 0, 1, ... up to ``blocks`` full blocks, each hashed from the one before."""
        size, chain = self.pool.block_tokens, request.chain
        if not chain:
            salt = request.cache_salt.encode(errors="surrogatepass")
            chain.append(_digest(self.identity.encode(), _digest(salt, b"")))
        if len(chain) <= blocks:
            first = len(chain) - 1
            tokens = request.tokens(first * size, blocks * size)
            for start in range(0, len(tokens), size):
                chain.append(_digest(chain[-1], array("I", tokens[start : start + size]).tobytes()))
        return chain[: blocks + 1]

    # ------------------------------------------------------------------------------------------ finding

    def lookup(self, request: Request) -> Hit | None:
        """The longest usable prefix of a request's tokens that leaves at least one row to run."""
        exact, replayed = self._exact(request), self._replayed(request)
        if exact is None or replayed is None:
            return exact or replayed
        return exact if exact.start >= replayed.start else replayed

    def _exact(self, request: Request) -> Hit | None:
        size, most = self.pool.block_tokens, request.length - 1
        depths = {(snapshot.length - 1) // size for snapshot in self.snapshots}
        for depth in sorted(depths, reverse=True):
            if depth * size > most:
                continue
            candidates = self._found.get(self.names(request, depth)[depth], [])
            tokens = request.tokens(depth * size, (depth + 1) * size)
            length, snapshot = max(((_agreed(s, tokens, most), s) for s in candidates), key=_first, default=(0, None))
            if length and snapshot is not None:
                full = length // size
                partial = snapshot.blocks[full] if length % size else None
                return Hit(length, length, snapshot.blocks[:full], partial, snapshot)
        return None

    def _replayed(self, request: Request) -> Hit | None:
        if self.replay_window is None:
            return None
        size = self.pool.block_tokens
        blocks = []
        for name in self.names(request, (request.length - 1) // size)[1:]:
            block = self.pool.find(name)
            if block is None:
                break
            blocks.append(block)
        start = len(blocks) * size - self.replay_window
        return Hit(len(blocks) * size, start, blocks, None, None) if start > 0 else None

    def use(self, snapshot: Snapshot, cycle: int) -> None:
        """Keep a snapshot until ``cycle``, which copies from it, has completed; it is now the most recently used."""
        snapshot.used = max(snapshot.used, cycle)
        self.snapshots.remove(snapshot)
        self.snapshots.append(snapshot)

    # ------------------------------------------------------------------------------------------ keeping

    def save(self, request: Request, length: int, cycle: int) -> int | None:
        """Register a snapshot of the rows [0, length) of a request, which ``cycle`` copies; the slot to copy to.

        None when there is nothing to do: the snapshot exists already, or a running cycle uses every slot.
        """
        size = self.pool.block_tokens
        depth = (length - 1) // size
        parent = self.names(request, depth)[depth]
        tail = tuple(request.tokens(depth * size, length))
        known = next((s for s in self._found.get(parent, ()) if s.tail == tail), None)
        if known is not None:
            self.use(known, known.used)
            return None
        if not self.slots.available:
            oldest = next((s for s in self.snapshots if s.used <= self.completed), None)
            if oldest is None:
                return None
            self._evict(oldest)
        blocks = request.block_table[: depth + 1]
        self.pool.share(blocks)
        self._held.update(blocks)
        snapshot = Snapshot(self.slots.take(), length, parent, tail, blocks, cycle)
        self.snapshots.append(snapshot)
        self._found.setdefault(parent, []).append(snapshot)
        return snapshot.slot

    def publish(self, request: Request) -> None:
        """Make the full blocks of a request's computed rows findable, if approximate reuse is on."""
        full = request.num_computed // self.pool.block_tokens
        if self.replay_window is None or full <= request.published or request.num_computed < request.replayed_until:
            return
        names = self.names(request, full)
        for block in range(request.published, full):
            self.pool.name(request.block_table[block], names[block + 1])
        request.published = full

    # ------------------------------------------------------------------------------------------ making room

    def evict_for(self, count: int, needed: Snapshot | None = None) -> None:
        """Drop snapshots but the ``needed`` one, least recently used first, until ``count`` blocks are available.

        Only those go that help: whose last block nobody else owns. Whoever owns it owns all before it.
        """
        if self.pool.available >= count:
            return
        for snapshot in list(self.snapshots):
            last = snapshot.blocks[-1]
            if snapshot is needed or snapshot.used > self.completed:
                continue
            if self.pool.references(last) == self._held[last]:
                self._evict(snapshot)
                if self.pool.available >= count:
                    return

    def _evict(self, snapshot: Snapshot) -> None:
        self.snapshots.remove(snapshot)
        siblings = self._found[snapshot.parent]
        siblings.remove(snapshot)
        if not siblings:
            del self._found[snapshot.parent]
        for block in snapshot.blocks:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
        self.pool.release(snapshot.blocks)
        self.slots.give(snapshot.slot)


def _digest(parent: bytes, content: bytes) -> bytes:
    return hashlib.sha256(len(parent).to_bytes(8, "little") + parent + content).digest()


def _agreed(snapshot: Snapshot, tokens: Sequence[int], most: int) -> int:
    """Rows of a snapshot that a request may start from; ``tokens``: the request's, from the snapshot's tail on."""
    kept = len(snapshot.tail)
    if snapshot.length <= most and snapshot.tail == tuple(tokens[:kept]):
        return snapshot.length
    kept, length = kept - REWIND, snapshot.length - REWIND
    return length if length <= most and snapshot.tail[:kept] == tuple(tokens[:kept]) else 0


def _first(pair: tuple[int, Snapshot]) -> int:
    return pair[0]

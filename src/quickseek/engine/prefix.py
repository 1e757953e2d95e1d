"""Prefixes that need not be computed again: a hash chain over tokens, and snapshots of slot state (spec/model.md 9).

A snapshot is a slot beyond the request slots that holds a copy of a request's slot state at a committed length; with
the blocks of the rows before it, a request with the same tokens starts there exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quickseek.engine.blocks import BlockPool
from quickseek.engine.request import Request

REWIND = 1
"""Rows that a request may start before its snapshot: the rings' slack (design.md 4.4) still holds the older rows.

It serves a repeated prompt, whose last token has to run again for its logits."""


@dataclass
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
    """Snapshots in ``slots``, found by tokens.

    ``identity``: everything besides tokens and salt that changes a row of a cache (checkpoint, numerics, options).
    ``replay_window``: None for exact reuse only; a number of rows allows the approximate reuse of full blocks by
    replaying as many rows before the end of the hit (spec 9).
    """

    def __init__(self, pool: BlockPool, slots: range, identity: str, *, replay_window: int | None = None) -> None:
        raise NotImplementedError("PrefixCache")

    def lookup(self, request: Request) -> Hit | None:
        """The longest usable prefix of a request's tokens that leaves at least one row to run."""
        raise NotImplementedError("PrefixCache.lookup")

    def save(self, request: Request, length: int, cycle: int, completed: int) -> int | None:
        """Register a snapshot of the rows [0, length) of a request; the slot to copy its slot state to.

        None when there is nothing to do: the snapshot exists already, or every slot is in use by a running cycle.
        """
        raise NotImplementedError("PrefixCache.save")

    def evict_for(self, count: int, completed: int) -> None:
        """Drop snapshots, least recently used first, until ``count`` blocks are available or none helps."""
        raise NotImplementedError("PrefixCache.evict_for")

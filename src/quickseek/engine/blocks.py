"""Who owns which block and which slot: reference counts, and giving back only what no launched cycle still uses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SCRATCH = 0
"""Block, and request slot, that absorbs what must not be kept; never handed out (as in ops/cache.py)."""


def rows_ahead(num_speculative_tokens: int) -> int:
    """Rows beyond its known length for which a decoding request owns blocks: two cycles' (design.md 4.7)."""
    return 2 * (num_speculative_tokens + 1)


class BlockPool:
    """``num_blocks`` blocks of ``block_tokens`` positions, numbered from 0; block 0 is scratch (design.md 4.4).

    A block has as many references as owners (requests, snapshots, retired holdings). An unreferenced block that has
    a name (the hash of the tokens up to its end) is kept until it is wanted, oldest first, and can be found again.
    ``block_tokens``: a multiple of 8; ValueError otherwise.
    """

    def __init__(self, num_blocks: int, block_tokens: int = 16) -> None:
        if block_tokens < 8 or block_tokens % 8:
            raise ValueError(f"block_tokens = {block_tokens}: expected a positive multiple of 8")
        if num_blocks < 2:
            raise ValueError(f"num_blocks = {num_blocks}: expected scratch and at least one block more")
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._kept: dict[int, None] = {}

    @property
    def usable(self) -> int:
        """Blocks that exist, without scratch."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks without an owner: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    def blocks_for(self, rows: int) -> int:
        """Blocks that hold ``rows`` positions."""
        return -(-rows // self.block_tokens)

    def references(self, block: int) -> int:
        """Owners of a block."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each; RuntimeError, with nothing taken, when fewer are available."""
        if count > self.available:
            raise RuntimeError(f"{count} blocks are wanted and {self.available} of {self.usable} are available")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = next(iter(self._kept))
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block; a kept block is owned again."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._kept, f"block {block} is free: it cannot be shared"
                del self._kept[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner fewer for each block; without any, a block is kept if it has a name, else free.

        The last block goes first, so that of a kept prefix the end is taken before the beginning.
        """
        for block in reversed(blocks):
            assert block != SCRATCH and self._references[block] > 0, f"block {block} has no owner that could release it"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._names:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def name(self, block: int, name: bytes) -> None:
        """Make an owned, full block findable; the first block of a name stays the one that is found."""
        assert self._references[block] > 0, f"block {block} has no owner"
        if name not in self._named and block not in self._names:
            self._names[block], self._named[name] = name, block

    def find(self, name: bytes) -> int | None:
        """The block of that name, or None."""
        return self._named.get(name)

    def unowned(self) -> tuple[list[int], list[int]]:
        """(free blocks, kept blocks)."""
        return list(self._free), list(self._kept)

    def _forget(self, block: int) -> None:
        del self._kept[block]
        del self._named[self._names.pop(block)]


class SlotPool:
    """Slots of a range, each with one owner or free."""

    def __init__(self, slots: range) -> None:
        self.slots = slots
        self._free = list(reversed(slots))

    @property
    def available(self) -> int:
        """Slots that are free."""
        return len(self._free)

    def take(self) -> int:
        """A free slot; the caller has seen that there is one."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Return a slot that ``take`` gave."""
        assert slot in self.slots and slot not in self._free, f"slot {slot} is not one that was taken"
        self._free.append(slot)

    def free(self) -> list[int]:
        """The free slots."""
        return list(self._free)


class LiveBlocks:
    """How many running requests have each block in their table; requests that share a prefix have it together."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks in at least one table."""
        return len(self._holders)

    def add(self, blocks: Iterable[int]) -> None:
        """One holder more of each."""
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) + 1

    def remove(self, blocks: Iterable[int]) -> None:
        """One holder fewer of each."""
        for block in blocks:
            left = self._holders[block] - 1
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]


@dataclass(frozen=True)
class Holding:
    """A request slot and references to blocks that were given up, which cycles up to ``cycle`` may still use."""

    cycle: int
    slot: int
    blocks: Sequence[int]


class Retired:
    """Holdings of requests that stopped: released once their last launched cycle has completed (design.md 4.7).

    ``completed``: every cycle up to it has completed.
    """

    def __init__(self, pool: BlockPool, slots: SlotPool) -> None:
        self.completed = -1
        self.holdings: list[Holding] = []
        self._pool, self._slots = pool, slots

    def retire(self, holding: Holding) -> None:
        """Take over a holding; one that no running cycle uses is released at once."""
        if holding.cycle <= self.completed:
            self._release(holding)
        else:
            self.holdings.append(holding)

    def complete(self, cycle: int) -> None:
        """Every cycle up to ``cycle`` has completed."""
        self.completed = max(self.completed, cycle)
        due = [holding for holding in self.holdings if holding.cycle <= self.completed]
        self.holdings = [holding for holding in self.holdings if holding.cycle > self.completed]
        for holding in due:
            self._release(holding)

    def _release(self, holding: Holding) -> None:
        self._slots.give(holding.slot)
        self._pool.release(holding.blocks)

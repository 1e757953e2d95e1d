"""``Tick``: what one cycle does, as plain data between the scheduler and the runner."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quickseek.engine.request import Request


@dataclass(frozen=True)
class PrefillChunk:
    """Rows [start, start + count) of a request, run in an eager prefill step.

    The first ``replayed`` of them write no global KV and no index keys, and none sees window keys before ``oldest``
    (spec 9, prefix caching; both 0 for exact reuse). ``last``: its last row is the prompt's and chooses a token.
    """

    request: Request
    start: int
    count: int
    last: bool
    replayed: int = 0
    oldest: int = 0

    @property
    def token_ids(self) -> list[int]:
        """The tokens of its rows."""
        return self.request.tokens(self.start, self.start + self.count)


@dataclass(frozen=True)
class Save:
    """Copy the slot state of ``request_slot``, which stands at ``length`` rows, to ``snapshot_slot``."""

    request_slot: int
    snapshot_slot: int
    length: int


@dataclass(frozen=True)
class Restore:
    """Start ``request`` at ``length`` rows in ``request_slot``.

    Copy the slot state of ``snapshot_slot`` (None: nothing to copy) and, in every paged cache, the block ``source`` to
    ``target`` for each pair (source, target) of ``copies``. A fresh start has length 0; every start has a Restore.
    """

    request: Request
    request_slot: int
    length: int
    snapshot_slot: int | None
    copies: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class TableUpdate:
    """Entries ``first`` and on of the block table of a request slot become ``blocks``."""

    slot: int
    first: int
    blocks: Sequence[int]


@dataclass
class Tick:
    """What to do in cycle ``cycle`` (0, 1, ...), in this order; ``preempted`` requests are not part of it any more."""

    cycle: int
    preempted: list[Request] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether nothing is to be launched."""
        return not (self.saves or self.restores or self.prefills or self.decodes)

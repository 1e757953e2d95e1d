"""Which requests run when: one ``Tick`` per cycle, as plain data; touches no tensor (design.md 4).

The runner's loop::

    while not scheduler.idle:
        tick = scheduler.schedule()
        ...carry out tick.saves, then tick.restores, then tick.table_updates...
        ...launch the prefill step; scheduler.prefilled(chunk) for each chunk...
        ...launch the cycle of tick.decodes...
        ...read the results of tick.cycle - 1: append tokens, then scheduler.committed(request, rows) and, where it
           ended, scheduler.finish(request)...
        scheduler.completed(tick.cycle - 1)

Results may be read one cycle late or at once. When a tick is ``empty``, whatever is outstanding is read and reported
completed before the next one: a request may be waiting for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quickseek.engine.blocks import BlockPool
from quickseek.engine.prefix import PrefixCache
from quickseek.engine.request import Request


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """``max_num_seqs`` requests hold slots 1 up to it; ``max_num_batched_tokens`` rows make up a prefill step.

    ``num_speculative_tokens`` drafts are verified per cycle. ``snapshot_interval``: prompts are cut at multiples of
    it, where a snapshot is taken; 0: only at the end of a prompt and of a request.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_speculative_tokens: int = 0
    snapshot_interval: int = 0

    @property
    def rows_ahead(self) -> int:
        """Rows beyond its known length for which a decoding request owns blocks: two cycles' (design.md 4.7)."""
        return 2 * (self.num_speculative_tokens + 1)


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


class Scheduler:
    """First come first served within a priority, lower number first; continuous batching with chunked prompts.

    ``prefix`` None: nothing is reused.
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, prefix: PrefixCache | None = None) -> None:
        raise NotImplementedError("Scheduler")

    def add(self, request: Request) -> None:
        """Queue a request. PromptError when it could never fit: it names the largest length that does.

        ValueError when its id is that of a live request.
        """
        raise NotImplementedError("Scheduler.add")

    def abort(self, request_id: str) -> bool:
        """Drop a live request, whatever it is doing; False when there is none of that id (so twice is harmless)."""
        raise NotImplementedError("Scheduler.abort")

    def schedule(self) -> Tick:
        """The next cycle's work; every call counts as one cycle, launched or empty."""
        raise NotImplementedError("Scheduler.schedule")

    def prefilled(self, chunk: PrefillChunk) -> None:
        """The step of a chunk has been launched (its token, if it chose one, may be read later)."""
        raise NotImplementedError("Scheduler.prefilled")

    def committed(self, request: Request, count: int) -> None:
        """A cycle's result was read: ``count`` more rows of a request are committed, their tokens are appended.

        Results that arrive for a request that was preempted, aborted or finished meanwhile change nothing here.
        """
        raise NotImplementedError("Scheduler.committed")

    def finish(self, request: Request, *, frozen: bool = True) -> None:
        """A request has ended; its ``finish_reason`` is set. Again: no effect.

        ``frozen``: the device stopped it at its known length (end token, stop id, length limit), so its slot state can
        be kept as a snapshot; False for a stop string found late.
        """
        raise NotImplementedError("Scheduler.finish")

    def completed(self, cycle: int) -> None:
        """Every launched step up to ``cycle`` has completed and its results are read: what it used may be reused."""
        raise NotImplementedError("Scheduler.completed")

    @property
    def idle(self) -> bool:
        """Whether there is no live request and no snapshot left to be saved."""
        raise NotImplementedError("Scheduler.idle")

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

from bisect import insort
from dataclasses import dataclass

from quickseek.engine.blocks import BlockPool, Holding, LiveBlocks, Retired, SlotPool, rows_ahead
from quickseek.engine.prefix import Hit, PrefixCache, Snapshot
from quickseek.engine.request import Request, Status
from quickseek.engine.tick import PrefillChunk, Restore, Save, TableUpdate, Tick
from quickseek.errors import ConfigError, PromptError


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

    def __post_init__(self) -> None:
        smallest = {"max_model_len": 2, "num_speculative_tokens": 0, "snapshot_interval": 0}
        for key, value in vars(self).items():
            if value < smallest.get(key, 1):
                raise ConfigError(key, value, f"{smallest.get(key, 1)} or more")

    @property
    def rows_ahead(self) -> int:
        """Rows beyond its known length for which a decoding request owns blocks."""
        return rows_ahead(self.num_speculative_tokens)


@dataclass
class _Round:
    """One ``schedule`` under way: the rows left for prompts, and whether less important requests may still take
    blocks or start; both stop at the first that cannot, so that nobody is overtaken."""

    tick: Tick
    budget: int
    may_grow: bool = True
    may_start: bool = True


class Scheduler:
    """First come first served within a priority, lower number first; continuous batching with chunked prompts.

    A request that needs blocks makes the least important request below it wait again (it computes its rows anew); one
    that wants to start does so only to requests of a lower priority. ``prefix`` None: nothing is reused; else its
    slots lie beyond ``max_num_seqs``.
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, prefix: PrefixCache | None = None) -> None:
        self.limits, self.pool, self.prefix = limits, pool, prefix
        if self.max_length < 2:
            raise ConfigError("num_blocks", pool.num_blocks, "enough blocks for a prompt token and a new one")
        if prefix is not None and prefix.slots.slots.start <= limits.max_num_seqs:
            raise ValueError(f"snapshot slots {prefix.slots.slots}: expected slots beyond {limits.max_num_seqs}")
        self.slots = SlotPool(range(1, limits.max_num_seqs + 1))
        self.retired = Retired(pool, self.slots)
        self.live = LiveBlocks()
        self.waiting: list[Request] = []
        """Most important first; so is ``running``, of requests that own a slot."""
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._to_save: list[tuple[Request, int]] = []
        self._closing: list[Request] = []
        self._cycle = self._arrivals = 0

    # ------------------------------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queue a request. PromptError when it could never fit: it names the largest length that does.

        ValueError when its id is that of a live request.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id = {request.request_id!r}: a live request has this id")
        length, most = len(request.prompt_ids) + request.limit, self.max_length
        if length > most:
            raise PromptError(
                f"the prompt of {len(request.prompt_ids)} tokens and up to {request.limit} new ones need {length}: "
                f"expected at most {most} together"
            )
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        self._requests[request.request_id] = request
        insort(self.waiting, request, key=_importance)

    @property
    def max_length(self) -> int:
        """Tokens, prompt and new ones, that a request may have: the context limit, or what all blocks hold."""
        # The last token needs no row, but what is launched ahead does.
        held = self.pool.usable * self.pool.block_tokens - self.limits.rows_ahead + 1
        return min(self.limits.max_model_len, held)

    @property
    def table_width(self) -> int:
        """Entries of the longest block table."""
        return self.pool.blocks_for(self.max_length - 1 + self.limits.rows_ahead)

    @property
    def idle(self) -> bool:
        """Whether there is no live request and no snapshot left to be saved."""
        return not (self._requests or self._to_save or self._closing)

    def abort(self, request_id: str) -> bool:
        """Drop a live request, whatever it is doing; False when there is none of that id (so twice is harmless)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.finish_reason = request.finish_reason or "abort"
        self.finish(request, frozen=False)
        return True

    # ------------------------------------------------------------------------------------------ feedback

    def prefilled(self, chunk: PrefillChunk) -> None:
        """The step of a chunk has been launched (its token, if it chose one, may be read later)."""
        request = chunk.request
        if request.state is not Status.PREFILL or request.num_computed != chunk.start:
            return
        request.num_computed += chunk.count
        if chunk.last:
            request.state = Status.DECODE
        if self.prefix is not None and request.num_computed >= request.replayed_until:
            self.prefix.publish(request)
            if chunk.last or self._at_boundary(request.num_computed):
                self._to_save.append((request, request.num_computed))

    def committed(self, request: Request, count: int) -> None:
        """A cycle's result was read: ``count`` more rows of a request are committed, their tokens are appended.

        Results that arrive for a request that was preempted, aborted or finished meanwhile change nothing here.
        ValueError when the request has fewer tokens than rows and one more.
        """
        if request.state is not Status.DECODE:
            return
        if count < 0 or request.num_computed + count >= request.length:
            raise ValueError(
                f"{request.request_id}: {count} rows after {request.num_computed} cannot be committed with "
                f"{request.length} tokens: expected them appended first, and the last one without a row"
            )
        request.num_computed += count
        if self.prefix is not None:
            self.prefix.publish(request)

    def finish(self, request: Request, *, frozen: bool = True) -> None:
        """A request has ended; its ``finish_reason`` is set. Again: no effect.

        ``frozen``: the device stopped it at its known length (end token, stop id, length limit), so its slot state can
        be kept as a snapshot, and it keeps its slot until the next ``schedule``; False for a stop string found late.
        """
        if self._requests.get(request.request_id) is not request:
            return
        del self._requests[request.request_id]
        if request.state is Status.WAITING:
            self.waiting.remove(request)
        elif frozen and request.state is Status.DECODE and self.prefix is not None:
            self.running.remove(request)
            self.live.remove(request.block_table)
            self._closing.append(request)
        else:
            self._stop(request)
        request.state = Status.FINISHED

    def completed(self, cycle: int) -> None:
        """Every launched step up to ``cycle`` has completed and its results are read: what it used may be reused."""
        if cycle >= self._cycle:
            raise ValueError(f"cycle = {cycle}: expected one that was scheduled, below {self._cycle}")
        self.retired.complete(cycle)
        if self.prefix is not None:
            self.prefix.completed = self.retired.completed

    # ------------------------------------------------------------------------------------------ a cycle

    def schedule(self) -> Tick:
        """The next cycle's work; every call counts as one cycle, launched or empty.

        RuntimeError when more than one earlier cycle is unread: lengths would be older than the rows owned ahead.
        """
        if self.retired.completed < self._cycle - 2:
            raise RuntimeError(
                f"cycle {self._cycle} cannot be scheduled: cycle {self._cycle - 2} has not been reported completed"
            )
        tick = Tick(self._cycle)
        self._cycle += 1
        self._keep_snapshots(tick)
        round_ = _Round(tick, self.limits.max_num_batched_tokens)
        # In the order of importance, so that whoever loses its place has not been given work yet.
        running, next_running = list(self.running), 0
        while True:
            head = self.waiting[0] if self.waiting and round_.may_start and round_.budget else None
            runner = running[next_running] if next_running < len(running) else None
            if head is not None and (runner is None or _importance(head) < _importance(runner)):
                if self._start(head, round_):
                    self._read(head, round_)
                else:
                    round_.may_start = False
            elif runner is not None:
                next_running += 1
                if runner.state is Status.DECODE:
                    self._decode(runner, round_)
                elif runner.state is Status.PREFILL:
                    self._read(runner, round_)
            else:
                return tick

    def _keep_snapshots(self, tick: Tick) -> None:
        """Save what the last steps and finished requests left, before anything moves on."""
        for request, length in self._to_save:
            if request.slot is not None and request.num_computed == length:
                self._save(request, tick)
        for request in self._closing:
            if request.num_computed >= request.replayed_until:
                self._save(request, tick)
            self._retire(request)
        self._to_save, self._closing = [], []

    def _save(self, request: Request, tick: Tick) -> None:
        assert self.prefix is not None and request.slot is not None
        slot = self.prefix.save(request, request.num_computed, tick.cycle)
        if slot is not None:
            request.last_cycle = tick.cycle
            tick.saves.append(Save(request.slot, slot, request.num_computed))

    def _read(self, request: Request, round_: _Round) -> None:
        """Give a request its chunk of this cycle's prefill step."""
        start, stop = request.num_computed, min(request.prefill_target, request.num_computed + round_.budget)
        interval = self.limits.snapshot_interval
        if self.prefix is not None and interval:
            stop = min(stop, (start // interval + 1) * interval)
        if stop == start:
            return
        replayed = min(max(request.replayed_until - start, 0), stop - start)
        chunk = PrefillChunk(
            request, start, stop - start, stop == request.prefill_target, replayed=replayed, oldest=request.oldest
        )
        round_.budget -= chunk.count
        request.last_cycle = round_.tick.cycle
        round_.tick.prefills.append(chunk)

    def _decode(self, request: Request, round_: _Round) -> None:
        """Let a request decode if it owns, or can be given, the blocks of the rows ahead of it."""
        have = len(request.block_table)
        count = self.pool.blocks_for(request.num_computed + self.limits.rows_ahead) - have
        if count > 0:
            if not self._make_room(request, count, round_):
                return
            blocks = self.pool.allocate(count)
            self.live.add(blocks)
            request.block_table += blocks
            assert request.slot is not None
            round_.tick.table_updates.append(TableUpdate(request.slot, have, blocks))
        request.last_cycle = round_.tick.cycle
        round_.tick.decodes.append(request)

    def _make_room(self, request: Request, count: int, round_: _Round) -> bool:
        """Whether ``count`` blocks are available to a running request now; what it waits for, no other takes."""
        if not round_.may_grow:
            return False
        if not self._available(count):
            while self.pool.usable - len(self.live) < count and self.running[-1] is not request:
                self._preempt(self.running[-1], round_)
            if not self._available(count):
                round_.may_grow = round_.may_start = False
                return False
        return True

    def _available(self, count: int, needed: Snapshot | None = None) -> bool:
        """Whether ``count`` blocks are there, if need be at the cost of snapshots other than the ``needed`` one."""
        if self.prefix is not None:
            self.prefix.evict_for(count, needed)
        return self.pool.available >= count

    # ------------------------------------------------------------------------------------------ starting and stopping

    def _start(self, request: Request, round_: _Round) -> bool:
        """Give a waiting request its slot and blocks, if it can have them now."""
        if not round_.may_grow or request.last_cycle > self.retired.completed:
            return False
        self._make_way(request, round_)
        if not self.slots.available:
            return False
        hit = self.prefix.lookup(request) if self.prefix is not None else None
        if not self._take_blocks(request, hit, round_):
            # Alone, the block that a hit copies from may be the one that is missing.
            if hit is None or self.running or self.retired.holdings or not self._take_blocks(request, None, round_):
                return False
        self.waiting.remove(request)
        insort(self.running, request, key=_importance)
        request.state, request.last_cycle = Status.PREFILL, round_.tick.cycle
        return True

    def _take_blocks(self, request: Request, hit: Hit | None, round_: _Round) -> bool:
        """Own the blocks of all known tokens and the rows ahead, those of a hit shared, and say how it starts."""
        cycle, slot_length = round_.tick.cycle, 0 if hit is None else hit.start
        shared: list[int] = []
        if hit is not None:
            shared = list(hit.blocks)
            self.pool.share(shared)
        count = self._wanted(request) - len(shared)
        # One block for each running request to grow into, or starting this one would soon stop another.
        if not self._available(count + len(self.running), None if hit is None else hit.snapshot):
            self.pool.release(shared)
            return False
        fresh = self.pool.allocate(count)
        request.slot, request.block_table = self.slots.take(), shared + fresh
        self.live.add(request.block_table)
        request.num_computed, request.prefill_target = slot_length, request.length
        request.oldest = request.replayed_until = request.published = 0
        copies, snapshot_slot = [], None
        if hit is not None:
            if request.preemptions == 0:
                request.cached_tokens = hit.start
            if hit.snapshot is None:
                request.oldest, request.replayed_until = hit.start, hit.length
            else:
                assert self.prefix is not None
                self.prefix.use(hit.snapshot, cycle)
                snapshot_slot = hit.snapshot.slot
            if hit.partial is not None:
                copies = [(hit.partial, fresh[0])]
        round_.tick.restores.append(Restore(request, request.slot, slot_length, snapshot_slot, copies))
        round_.tick.table_updates.append(TableUpdate(request.slot, 0, request.block_table))
        return True

    def _wanted(self, request: Request) -> int:
        return self.pool.blocks_for(request.length + self.limits.rows_ahead)

    def _make_way(self, request: Request, round_: _Round) -> None:
        """Stop requests of lower priority, the least important first, where that lets a waiting one start."""
        lower = [other for other in self.running if other.priority > request.priority]
        if not lower:
            return
        staying = self.running[: len(self.running) - len(lower)]
        kept = set().union(*(other.block_table for other in staying))
        if self._wanted(request) + len(staying) > self.pool.usable - len(kept):
            return
        while lower and not self._will_have_place(request):
            self._preempt(lower.pop(), round_)

    def _will_have_place(self, request: Request) -> bool:
        """Whether a slot and all blocks will be there once launched cycles have completed."""
        if len(self.running) >= self.limits.max_num_seqs:
            return False
        return self._wanted(request) + len(self.running) <= self.pool.usable - len(self.live)

    def _preempt(self, request: Request, round_: _Round) -> None:
        """Make a request wait again, to compute its prompt and its tokens so far anew."""
        self._stop(request)
        request.state, request.num_computed = Status.WAITING, 0
        request.preemptions += 1
        insort(self.waiting, request, key=_importance)
        round_.tick.preempted.append(request)
        round_.may_start = False

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.live.remove(request.block_table)
        self._retire(request)

    def _retire(self, request: Request) -> None:
        """Give up slot and blocks; they are released when the last cycle launched with the request has completed."""
        assert request.slot is not None
        self.retired.retire(Holding(request.last_cycle, request.slot, request.block_table))
        request.slot, request.block_table = None, []

    def _at_boundary(self, length: int) -> bool:
        interval = self.limits.snapshot_interval
        return interval > 0 and length % interval == 0


def _importance(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival

"""A runner without a model: the next token is a function of all tokens before it, and every cache row is that value.

So a row that was lost, overwritten or taken from another request is seen when it is read, and the tokens of a request
are known beforehand. Results are read up to one cycle late, as design.md 4.7 allows.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from quickseek.engine.blocks import SCRATCH, BlockPool
from quickseek.engine.prefix import REWIND, PrefixCache
from quickseek.engine.request import Request, Status
from quickseek.engine.scheduler import Scheduler, SchedulerLimits
from quickseek.engine.tick import Tick
from quickseek.sampling_params import SamplingParams

EOS = 1
GARBAGE = -7


def row_value(tokens: list[int], row: int) -> int:
    """What a cache holds for a row: it depends on every token up to it."""
    value = 17
    for token in tokens[: row + 1]:
        value = (value * 31 + token + 1) % 1_000_003
    return value


def next_token(tokens: list[int]) -> int:
    """The token that follows; the end token now and then."""
    return row_value(tokens, len(tokens) - 1) % 23


def append(request: Request, token: int) -> None:
    """Take one more token and decide, as the device does, whether it is the last."""
    request.output_ids.append(token)
    if token in request.params.stop_token_ids or (token == EOS and not request.params.ignore_eos):
        request.finish_reason = "stop"
    elif len(request.output_ids) >= request.limit:
        request.finish_reason = "length"


def expected_output(prompt: list[int], limit: int) -> list[int]:
    """All tokens that a request must produce."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def make_request(prompt: list[int], limit: int = 8, *, priority: int = 0, salt: str = "") -> Request:
    """A request that ends after ``limit`` tokens or at the end token."""
    params = SamplingParams(max_tokens=limit, temperature=0.0)
    return Request(list(prompt), params, limit, priority=priority, cache_salt=salt)


@dataclass
class SlotState:
    """What the device knows of a slot: the tokens whose rows are committed, then what it is to produce."""

    rows: list[int] = field(default_factory=list)
    anchor: int | None = None
    produced: int = 0
    frozen: bool = False


@dataclass
class Launched:
    """A cycle whose results are not read yet: tokens chosen for each request, and rows committed by them."""

    cycle: int
    results: list[tuple[Request, list[int], int]] = field(default_factory=list)


class SimulatedRunner:
    """Carries out ticks, and checks every invariant of the scheduler after each thing it does."""

    def __init__(
        self,
        *,
        num_blocks: int = 24,
        block_tokens: int = 8,
        snapshots: int = 3,
        scheduler: type[Scheduler] = Scheduler,
        seed: int = 0,
        **limits: int,
    ) -> None:
        options = {"max_num_seqs": 3, "max_num_batched_tokens": 12, "max_model_len": 96, "num_speculative_tokens": 2}
        self.limits = SchedulerLimits(**(options | limits))
        self.pool = BlockPool(num_blocks, block_tokens)
        first = self.limits.max_num_seqs + 1
        self.prefix = PrefixCache(self.pool, range(first, first + snapshots), "simulated") if snapshots else None
        self.scheduler = scheduler(self.limits, self.pool, self.prefix)
        self.random = random.Random(seed)
        self.slots: dict[int, SlotState] = {}
        self.blocks = [[GARBAGE] * block_tokens for _ in range(num_blocks)]
        self.unread: deque[Launched] = deque()
        self.completed = -1
        self.last_use: dict[int, int] = {}
        self.last_slot_use: dict[int, int] = {}
        self.requests: list[Request] = []
        self.starts: list[Request] = []
        self.ticks: list[Tick] = []
        self.live: set[Request] = set()

    # ------------------------------------------------------------------------------------------ what a test does

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.requests.append(request)
        self.live.add(request)
        self.check()
        return request

    def abort(self, request: Request) -> bool:
        aborted = self.scheduler.abort(request.request_id)
        self.live.discard(request)
        self.check()
        return aborted

    def stop_late(self, request: Request) -> None:
        """A stop string was found: the request ends at tokens that the device has passed already."""
        request.finish_reason = "stop"
        self.scheduler.finish(request, frozen=False)
        self.live.discard(request)
        self.check()

    def launch(self) -> Tick:
        """Schedule a cycle and run it on the device; its results stay unread."""
        assert len(self.unread) <= 1
        tick = self.scheduler.schedule()
        self.ticks.append(tick)
        self._check_tick(tick)
        launched = Launched(tick.cycle)
        self._restore(tick)
        self._prefill(tick, launched)
        self._decode(tick, launched)
        self.unread.append(launched)
        self.check()
        return tick

    def read(self) -> None:
        """Read the oldest results."""
        launched = self.unread.popleft()
        for request, tokens, rows in launched.results:
            if request not in self.live:
                continue
            for token in tokens:
                append(request, token)
            self.scheduler.committed(request, rows)
            if request.finish_reason is not None:
                self.scheduler.finish(request)
                self.live.discard(request)
                assert request.output_ids == expected_output(request.prompt_ids, request.limit)
        self.completed = launched.cycle
        self.scheduler.completed(launched.cycle)
        self.check()

    def step(self) -> Tick:
        """One turn of the runner's loop, results one cycle late."""
        tick = self.launch()
        while len(self.unread) > (0 if tick.empty else 1):
            self.read()
        return tick

    def drain(self, most: int = 2000) -> None:
        """Run until nothing is left, and check that nothing is held."""
        for _ in range(most):
            if self.scheduler.idle and not self.unread:
                break
            self.step()
            if self.scheduler.idle:
                while self.unread:
                    self.read()
        assert self.scheduler.idle, "requests are left that do not finish"
        assert not self.scheduler.retired.holdings
        assert self.scheduler.slots.available == self.limits.max_num_seqs
        if self.prefix is not None:
            self.prefix.evict_for(self.pool.usable)
            assert not self.prefix.snapshots
            assert self.prefix.slots.available == len(self.prefix.slots.slots)
        assert self.pool.available == self.pool.usable
        self.check()

    # ------------------------------------------------------------------------------------------ the device

    def _restore(self, tick: Tick) -> None:
        for save in tick.saves:
            state = self.slots[save.request_slot]
            assert len(state.rows) == save.length, "a snapshot is taken at another length than it says"
            self.slots[save.snapshot_slot] = SlotState(list(state.rows))
        for restore in tick.restores:
            for source, target in restore.copies:
                self.blocks[target] = list(self.blocks[source])
            kept: list[int] = []
            if restore.snapshot_slot is not None:
                kept = self.slots[restore.snapshot_slot].rows
                assert restore.length <= len(kept) <= restore.length + REWIND
            assert kept[: restore.length] == restore.request.tokens(0, restore.length), "state of other tokens"
            self.slots[restore.request_slot] = SlotState(kept[: restore.length])

    def _prefill(self, tick: Tick, launched: Launched) -> None:
        for chunk in tick.prefills:
            request, state = chunk.request, self.slots[chunk.request.slot or 0]
            assert len(state.rows) == chunk.start == request.num_computed
            self._read_rows(request, state)
            state.rows += chunk.token_ids
            for row in range(chunk.start, chunk.start + chunk.count):
                self._write(request, row, row_value(state.rows, row))
            if chunk.last:
                state.anchor = next_token(state.rows)
                state.produced = len(request.output_ids) + 1
                state.frozen = state.anchor == EOS or state.produced >= request.limit
                launched.results.append((request, [state.anchor], 0))
            self.scheduler.prefilled(chunk)

    def _decode(self, tick: Tick, launched: Launched) -> None:
        for request in tick.decodes:
            state = self.slots[request.slot or 0]
            self._read_rows(request, state)
            first, tokens = len(state.rows), []
            accepted = self.random.randint(1, self.limits.num_speculative_tokens + 1)
            while len(tokens) < accepted and not state.frozen:
                assert state.anchor is not None
                state.rows.append(state.anchor)
                state.anchor = next_token(state.rows)
                state.produced += 1
                tokens.append(state.anchor)
                state.frozen = state.anchor == EOS or state.produced >= request.limit
            for row in range(first, first + self.limits.num_speculative_tokens + 1):
                self._write(request, row, row_value(state.rows, row) if row < len(state.rows) else GARBAGE)
            launched.results.append((request, tokens, len(tokens)))

    def _write(self, request: Request, row: int, value: int) -> None:
        size = self.pool.block_tokens
        assert row // size < len(request.block_table), f"row {row} is beyond the blocks that its request owns"
        self.blocks[request.block_table[row // size]][row % size] = value

    def _read_rows(self, request: Request, state: SlotState) -> None:
        """All rows before a step are those of the request's tokens."""
        size, value = self.pool.block_tokens, 17
        for row, token in enumerate(state.rows):
            value = (value * 31 + token + 1) % 1_000_003
            found = self.blocks[request.block_table[row // size]][row % size]
            assert found == value, f"row {row} of {request.request_id} is not its own"

    # ------------------------------------------------------------------------------------------ invariants

    def _check_tick(self, tick: Tick) -> None:
        limits = self.limits
        work = [*(chunk.request for chunk in tick.prefills), *tick.decodes]
        assert len(set(work)) == len(work), "a request has two parts in one cycle"
        assert not set(work) & set(tick.preempted), "a request that was stopped has work"
        assert sum(chunk.count for chunk in tick.prefills) <= limits.max_num_batched_tokens
        assert all(chunk.count > 0 for chunk in tick.prefills)
        assert len(work) <= limits.max_num_seqs
        for request in tick.decodes:
            owned = len(request.block_table) * self.pool.block_tokens
            assert owned >= request.num_computed + limits.rows_ahead, "a decoding request owns too few blocks ahead"
        for update in tick.table_updates:
            for block in update.blocks:
                if self.pool.references(block) == 1:
                    assert self.last_use.get(block, -1) <= self.completed, f"block {block} is reused early"
        for restore in tick.restores:
            assert self.last_slot_use.get(restore.request_slot, -1) <= self.completed, "a slot is reused early"
            self.starts.append(restore.request)
            for other in self.scheduler.waiting:
                if other.priority == restore.request.priority and other not in tick.preempted:
                    assert other.arrival > restore.request.arrival, "a request of the same priority is overtaken"
        for request in tick.preempted:
            importance = (request.priority, request.arrival)
            assert any((other.priority, other.arrival) < importance for other in self.scheduler.running) or (
                self.scheduler.waiting[0].priority < request.priority
            ), "a request was stopped for a less important one"
        for save in tick.saves:
            assert self.last_slot_use.get(save.snapshot_slot, -1) <= self.completed, "a snapshot is dropped early"
            self.last_slot_use[save.request_slot] = self.last_slot_use[save.snapshot_slot] = tick.cycle
        for restore in tick.restores:
            self.last_use.update((source, tick.cycle) for source, _ in restore.copies)
            if restore.snapshot_slot is not None:
                self.last_slot_use[restore.snapshot_slot] = tick.cycle
        for request in work:
            self.last_slot_use[request.slot or 0] = tick.cycle
            self.last_use.update(dict.fromkeys(request.block_table, tick.cycle))

    def check(self) -> None:
        """Every block and slot has exactly the owners that are counted."""
        scheduler, pool = self.scheduler, self.pool
        owners: Counter[int] = Counter()
        taken: Counter[int] = Counter()
        for request in [*scheduler.running, *scheduler._closing]:
            assert request.slot is not None
            owners.update(request.block_table)
            taken[request.slot] += 1
        for request in self.requests:
            held = request in scheduler.running or request in scheduler._closing
            assert held == (request.slot is not None) == bool(request.block_table)
            assert (request in scheduler.waiting) == (request.state is Status.WAITING)
        for holding in scheduler.retired.holdings:
            owners.update(holding.blocks)
            taken[holding.slot] += 1
        for snapshot in self.prefix.snapshots if self.prefix is not None else ():
            owners.update(snapshot.blocks)
            taken[snapshot.slot] += 1
        free, kept = pool.unowned()
        assert SCRATCH not in owners and SCRATCH not in free
        assert all(pool.references(block) == owners[block] for block in range(pool.num_blocks)), "references differ"
        assert sorted([*free, *kept, *owners]) == list(range(1, pool.num_blocks)), "a block is lost, or free and owned"
        free_slots = scheduler.slots.free() + (self.prefix.slots.free() if self.prefix is not None else [])
        slots = len(scheduler.slots.slots) + (len(self.prefix.slots.slots) if self.prefix is not None else 0)
        assert sorted([*free_slots, *taken.elements()]) == list(range(1, slots + 1)), "a slot has no or two owners"
        writable: Counter[int] = Counter()
        tables: Counter[int] = Counter()
        for request in scheduler.running:
            tables.update(request.block_table)
            writable.update(request.block_table[request.num_computed // pool.block_tokens :])
        assert all(tables[block] == 1 for block in writable), "two requests share a block that one may write to"
        assert len(scheduler.live) == len(tables)

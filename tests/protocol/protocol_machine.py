"""A small machine that runs mailbox protocols one atomic step at a time (spec/decode.md L.3 b).

Every rank runs its kernels in order; a kernel is a set of threads; a thread is a list of operations. Stores to peers
go into a set of stores in flight and land atom by atom, in any order and after any delay that the adversary allows.
The machine says which actions are possible in a state and what each leads to, and raises ``Violation`` where one
breaks an invariant. It chooses nothing: that is the business of protocol_search.

Invariants: I1 a consumer sees exactly its own call's payload in all atoms. I2 no atom goes from one payload to another
without resting at the sentinel between. I3 no store lands in a slot while its reader of another call is between first
poll and last clear. I4 at the end all atoms rest and every NEXT counts the calls. I5 something can happen until all is
done.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from protocol_parts import (
    NEVER,
    SENTINEL,
    Action,
    Advance,
    Adversary,
    Arrive,
    Clear,
    Complete,
    Cursor,
    Flying,
    Kernel,
    Land,
    Load,
    Operation,
    Read,
    Set,
    Slot,
    State,
    Step,
    Store,
    Thread,
    Wait,
)


class Violation(Exception):
    """An invariant is broken in this action."""

    def __init__(self, invariant: str, text: str) -> None:
        self.invariant = invariant
        super().__init__(f"{invariant}: {text}")


@dataclass(frozen=True)
class Machine:
    """Programs of all ranks over ``size`` atoms and ``words`` state words a rank.

    ``calls_of`` maps a rank's number of a NEXT word to how many calls advance it; ``names`` explains tags.
    """

    programs: tuple[tuple[Kernel, ...], ...]
    size: int
    words: int
    generations: int
    calls_of: dict[int, int]
    names: dict[str, tuple[int, int, int, int]]
    adversary: Adversary

    @property
    def only_waits(self) -> bool:
        """Whether every read is part of a poll, so that none can tell a late payload from an early one."""
        threads = (operations for program in self.programs for kernel in program for operations in kernel.threads)
        return all(one.waits for operations in threads for one in operations if isinstance(one, Read))

    def start(self) -> State:
        """All mailboxes at rest, all words zero, nothing launched."""
        cursors = tuple(self._enter(rank, 0) for rank in range(len(self.programs)))
        return State(SENTINEL * self.size, (), (0,) * (self.words * len(self.programs)), cursors)

    def _enter(self, rank: int, kernel: int, threads: tuple[Thread, ...] | None = None) -> Cursor:
        program = self.programs[rank]
        if threads is None:
            threads = program[kernel].start() if kernel < len(program) else ()
        following = program[kernel + 1] if kernel + 1 < len(program) else None
        return Cursor(kernel, threads, following.start() if following is not None and following.prologue else ())

    def finished(self, state: State) -> bool:
        """All kernels of all ranks complete and nothing in flight."""
        return not state.flight and all(
            cursor.kernel == len(program) for cursor, program in zip(state.cursors, self.programs, strict=True)
        )

    def actions(self, state: State) -> list[Action]:
        """Everything that may happen next. A thread whose poll would see a sentinel is not in the list.

        A real poll starts over when any atom is at rest. Reading on from the atom that was missing is the same run
        unless an atom that was read changed, and that is a violation of I2 or I3 by itself.
        """
        found: list[Action] = []
        for rank, cursor in enumerate(state.cursors):
            program = self.programs[rank]
            if cursor.kernel == len(program):
                continue
            kernel, busy = program[cursor.kernel], False
            for thread, (pc, generation, _) in enumerate(cursor.threads):
                operations = kernel.threads[thread]
                if pc == len(operations):
                    continue
                busy = True
                operation = operations[pc]
                if isinstance(operation, Read):
                    held = state.memory[operation.slot.origin + generation * operation.slot.stride + operation.atom]
                    if operation.waits and held == SENTINEL:
                        continue
                    if operation.weak:
                        found.append(Step(rank, 0, thread, stale=True))
                found.append(Step(rank, 0, thread))
            for thread, (pc, _, _) in enumerate(cursor.ahead):
                if not isinstance(program[cursor.kernel + 1].threads[thread][pc], Wait):
                    found.append(Step(rank, 1, thread))
            if not busy and not any(f.writer == rank and f.due <= cursor.kernel for f in state.flight):
                found.append(Complete(rank))
        before: tuple[int, int] | None = None
        for index, flying in enumerate(state.flight):
            # Stores of one writer to one address land in order; those of two writers in either order.
            if before != (flying.address, flying.writer):
                found.append(Land(index))
            before = (flying.address, flying.writer)
        return found

    def apply(self, state: State, action: Action) -> State:
        """The state after ``action``, one of ``actions(state)``; Violation if it breaks an invariant."""
        if isinstance(action, Land):
            return self._land(state, action.index)
        cursor = state.cursors[action.rank]
        if isinstance(action, Complete):
            entered = self._enter(action.rank, cursor.kernel + 1, cursor.ahead or None)
            return state._replace(cursors=_put(state.cursors, action.rank, entered))
        return self._step(state, action, cursor)

    def check_end(self, state: State) -> None:
        """I5 where nothing can happen although calls are left, and I4 where all are done."""
        if not self.finished(state):
            raise Violation("I5", f"nothing can happen: {self.describe(state)}")
        left = [address for address, value in enumerate(state.memory) if value != SENTINEL]
        if left:
            raise Violation("I4", f"{len(left)} atoms are not at rest at the end")
        for word, calls in self.calls_of.items():
            for rank in range(len(self.programs)):
                if state.words[rank * self.words + word] != calls % self.generations:
                    raise Violation("I4", f"NEXT of rank {rank} is {state.words[rank * self.words + word]}")

    def describe(self, state: State) -> str:
        """Which kernel of how many each rank is at."""
        return ", ".join(
            f"rank {rank} at kernel {cursor.kernel} of {len(self.programs[rank])}"
            for rank, cursor in enumerate(state.cursors)
        )

    def _step(self, state: State, step: Step, cursor: Cursor) -> State:
        rank, base = step.rank, step.rank * self.words
        memory, flight, words, cursors = state
        threads = cursor.ahead if step.ahead else cursor.threads
        pc, generation, last = threads[step.thread]
        kernel = self.programs[rank][cursor.kernel + step.ahead]
        operation = kernel.threads[step.thread][pc]
        match operation:
            case Wait():
                pass
            case Load(word):
                generation = words[base + word]
            case Set(word, by):
                words = _put(words, base + word, (generation + by) % self.generations)
            case Arrive(word, count):
                last = words[base + word] + 1 == count
                words = _put(words, base + word, words[base + word] + 1)
            case Advance(counter, word):
                if last:
                    words = _put(words, base + counter, 0)
                    words = _put(words, base + word, (generation + 1) % self.generations)
            case Store(slot, tag):
                due = cursor.kernel if self.adversary.flush else NEVER
                for address in _atoms(slot, generation):
                    self._check_store(state, address, rank, tag)
                    flight = _launch(flight, Flying(address, rank, tag, due))
            case Read(slot, atom, tag):
                value = SENTINEL if step.stale else memory[slot.origin + generation * slot.stride + atom]
                if value != tag:
                    raise Violation("I1", f"rank {rank} reads {self._name(value)} for {self._name(tag)}")
            case Clear(slot, atom, shift):
                address = slot.origin + (generation + shift) % self.generations * slot.stride + atom
                late = self.adversary.clears_late
                if late is None:
                    memory = memory[:address] + SENTINEL + memory[address + 1 :]
                else:
                    flight = _launch(flight, Flying(address, rank, SENTINEL, self._due(rank, cursor.kernel, late)))
        threads = _put(threads, step.thread, Thread(pc + 1, generation, last))
        cursor = cursor._replace(ahead=threads) if step.ahead else cursor._replace(threads=threads)
        return State(memory, flight, words, _put(cursors, rank, cursor))

    def _due(self, rank: int, kernel: int, late: int) -> int:
        """The kernel that may not complete before a clear issued in ``kernel`` landed."""
        if late == 0:
            return kernel
        program = self.programs[rank]
        call = program[kernel].call + late
        ends = [index for index, one in enumerate(program) if one.call == call and one.last_of_call]
        return ends[0] if ends else NEVER

    def _land(self, state: State, index: int) -> State:
        flying = state.flight[index]
        if flying.value != SENTINEL:
            self._check_payload(state, flying.address, flying.value)
        memory = state.memory[: flying.address] + flying.value + state.memory[flying.address + 1 :]
        return state._replace(memory=memory, flight=state.flight[:index] + state.flight[index + 1 :])

    def _check_store(self, state: State, address: int, writer: int, tag: str) -> None:
        """A store may land at once, so it must be right already when it is issued."""
        for flying in state.flight:
            if flying.address == address and flying.value != SENTINEL:
                raise Violation("I2", f"{self._name(tag)} is sent after {self._name(flying.value)}, not yet landed")
        self._check_payload(state, address, tag)

    def _check_payload(self, state: State, address: int, tag: str) -> None:
        held, call = state.memory[address], self.names[tag][1]
        if held != SENTINEL:
            raise Violation("I2", f"{self._name(tag)} lands on {self._name(held)}")
        for cursor, program in zip(state.cursors, self.programs, strict=True):
            if cursor.kernel == len(program) or program[cursor.kernel].call == call:
                continue
            for (pc, generation, _), operations in zip(cursor.threads, program[cursor.kernel].threads, strict=True):
                if any(address in _atoms(slot, generation) for slot in _held(operations, pc)):
                    raise Violation("I3", f"{self._name(tag)} lands while its slot is being read and cleared")

    def _name(self, value: str) -> str:
        if value == SENTINEL:
            return "the sentinel"
        source, call, token, fragment = self.names[value]
        return f"(source {source}, call {call}, token {token}, fragment {fragment})"


def _atoms(slot: Slot, generation: int) -> range:
    first = slot.origin + generation * slot.stride
    return range(first, first + slot.atoms)


def _held(operations: tuple[Operation, ...], pc: int) -> set[Slot]:
    """Slots between first poll and last clear of a thread that is at operation ``pc``."""
    if pc == len(operations) or not any(isinstance(one, Read) for one in operations[:pc]):
        return set()
    cleared = Counter(one.slot for one in operations[:pc] if isinstance(one, Clear) and one.shift == 0)
    return {one.slot for one in operations if isinstance(one, Read) and cleared[one.slot] < one.slot.atoms}


def _put(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def _launch(flight: tuple[Flying, ...], flying: Flying) -> tuple[Flying, ...]:
    """Sorted by address and writer, in issue order within: equal sets of stores are equal states."""
    index = bisect_right(flight, flying[:2], key=lambda one: one[:2])
    return (*flight[:index], flying, *flight[index:])

"""Searching a machine's runs: all of them by depth-first search with state hashing, or many at random.

``explore`` can leave out runs that differ from an explored one only in the order of independent actions. What it
relies on is said at ``_persistent``; test_protocol_search shows that it loses no verdict on small machines.
"""

import random
from dataclasses import dataclass, field

from protocol_machine import Machine, Violation
from protocol_parts import SENTINEL, Action, Advance, Complete, Land, Load, Read, Set, State, Step, Store, Wait


@dataclass
class Report:
    """What a search found: distinct states (or steps of random walks), finished runs, broken invariants."""

    states: int = 0
    finished: int = 0
    broken: dict[str, str] = field(default_factory=dict)
    complete: bool = True

    @property
    def passed(self) -> bool:
        """Every run finishes and no invariant broke."""
        return self.complete and not self.broken and self.finished > 0


def explore(machine: Machine, *, reduced: bool = True, limit: int = 1_000_000, stop: bool = True) -> Report:
    """All runs. ``stop``: at the first violation; else go on elsewhere and collect the kinds. Gives up at ``limit``."""
    report = Report()
    start = machine.start()
    reduced = reduced and machine.only_waits
    seen = {start}
    stack = [start]
    while stack:
        state = stack.pop()
        actions = machine.actions(state)
        try:
            if not actions:
                machine.check_end(state)
                report.finished += 1
            for action in _persistent(machine, state, actions) if reduced else actions:
                after = machine.apply(state, action)
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
        except Violation as violation:
            report.broken.setdefault(violation.invariant, str(violation))
            if stop:
                break
        if len(seen) >= limit:
            report.complete = False
            break
    report.states = len(seen)
    return report


def walk(machine: Machine, walks: int, seed: int, *, stop: bool = True) -> Report:
    """``walks`` runs of random actions, each with a pace of its own for every rank and thread, and for landings.

    At one pace ranks and threads stay level and stores land soon, so that little of what matters would happen.
    """
    report = Report()
    for number in range(walks):
        chance = random.Random(f"{seed} {number}")
        ranks = [chance.choice((0.02, 0.3, 1.0)) for _ in machine.programs]
        threads = [chance.choice((0.02, 1.0, 1.0)) for _ in range(4)]
        landing = chance.choice((0.02, 0.2, 1.0))
        state = machine.start()
        try:
            while actions := machine.actions(state):
                state = machine.apply(
                    state, chance.choices(actions, [_pace(one, ranks, threads, landing) for one in actions])[0]
                )
                report.states += 1
            machine.check_end(state)
            report.finished += 1
        except Violation as violation:
            report.broken.setdefault(violation.invariant, str(violation))
            if stop:
                break
    return report


def _pace(action: Action, ranks: list[float], threads: list[float], landing: float) -> float:
    if isinstance(action, Land):
        return landing
    return ranks[action.rank] * (threads[action.thread % len(threads)] if isinstance(action, Step) else 1.0)


def _persistent(machine: Machine, state: State, actions: list[Action]) -> list[Action]:
    """One action that no other can disturb, if there is one; else all that are worth interleaving.

    Undisturbed: completing a kernel; a poll that finds its payload; state words that no sibling thread touches; a
    store, for its slot has one writer and only becomes freer with time: what may be sent now may be sent later, and
    what may not is a violation now; a payload that lands where nothing else is in flight, for a waiting read cannot
    tell early from late. Clears are what peers' stores race with: they land as late as they may, in one order, for
    landings at several addresses do not disturb each other, and in either order with a payload for their address.
    """
    crowded: set[int] = set()
    for one, other in zip(state.flight, state.flight[1:], strict=False):
        if one.address == other.address:
            crowded.add(one.address)
    clears: list[Action] = []
    rest: list[Action] = []
    for action in actions:
        if isinstance(action, Complete):
            return [action]
        if isinstance(action, Land):
            flying = state.flight[action.index]
            if flying.address in crowded:
                rest.append(action)
            elif flying.value != SENTINEL:
                return [action]
            elif flying.due <= state.cursors[flying.writer].kernel and _idle(machine, state, flying.writer):
                clears.append(action)
        elif _private(machine, state, action):
            return [action]
        else:
            rest.append(action)
    found = rest + clears[:1]
    return found or [action for action in actions if isinstance(action, Land)][:1]


def _idle(machine: Machine, state: State, rank: int) -> bool:
    cursor = state.cursors[rank]
    program = machine.programs[rank]
    if cursor.kernel == len(program):
        return True
    ends = (len(operations) for operations in program[cursor.kernel].threads)
    return all(thread.pc == end for thread, end in zip(cursor.threads, ends, strict=True))


def _private(machine: Machine, state: State, step: Step) -> bool:
    """Whether an operation touches nothing that another thread, of this rank or a peer, writes meanwhile."""
    cursor = state.cursors[step.rank]
    kernels = machine.programs[step.rank]
    kernel = kernels[cursor.kernel]
    if step.ahead or cursor.ahead:
        return False
    operation = kernel.threads[step.thread][cursor.threads[step.thread].pc]
    if isinstance(operation, Wait | Store):
        return True
    if isinstance(operation, Read):
        return operation.waits
    if not isinstance(operation, Load | Set):
        return False
    siblings = [one for i, ops in enumerate(kernel.threads) if i != step.thread for one in ops]
    touching = [one for one in siblings if isinstance(one, Load | Set | Advance) and one.word == operation.word]
    return (isinstance(operation, Load) and all(isinstance(one, Load) for one in touching)) or not touching

"""The mailbox protocols as programs of the machine, right and wrong (spec/decode.md B.4 to B.8, C; mutants of L.3).

A ``Design`` with its defaults is the protocol as specified. Every other field plants one fault.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from protocol_machine import Machine
from protocol_parts import (
    Advance,
    Adversary,
    Arrive,
    Clear,
    Kernel,
    Load,
    Operation,
    Read,
    Set,
    Slot,
    Store,
    Wait,
)

ONE_SHOT, TWO_SHOT, FUSED, GATHER = "one-shot", "two-shot", "fused", "gather"


@dataclass(frozen=True)
class Call:
    """One collective call of ``rows`` tokens."""

    kind: str
    rows: int


def calls(kinds: str, *rows: int) -> tuple[Call, ...]:
    """Calls from letters: L one-shot, B two-shot, F fused (one-shot in one kernel), G gather; rows repeat."""
    names = {"L": ONE_SHOT, "B": TWO_SHOT, "F": FUSED, "G": GATHER}
    return tuple(Call(names[letter], rows[i % len(rows)]) for i, letter in enumerate(kinds))


@dataclass(frozen=True)
class Design:
    """A protocol over ``ranks``, with its sizes and its faults.

    ``clear``: "own" (what was read), "none", "next" (the next generation instead), "next, lazily" (before polling),
    "previous, lazily" (right, but leaves the last call's payload). ``advance``: who advances NEXT, "collect" or
    "publish"; in a single kernel, "first" is the first thread at its end, instead of the last to arrive. ``arrive``:
    a thread of a single kernel arrives when it has "sent" or at its "end" (both right). ``keeps_own``: a single kernel
    keeps its own contribution in registers. ``looped``: its threads run all tokens of a fragment. ``poll``: which
    atoms are looked at, "all", "first half" of each word of two atoms, "first word". ``reload``: "no", "weak" (the
    payload is loaded again by ordinary loads after the poll), "volatile". ``one_word``: ACTIVE is NEXT. ``early``: the
    kernel, "publish", "reduce", "collect" or "single", that loads its state word before the grid wait. ``rows_of``:
    (rank, call, rows) where one rank has another row count. ``blocked_owner``: the rank that owns token
    t / ceil(rows / ranks) instead of t % ranks. ``shared``: what one-shot and two-shot share, of "words" and "memory".
    """

    ranks: int
    calls: tuple[Call, ...]
    generations: int = 3
    fragments: int = 1
    atoms: int = 2
    clear: str = "own"
    advance: str = "collect"
    arrive: str = "sent"
    keeps_own: bool = False
    looped: bool = False
    poll: str = "all"
    reload: str = "no"
    one_word: bool = False
    early: str = ""
    rows_of: tuple[int, int, int] | None = None
    blocked_owner: int | None = None
    shared: frozenset[str] = frozenset()

    def machine(self, adversary: Adversary) -> Machine:
        """The programs of all ranks."""
        return _Builder(self).machine(adversary)


@dataclass
class _Box:
    """One mailbox of every rank: ``slots`` fragments a generation, from ``base`` on."""

    base: int
    slots: int


@dataclass
class _Builder:
    design: Design
    names: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    tags: dict[tuple[int, int, int, int], str] = field(default_factory=dict)
    size: int = 0

    def machine(self, adversary: Adversary) -> Machine:
        design = self.design
        self.capacity = max(call.rows for call in design.calls)
        self.owner_capacity = -(-self.capacity // design.ranks)
        self.one_shot = self._box(design.ranks * self.capacity)
        self.contributions = self._box(design.ranks * self.owner_capacity)
        if "memory" in design.shared:
            self.contributions = _Box(self.one_shot.base, self.contributions.slots)
        self.reduced = self._box(self.capacity)
        self.gathered = self._box(design.ranks * self.capacity)
        # NEXT of each protocol; ACTIVE, and the counter of arrivals of a single kernel, follow it.
        self.word = {ONE_SHOT: 0, FUSED: 0, TWO_SHOT: 0 if "words" in design.shared else 3, GATHER: 6}
        programs = tuple(
            tuple(kernel for call in range(len(design.calls)) for kernel in self._call(rank, call))
            for rank in range(design.ranks)
        )
        counts = Counter(self.word[call.kind] for call in design.calls)
        calls_of = {word: counts[word] for word in (0, 3, 6)}
        return Machine(programs, self.size, 9, design.generations, calls_of, self.names, adversary)

    def _box(self, rows: int) -> _Box:
        design = self.design
        box = _Box(self.size, rows * design.fragments)
        self.size += design.ranks * design.generations * box.slots * design.atoms
        return box

    def _slot(self, box: _Box, rank: int, row: int, fragment: int) -> Slot:
        design = self.design
        stride = box.slots * design.atoms
        origin = box.base + rank * design.generations * stride + (row * design.fragments + fragment) * design.atoms
        return Slot(rank, origin, stride, design.atoms)

    def _tag(self, source: int, call: int, token: int, fragment: int) -> str:
        key = (source, call, token, fragment)
        if key not in self.tags:
            self.tags[key] = chr(0x100 + len(self.tags))
            self.names[self.tags[key]] = key
        return self.tags[key]

    def _call(self, rank: int, number: int) -> Iterator[Kernel]:
        design, call = self.design, self.design.calls[number]
        rows = call.rows
        if design.rows_of is not None and design.rows_of[:2] == (rank, number):
            rows = design.rows_of[2]
        items = [(token, fragment) for token in range(rows) for fragment in range(design.fragments)]
        if call.kind in (FUSED, GATHER):
            yield Kernel(number, self._single(rank, number, rows, call.kind), last_of_call=True)
            return
        two_shot = call.kind == TWO_SHOT
        yield Kernel(number, self._publish(rank, number, items, rows, two_shot), last_of_call=False)
        if two_shot:
            yield Kernel(number, self._reduce(rank, number, rows), last_of_call=False)
        yield Kernel(number, self._collect(rank, number, items, two_shot), last_of_call=True)

    def _owner(self, rank: int, token: int, rows: int) -> tuple[int, int]:
        """(owner, its row) of a token, as ``rank`` sees it."""
        ranks = self.design.ranks
        if self.design.blocked_owner == rank:
            share = -(-rows // ranks)
            return token // share, token % share
        return token % ranks, token // ranks

    def _publish(self, rank: int, call: int, items: list[tuple[int, int]], rows: int, two_shot: bool) -> tuple:
        next_, active = self._words(TWO_SHOT if two_shot else ONE_SHOT)
        threads = []
        for token, fragment in items:
            operations = self._begin("publish", next_)
            tag = self._tag(rank, call, token, fragment)
            if two_shot:
                owner, row = self._owner(rank, token, rows)
                row += rank * self.owner_capacity
                operations.append(Store(self._slot(self.contributions, owner, row, fragment), tag))
            else:
                operations += self._push(self.one_shot, rank * self.capacity + token, fragment, tag)
            if (token, fragment) == (0, 0):
                if active != next_:
                    operations.append(Set(active, 0))
                if self.design.advance == "publish":
                    operations.append(Set(next_, 1))
            threads.append(tuple(operations))
        return tuple(threads)

    def _reduce(self, rank: int, call: int, rows: int) -> tuple:
        """The owner reduce: sums what it owns, sends it to all, advances NEXT."""
        next_, active = self._words(TWO_SHOT)
        ranks, threads = self.design.ranks, []
        for row in range(-(-rows // ranks)):
            for fragment in range(self.design.fragments):
                token = row * ranks + rank
                operations = self._begin("reduce", active)
                sources = [(source * self.owner_capacity + row, source) for source in range(ranks)]
                reads = [(self._slot(self.contributions, rank, place, fragment), source) for place, source in sources]
                owned = token < rows
                if owned:
                    found = [(slot, self._tag(source, call, token, fragment)) for slot, source in reads]
                    operations += self._poll(found)
                    tag = self._tag(ranks, call, token, fragment)
                    operations += self._push(self.reduced, token, fragment, tag)
                if (row, fragment) == (0, 0) and self.design.advance == "collect":
                    operations.append(Set(next_, 1))
                if owned:
                    operations += self._clear([slot for slot, _ in reads])
                threads.append(tuple(operations))
        return tuple(threads)

    def _collect(self, rank: int, call: int, items: list[tuple[int, int]], two_shot: bool) -> tuple:
        next_, active = self._words(TWO_SHOT if two_shot else ONE_SHOT)
        threads = []
        for token, fragment in items:
            found = self._expected(self.one_shot, rank, call, token, fragment)
            if two_shot:
                total = self._tag(self.design.ranks, call, token, fragment)
                found = [(self._slot(self.reduced, rank, token, fragment), total)]
            operations = self._begin("collect", active)
            slots = [slot for slot, _ in found]
            if self.design.clear.endswith("lazily"):
                operations += self._clear(slots)
            operations += self._poll(found)
            if (token, fragment) == (0, 0) and self.design.advance == "collect" and not two_shot:
                operations.append(Set(next_, 1))
            if not self.design.clear.endswith("lazily"):
                operations += self._clear(slots)
            threads.append(tuple(operations))
        return tuple(threads)

    def _single(self, rank: int, call: int, rows: int, kind: str) -> tuple:
        """One kernel that publishes and collects: a fused boundary, or a gather."""
        design, (next_, _) = self.design, self._words(kind)
        counter, box = next_ + 2, self.gathered if kind == GATHER else self.one_shot
        turns = [range(rows)] if design.looped else [range(token, token + 1) for token in range(rows)]
        work = [(tokens, fragment) for tokens in turns for fragment in range(design.fragments)]
        threads = []
        for tokens, fragment in work:
            operations = self._begin("single", next_)
            sends = []
            for token in tokens:
                tag, row = self._tag(rank, call, token, fragment), rank * self.capacity + token
                sends.append(self._push(box, row, fragment, tag, without=rank if design.keeps_own else None))
            operations += sends[0]
            if design.arrive == "sent":
                operations.append(Arrive(counter, len(work)))
            # A looped thread sends its next token before it polls for the one in hand.
            for token, following in zip(tokens, [*sends[1:], []], strict=True):
                found = self._expected(box, rank, call, token, fragment)
                if design.keeps_own:
                    del found[rank]
                operations += [*following, *self._poll(found), *self._clear([slot for slot, _ in found])]
            if design.advance == "first" and (tokens[0], fragment) == (0, 0):
                operations.append(Set(next_, 1))
            if design.arrive == "end":
                operations.append(Arrive(counter, len(work)))
            if design.advance != "first":
                operations.append(Advance(counter, next_))
            threads.append(tuple(operations))
        return tuple(threads)

    def _words(self, kind: str) -> tuple[int, int]:
        first = self.word[kind]
        return first, first if self.design.one_word else first + 1

    def _begin(self, kernel: str, word: int) -> list[Operation]:
        return [Load(word), Wait()] if self.design.early == kernel else [Wait(), Load(word)]

    def _push(self, box: _Box, row: int, fragment: int, tag: str, without: int | None = None) -> list[Operation]:
        peers = [peer for peer in range(self.design.ranks) if peer != without]
        return [Store(self._slot(box, peer, row, fragment), tag) for peer in peers]

    def _expected(self, box: _Box, rank: int, call: int, token: int, fragment: int) -> list[tuple[Slot, str]]:
        return [
            (self._slot(box, rank, source * self.capacity + token, fragment), self._tag(source, call, token, fragment))
            for source in range(self.design.ranks)
        ]

    def _poll(self, found: list[tuple[Slot, str]]) -> list[Operation]:
        atoms = range(self.design.atoms)
        looked_at = {"all": atoms, "first half": atoms[::2], "first word": atoms[:2]}[self.design.poll]
        reads: list[Operation] = [Read(slot, atom, tag, atom in looked_at) for slot, tag in found for atom in atoms]
        if self.design.reload != "no":
            weak = self.design.reload == "weak"
            reads += [Read(slot, atom, tag, waits=False, weak=weak) for slot, tag in found for atom in atoms]
        return reads

    def _clear(self, slots: list[Slot]) -> list[Operation]:
        shift = {"own": 0, "none": None, "next": 1, "next, lazily": 1, "previous, lazily": -1}[self.design.clear]
        if shift is None:
            return []
        return [Clear(slot, atom, shift) for slot in slots for atom in range(self.design.atoms)]

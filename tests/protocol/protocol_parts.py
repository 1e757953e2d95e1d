"""What protocol programs are made of, and what a state of the machine is: plain data (spec/decode.md L.3 b)."""

from dataclasses import dataclass, field
from typing import NamedTuple

SENTINEL = "."
"""The resting value of an atom; payload tags are other characters."""
NEVER = 1_000_000


class Slot(NamedTuple):
    """One fragment's place in one rank's mailbox: atom i of generation g is at origin + g * stride + i."""

    rank: int
    origin: int
    stride: int
    atoms: int


class Wait(NamedTuple):
    """The grid wait: passes once the kernel before is complete. Operations ahead of it are the kernel's prologue."""


class Load(NamedTuple):
    """generation = the state word."""

    word: int


class Set(NamedTuple):
    """The state word = generation + step, modulo the generations."""

    word: int
    step: int


class Arrive(NamedTuple):
    """Count an arrival in a state word; the thread remembers whether it was the last of ``threads``."""

    word: int
    threads: int


class Advance(NamedTuple):
    """What the last arrival does at its end: zero the counter, and ``word`` = generation + 1."""

    counter: int
    word: int


class Store(NamedTuple):
    """Put all atoms of one fragment for one destination into flight."""

    slot: Slot
    tag: str


class Read(NamedTuple):
    """Read one atom that must hold ``tag``. ``waits``: a sentinel sends it back to polling.

    ``weak``: an ordinary load, which may be served from a line that was cached before the payload came.
    """

    slot: Slot
    atom: int
    tag: str
    waits: bool = True
    weak: bool = False


class Clear(NamedTuple):
    """Put one atom of the own mailbox, ``shift`` generations away, back to the sentinel."""

    slot: Slot
    atom: int
    shift: int = 0


Operation = Wait | Load | Set | Arrive | Advance | Store | Read | Clear


@dataclass(frozen=True)
class Kernel:
    """The threads of one launch, and which call it belongs to (numbered from 0)."""

    call: int
    threads: tuple[tuple[Operation, ...], ...]
    last_of_call: bool
    prologue: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prologue", any(ops and not isinstance(ops[0], Wait) for ops in self.threads))

    def start(self) -> "tuple[Thread, ...]":
        """Every thread before anything ran."""
        return (Thread(0, 0, False),) * len(self.threads)


class Thread(NamedTuple):
    """A thread's next operation, its generation, and whether it was the last to arrive."""

    pc: int
    generation: int
    last: bool


@dataclass(frozen=True)
class Adversary:
    """What the memory system may do.

    ``flush``: a kernel completes only once its own stores to peers have landed (hardware); otherwise they may be on
    the way for ever longer. ``clears_late``: until the end of how many later calls a clear may be on the way; 0 means
    until its own kernel completes, None that it is there at once.
    """

    flush: bool = True
    clears_late: int | None = 0


class Flying(NamedTuple):
    """One atom on its way: ``writer`` may not complete kernel ``due`` before it landed."""

    address: int
    writer: int
    value: str
    due: int


class Cursor(NamedTuple):
    """Where a rank is: its current kernel, that kernel's threads, and the next one's threads in their prologue."""

    kernel: int
    threads: tuple[Thread, ...]
    ahead: tuple[Thread, ...]


class State(NamedTuple):
    """Everything that decides what can still happen; hashable."""

    memory: str
    flight: tuple[Flying, ...]
    words: tuple[int, ...]
    cursors: tuple[Cursor, ...]


class Step(NamedTuple):
    """One operation of one thread; ``ahead`` 1 is a prologue operation of the next kernel. ``stale``: a weak load
    gets the sentinel from its cache."""

    rank: int
    ahead: int
    thread: int
    stale: bool = False


class Land(NamedTuple):
    """One atom in flight lands."""

    index: int


class Complete(NamedTuple):
    """A rank's current kernel completes."""

    rank: int


Action = Step | Land | Complete

"""The sticky abort flag, time-out records, and the thread that turns them into ``CollectiveTimeout`` (decode.md L.6).

Each rank has a *control block* in memory that its peers can store into, and a *record* in host memory that its
kernels can store into. A wait that gives up fills the record once and raises the abort flag of every rank; every
later wait on every rank sees its flag and leaves at once, and the host sees the record.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from quickseek.errors import CollectiveTimeout
from quickseek.parallel.fabric import Fabric

KINDS = ("all_reduce", "two_shot_owner", "two_shot_collect", "all_gather")
"""What waited, by the number that a record holds."""

MAGIC = 0x51AB0057
ABORT, RECORD, CLAIMED, PEERS = 0, 8, 16, 32
"""Byte offsets in a control block: flag word, address of the record, word taken by the first reporter, addresses of
every rank's control block."""
MAX_RANKS = 8
"""Addresses of peers that a control block holds."""
CONTROL_WORDS = PEERS // 8 + MAX_RANKS
RECORD_WORDS = 16
POLL_INTERVAL_S = 0.05


class Resettable(Protocol):
    """A collective whose mailboxes ``Watchdog.reset`` empties."""

    def refill(self) -> None:
        """Fill the own mailboxes with the sentinel and zero the own state words."""


class Watchdog:
    """One rank's control block and record, shared by all collectives of a fabric.

    Construction is collective. ``on_timeout`` (optional) is called once per time-out, from the polling thread, with
    the error; ``check()`` raises it in the calling thread.
    """

    def __init__(self, fabric: Fabric, on_timeout: Callable[[CollectiveTimeout], None] | None = None) -> None:
        if fabric.size > MAX_RANKS:
            raise ValueError(f"a watchdog of {fabric.size} ranks: at most {MAX_RANKS}")
        # A proxy, since the table of watchdogs is keyed by the fabric and must not keep it alive.
        self.fabric, self.on_timeout = weakref.proxy(fabric), on_timeout
        self._world = fabric.world
        self.mailbox = fabric.allocate([CONTROL_WORDS], torch.int64)
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int32, pin_memory=fabric.device.type == "cuda")
        self._words = self.record.numpy()
        self._instances: list[weakref.ref[Resettable]] = []
        self._error: CollectiveTimeout | None = None
        self._deferred = False
        self._stopped = threading.Event()
        self.clear()
        fabric.barrier()
        if on_timeout is not None:
            thread = threading.Thread(
                target=_watch, args=(weakref.ref(self), self._stopped), daemon=True, name="quickseek-watchdog"
            )
            thread.start()

    @property
    def control(self) -> int:
        """Address of this rank's control block."""
        return self.mailbox.local.data_ptr()

    @property
    def flag(self) -> Tensor:
        """int64 [1] of this rank's control block: not 0 from the moment on that any rank gave up, until ``reset``."""
        return self.mailbox.local[ABORT // 8 : ABORT // 8 + 1]

    @classmethod
    def of(cls, fabric: Fabric) -> "Watchdog":
        """The watchdog of a fabric; the first call, like construction, is collective."""
        if fabric not in _watchdogs:
            _watchdogs[fabric] = cls(fabric)
        return _watchdogs[fabric]

    def register(self, collective: Resettable) -> int:
        """The number that the records of a collective carry; its mailboxes are emptied by ``reset``."""
        self._instances.append(weakref.ref(collective))
        return len(self._instances)

    def error(self) -> CollectiveTimeout | None:
        """The time-out that a kernel of this rank has recorded since the last reset, if any."""
        if self._error is None and int(self._words[0]) & 0xFFFFFFFF == MAGIC:
            _, kind, rank, generation, token, _, mask = (int(word) for word in self._words[1:8])
            missing = [source for source in range(self.fabric.size) if mask >> source & 1]
            if KINDS[kind] == "two_shot_collect":
                # Its one slot a token is filled by the token's owner (spec/decode.md B.8).
                missing = [token % self.fabric.size] if mask else []
            self._error = CollectiveTimeout(KINDS[kind], rank, generation, token, missing)
        return self._error

    def check(self) -> None:
        """Raise the recorded ``CollectiveTimeout``, if any: before each collective, which ``World.launches`` counts."""
        if self._world is not None:
            self._world.launches += 1
        error = self.error()
        if error is not None and not self._deferred:
            raise error

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, ``check`` raises nothing: for an owner that looks at ``error`` when it reads results.

        Ranks hear of a time-out at different moments, and one that stopped at its next launch would leave out
        exchanges that its peers have launched and wait for.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def reset(self) -> None:
        """Make every collective of the fabric usable after a time-out or an aborted eager step. Collective."""
        self.fabric.barrier()
        for reference in self._instances:
            collective = reference()
            if collective is not None:
                collective.refill()
        self.clear()
        if self._world is not None:
            self._world.launches, self._world.impaired = 0, False
        self.fabric.barrier()

    def clear(self) -> None:
        """Lower this rank's flag and empty its record; the caller puts barriers around it."""
        block = torch.zeros(CONTROL_WORDS, dtype=torch.int64)
        block[RECORD // 8] = self.record.data_ptr()
        block[PEERS // 8 : PEERS // 8 + self.fabric.size] = self.mailbox.peer_pointers.cpu()
        self.mailbox.local.copy_(block)
        self.record.zero_()
        self._error = None

    def close(self) -> None:
        """Stop the polling thread."""
        self._stopped.set()


_watchdogs: "weakref.WeakKeyDictionary[Fabric, Watchdog]" = weakref.WeakKeyDictionary()


def _watch(reference: "weakref.ref[Watchdog]", stopped: threading.Event) -> None:
    reported: CollectiveTimeout | None = None
    while not stopped.wait(POLL_INTERVAL_S):
        watchdog = reference()
        if watchdog is None:
            return
        error = watchdog.error()
        if error is not None and error is not reported and watchdog.on_timeout is not None:
            watchdog.on_timeout(error)
        reported = error
        del watchdog

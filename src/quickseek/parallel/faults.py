"""Faults of single ranks: what a rank that waits for peers learns beside its collectives, through the ranks' store."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AGREE_S = 10.0
"""How long a rank that failed waits for peers to fail alike, unless they are known to wait for it."""
SETTLE_S = 5.0
"""How long after a broken connection its process may take to end."""
POLL_S = 0.02


class PeersLost(BaseException):
    """This rank cannot go on: ``ranks`` (itself, perhaps) failed alone, ended or did not come, as far as is known.

    No Exception: what ends one request for a fault of its own must not take it for one. Every later collective of the
    world raises it again.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


@dataclass(frozen=True)
class Fault:
    """What a rank failed with, how many collectives it had begun, and launched in mailboxes (``World.launches``)."""

    calls: int
    text: str
    launches: int = 0


class FaultBoard:
    """Where the ranks of one group tell faults: keys of a torch.distributed store, whose failures count as silence.

    Faults come in rounds. A round ends with one verdict, the same on all ranks: that all failed alike and go on, or
    that ranks are lost, which is the last one. ``lost`` holds it from the moment this rank knows.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.lost: PeersLost | None = None
        self._round = 0
        self._processes: list[str] | None = None
        self._set(f"process {rank}", f"{os.getpid()} {socket.gethostname()}")

    def check(self) -> None:
        """Raise the ``PeersLost`` of a verdict that this rank knows of."""
        if self.lost is not None:
            raise PeersLost(str(self.lost), self.lost.ranks)

    def met(self) -> None:
        """Note which processes the ranks are, once all have come to a collective."""
        if self._processes is None:
            names = [self._get(f"process {rank}") for rank in range(self.size)]
            self._processes = ["" if name is None else name for name in names]

    def agree(self, calls: int, text: str, launches: int = 0) -> None:
        """This rank failed with ``text`` after ``calls`` collectives and ``launches`` of those in mailboxes: return if
        all ranks did, else PeersLost on all.

        Returns after AGREE_S at the latest.
        """
        self._set(self._fault(self.rank), json.dumps([calls, text, launches]))
        deadline, this = time.monotonic() + AGREE_S, self._round
        while self._round == this and not self._decided():
            told = self._told()
            if len(told) == self.size and len(set(told.values())) == 1:
                self._decide("", [])
            elif len(told) == self.size or time.monotonic() > deadline:
                self._blame(told or {self.rank: Fault(calls, text, launches)})
            else:
                time.sleep(POLL_S)
        self.check()

    def give_up(self, text: str) -> None:
        """This rank ends with ``text``: its peers, wherever they wait for it, raise PeersLost."""
        if self.lost is None:
            self._decide(f"rank {self.rank} failed: {text}", [self.rank])

    def look(self, calls: int | None = None) -> None:
        """PeersLost if a rank failed before the collective that this rank waits in, its ``calls``-th; None: at all."""
        told = {rank: fault for rank, fault in self._told().items() if calls is None or fault.calls < calls}
        if not self._decided() and told:
            self._blame(told)
        self.check()

    def broken(self, what: str, error: RuntimeError) -> PeersLost:
        """What became of the collective ``what``, whose connections failed with ``error``."""
        deadline = time.monotonic() + SETTLE_S
        while not self._decided() and time.monotonic() < deadline:
            told, gone = self._told(), [rank for rank in range(self.size) if self._ended(rank)]
            if told:
                self._blame(told)
            elif gone:
                self._decide(f"{_named(gone)} ended; rank {self.rank} waited in {what}", gone)
            else:
                time.sleep(POLL_S)
        if self.lost is None:
            others = [rank for rank in range(self.size) if rank != self.rank]
            self._decide(f"{_named(others)} not reached by rank {self.rank} in {what}: {error}", others)
        assert self.lost is not None
        return self.lost

    # ------------------------------------------------------------------------------------------ the store

    def _decided(self) -> bool:
        """Whether the round has a verdict; takes it in."""
        return self.lost is not None or self._take(self._get(self._verdict()))

    def _take(self, verdict: str | None) -> bool:
        if verdict is None:
            return False
        message, ranks = json.loads(verdict)
        if message:
            self.lost = PeersLost(message, ranks)
        else:
            self._round += 1
        return True

    def _decide(self, message: str, ranks: Sequence[int]) -> None:
        """Give the round its verdict, unless a peer was first; ``message`` "": all failed alike."""
        mine = json.dumps([message, list(ranks)])
        try:
            found = self.store.compare_set(self._verdict(), "", mine).decode()
        except RuntimeError:
            found = mine
        self._take(found)

    def _blame(self, told: dict[int, Fault]) -> None:
        message = "; ".join(f"rank {rank} failed {fault.text}" for rank, fault in told.items())
        self._decide(message, list(told))

    def _told(self) -> dict[int, Fault]:
        """The faults of the round so far, ranks ascending."""
        texts = ((rank, self._get(self._fault(rank))) for rank in range(self.size))
        return {rank: Fault(*json.loads(text)) for rank, text in texts if text is not None}

    def _ended(self, rank: int) -> bool:
        """Whether the process of a rank of this host is known to be no more."""
        name = (self._processes or [""] * self.size)[rank]
        pid, _, host = name.partition(" ")
        return bool(name) and host == socket.gethostname() and not _runs(int(pid))

    def _fault(self, rank: int) -> str:
        return f"fault {self._round} {rank}"

    def _verdict(self) -> str:
        return f"verdict {self._round}"

    def _get(self, key: str) -> str | None:
        try:
            return self.store.get(key).decode() if self.store.check([key]) else None
        except RuntimeError:
            return None

    def _set(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):
            self.store.set(key, value)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _runs(pid: int) -> bool:
    """Whether a process of this host runs; one that has ended and waits to be noticed does not."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True

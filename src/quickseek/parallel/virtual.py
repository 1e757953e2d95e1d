"""Virtual ranks: all ranks of a tensor parallel group in one process on one device (spec/decode.md L.2, schedule A).

Each rank's code runs on a thread of its own, of which one runs at a time. Every collective is a *meeting*: a rank that
comes to it hands on its turn, and goes on once all have come. So what ranks launch on one CUDA stream lies there in the
order of their turns, and no kernel may wait for what a peer launches in a later one.
"""

import pickle
import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from quickseek.errors import RankFailure, WorldError
from quickseek.parallel.fabric import VirtualFabric
from quickseek.parallel.world import World

T = TypeVar("T")

GRACE_S = 3.0
"""How long each of the other ranks gets to leave, once one did not come in time."""
What = tuple[Any, ...]
"""A collective and what ranks must have in common in it."""


class _Ended(BaseException):
    """Unwinds a rank whose peers cannot go on; no Exception, so that nothing takes it for a fault of its own."""


class _Turns:
    """Whose turn it is, what ranks brought to the meeting that is open, and why the run ended early.

    Written by the thread whose turn it is; the caller of ``run_virtual`` only fails a run that is late. ``running``:
    the rank that had the last turn. ``seed``: ranks take their turns between two meetings in an order drawn anew, not
    ascending.
    """

    def __init__(self, size: int, seed: int | None) -> None:
        self.size, self.running = size, 0
        self.threads: list[threading.Thread] = []
        self.failure: RankFailure | None = None
        self.done = threading.Event()
        self._chooser = None if seed is None else random.Random(seed)
        self._order = self._drawn()
        self._may_go = [threading.Semaphore(0) for _ in range(size)]
        self._left = [False] * size
        self._whats: list[What | None] = [None] * size
        self._values: list[Any] = [None] * size
        self._met: list[Any] = []

    def start(self) -> None:
        """Give the first turn."""
        self._may_go[self._order[0]].release()

    def wait(self, rank: int) -> None:
        """Return when it is the turn of ``rank``; _Ended if the run has failed."""
        self._may_go[rank].acquire()
        self.running = rank
        if self.failure is not None:
            raise _Ended

    def meet(self, rank: int, what: What, value: Any, once: Callable[[], Any] | None = None) -> list[Any]:
        """Every rank's value, ranks ascending, once all have come to the same collective ``what``.

        ``once``: called by the last to come, before any goes on; what it returns is then every rank's value.
        """
        if self.done.is_set():
            raise WorldError(f"{_told(what)} of virtual rank {rank}: the run that it belongs to is over")
        if self.failure is not None:
            raise _Ended
        self._whats[rank], self._values[rank] = what, value
        if not self._hand_on(rank):
            self._complete(rank, once)
        self.wait(rank)
        return self._met

    def leave(self, rank: int) -> None:
        """The code of ``rank`` has ended, however it did."""
        self._left[rank] = True
        self._whats[rank] = None
        if all(self._left):
            self.done.set()
            return
        if self.failure is None and not self._hand_on(rank):
            self._differ()
        if self.failure is not None:
            self._may_go[self._left.index(False)].release()

    def fail(self, rank: int, message: str) -> None:
        """End the run because of ``rank``, unless it has ended already: the others leave at their next turns."""
        if self.failure is None:
            self.failure = RankFailure(rank, f"rank {rank} {message}")

    def end_waiting(self) -> None:
        """After a failure: let each rank that waits leave, though the one whose turn it is does not hand it on."""
        late = self.running
        for rank, thread in enumerate(self.threads):
            if rank != late:
                self._may_go[rank].release()
                thread.join(GRACE_S)

    def stack(self, rank: int) -> str:
        """Where the code of ``rank`` is now, most recent call last."""
        frame = sys._current_frames().get(self.threads[rank].ident or 0)
        return "(it has ended)\n" if frame is None else "".join(traceback.format_stack(frame))

    def _drawn(self) -> list[int]:
        ranks = list(range(self.size))
        if self._chooser is not None:
            self._chooser.shuffle(ranks)
        return ranks

    def _hand_on(self, rank: int) -> bool:
        """Give the turn to the next rank that is still there; False if all have come or left."""
        following = self._order[self._order.index(rank) + 1 :]
        chosen = next((one for one in following if not self._left[one]), None)
        if chosen is not None:
            self._may_go[chosen].release()
        return chosen is not None

    def _complete(self, rank: int, once: Callable[[], Any] | None) -> None:
        """Close a meeting to which ``rank`` came last and give the next turns, or end the run if ranks differ."""
        if any(what != self._whats[0] for what in self._whats):
            self._differ()
            raise _Ended
        try:
            self._met = list(self._values) if once is None else [once()] * self.size
        except BaseException:
            self.fail(rank, f"raised:\n{traceback.format_exc()}")
            raise
        self._values = [None] * self.size
        self._order = self._drawn()
        self._may_go[self._order[0]].release()

    def _differ(self) -> None:
        """End the run because ranks have come to different collectives, or some to the end."""
        told = [
            f"rank {rank}: {_told(what)}" + ("" if what is None else f", at\n{self.stack(rank)}")
            for rank, what in enumerate(self._whats)
        ]
        first = next(rank for rank, what in enumerate(self._whats) if what != self._whats[0])
        lines = "\n".join(told)
        self.fail(first, f"is not where rank 0 is: ranks are in different collectives\n{lines}")


def _told(what: What | None) -> str:
    return "has ended" if what is None else " ".join(map(str, what))


class VirtualWorld(World):
    """One of the ranks of ``run_virtual``. Its collectives are meetings, in which the device is not waited for.

    Ranks that come to different ones, or to one with other shapes, end the run: RankFailure tells what each is in.
    """

    def __init__(self, turns: _Turns, rank: int, device: torch.device) -> None:
        self._turns, self.rank, self.size, self.device = turns, rank, turns.size, device

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        # A copy: the owner may write into x as soon as it has its own result.
        return torch.cat(self._meet("all_gather", *_form(x), dim, value=x.detach().clone()), dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        self.check_source(source)
        mine = self.rank == source
        sent = self._meet("broadcast", *_form(x), source, value=x.detach().clone() if mine else None)[source]
        return x if mine else x.copy_(sent)

    def all_reduce_min(self, value: int) -> int:
        return min(self._meet("all_reduce_min", value=int(value)))

    def gather_object(self, value: Any) -> list[Any]:
        return [pickle.loads(sent) for sent in self._meet("gather_object", value=pickle.dumps(value))]

    def barrier(self) -> None:
        self._meet("barrier")

    def once(self, what: str, function: Callable[[], T]) -> T:
        """What ``function`` of one rank returned, the same object on all: called when all have come, before any goes
        on. Collective."""
        result: T = self._turns.meet(self.rank, (what,), None, function)[0]
        return result

    def fabric(self) -> "TurnsFabric":
        """Peer memory of these ranks, a new one. Collective."""
        fabric: TurnsFabric = self.once("fabric", lambda: TurnsFabric.ranks(self.size, self.device))[self.rank]  # type: ignore[assignment]
        fabric.turns = self
        return fabric

    def _failed(self, what: str, error: Exception) -> None:
        self._meet(f"failed in {what}: {type(error).__name__}: {error}")

    def _meet(self, *what: Any, value: Any = None) -> list[Any]:
        return self._turns.meet(self.rank, what, value)


def _form(x: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return x.dtype, tuple(x.shape)


class TurnsFabric(VirtualFabric):
    """The memory of a ``VirtualFabric``, for ranks whose host values are their own (``VirtualWorld.fabric``)."""

    turns: VirtualWorld

    def barrier(self) -> None:
        super().barrier()
        self.turns.barrier()

    def gather_object(self, value: Any) -> list[Any]:
        return self.turns.gather_object(value)

    def all_reduce_min(self, value: int) -> int:
        return self.turns.all_reduce_min(value)


def run_virtual(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float = 120.0,
    device: torch.device | str = "cpu",
    seed: int | None = None,
) -> list[Any]:
    """``function(world, *args)`` on ``size`` virtual ranks of ``device``; every rank's result, ranks ascending.

    As ``launch.spawn``, on threads of this process: arguments and results are shared, and ``world`` is no process
    default. ``seed``: the order of turns is drawn, not ascending. Never hangs: when a rank raises, comes to another
    collective than its peers or is not done after ``timeout_s``, the others leave at their next turns and RankFailure
    names it, with its traceback. A thread that never comes back is left behind.
    """
    if size < 1:
        raise WorldError(f"cannot run {size} ranks: expected at least one")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    turns, results = _Turns(size, seed), [None] * size

    def run(rank: int) -> None:
        try:
            turns.wait(rank)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            results[rank] = function(VirtualWorld(turns, rank, device), *args)
        except _Ended:
            pass
        except BaseException:
            turns.fail(rank, f"raised:\n{traceback.format_exc()}")
        finally:
            turns.leave(rank)

    turns.threads = [
        threading.Thread(target=run, args=(rank,), daemon=True, name=f"virtual rank {rank}") for rank in range(size)
    ]
    for thread in turns.threads:
        thread.start()
    turns.start()
    try:
        if not turns.done.wait(timeout_s):
            late = turns.running
            turns.fail(late, f"was not done after {timeout_s} s:\n{turns.stack(late)}")
    finally:
        if not turns.done.is_set():
            turns.fail(turns.running, "was interrupted")
            turns.end_waiting()
    if turns.failure is not None:
        raise turns.failure
    return results

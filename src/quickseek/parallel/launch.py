"""Bringing ranks into being: from torchrun's environment, or by spawning processes on this host."""

import atexit
import contextlib
import faulthandler
import logging
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from quickseek.errors import QuickseekError, RankFailure, WorldError
from quickseek.parallel.faults import PeersLost
from quickseek.parallel.world import (
    DistributedWorld,
    SoloWorld,
    World,
    default_world,
    distributed_worlds,
    set_default_world,
)

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
START_METHOD = "spawn"
"""How processes of ``spawn`` begin: anew, or as "forkserver", which begins them from one that has loaded its modules,
in the environment variables of the first call."""
GRACE_S = 3.0
"""How long the other ranks get to report, once one has failed, before they are ended."""
TRACE_S = 2.0
"""How long a rank that hangs gets to write down where it is."""
WAITING = r"[/\\](torch[/\\]distributed[/\\]|quickseek[/\\]parallel[/\\](world|faults)\.py)"
"""Where a rank waits for its peers."""
PATIENCE_S = 7 * 86400.0
"""How long a collective waits where nobody set a limit: a rank that fails ends its peers before."""
NOT_BEGUN = """\
A rank ended before it began; what it wrote to stderr says why. A script that spawns ranks is a file, imported by each
of them: it does so below `if __name__ == "__main__":`, and its functions for the ranks can be imported."""


def world_from_environment(device: torch.device | str = "cpu", *, timeout_s: float = 600.0) -> World:
    """The world that torchrun describes in the environment, one rank alone where it describes none; from now on the
    process default.

    ``device`` "cuda" means the GPU of LOCAL_RANK. Collectives give up after ``timeout_s``. Raises WorldError naming
    the variables that are absent or wrong, or the GPU that is not there. Call it once a process.
    """
    world = _environment_world(torch.device(device), timeout_s)
    set_default_world(world)
    return world


def world_of_process(device: torch.device | str = "cpu") -> World:
    """What ``world=None`` means for a whole model: the default world if it has several ranks, else that of the
    environment if torchrun started several, else the default world.

    Raises what ``world_from_environment`` raises.
    """
    world = default_world()
    return world_from_environment(device) if world.size == 1 and (launched_ranks() or 1) > 1 else world


def launched_ranks() -> int | None:
    """WORLD_SIZE of the environment, None where it is not set; WorldError if it is no number of ranks."""
    text = os.environ.get("WORLD_SIZE")
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise WorldError(f"WORLD_SIZE={text!r}: expected a number of ranks")
    return int(text)


def _environment_world(device: torch.device, timeout_s: float) -> World:
    if "WORLD_SIZE" not in os.environ:
        return SoloWorld(device)
    absent = [name for name in ENVIRONMENT if name not in os.environ]
    if absent:
        raise WorldError(f"WORLD_SIZE is set but {', '.join(absent)} is not: start the ranks with torchrun")
    values = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    wrong = [f"{name}={value!r}" for name, value in values.items() if not value.isdecimal()]
    if wrong or int(values["RANK"]) >= int(values["WORLD_SIZE"]):
        raise WorldError(f"{', '.join(wrong) or values}: expected 0 <= RANK < WORLD_SIZE and a LOCAL_RANK")
    rank, size, local_rank = (int(values[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if size == 1:
        return SoloWorld(device)
    world = _connect("env://", rank, size, device, local_rank, timeout_s)
    atexit.register(_leave, world)
    return world


def _connect(method: str, rank: int, size: int, device: torch.device, local_rank: int, timeout_s: float) -> World:
    limit = timedelta(seconds=timeout_s)
    if device.type == "cpu":
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=limit)
        return DistributedWorld(device)
    device = torch.device("cuda", local_rank if device.index is None else device.index)
    _require_gpus(device.index + 1)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=method, rank=rank, world_size=size, timeout=limit)
    return DistributedWorld(device, None, dist.new_group(backend="gloo", timeout=limit))


def _require_gpus(count: int) -> None:
    found = torch.cuda.device_count()
    if found < count:
        raise WorldError(f"the ranks need {count} GPUs on this host: torch {torch.__version__} finds {found}")


_ending: tuple[int, BaseException] | None = None


def ending(code: int, error: BaseException) -> None:
    """This process is about to end with exit code ``code``, not 0, because of ``error``, which nobody will raise: at
    its end peers of a world from the environment hear of it. Not collective."""
    global _ending
    _ending = code, error


def _leave(world: World) -> None:
    """End a rank with its interpreter; peers that wait for one that ends on an error hear of it.

    A rank with a GPU that ends on an error, or after a fault of a peer that nothing has cleared, ends here and now:
    kernels of NCCL may wait on its GPU for peers that are gone, and all that would follow waits for them. Its exit code
    is that of ``ending``, else 130 on Ctrl-C, else 1, since nobody tells what was given to ``sys.exit``; what was
    registered with ``atexit`` before the world was made does not run.
    """
    code, error = _ending or (None, getattr(sys, "last_value", None))
    if error is not None:
        world.give_up(error)
    troubled = any(one.impaired or one.lost is not None for one in distributed_worlds)
    if world.device.type == "cuda" and (error is not None or troubled):
        for last in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
            with contextlib.suppress(Exception):
                last()
        os._exit(code or (130 if isinstance(error, KeyboardInterrupt) else 1))
    # Gloo's threads end the process with an abort when the interpreter leaves before they do.
    _disconnect()


captured: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""CUDA graphs that may hold collectives of NCCL, which leaves no group while one of them exists."""


def _disconnect() -> None:
    if dist.is_initialized():
        for graph in list(captured):
            with contextlib.suppress(RuntimeError):
                graph.reset()
        dist.destroy_process_group()


def spawn(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float | None = 120.0,
    device: torch.device | str = "cpu",
) -> list[Any]:
    """``function(world, *args)`` on ``size`` new processes of this host; every rank's result, ranks ascending.

    ``function``, ``args`` and results are pickled; ``function`` must be importable, and a script calls ``spawn`` below
    ``if __name__ == "__main__":``. ``world`` is also the process default of its rank. Never hangs: when a rank raises,
    dies or is not done after ``timeout_s`` (None: it may take as long as it likes), all are ended and RankFailure
    names it, with the traceback of every rank that left one. Peers that wait for a rank that raised or died get
    PeersLost. Of ranks that are not done it names one that does not wait in a collective, if there is one. Its cause is
    the rank's error, if that was a QuickseekError, OSError or NotImplementedError. The ranks end with this process, and
    on Ctrl-C. WorldError if GPUs are missing.
    """
    if size < 1:
        raise WorldError(f"cannot spawn {size} ranks: expected at least one")
    device = torch.device(device)
    if device.type == "cuda":
        _require_gpus(size if device.index is None else device.index + 1)
    limit_s = PATIENCE_S if timeout_s is None else timeout_s
    context: Any = multiprocessing.get_context(START_METHOD)
    with tempfile.TemporaryDirectory(prefix="quickseek-") as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(size):
                here, there = context.Pipe()
                job = (rank, size, folder, str(device), limit_s, there, function, args)
                process = context.Process(target=_run_rank, args=job, daemon=True, name=f"rank {rank}")
                with _deaf_to_interrupts():
                    process.start()
                there.close()
                ranks.append(_Rank(rank, process, here, Path(folder)))
            return _collect(ranks, limit_s)
        finally:
            for one in ranks:
                one.end()


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that begin meanwhile never see a Ctrl-C: this one ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change what signals do
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


class _Rank:
    """The parent's end of one spawned process."""

    def __init__(self, rank: int, process: Any, pipe: Connection, folder: Path) -> None:
        self.rank, self.process, self.pipe = rank, process, pipe
        self.trace_file = _trace_file(folder, rank)
        self.outcome: str | None = None
        self.value: Any = None
        self.report = ""
        self.cause: Exception | None = None
        self.blamed = rank

    @property
    def began(self) -> bool:
        """Whether the process came as far as its own function."""
        return self.trace_file.exists()

    def receive(self) -> None:
        """Take what the rank sent, or note that it died without a word."""
        try:
            self.outcome, payload = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(GRACE_S)
            self.outcome = "died"
            self.report = f"ended with exit code {self.process.exitcode} and no result"
            return
        if self.outcome == "result":
            self.value = payload
        else:
            self.report, self.cause, self.blamed = payload

    def trace(self) -> str:
        """Where every thread of a rank that hangs is now, most recent call first."""
        if hasattr(signal, "SIGUSR1") and self.trace_file.exists():
            with contextlib.suppress(OSError):
                os.kill(self.process.pid, signal.SIGUSR1)
                deadline = time.monotonic() + TRACE_S
                while self.trace_file.stat().st_size == 0 and time.monotonic() < deadline:
                    time.sleep(0.02)
                time.sleep(0.05)
                return self.trace_file.read_text() or "(it left no traceback)"
        return "(it left no traceback)"

    def end(self) -> None:
        """Let a rank that has delivered go, and end any other."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"go")
        self.process.join(GRACE_S if self.outcome == "result" else 0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    failed: list[_Rank] = []
    while waiting := [one for one in ranks if one.outcome is None]:
        ready = wait([one.pipe for one in waiting], max(deadline - time.monotonic(), 0))
        if not ready:
            break
        for one in waiting:
            if one.pipe in ready:
                one.receive()
                if one.outcome != "result":
                    deadline = min(deadline, time.monotonic() + GRACE_S) if not failed else deadline
                    failed.append(one)
    if not failed and not waiting:
        return [one.value for one in ranks]
    # A rank that failed or died breaks its peers' collectives: their errors follow from its own.
    failed.sort(key=lambda one: (one.outcome != "died", one.blamed != one.rank))
    lines = [f"rank {one.rank} {one.report}" for one in failed]
    if any(one.outcome == "died" and not one.began for one in failed):
        lines.append(NOT_BEGUN)
    if failed:
        raise RankFailure(failed[0].blamed, "\n".join(lines)) from failed[0].cause
    traced = [(one.rank, trace, in_collective(trace)) for one in waiting for trace in [one.trace()]]
    traced.sort(key=lambda one: one[2])
    for rank, trace, waits in traced:
        where = ", in a collective" if waits else ""
        lines.append(f"rank {rank} was not done after {timeout_s} s{where}:\n{trace}")
    raise RankFailure(traced[0][0], "\n".join(lines))


def in_collective(trace: str) -> bool:
    """Whether the main thread of a faulthandler trace, its last, waits inside torch.distributed or a world over it.

    A rank that waits on its GPU for a collective launched before is not noticed.
    """
    newest = re.search(r"^ +File (.*)", trace.rstrip().split("\n\n")[-1], re.MULTILINE)
    return newest is not None and re.search(WAITING, newest[1]) is not None


def _trace_file(folder: Path, rank: int) -> Path:
    return folder / f"trace-{rank}"


def _run_rank(
    rank: int,
    size: int,
    folder: str,
    device: str,
    timeout_s: float,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The body of a spawned process: connect, run, send the result or the traceback, wait to be let go."""
    with _traceable(_trace_file(Path(folder), rank)):
        let_go = _watch(pipe)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        world: World | None = None
        try:
            if sys.platform == "linux":
                # All ranks are on this host, whose own name need not resolve.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            method = f"file://{folder}/store"
            world = _connect(method, rank, size, torch.device(device), rank, timeout_s + 2 * GRACE_S)
            set_default_world(world)
            # Plain pickle copies tensors into the message: shared handles would die with this process.
            message = pickle.dumps(("result", function(world, *args)))
        except BaseException as error:
            if world is not None:
                world.give_up(error)
            blamed = error.ranks[0] if isinstance(error, PeersLost) and rank not in error.ranks else rank
            message = pickle.dumps(("raised", (f"raised:\n{traceback.format_exc()}", _told(error), blamed)))
        pipe.send_bytes(message)
        # Peers may still be reading what this rank sent them: leave only when all are done.
        let_go.wait()
        _disconnect()


def _watch(pipe: Connection) -> threading.Event:
    """An event that is set when the parent lets this rank go; the process ends when the parent has."""
    let_go = threading.Event()

    def watch() -> None:
        try:
            pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)
        let_go.set()

    threading.Thread(target=watch, daemon=True, name="parent").start()
    return let_go


def _told(error: BaseException) -> Exception | None:
    """An error that a user can act on, as a plain one with its text: not every error can be unpickled."""
    if isinstance(error, PeersLost) and error.__cause__ is not None:
        return _told(error.__cause__)
    for kind in (QuickseekError, OSError, NotImplementedError):
        if isinstance(error, kind):
            return kind(str(error))
    return None


@contextlib.contextmanager
def _traceable(path: Path) -> Iterator[None]:
    """On SIGUSR1 every thread's stack goes to ``path``, also while the process waits inside a library."""
    with path.open("w") as file:
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        yield
        if hasattr(signal, "SIGUSR1"):
            faulthandler.unregister(signal.SIGUSR1)

"""Bringing ranks into being: from torchrun's environment, or by spawning processes on this host."""

import atexit
import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from quickseek.errors import RankFailure, WorldError
from quickseek.parallel.world import DistributedWorld, SoloWorld, World, set_default_world

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
START_METHOD = "spawn"
"""How processes of ``spawn`` begin: anew, or as "forkserver", which begins them from one that has loaded its modules,
in the environment variables of the first call."""
GRACE_S = 3.0
"""How long the other ranks get to report, once one has failed, before they are ended."""
TRACE_S = 2.0
"""How long a rank that hangs gets to write down where it is."""


def world_from_environment(device: torch.device | str = "cpu", *, timeout_s: float = 600.0) -> World:
    """The world that torchrun describes in the environment; one rank alone where it describes none.

    ``device`` "cuda" means the GPU of LOCAL_RANK. Collectives give up after ``timeout_s``. Raises WorldError naming
    the variables that are absent or wrong. Call it once a process.
    """
    device = torch.device(device)
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
    # Gloo's threads end the process with an abort when the interpreter leaves before they do.
    atexit.register(_disconnect)
    return _connect("env://", rank, size, device, local_rank, timeout_s)


def _connect(method: str, rank: int, size: int, device: torch.device, local_rank: int, timeout_s: float) -> World:
    limit = timedelta(seconds=timeout_s)
    if device.type == "cpu":
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=limit)
        return DistributedWorld(device)
    device = torch.device("cuda", local_rank if device.index is None else device.index)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=method, rank=rank, world_size=size, timeout=limit)
    return DistributedWorld(device, None, dist.new_group(backend="gloo", timeout=limit))


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def spawn(
    function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 120.0, device: torch.device | str = "cpu"
) -> list[Any]:
    """``function(world, *args)`` on ``size`` new processes of this host; every rank's result, ranks ascending.

    ``function``, ``args`` and results are pickled; ``function`` must be importable. ``world`` is also the process
    default of its rank. Never hangs: when a rank raises, dies or is not done after ``timeout_s``, all are ended and
    RankFailure names it, with the traceback of every rank that left one.
    """
    if size < 1:
        raise WorldError(f"cannot spawn {size} ranks: expected at least one")
    context: Any = multiprocessing.get_context(START_METHOD)
    with tempfile.TemporaryDirectory(prefix="quickseek-") as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(size):
                here, there = context.Pipe()
                job = (rank, size, folder, str(device), timeout_s, there, function, args)
                process = context.Process(target=_run_rank, args=job, daemon=True, name=f"rank {rank}")
                process.start()
                there.close()
                ranks.append(_Rank(rank, process, here, Path(folder)))
            return _collect(ranks, timeout_s)
        finally:
            for one in ranks:
                one.end()


class _Rank:
    """The parent's end of one spawned process."""

    def __init__(self, rank: int, process: Any, pipe: Connection, folder: Path) -> None:
        self.rank, self.process, self.pipe = rank, process, pipe
        self.trace_file = _trace_file(folder, rank)
        self.outcome: str | None = None
        self.value: Any = None
        self.report = ""

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
            self.report = payload

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
    # A rank that died breaks its peers' connections: their errors follow from its own.
    failed.sort(key=lambda one: one.outcome != "died")
    lines = [f"rank {one.rank} {one.report}" for one in failed]
    for one in waiting if not failed else []:
        lines.append(f"rank {one.rank} was not done after {timeout_s} s:\n{one.trace()}")
    raise RankFailure((failed or waiting)[0].rank, "\n".join(lines))


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
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        try:
            if sys.platform == "linux":
                # All ranks are on this host, whose own name need not resolve.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            method = f"file://{folder}/store"
            world = _connect(method, rank, size, torch.device(device), rank, timeout_s + 2 * GRACE_S)
            set_default_world(world)
            # Plain pickle copies tensors into the message: shared handles would die with this process.
            message = pickle.dumps(("result", function(world, *args)))
        except BaseException:
            message = pickle.dumps(("raised", f"raised:\n{traceback.format_exc()}"))
        pipe.send_bytes(message)
        # Peers may still be reading what this rank sent them: leave only when all are done.
        with contextlib.suppress(EOFError, OSError):
            pipe.recv_bytes()
        _disconnect()


@contextlib.contextmanager
def _traceable(path: Path) -> Iterator[None]:
    """On SIGUSR1 every thread's stack goes to ``path``, also while the process waits inside a library."""
    with path.open("w") as file:
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        yield
        if hasattr(signal, "SIGUSR1"):
            faulthandler.unregister(signal.SIGUSR1)

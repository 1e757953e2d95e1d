"""Ranks as torchrun starts them, processes that nobody watches: what each does when one of them ends early.

Run as a program it is one rank, which takes ``Orders`` as JSON and its place from torchrun's environment variables.
"""

import faulthandler
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROMPT = [0, *range(20, 23)]
BEGIN_S = 240.0
"""Until the first rank has ended: ranks load PyTorch and, on a GPU, compile their kernels first."""
DONE = "done"


@dataclass(frozen=True)
class Orders:
    """``dead``: the rank that ends (None: nobody) after ``tokens`` tokens of an answer of ``most``; ``how``: "killed",
    "raised" (by what it does with its tokens) or "in a step" (of the engine). ``wait_s``: how long fused collectives
    wait for a peer (None: as long as they do by themselves).
    """

    directory: str
    dead: int | None
    how: str = "killed"
    tokens: int = 20
    most: int = 120
    wait_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a process ended: exit code (None: it had to be killed), tokens it told of, whether it told of all, what it
    wrote to stderr, and how many seconds after the first one to end."""

    code: int | None
    tokens: int
    done: bool
    error: str
    after_s: float

    @property
    def last_words(self) -> str:
        """The line that names the error of its traceback."""
        text = re.sub(r"^\[rank\d+\]: ?", "", self.error, flags=re.MULTILINE)
        lines = text[text.rindex("Traceback (most recent call last):") :].splitlines()
        return next(line for line in lines[1:] if not line.startswith(" "))


def places(size: int) -> list[dict[str, str]]:
    """What torchrun tells each of ``size`` ranks of this host in its environment, and paths to import from."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    each = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(size)]
    return [{name: str(value) for name, value in one.items()} for one in each]


def run_ranks(folder: Path, size: int, orders: Orders, limit_s: float) -> list[Ended]:
    """Start ``size`` ranks; once one has ended the others have ``limit_s``. Output goes to files in ``folder``."""
    processes: list[subprocess.Popen[bytes]] = []
    ends: dict[int, float] = {}
    begun = time.monotonic()
    try:
        for rank, place in enumerate(places(size)):
            with (folder / f"told {rank}").open("wb") as told, (folder / f"error {rank}").open("wb") as error:
                command = [sys.executable, __file__, json.dumps(asdict(orders))]
                processes.append(subprocess.Popen(command, env=os.environ | place, stdout=told, stderr=error))
        limit = begun + BEGIN_S
        while len(ends) < size and time.monotonic() < limit:
            for rank, process in enumerate(processes):
                if rank not in ends and process.poll() is not None:
                    ends[rank] = time.monotonic()
                    limit = min(ends.values()) + limit_s
            time.sleep(0.02)
    finally:
        # One that hangs first writes to stderr where.
        for rank, process in enumerate(processes):
            if rank not in ends:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5 if len(ends) < size else 0.0)
        for process in processes:
            process.kill()
            process.wait()
    first = min(ends.values(), default=begun)
    found_ends = []
    for rank, process in enumerate(processes):
        lines = (folder / f"told {rank}").read_text().split()
        counts = [int(line) for line in lines if line != DONE]
        error_text = (folder / f"error {rank}").read_text()
        code = process.returncode if rank in ends else None
        after = ends.get(rank, time.monotonic()) - first
        found_ends.append(Ended(code, max(counts, default=0), DONE in lines, error_text, after))
    return found_ends


def fail(*arguments: Any) -> None:
    raise ValueError("a step's own fault")


def serve(orders: Orders) -> None:
    """One rank: answer, and end in the middle of it if this is the one."""
    from quickseek import LLM, SamplingParams
    from quickseek.ops.collectives import AllReduceMHC, LamportAllGather

    if orders.wait_s is not None:
        for collective in (AllReduceMHC, LamportAllGather):
            defaults: Any = collective.__init__.__kwdefaults__
            defaults["timeout_s"] = orders.wait_s
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    llm = LLM(orders.directory, **orders.options)
    params = SamplingParams(max_tokens=orders.most, temperature=0.0, ignore_eos=True)
    for _, output in llm.stream(PROMPT, params):
        print(len(output.token_ids), flush=True)
        if llm.world.rank == orders.dead and len(output.token_ids) >= orders.tokens:
            if orders.how == "raised":
                raise ValueError("a caller's own fault")
            if orders.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            vars(llm.runner)["_decode"] = fail
    print(DONE, flush=True)


if __name__ == "__main__":
    serve(Orders(**json.loads(sys.argv[1])))

"""Ranks on two GPUs: spawned or started by torchrun, a world over NCCL, and what happens when one fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from quickseek.errors import RankFailure
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import World, default_world, split

pytestmark = [pytest.mark.gpu2, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

PROGRAM = """
import sys
import torch
from quickseek.parallel.launch import world_from_environment

world = world_from_environment("cuda")
total = world.all_reduce(torch.full((4,), world.rank + 1.0, device=world.device)).tolist()
with open(sys.argv[1] + str(world.rank), "w") as file:
    file.write(f"{world.size} {world.device.index} {total}")
world.barrier()
"""


def exchange(world: World) -> dict[str, object]:
    device = world.device
    here = torch.full((2, 3), world.rank + 0.5, dtype=torch.bfloat16, device=device)
    columns = torch.arange(6, device=device).view(3, 2).t() + 10 * world.rank
    codes = torch.full((5,), world.rank + 1.0, device=device).to(torch.float8_e4m3fn)
    own = split(world, 1)
    return {
        "place": (world.rank, world.size, device.index, torch.cuda.current_device(), default_world() is world),
        "sum": world.all_reduce(here).tolist(),
        "rows": world.all_gather(here).tolist(),
        "columns": world.all_gather(columns, 1).tolist(),
        "from 1": world.broadcast(columns.clone().t().contiguous().t(), 1).tolist(),
        "codes": world.broadcast(codes, 1).float().tolist(),
        "least": world.all_reduce_min(7 - world.rank),
        "objects": world.gather_object({"rank": world.rank}),
        "alone": (own.size, own.all_reduce(here).tolist() == here.tolist()),
    }


def test_ranks_on_gpus_exchange_tensors_and_host_values() -> None:
    first, second = spawn(exchange, 2, device="cuda", timeout_s=90)
    assert first["place"] == (0, 2, 0, 0, True) and second["place"] == (1, 2, 1, 1, True)
    assert first["sum"] == [[2.0] * 3] * 2
    assert first["rows"] == [[0.5] * 3] * 2 + [[1.5] * 3] * 2
    assert first["columns"] == [[0, 2, 4, 10, 12, 14], [1, 3, 5, 11, 13, 15]]
    assert first["from 1"] == [[10, 12, 14], [11, 13, 15]]
    assert first["codes"] == [2.0] * 5
    assert first["least"] == 6 and first["objects"] == [{"rank": 0}, {"rank": 1}]
    assert first["alone"] == (1, True)
    assert {k: v for k, v in first.items() if k != "place"} == {k: v for k, v in second.items() if k != "place"}


def raise_while_the_other_waits(world: World) -> None:
    if world.rank == 1:
        raise ValueError("the shard of rank one is torn")
    world.all_reduce(torch.ones(4, device=world.device))
    torch.cuda.synchronize()


def test_a_rank_that_raises_ends_a_peer_that_waits_for_it_on_its_gpu() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match="the shard of rank one is torn") as caught:
        spawn(raise_while_the_other_waits, 2, device="cuda", timeout_s=90)
    assert caught.value.rank == 1 and time.monotonic() - started < 60


def test_torchrun_gives_each_rank_its_gpu(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, f"{tmp_path}/rank"], env=environment, timeout=90, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    written = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert written == [f"2 {rank} {[3.0] * 4}" for rank in range(2)]

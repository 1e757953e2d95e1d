"""Spawning and torchrun's environment: results come back, and no failure of a rank becomes a hang."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from quickseek.errors import RankFailure, WorldError
from quickseek.parallel import launch
from quickseek.parallel.launch import spawn, world_from_environment
from quickseek.parallel.world import SoloWorld, World, default_world


@pytest.fixture(autouse=True)
def from_nothing(monkeypatch):
    """Ranks begin as they do outside of tests."""
    monkeypatch.setattr(launch, "START_METHOD", "spawn")


def report(world: World, addend: int) -> tuple[int, int, int, bool]:
    total = world.all_reduce(torch.tensor([float(world.rank + addend)]))
    return world.rank, world.size, int(total.item()), default_world() is world


def give_tensor(world: World) -> torch.Tensor:
    return torch.full((3,), world.rank, dtype=torch.bfloat16)


def raise_on_one(world: World) -> None:
    if world.rank == 1:
        raise ValueError("the shard of rank one is torn")
    world.barrier()


def die_on_one(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def sleep_in_a_named_place(world: World) -> None:
    if world.rank == 1:
        time.sleep(600)


def test_every_rank_returns_its_result_in_rank_order():
    assert spawn(report, 2, 10) == [(0, 2, 21, True), (1, 2, 21, True)]


def test_results_may_hold_tensors_of_any_dtype():
    first, second = spawn(give_tensor, 2)
    assert first.dtype == torch.bfloat16 and torch.equal(second, torch.ones(3, dtype=torch.bfloat16))
    assert not torch.equal(first, second)


def test_a_rank_that_raises_is_named_with_its_traceback():
    with pytest.raises(RankFailure, match="the shard of rank one is torn") as caught:
        spawn(raise_on_one, 2)
    assert caught.value.rank == 1
    assert "in raise_on_one" in str(caught.value)


def test_a_rank_that_is_killed_is_named_though_its_peers_fail_too():
    with pytest.raises(RankFailure, match="rank 1 ended with exit code -9") as caught:
        spawn(die_on_one, 2)
    assert caught.value.rank == 1


def test_a_rank_that_hangs_is_ended_in_time_and_says_where_it_was():
    # On a busy machine rank 0 may not even have started in the shorter time.
    for limit_s in (12, 60):
        started = time.monotonic()
        with pytest.raises(RankFailure, match="rank 1 was not done after") as caught:
            spawn(sleep_in_a_named_place, 2, timeout_s=limit_s)
        assert time.monotonic() - started < limit_s + 28
        if "rank 0" not in str(caught.value):
            break
    assert "sleep_in_a_named_place" in str(caught.value)
    assert "rank 0" not in str(caught.value)


def test_a_world_of_no_ranks_is_refused():
    with pytest.raises(WorldError, match="0 ranks"):
        spawn(report, 0, 10)


def test_without_torchrun_there_is_one_rank(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(world_from_environment(), SoloWorld)


def test_half_an_environment_is_an_error_that_names_what_is_absent(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "29511")
    with pytest.raises(WorldError, match="RANK, LOCAL_RANK, MASTER_ADDR is not"):
        world_from_environment()


@pytest.mark.parametrize(("rank", "fault"), [("two", "RANK='two'"), ("2", "'RANK': '2'")])
def test_a_rank_that_is_no_rank_of_the_world_is_an_error(monkeypatch, rank, fault):
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(WorldError, match=fault):
        world_from_environment()


def test_torchrun_gives_the_same_world(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from quickseek.parallel.launch import world_from_environment\n"
        "world = world_from_environment()\n"
        "total = world.all_reduce(torch.tensor([world.rank + 1.0])).item()\n"
        f"open(r'{tmp_path}/rank' + str(world.rank), 'w').write(f'{{world.size}} {{total}}')\n"
        "world.barrier()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2 3.0", "2 3.0"]

"""Spawning and torchrun's environment: results come back, and no failure of a rank becomes a hang."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import pytest
import torch

from quickseek.errors import CheckpointError, ConfigError, QuickseekError, RankFailure, WorldError
from quickseek.llm import LLM
from quickseek.parallel import launch
from quickseek.parallel.launch import NOT_BEGUN, in_collective, spawn, world_from_environment, world_of_process
from quickseek.parallel.world import SoloWorld, World, default_world, set_default_world

AS_IN_TESTS = launch.START_METHOD


@pytest.fixture(autouse=True)
def from_nothing(monkeypatch):
    """Ranks begin as they do outside of tests unless a test says otherwise, and no test leaves a world to the next."""
    monkeypatch.setattr(launch, "START_METHOD", "spawn")
    before = default_world()
    yield
    set_default_world(before)


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


def sleep_while_the_other_waits(world: World) -> None:
    if world.rank == 1:
        time.sleep(600)
    world.barrier()


def raise_as_a_user_sees_it(world: World) -> None:
    if world.rank == 1:
        raise CheckpointError("shard 7 is torn")
    world.barrier()


def hold(pipe: Connection) -> None:
    launch._watch(pipe).wait(600)


def test_every_rank_returns_its_result_in_rank_order():
    assert spawn(report, 2, 10) == [(0, 2, 21, True), (1, 2, 21, True)]


def test_results_may_hold_tensors_of_any_dtype(monkeypatch):
    monkeypatch.setattr(launch, "START_METHOD", AS_IN_TESTS)
    first, second = spawn(give_tensor, 2)
    assert first.dtype == torch.bfloat16 and torch.equal(second, torch.ones(3, dtype=torch.bfloat16))
    assert not torch.equal(first, second)


def test_a_rank_that_raises_is_named_with_its_traceback(monkeypatch):
    monkeypatch.setattr(launch, "START_METHOD", AS_IN_TESTS)
    with pytest.raises(RankFailure, match="the shard of rank one is torn") as caught:
        spawn(raise_on_one, 2)
    assert caught.value.rank == 1
    assert "in raise_on_one" in str(caught.value) and caught.value.__cause__ is None


def test_an_error_that_a_user_can_act_on_is_the_cause(monkeypatch):
    monkeypatch.setattr(launch, "START_METHOD", AS_IN_TESTS)
    with pytest.raises(RankFailure, match="rank 1 raised") as caught:
        spawn(raise_as_a_user_sees_it, 2)
    assert isinstance(caught.value.__cause__, QuickseekError) and str(caught.value.__cause__) == "shard 7 is torn"


def test_a_rank_that_is_killed_is_named_though_its_peers_fail_too(monkeypatch):
    monkeypatch.setattr(launch, "START_METHOD", AS_IN_TESTS)
    with pytest.raises(RankFailure, match="rank 1 ended with exit code -9") as caught:
        spawn(die_on_one, 2)
    assert caught.value.rank == 1 and NOT_BEGUN not in str(caught.value)


def test_a_rank_that_hangs_is_ended_in_time_and_says_where_it_was(monkeypatch):
    monkeypatch.setattr(launch, "START_METHOD", AS_IN_TESTS)
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


def test_the_rank_that_sleeps_is_named_before_the_one_that_waits_for_it(monkeypatch):
    monkeypatch.setattr(launch, "START_METHOD", AS_IN_TESTS)
    for limit_s in (8, 60):
        with pytest.raises(RankFailure, match=f"^rank 1 was not done after {limit_s} s:\n") as caught:
            spawn(sleep_while_the_other_waits, 2, timeout_s=limit_s)
        assert caught.value.rank == 1
        if "sleep_while_the_other_waits" in str(caught.value) and "in a collective:" in str(caught.value):
            break
    assert f"rank 0 was not done after {limit_s} s, in a collective:\n" in str(caught.value)


@pytest.mark.parametrize(
    ("newest", "waits"),
    [
        ("/lib/site-packages/torch/distributed/distributed_c10d.py", True),
        ("/lib/site-packages/torch/cuda/streams.py", False),
        ("/mine/model.py", False),
    ],
)
def test_a_trace_shows_a_collective_where_the_main_thread_is_in_one_now(newest, waits):
    frames = [f'  File "{newest}", line 7 in wait', '  File "/lib/torch/distributed/run.py", line 2 in main']
    other = ['Thread 0x01 (most recent call first):\n  File "/lib/torch/distributed/elastic.py", line 3 in beat', ""]
    assert in_collective("\n".join([*other, "Current thread 0x02 (most recent call first):", *frames])) is waits
    assert not in_collective("") and not in_collective("(it left no traceback)")


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text("from quickseek.parallel.launch import spawn\nprint(spawn(len, 1))\n")
    run = subprocess.run([sys.executable, str(script)], timeout=120, capture_output=True, text=True)
    assert run.returncode == 1
    assert "RankFailure: rank 0 ended with exit code 1 and no result" in run.stderr
    assert NOT_BEGUN in run.stderr and '`if __name__ == "__main__":`' in NOT_BEGUN


def test_a_rank_ends_when_the_process_that_spawned_it_has():
    context = multiprocessing.get_context(AS_IN_TESTS)
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(there,), daemon=True)
    process.start()
    there.close()
    process.join(1)
    assert process.is_alive()
    here.close()
    process.join(60)
    assert process.exitcode == 1


def test_gpus_that_are_not_there_are_an_error_before_any_rank_begins(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(WorldError, match=r"the ranks need 2 GPUs on this host: torch .* finds 1"):
        spawn(report, 2, 10, device="cuda")
    with pytest.raises(WorldError, match="need 3 GPUs"):
        spawn(report, 1, 10, device="cuda:2")
    describe(monkeypatch, rank=1, size=2)
    with pytest.raises(WorldError, match="need 2 GPUs"):
        world_from_environment("cuda")


def describe(monkeypatch, rank, size):
    """The environment of a rank that torchrun started."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def test_a_model_takes_the_ranks_that_torchrun_started(monkeypatch):
    started = SoloWorld()
    started.size = 2
    calls = []
    monkeypatch.setattr(launch, "_connect", lambda *given: calls.append(given) or started)
    set_default_world(None)
    describe(monkeypatch, rank=0, size=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 1: expected .* launched .*, 2"):
        LLM("miniature")
    assert default_world() is started and world_of_process() is started and len(calls) == 1
    # One rank, however it was started, is what it was without torchrun.
    set_default_world(None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert world_of_process().size == 1 and len(calls) == 1
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(WorldError, match="WORLD_SIZE='two'"):
        world_of_process()


def test_a_default_world_of_several_ranks_stays_under_torchrun(monkeypatch):
    spawned = SoloWorld()
    spawned.size = 4
    set_default_world(spawned)
    describe(monkeypatch, rank=0, size=2)
    assert world_of_process() is spawned


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
        "from quickseek.parallel.world import default_world\n"
        "world = world_from_environment()\n"
        "assert default_world() is world\n"
        "total = world.all_reduce(torch.tensor([world.rank + 1.0])).item()\n"
        f"open(r'{tmp_path}/rank' + str(world.rank), 'w').write(f'{{world.size}} {{total}}')\n"
        "world.barrier()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2 3.0", "2 3.0"]


LEAVING = """
import sys
import torch.distributed as dist
from quickseek.errors import CollectiveTimeout
from quickseek.parallel import launch, world

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
found = world.DistributedWorld(sys.argv[2])


class Graph:
    def reset(self):
        print("reset", end=" ")


graph, gone = Graph(), Graph()
launch.captured.update((graph, gone))
del gone
dist.destroy_process_group, destroy = lambda: print("destroyed"), dist.destroy_process_group
launch.atexit.register(destroy)
launch.atexit.register(launch._leave, found)
launch.atexit.register(print, "earlier", end="")
how = sys.argv[3]
print(how, end=" ")
try:
    if how in ("timeout", "serves again"):
        with found.as_one("a test"):
            raise CollectiveTimeout("all_reduce", 0, 1, 2, [1])
except CollectiveTimeout:
    found.impaired = how == "timeout" and found.impaired
if how == "lost":
    found.give_up(ValueError("a peer's"))
if how == "a group's":
    other = world.DistributedWorld(sys.argv[2])
    other.impaired = True
if how == "told":
    launch.ending(2, ValueError("a user's"))
    sys.exit(2)
if how == "exit":
    sys.exit(3)
if how == "handler":
    import logging

    class Torn(logging.NullHandler):
        def flush(self):
            raise AttributeError("torn")

    torn = Torn()
    found.impaired = True
if how == "graph":
    Graph.reset = lambda self: exec("raise RuntimeError('torn')")
if how == "interrupt":
    raise KeyboardInterrupt
if how == "raised":
    raise ValueError("not caught")
"""


@pytest.mark.parametrize(
    ("device", "how", "code", "destroyed"),
    [
        ("cuda", "nothing", 0, True),
        ("cuda", "serves again", 0, True),
        ("cuda", "timeout", 1, False),
        ("cuda", "lost", 1, False),
        ("cuda", "raised", 1, False),
        ("cuda", "interrupt", 130, False),
        ("cuda", "a group's", 1, False),
        ("cuda", "told", 2, False),
        ("cuda", "handler", 1, False),
        ("cuda", "exit", 3, True),
        ("cpu", "told", 2, True),
        ("cpu", "graph", 0, True),
        ("cpu", "lost", 0, True),
        ("cpu", "raised", 1, True),
    ],
)
def test_a_rank_on_a_gpu_that_ends_after_a_fault_does_not_wait_for_nccl(tmp_path, device, how, code, destroyed):
    command = [sys.executable, "-c", LEAVING, f"{tmp_path}/store", device, how]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True)
    reset = "" if how == "graph" else "reset "
    told = f"{how} earlier" + (f"{reset}destroyed\n" if destroyed else "")
    assert (run.returncode, run.stdout) == (code, told), run.stderr
    assert ("not caught" in run.stderr) == (how == "raised")

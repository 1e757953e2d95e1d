"""The example of docs/collectives.md runs, and what the page says of a CPU holds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quickseek.ops.collectives import AllReduceMHC, LamportAllGather
from quickseek.parallel.virtual import run_virtual
from quickseek.parallel.world import World

PAGE = Path(__file__).parents[3] / "docs" / "collectives.md"


def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(source)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (promised,) = re.findall(r"print\(.*\)  # (.*)", source)
    assert done.stdout.strip() == promised == "[3.0, 3.0] [3.0, 3.0]"


def one_rank_alone(world: World) -> tuple[int, int]:
    return (
        LamportAllGather(rank_capacity_bytes=64, device="cpu").world_size,
        LamportAllGather(rank_capacity_bytes=64, device="cpu", world=world).world_size,
    )


def test_no_world_is_one_rank_alone_among_virtual_ranks() -> None:
    assert run_virtual(one_rank_alone, 2) == [(1, 2)] * 2


def test_a_cpu_has_no_phases() -> None:
    door, x = AllReduceMHC(hidden_size=64, hc_mult=1, max_num_tokens=4, top_k=1, device="cpu"), torch.ones(2, 64)
    index, weights = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    for phase in (
        lambda: door.publish(x),
        lambda: door.publish_finalize(x, weights, index, x),
        door.sum_owned,
        lambda: door.collect(x[:, None], weights, weights[:, None]),
        lambda: door.publish_target(2),
        lambda: door.mark_published(2),
        door.drop_mark,
    ):
        with pytest.raises(NotImplementedError, match="on a CPU"):
            phase()
    door.reset()


def reset_out_of_step(world: World, log: list[str]) -> None:
    doors = (
        AllReduceMHC(hidden_size=64, hc_mult=1, max_num_tokens=4, top_k=1, device="cpu", world=world),
        LamportAllGather(rank_capacity_bytes=64, device="cpu", world=world),
    )
    for door in doors:
        log.append("before")
        door.reset()
        log.append("after")
        world.barrier()


def test_a_reset_on_a_cpu_waits_for_all_ranks() -> None:
    log: list[str] = []
    run_virtual(reset_out_of_step, 2, log)
    assert log == ["before", "before", "after", "after"] * 2

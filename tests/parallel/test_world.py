"""What worlds promise: ordered sums, groups of their own, and one error on all ranks for a fault on one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quickseek.errors import WorldError
from quickseek.parallel.launch import spawn
from quickseek.parallel.virtual import run_virtual
from quickseek.parallel.world import SoloWorld, World, require_agreement, split, together
from rank_cases import told_by

# In FP32, ascending: (1e8 - 1e8) + 1 = 1, but 1e8 + (1 - 1e8) = 0: the order shows in the result.
ORDER_SENSITIVE = (1e8, -1e8, 1.0)


def ordered_sums(world: World) -> dict[str, torch.Tensor]:
    mine = ORDER_SENSITIVE[world.rank]
    # BF16: 256 + 1 + 1 rounds to 258 once, but to 256 when each addition rounds.
    half = torch.tensor([(256.0, 1.0, 1.0)[world.rank]], dtype=torch.bfloat16)
    tiny = torch.tensor([(1.0, 1e-12, 1e-12)[world.rank]], dtype=torch.float64)
    return {
        "float32": world.all_reduce(torch.tensor([mine])),
        "bfloat16": world.all_reduce(half),
        "float64": world.all_reduce(tiny),
        "zero": world.all_reduce(torch.tensor([-0.0])),
    }


def whole_sums(world: World) -> list[torch.Tensor]:
    """Of integers that FP32 does not hold, of small ones, and of none."""
    large = torch.tensor([2**24 + 1, -(2**40) - world.rank])
    return [
        world.all_reduce(large),
        world.all_reduce(torch.tensor([2**24 + world.rank], dtype=torch.int32)),
        world.all_reduce(torch.tensor([100], dtype=torch.uint8)),
    ]


def from_nobody(world: World) -> list[str]:
    told = []
    for source in (-1, world.size, 7):
        try:
            world.broadcast(torch.ones(2), source)
            told.append("not noticed")
        except WorldError as error:
            told.append(str(error))
    assert world.broadcast(torch.full((1,), float(world.rank)), world.size - 1).item() == world.size - 1
    return told


def odd_facts(world: World) -> list[str]:
    nan, odd = float("nan"), world.rank == 1
    facts = (
        {"eps": nan},
        {"eps": nan if odd else 1.0},
        {"map": torch.tensor([1, 2])},
        {"map": torch.tensor([1, 3 if odd else 2])},
        {"map": torch.tensor([1.0, nan])},
        {"map": torch.ones(2 if odd else 1)},
        {"map": [torch.tensor(1), {"eps": nan}]},
        {"map": [torch.tensor(1), {"eps": nan}, 2.0 if odd else 2]},
    )
    return [told_by(partial(require_agreement, world, fact)) for fact in facts]


def moves(world: World) -> dict[str, torch.Tensor]:
    rank = world.rank
    transposed = torch.full((3, 2), float(rank)).t()
    received = torch.full((2, 2), float(rank)).t()
    world.broadcast(received, 1)
    return {
        "along 1": world.all_gather(transposed, 1),
        "float8": world.all_gather(torch.tensor([rank + 1.0]).to(torch.float8_e4m3fn)).to(torch.float32),
        "flags": world.all_gather(torch.tensor([rank == 1])),
        "broadcast": received,
        "least": torch.tensor(world.all_reduce_min(7 - rank)),
    }


def groups(world: World) -> tuple[int, int, float, float, list[int]]:
    group = split(world, 2)
    both = group.all_reduce(torch.tensor([float(world.rank)])).item()
    everyone = world.all_reduce(torch.tensor([float(world.rank)])).item()
    return group.rank, group.size, both, everyone, group.gather_object(world.rank)


def disagreements(world: World) -> list[str]:
    facts = {"max_num_seqs": 8 if world.rank else 4, "dtype": "bfloat16", **({"draft": True} if world.rank else {})}

    def read_a_shard() -> str:
        return Path("/nowhere/shard").read_text()

    return [
        told_by(lambda: require_agreement(world, facts)),
        told_by(lambda: together(world, "loading", lambda: read_a_shard() if world.rank else "loaded")),
        told_by(lambda: together(world, "loading", read_a_shard), FileNotFoundError),
        told_by(lambda: require_agreement(world, {"max_num_seqs": 8})),
        together(world, "loading", lambda: "all loaded"),
    ]


def test_sums_run_over_ranks_ascending_with_one_rounding():
    for sums in spawn(ordered_sums, 3):
        assert sums["float32"].item() == 1.0
        assert sums["bfloat16"].item() == 258.0 and sums["bfloat16"].dtype == torch.bfloat16
        assert sums["float64"].item() == (1.0 + 1e-12) + 1e-12
        assert torch.signbit(sums["zero"]).item()
    # Negative control: another order and another rounding do give other numbers.
    assert sum(torch.tensor(ORDER_SENSITIVE[::-1])).item() != 1.0
    assert (torch.tensor(256.0, dtype=torch.bfloat16) + 1 + 1).item() == 256.0


@pytest.mark.parametrize("run", [spawn, run_virtual])
def test_integers_are_summed_as_integers(run: Callable[..., Any]) -> None:
    for large, middle, small in run(whole_sums, 3):
        assert large.tolist() == [3 * (2**24 + 1), -3 * 2**40 - 3] and large.dtype == torch.int64
        assert middle.tolist() == [3 * 2**24 + 3] and middle.dtype == torch.int32
        assert small.tolist() == [300 - 256] and small.dtype == torch.uint8
    # Negative control: FP32 does not hold them.
    assert int(torch.tensor(2**24 + 1).float()) != 2**24 + 1


@pytest.mark.parametrize("run", [spawn, run_virtual])
@pytest.mark.parametrize("size", [1, 2])
def test_a_broadcast_from_a_rank_that_does_not_exist_is_refused_by_all(run: Callable[..., Any], size: int) -> None:
    for told in [*run(from_nobody, size), *([from_nobody(SoloWorld())] if size == 1 else [])]:
        assert all(f"there are ranks 0 to {size - 1}" in text for text in told)


def test_ranks_agree_on_facts_of_any_kind() -> None:
    first, second = spawn(odd_facts, 2)
    assert first == second
    assert [text == "not noticed" for text in first] == [True, False, True, False, True, False, True, False]
    assert first[1] == "RankDisagreement: ranks disagree on eps (rank 0: 1.0; rank 1: nan)"


def test_gathers_and_broadcasts_carry_any_dtype_and_layout():
    for got in spawn(moves, 2):
        assert torch.equal(got["along 1"], torch.tensor([[0.0] * 3 + [1.0] * 3] * 2))
        assert torch.equal(got["float8"], torch.tensor([1.0, 2.0]))
        assert torch.equal(got["flags"], torch.tensor([False, True]))
        assert torch.equal(got["broadcast"], torch.ones(2, 2))
        assert got["least"].item() == 6


def test_two_groups_in_one_world_sum_apart_and_together():
    assert spawn(groups, 4) == [
        (0, 2, 1.0, 6.0, [0, 1]),
        (1, 2, 1.0, 6.0, [0, 1]),
        (0, 2, 5.0, 6.0, [2, 3]),
        (1, 2, 5.0, 6.0, [2, 3]),
    ]


def test_a_fault_or_another_opinion_on_one_rank_is_the_same_error_on_all():
    first, second = spawn(disagreements, 2)
    assert first == second
    opinion, fault, common, none, result = first
    held = "draft (rank 0: '(absent)'; rank 1: True), max_num_seqs (rank 0: 4; rank 1: 8)"
    assert opinion == f"RankDisagreement: ranks disagree on {held}"
    assert fault.startswith("RankDisagreement: loading failed: rank 1: FileNotFoundError") and "rank 0" not in fault
    assert common.startswith("FileNotFoundError"), "a fault that all share stays what it is"
    assert none == "not noticed" and result == "all loaded"


def test_a_group_size_that_does_not_divide_the_world_is_refused():
    assert split(SoloWorld(), 1).size == 1
    with pytest.raises(WorldError, match="1 ranks cannot be split into groups of 2"):
        split(SoloWorld(), 2)

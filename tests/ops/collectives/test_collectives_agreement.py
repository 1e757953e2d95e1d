"""Ranks that build different collectives, or make different calls, all raise the same error on a CPU."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from quickseek.errors import RankFailure
from quickseek.ops.collectives import AllReduceMHC, LamportAllGather
from quickseek.parallel.launch import spawn
from quickseek.parallel.virtual import run_virtual
from quickseek.parallel.world import World
from rank_cases import told_by

HIDDEN, STREAMS, CAPACITY, TOP_K = 64, 2, 8, 2
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "hc_mult": STREAMS, "max_num_tokens": CAPACITY, "top_k": TOP_K}


def reduce_on(world: World, **changed: Any) -> AllReduceMHC:
    return AllReduceMHC(**{**SIZES, "device": "cpu", **changed}, world=world)


def gather_on(world: World, **changed: Any) -> LamportAllGather:
    return LamportAllGather(**{"rank_capacity_bytes": 256, "device": "cpu", **changed}, world=world)


def build(world: World) -> list[str]:
    """What a rank is told about collectives that the last rank builds otherwise."""
    odd = world.rank == world.size - 1
    changes: list[tuple[str, Any, Any]] = [
        ("hidden_size", 64, 128),
        ("hidden_size", 64, 63),
        ("hc_mult", 2, 4),
        ("max_num_tokens", 8, 9),
        ("residual_only", False, True),
        ("timeout_s", 1.0, float("nan")),
        ("device", "cpu", "cuda:0"),
        ("hidden_size", 64, 64.0),
    ]
    told = [told_by(partial(reduce_on, world, **{name: other if odd else usual})) for name, usual, other in changes]
    told.append(told_by(lambda: reduce_on(world) if odd else gather_on(world)))
    told.append(told_by(lambda: gather_on(world, rank_capacity_bytes=512 if odd else 256)))
    told.append(told_by(lambda: reduce_on(world, timeout_s=float("nan"))))
    reduce_on(world), gather_on(world)
    return told


def check_built(found: list[list[str]]) -> None:
    for other in found[1:]:
        assert other == found[0]
    assert all(re.match("ValueError: ranks build different collectives", text) for text in found[0][:10]), found[0]
    assert "max_num_tokens=8" in found[0][3] and "max_num_tokens=9" in found[0][3]
    assert "AllReduceMHC" in found[0][8] and "LamportAllGather" in found[0][8]
    assert "512" in found[0][9] and found[0][10].startswith("ValueError: timeout_s nan")


def given(rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = ([rows, STREAMS], [rows, STREAMS, STREAMS], [rows, STREAMS])
    mixes = [torch.ones(shape, dtype=wide) for shape in shapes]
    return [torch.ones(rows, STREAMS, HIDDEN, dtype=dtype), *mixes, torch.ones(HIDDEN, dtype=dtype)]


def reduced(collective: AllReduceMHC, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return collective(torch.ones(rows, HIDDEN, dtype=dtype), *given(rows, dtype))[0]


def finalized(collective: AllReduceMHC, rows: int) -> torch.Tensor:
    index = torch.zeros(rows, TOP_K, dtype=torch.int32)
    x = torch.ones(rows, HIDDEN)
    return collective.finalize(x, torch.ones(rows, TOP_K), index, x, *given(rows, torch.float32))[0]


def call(world: World) -> list[str]:
    """What a rank is told about calls that the last rank makes otherwise; ranks go on together after each."""
    odd, reduce, gather = world.rank == world.size - 1, reduce_on(world), gather_on(world)
    half, full = torch.bfloat16, torch.float32
    told = [
        told_by(lambda: reduced(reduce, 3 if odd else 2, full)),
        # The same bytes of other numbers.
        told_by(lambda: gather(torch.ones(8, dtype=full if odd else torch.int32))),
        told_by(lambda: gather(torch.ones(4, 2) if odd else torch.ones(2, 4))),
        told_by(lambda: reduced(reduce, 2, half if odd else full)),
        told_by(lambda: finalized(reduce, 2) if odd else reduced(reduce, 2, full)),
        told_by(lambda: gather(torch.ones(2, HIDDEN // 2)) if odd else reduced(reduce, 2, full)),
    ]
    assert reduced(reduce, 2, full).shape == (2, STREAMS, HIDDEN) and finalized(reduce, 3).shape[0] == 3
    assert gather(torch.full((4,), float(world.rank))).tolist() == [float(rank) for rank in range(2) for _ in range(4)]
    return told


def check_called(found: list[list[str]]) -> None:
    assert found[0] == found[1]
    assert all(text.startswith("RankDisagreement: ranks make different calls: rank 0: ") for text in found[0]), found[0]
    assert "all-reduce torch.float32 [2, 64]; rank 1: all-reduce torch.float32 [3, 64]" in found[0][0]
    assert "torch.int32 [8]; rank 1: all-gather torch.float32 [8]" in found[0][1]
    assert "finalize" in found[0][4] and "all-gather" in found[0][5]


@pytest.mark.parametrize("run", [spawn, run_virtual])
def test_ranks_that_build_different_collectives_raise_the_same_error(run: Callable[..., Any]) -> None:
    check_built(run(build, 2, timeout_s=60.0))


@pytest.mark.parametrize("run", [spawn, run_virtual])
def test_ranks_that_make_different_calls_raise_the_same_error_and_can_go_on(run: Callable[..., Any]) -> None:
    check_called(run(call, 2, timeout_s=60.0))


def unchecked(world: World) -> None:
    world.all_gather(torch.ones(3 if world.rank else 2, HIDDEN))


def test_without_the_comparison_the_world_itself_would_end_the_run() -> None:
    with pytest.raises(RankFailure):
        run_virtual(unchecked, 2)


def build_for_too_many(world: World) -> list[str]:
    return [told_by(lambda: reduce_on(world)), told_by(lambda: gather_on(world))]


def test_more_than_eight_ranks_are_refused_on_every_rank() -> None:
    for told in run_virtual(build_for_too_many, 9):
        assert told[0].startswith("ValueError: 9 ranks") and told[1] == "ValueError: 9 ranks: at most 8"
    assert run_virtual(build_for_too_many, 8)[7] == ["not noticed"] * 2

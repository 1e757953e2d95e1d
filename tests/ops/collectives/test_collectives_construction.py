"""Construction on a GPU where one rank fails, and how many blocks may wait; nothing is compiled or launched here."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from quickseek.errors import RankDisagreement
from quickseek.ops.collectives import all_reduce, gather
from quickseek.ops.collectives.all_reduce import FusedAllReduceMHC
from quickseek.ops.collectives.gather import FusedAllGather
from quickseek.ops.collectives.spec import AllReduceShape
from quickseek.parallel.fabric import Fabric, Mailbox, VirtualFabric
from quickseek.parallel.virtual import TurnsFabric, VirtualWorld, run_virtual

SHAPE = AllReduceShape(5120, 4, 8, 2, torch.device("cpu"), False, False, 1.0)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is asked for its size only, and kernels that are only named."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    for module in (all_reduce, gather):
        monkeypatch.setattr(module, "compiled", lambda kernel, *_, **__: kernel.__name__)


class Misaligned(TurnsFabric):
    """A mailbox of rank 1 starts between two packs of 16 bytes."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Mailbox:
        box = super().allocate(shape, dtype)
        if self.rank == 0 or dtype != torch.bfloat16:
            return box
        moved = torch.zeros(box.local.numel() + 8, dtype=dtype)
        start = (16 - moved.data_ptr() % 16) % 16 // 2 + 1
        return replace(box, local=moved[start : start + box.local.numel()].view(box.local.shape))


class NoCompiler(FusedAllReduceMHC):
    """Kernels of rank 1 cannot be built."""

    def compile(self) -> None:
        if self.fabric.rank == 1:
            raise OSError("no compiler")
        super().compile()


def told_by(attempt: Any) -> str:
    try:
        attempt()
    except RankDisagreement as error:
        return str(error)
    return "not noticed"


def build(world: VirtualWorld) -> list[str]:
    def misaligned() -> Fabric:
        fabric = world.fabric()
        fabric.__class__ = Misaligned
        return fabric

    told = [
        told_by(lambda: FusedAllReduceMHC(SHAPE, misaligned())),
        told_by(lambda: NoCompiler(SHAPE, world.fabric())),
    ]
    FusedAllReduceMHC(SHAPE, world.fabric())
    return told


def test_a_rank_that_cannot_build_its_collective_is_the_same_error_on_every_rank() -> None:
    first, second = run_virtual(build, 2)
    assert first == second
    assert "placing a mailbox failed: rank 1" in first[0] and "alignment" in first[0] and "rank 0" not in first[0]
    assert first[1] == "compiling AllReduceMHC failed: rank 1: OSError: no compiler"


def test_a_gather_of_more_ranks_than_a_watchdog_has_addresses_for_is_refused() -> None:
    FusedAllGather(64, torch.device("cpu"), VirtualFabric.ranks(8, "cpu")[0], 1.0)
    with pytest.raises(ValueError, match="9 ranks: at most 8"):
        FusedAllGather(64, torch.device("cpu"), VirtualFabric.ranks(9, "cpu")[0], 1.0)


def test_ranks_that_wait_on_one_gpu_leave_room_for_the_next_call_of_each() -> None:
    def rows(ranks: int, share: int, turns: Any = None) -> int:
        one = FusedAllReduceMHC.__new__(FusedAllReduceMHC)
        one.ranks, one.shape, one.device = ranks, SHAPE, torch.device("cpu")
        one.threads, one.cluster = 128, 5
        one.fabric = SimpleNamespace(ranks_on_device=share, turns=turns)  # type: ignore[assignment]
        return one._resident_clusters()

    for ranks in (2, 4, 8):
        alone = rows(ranks, 1)
        assert rows(ranks, ranks) == alone // (2 * ranks), "a call of every rank and the next one of each wait at once"
        assert rows(ranks, ranks, turns=object()) == alone // ranks, "ranks in turns launch what waits last"

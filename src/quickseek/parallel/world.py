"""``World``: the tensor parallel ranks of one model replica.

Passed explicitly to everything that talks to peers; ``None`` anywhere means ``default_world()``. The host side of
every decision that ranks share goes through ``all_reduce_min`` and ``gather_object``.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_default: "World | None" = None


class World(ABC):
    """Rank, size and device of this participant, and the collectives that the stock model uses.

    Tensors are on ``device``. Every rank calls every collective, in the same order.
    """

    rank: int
    size: int
    device: torch.device

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Every rank's x (equal shapes) concatenated along ``dim``, ranks ascending."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """x of rank ``source``, on every rank; written into x, which is returned."""

    @abstractmethod
    def all_reduce_min(self, value: int) -> int:
        """The least of all ranks' host integers: how rank-local facts become common decisions."""

    @abstractmethod
    def gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable host value, ranks ascending."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x: FP32 (float64 if x is), ranks ascending from 0, one rounding (equality.md 1.5)."""
        if self.size == 1:
            return x
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        parts = self.all_gather(x.unsqueeze(0)).to(wide)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)


class SoloWorld(World):
    """One rank: every collective is the identity."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = 0, 1, torch.device(device)

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def all_reduce_min(self, value: int) -> int:
        return value

    def gather_object(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return


class DistributedWorld(World):
    """A torch.distributed group: gloo for CPU tensors and host values, NCCL for CUDA tensors.

    ``group`` carries tensors, ``host_group`` (gloo) host values; both hold the same ranks, and None means the
    whole process group. Several worlds can live in one process group.
    """

    def __init__(
        self,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("DistributedWorld needs torch.distributed.init_process_group first")
        self.group = group
        self.host_group = host_group if host_group is not None else group
        self.device = torch.device(device)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        dist.broadcast(x, group=self.group, group_src=source)
        return x

    def all_reduce_min(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.host_group)
        return int(tensor.item())

    def gather_object(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.host_group)
        return gathered

    def barrier(self) -> None:
        self.all_reduce_min(0)


def default_world() -> World:
    """The world of the process: what ``set_default_world`` was given, else one CPU rank."""
    global _default
    if _default is None:
        _default = SoloWorld()
    return _default


def set_default_world(world: World | None) -> None:
    """Choose what ``world=None`` means from now on in this process."""
    global _default
    _default = world

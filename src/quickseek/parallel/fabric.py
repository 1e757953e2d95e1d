"""``Fabric``: memory that peers can store into (spec/decode.md L.1.1 and L.2)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quickseek.parallel.world import World


@dataclass(frozen=True)
class Mailbox:
    """One allocation that every rank of a fabric made with the same shape.

    ``local``: this rank's copy. ``peer_pointers``: int64 [ranks] on the device, where each rank's copy is mapped
    here (the own entry is ``local``). ``multicast_pointer``: an address that stores into every copy, or 0.
    """

    local: Tensor
    peer_pointers: Tensor
    multicast_pointer: int = 0


class Fabric(ABC):
    """The peers of one tensor parallel group as seen from ``rank``, and how to allocate what they share.

    Construction is collective and ends with a functional self-test: each rank writes a word into each peer's
    memory and checks what arrived, with a time limit.
    """

    rank: int
    size: int
    device: torch.device

    @abstractmethod
    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Mailbox:
        """Memory of ``shape`` on every rank, mapped everywhere. Collective; the content is undefined."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it and the device work enqueued before it is done."""

    @abstractmethod
    def gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable host value, ranks ascending."""

    @abstractmethod
    def all_reduce_min(self, value: int) -> int:
        """The least of all ranks' host integers."""


class SymmetricFabric(Fabric):
    """torch symmetric memory over NVLink or PCIe peers; multicast only where every rank has it and it is allowed."""

    def __init__(self, world: World, *, timeout_s: float = 10.0) -> None:
        raise NotImplementedError("parallel.fabric.SymmetricFabric")


class VirtualFabric(Fabric):
    """All ranks on one GPU: one allocation, a slice a rank."""

    def __init__(self, size: int, device: torch.device) -> None:
        raise NotImplementedError("parallel.fabric.VirtualFabric")


class LoopbackFabric(Fabric):
    """One rank's share of the work without peers: peer q's entry points at source slot q of the own mailbox."""

    def __init__(self, size: int, device: torch.device) -> None:
        raise NotImplementedError("parallel.fabric.LoopbackFabric")

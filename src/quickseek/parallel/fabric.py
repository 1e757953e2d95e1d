"""``Fabric``: memory that peers can store into (spec/decode.md L.1.1 and L.2)."""

import time
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
    ``replay_stride`` not 0: that address stands for copies so many bytes apart, to be reached by plain stores (tests).
    """

    local: Tensor
    peer_pointers: Tensor
    multicast_pointer: int = 0
    replay_stride: int = 0


class Fabric(ABC):
    """The peers of one tensor parallel group as seen from ``rank``, and how to allocate what they share.

    Construction is collective and ends with a functional self-test: each rank writes a word into each peer's
    memory and checks what arrived, with a time limit.
    """

    rank: int
    size: int
    device: torch.device
    world: World | None = None
    """The ranks that fail as one with those of the fabric (``World.as_one``); None: ranks of one process."""
    ranks_on_device: int = 1
    """Ranks whose kernels share this device's multiprocessors."""
    one_shot_only: bool = False
    """No rank sums on behalf of the others: two-shot protocols would wait for sums that nobody sends."""
    turns: World | None = None
    """Ranks that launch in turns on one CUDA stream, which change at every collective of this world: a kernel must not
    wait for what a peer launches after it. None: ranks run by themselves."""

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
    """torch symmetric memory over NVLink or PCIe peers; multicast only where every rank has it and it is allowed.

    ``world``: one rank a GPU, with an NCCL ``group`` for the rendezvous. ``multicast`` False never asks for it; True
    uses it where every rank has an address (torch's own switch TORCH_SYMM_MEM_DISABLE_MULTICAST still applies).
    Raises RuntimeError, on every rank alike, when a peer's memory cannot be mapped or does not hold what was written.
    """

    def __init__(self, world: World, *, timeout_s: float = 10.0, multicast: bool = False) -> None:
        if world.device.type != "cuda":
            raise RuntimeError(f"symmetric memory needs ranks on CUDA devices: rank {world.rank} is on {world.device}")
        self.world: World = world
        self.rank, self.size = world.rank, world.size
        self.device = torch.device("cuda", torch.cuda.current_device()) if world.device.index is None else world.device
        self.multicast = multicast
        self._handles: list[Any] = []
        self._self_test(timeout_s)

    @classmethod
    def of(cls, world: World) -> "SymmetricFabric":
        """The world's fabric, without multicast; the first call is collective.

        It stays for the life of the process: a peer may store into its memory as long as that peer lives.
        """
        if world not in _fabrics:
            _fabrics[world] = cls(world)
        return _fabrics[world]

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Mailbox:
        import torch.distributed._symmetric_memory as symmetric

        failure, mailbox = "", None
        try:
            local = symmetric.empty(*shape, dtype=dtype, device=self.device)
            handle = symmetric.rendezvous(local, self._group())
            # The tensor may lie inside a pooled allocation, at the same offset on every rank.
            offset = local.data_ptr() - handle.buffer_ptrs[self.rank]
            pointers = [pointer + offset for pointer in handle.buffer_ptrs]
            address = handle.multicast_ptr + offset if self.multicast and handle.multicast_ptr else 0
            self._handles.append((local, handle))
            mailbox = Mailbox(local, torch.tensor(pointers, dtype=torch.int64, device=self.device), address)
        except RuntimeError as error:
            failure = str(error)
        failures = {rank: text for rank, text in enumerate(self.gather_object(failure)) if text}
        if failures or mailbox is None:
            raise RuntimeError(f"peer memory of {list(shape)} {dtype} cannot be mapped: {failures}")
        if not self.all_reduce_min(int(mailbox.multicast_pointer != 0)):
            mailbox = Mailbox(mailbox.local, mailbox.peer_pointers, 0)
        return mailbox

    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        self.world.barrier()

    def gather_object(self, value: Any) -> list[Any]:
        return self.world.gather_object(value)

    def all_reduce_min(self, value: int) -> int:
        return self.world.all_reduce_min(value)

    def _group(self) -> Any:
        group = getattr(self.world, "group", None)
        return torch.distributed.group.WORLD if group is None else group

    def _self_test(self, timeout_s: float) -> None:
        """Write a word into every peer's memory and wait, for a limited time, for what the peers wrote here."""
        mailbox = self.allocate([self.size], torch.int64)
        local, handle = self._handles[-1]
        mailbox.local.fill_(-1)
        self.barrier()
        for peer in range(self.size):
            copy = local if peer == self.rank else handle.get_buffer(peer, [self.size], torch.int64)
            agreed = copy.data_ptr() == int(mailbox.peer_pointers[peer])
            copy[self.rank : self.rank + 1].fill_(_word(self.rank, peer) if agreed else -2)
        expected = torch.tensor([_word(source, self.rank) for source in range(self.size)])
        deadline = time.monotonic() + timeout_s
        while not torch.equal(mailbox.local.cpu(), expected) and time.monotonic() < deadline:
            time.sleep(0.001)
        found = mailbox.local.tolist()
        silent = [source for source in range(self.size) if found[source] != _word(source, self.rank)]
        reports = {rank: missing for rank, missing in enumerate(self.gather_object(silent)) if missing}
        if reports:
            raise RuntimeError(f"peer memory does not work: rank {{reader: writers not seen}} {reports}")


_fabrics: dict[World, SymmetricFabric] = {}


def _word(writer: int, reader: int) -> int:
    return 0x51AB_0000_0000 + writer * 1024 + reader


class _Pool:
    """What the virtual ranks of one fabric share: their allocations, in the order of the calls."""

    def __init__(self) -> None:
        self.allocations: list[tuple[tuple[int, ...], torch.dtype, Tensor]] = []


class VirtualFabric(Fabric):
    """All ranks on one GPU (spec/decode.md L.2): one allocation, a slice a rank.

    One process holds all ranks, so host values are equal by construction: ``gather_object`` repeats the own value.
    ``replay_multicast``: mailboxes carry the multicast addressing, which kernels then perform with plain stores.
    """

    def __init__(self, rank: int, size: int, device: torch.device, pool: _Pool, replay_multicast: bool) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.ranks_on_device = size
        self._pool, self._replay, self._next = pool, replay_multicast, 0

    @classmethod
    def ranks(cls, size: int, device: torch.device | str, *, replay_multicast: bool = False) -> list["VirtualFabric"]:
        """One fabric a rank; each rank must allocate the same shapes in the same order."""
        pool = _Pool()
        return [cls(rank, size, torch.device(device), pool, replay_multicast) for rank in range(size)]

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Mailbox:
        allocations = self._pool.allocations
        if self._next == len(allocations):
            memory = torch.zeros(self.size, *shape, dtype=dtype, device=self.device)
            allocations.append((tuple(shape), dtype, memory))
        known_shape, known_dtype, memory = allocations[self._next]
        if (known_shape, known_dtype) != (tuple(shape), dtype):
            raise RuntimeError(f"rank {self.rank} allocates {list(shape)} {dtype}: {list(known_shape)} {known_dtype}")
        self._next += 1
        pointers = torch.tensor([copy.data_ptr() for copy in memory], dtype=torch.int64, device=self.device)
        if not self._replay:
            return Mailbox(memory[self.rank], pointers)
        return Mailbox(memory[self.rank], pointers, memory.data_ptr(), memory[0].nbytes)

    def barrier(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def all_reduce_min(self, value: int) -> int:
        return value


class LoopbackFabric(Fabric):
    """One rank's share of the work without peers: peer q's entry points at source slot q of the own mailbox.

    For mailboxes [generations, sources, ...] (one-shot); every source then holds the own contribution. Other
    allocations map every peer to the own copy.
    """

    def __init__(self, size: int, device: torch.device | str) -> None:
        self.rank, self.size, self.device = 0, size, torch.device(device)
        self.one_shot_only = True

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Mailbox:
        local = torch.zeros(*shape, dtype=dtype, device=self.device)
        by_source = len(shape) > 2 and shape[1] == self.size
        step = local[0, 0].nbytes if by_source else 0
        pointers = [local.data_ptr() + peer * step for peer in range(self.size)]
        return Mailbox(local, torch.tensor(pointers, dtype=torch.int64, device=self.device))

    def barrier(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def all_reduce_min(self, value: int) -> int:
        return value

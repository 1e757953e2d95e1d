"""``HostFabric``: mailboxes in shared host memory, for the protocol tests (spec/decode.md L.3 a)."""

import contextlib
import ctypes
import os
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quickseek.errors import WorldError
from quickseek.parallel.fabric import Fabric, Mailbox
from quickseek.parallel.world import World

SHARED_MEMORY = Path("/dev/shm")
PROBE = 0x5EED0000


class HostFabric(Fabric):
    """Processes of one host that map each other's memory; world ranks are fabric ranks.

    Each allocation is one file a rank, mapped by every rank and unlinked once all have it, so that nothing stays
    behind however a rank ends. Mappings live as long as the fabric. Raises WorldError, on every rank alike, when a
    rank cannot make its file, asks for another shape or dtype than the rest, or cannot map or reach a peer.
    """

    def __init__(self, world: World, *, timeout_s: float = 10.0) -> None:
        self.world: World = world
        self.rank, self.size, self.device = world.rank, world.size, torch.device("cpu")
        self._mapped: list[Tensor] = []
        self._self_test(timeout_s)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Mailbox:
        """Memory of ``shape`` on every rank, mapped everywhere, page-aligned. Collective; the content is zeros."""
        size = prod(shape) * torch.empty((), dtype=dtype).element_size()
        path, failure = "", ""
        try:
            try:
                path = _new_file(max(size, 1))
            except OSError as error:
                failure = str(error)
            self._check_all(failure, f"{list(shape)} {dtype}")
            copies = self._map_all(path, max(size, 1))
        finally:
            if path:
                os.unlink(path)
        self._mapped.extend(copies)
        pointers = torch.tensor([copy.data_ptr() for copy in copies], dtype=torch.int64)
        return Mailbox(copies[self.rank][:size].view(dtype).view(*shape), pointers)

    def barrier(self) -> None:
        self.world.barrier()

    def gather_object(self, value: Any) -> list[Any]:
        return self.world.gather_object(value)

    def all_reduce_min(self, value: int) -> int:
        return self.world.all_reduce_min(value)

    def _check_all(self, failure: str, form: str) -> None:
        """WorldError, on every rank alike, if some rank has no file or ranks want different memory."""
        reports = self.gather_object((failure, form))
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text]
        if failed:
            raise WorldError(f"HostFabric: no file for a mailbox: {'; '.join(failed)}")
        if len({wanted for _, wanted in reports}) > 1:
            wants = "; ".join(f"rank {rank}: {wanted}" for rank, (_, wanted) in enumerate(reports))
            raise WorldError(f"HostFabric: ranks allocate different memory: {wants}")

    def _map_all(self, path: str, size: int) -> list[Tensor]:
        """Every rank's file, mapped; returns once all ranks have mapped all."""
        copies = []
        for peer in self.gather_object(path):
            with contextlib.suppress(OSError, RuntimeError):
                copies.append(torch.from_file(peer, shared=True, size=size, dtype=torch.uint8))
        if not self.all_reduce_min(len(copies) == self.size):
            raise WorldError("HostFabric: a rank cannot map a peer's memory: all ranks must run on one host")
        return copies

    def _self_test(self, timeout_s: float) -> None:
        """Each rank writes a word of its own through each peer's address and checks what arrived in its memory."""
        box = self.allocate([self.size], torch.int32)
        for address in box.peer_pointers.tolist():
            ctypes.c_int32.from_address(address + 4 * self.rank).value = PROBE + self.rank
        expected = torch.arange(PROBE, PROBE + self.size, dtype=torch.int32)
        deadline = time.monotonic() + timeout_s
        while not torch.equal(box.local, expected) and time.monotonic() < deadline:
            time.sleep(0.001)
        missing = (box.local != expected).nonzero().flatten().tolist()
        faults = [f"rank {rank} misses {words}" for rank, words in enumerate(self.gather_object(missing)) if words]
        if faults:
            raise WorldError(f"HostFabric: words did not arrive in {timeout_s} s: {'; '.join(faults)}")


def _new_file(size: int) -> str:
    """Path of a new file of ``size`` zero bytes; OSError leaves none behind."""
    descriptor, path = tempfile.mkstemp(prefix="quickseek-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    try:
        os.truncate(descriptor, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return path

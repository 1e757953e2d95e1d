"""Shared host memory: what one rank stores through the pointer table, its peers find."""

import ctypes
import os
import tempfile
from pathlib import Path
from unittest import mock

import torch

from quickseek.errors import WorldError
from quickseek.parallel import host_fabric
from quickseek.parallel.host_fabric import HostFabric
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import World


def store_everywhere(world: World, folder: str) -> tuple[list[int], list[int], bool]:
    host_fabric.SHARED_MEMORY = Path(folder)
    fabric = HostFabric(world)
    box, other = fabric.allocate([world.size, 4], torch.int16), fabric.allocate([5], torch.int32)
    for peer, address in enumerate(box.peer_pointers.tolist()):
        ctypes.c_int16.from_address(address + 2 * (4 * world.rank)).value = 100 * world.rank + peer
    fabric.barrier()
    return box.local[:, 0].tolist(), other.local.tolist(), box.local.data_ptr() == box.peer_pointers[world.rank].item()


class ForgetfulFabric(HostFabric):
    """Rank 1 hands out the address of its own copy as if it were rank 0's."""

    def allocate(self, shape, dtype):
        box = super().allocate(shape, dtype)
        if self.rank == 1:
            box.peer_pointers[0] = box.peer_pointers[1].item()
        return box


def wrong_addresses(world: World) -> str:
    try:
        ForgetfulFabric(world, timeout_s=0.2)
    except WorldError as error:
        return str(error)
    return "not noticed"


def unmappable(world: World) -> str:
    class Elsewhere(HostFabric):
        def gather_object(self, value):
            found = super().gather_object(value)
            return ["/nowhere/memory" if world.rank and isinstance(path, str) else path for path in found]

    try:
        Elsewhere(world)
    except WorldError as error:
        return str(error)
    return "not noticed"


def test_a_store_through_the_pointer_table_reaches_each_peer():
    memory = host_fabric.SHARED_MEMORY
    # A folder of its own: other tests, at the same time, make files beside it.
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for rank, (column, untouched, own) in enumerate(spawn(store_everywhere, 3, folder)):
            assert column == [rank, 100 + rank, 200 + rank]
            assert untouched == [0] * 5 and own
        assert not list(Path(folder).iterdir())
    assert not Path("/nowhere").exists()


def test_a_wrong_address_fails_the_self_test_on_every_rank_alike():
    told = spawn(wrong_addresses, 2)
    assert told[0] == told[1] and "rank 0 misses [1]" in told[0]


def test_memory_that_cannot_be_mapped_is_the_same_error_on_every_rank():
    told = spawn(unmappable, 2)
    assert told[0] == told[1] and "one host" in told[0]


def troubled(world: World, folder: str) -> list[str]:
    """What a rank is told when rank 1 cannot make its file, or wants other memory; then all go on."""
    host_fabric.SHARED_MEMORY = Path(folder)
    fabric = HostFabric(world)

    def told_by(size: int = 4, dtype: torch.dtype = torch.int32) -> str:
        try:
            fabric.allocate([size], dtype)
        except WorldError as error:
            return str(error)
        return "not noticed"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    told = []
    for module, name in ((tempfile, "mkstemp"), (os, "truncate")):
        if world.rank == 1:
            with mock.patch.object(module, name, refuse):
                told.append(told_by())
        else:
            told.append(told_by())
    told += [told_by(size=4 + world.rank), told_by(dtype=(torch.int32, torch.float32)[world.rank]), told_by()]
    return told


def test_a_rank_that_cannot_make_its_memory_or_wants_another_is_the_same_error_on_every_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = spawn(troubled, 2, folder)
        assert not list(Path(folder).iterdir()), "files stay behind"
    assert first == second
    assert all("no file" in text and "rank 1" in text and "No space left" in text for text in first[:2])
    assert "rank 0: [4] torch.int32; rank 1: [5] torch.int32" in first[2] and "rank 1: [4] torch.float32" in first[3]
    assert first[4] == "not noticed"

"""Where virtual and loopback fabrics let a rank's stores arrive."""

import pytest
import torch

from quickseek.parallel.fabric import LoopbackFabric, SymmetricFabric, VirtualFabric
from quickseek.parallel.world import SoloWorld


def test_virtual_ranks_see_one_anothers_slices() -> None:
    fabrics = VirtualFabric.ranks(3, "cpu")
    boxes = [fabric.allocate([2, 3, 4], torch.int32) for fabric in fabrics]
    for rank, box in enumerate(boxes):
        assert box.peer_pointers.tolist() == [other.local.data_ptr() for other in boxes]
        assert box.local.data_ptr() == int(box.peer_pointers[rank]) and box.multicast_pointer == 0
    boxes[1].local.fill_(7)
    assert int(boxes[0].local.sum()) == 0


def test_replayed_multicast_steps_from_copy_to_copy() -> None:
    fabrics = VirtualFabric.ranks(4, "cpu", replay_multicast=True)
    box = [fabric.allocate([5], torch.int64) for fabric in fabrics][2]
    steps = [box.multicast_pointer + rank * box.replay_stride for rank in range(4)]
    assert steps == box.peer_pointers.tolist()


def test_virtual_ranks_that_allocate_differently_are_told() -> None:
    first, second = VirtualFabric.ranks(2, "cpu")
    first.allocate([4], torch.int32)
    with pytest.raises(RuntimeError, match="rank 1 allocates"):
        second.allocate([5], torch.int32)


def test_loopback_peers_enter_at_their_source_slot() -> None:
    fabric = LoopbackFabric(4, "cpu")
    box = fabric.allocate([3, 4, 10, 8], torch.bfloat16)
    slots = [box.local[0, source].data_ptr() for source in range(4)]
    assert box.peer_pointers.tolist() == slots, "a store to slot 0 of peer q must land in slot q here"
    block = fabric.allocate([12], torch.int64)
    assert block.peer_pointers.tolist() == [block.local.data_ptr()] * 4


def test_symmetric_memory_needs_ranks_on_gpus() -> None:
    with pytest.raises(RuntimeError, match="rank 0 is on cpu"):
        SymmetricFabric.of(SoloWorld())

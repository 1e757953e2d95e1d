"""Blocks and slots: each has the owners that are counted, and none is given out while a cycle may use it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickseek.engine.blocks import SCRATCH, BlockPool, Holding, LiveBlocks, Retired, SlotPool, rows_ahead
from quickseek.ops import cache


def test_scratch_is_the_block_that_operations_write_to_and_is_never_given_out() -> None:
    assert SCRATCH == cache.SCRATCH
    assert sorted(BlockPool(6, 8).allocate(5)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [0, 4, 12, -8])
def test_a_block_is_a_multiple_of_eight_tokens(size: int) -> None:
    with pytest.raises(ValueError, match=f"block_tokens = {size}"):
        BlockPool(4, size)
    with pytest.raises(ValueError, match="num_blocks = 1"):
        BlockPool(1, 8)


def test_asking_for_too_much_takes_nothing() -> None:
    pool = BlockPool(4, 8)
    with pytest.raises(RuntimeError, match="4 blocks are wanted and 3 of 3 are available"):
        pool.allocate(4)
    assert pool.available == 3


def test_a_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(4, 8)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.available == 1 and [pool.references(block) for block in blocks] == [1, 1]
    pool.release(blocks)
    assert pool.available == 3
    with pytest.raises(AssertionError, match="has no owner"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(blocks)


def test_a_named_block_is_found_until_it_is_wanted_and_the_end_of_a_prefix_goes_first() -> None:
    pool = BlockPool(4, 8)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, (b"one", b"two", b"three"), strict=True):
        pool.name(block, name)
    pool.release(blocks)
    assert pool.available == 3 and pool.find(b"three") == blocks[2]
    assert pool.allocate(1) == [blocks[2]]
    assert pool.find(b"three") is None and pool.find(b"two") == blocks[1]
    pool.share([blocks[0]])
    assert pool.allocate(1) == [blocks[1]]
    assert pool.available == 0 and pool.find(b"one") == blocks[0]


def test_the_first_block_of_a_name_stays_the_one_that_is_found() -> None:
    pool = BlockPool(4, 8)
    first, second = pool.allocate(2)
    pool.name(first, b"same")
    pool.name(second, b"same")
    pool.release([second])
    assert pool.find(b"same") == first and pool.unowned() == ([3, second], [])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=60))
def test_references_follow_any_history(history: list[tuple[int, int]]) -> None:
    pool, owners = BlockPool(9, 8), list[list[int]]()
    for action, count in history:
        if action < 2 and count <= pool.available:
            owners.append(pool.allocate(count))
            if action:
                pool.name(owners[-1][0], f"{len(owners)} {owners[-1]}".encode())
        elif action == 2 and owners:
            pool.share(owners[count % len(owners)])
            owners.append(owners[count % len(owners)])
        elif owners:
            pool.release(owners.pop(count % len(owners)))
        free, kept = pool.unowned()
        owned = {block for blocks in owners for block in blocks}
        assert sorted([*free, *kept, *owned]) == list(range(1, 9))
        assert all(pool.references(b) == sum(b in blocks for blocks in owners) for b in range(9))


def test_a_holding_is_released_when_its_last_cycle_has_completed_and_not_before() -> None:
    pool, slots = BlockPool(5, 8), SlotPool(range(1, 3))
    retired = Retired(pool, slots)
    retired.retire(Holding(3, slots.take(), pool.allocate(2)))
    retired.retire(Holding(2, slots.take(), pool.allocate(1)))
    assert (pool.available, slots.available) == (1, 0)
    retired.complete(2)
    assert (pool.available, slots.available) == (2, 1)
    retired.complete(3)
    assert (pool.available, slots.available) == (4, 2)
    retired.retire(Holding(3, slots.take(), pool.allocate(4)))
    assert (pool.available, slots.available) == (4, 2)


def test_a_slot_cannot_be_given_twice() -> None:
    slots = SlotPool(range(1, 3))
    slot = slots.take()
    slots.give(slot)
    for wrong in (slot, 0, 3):
        with pytest.raises(AssertionError, match=f"slot {wrong}"):
            slots.give(wrong)


def test_shared_blocks_are_live_until_the_last_table_drops_them() -> None:
    live = LiveBlocks()
    live.add([1, 2])
    live.add([1, 3])
    live.remove([1, 2])
    assert len(live) == 2
    live.remove([1, 3])
    assert len(live) == 0
    with pytest.raises(KeyError):
        live.remove([1])


def test_two_cycles_of_rows_are_owned_ahead() -> None:
    assert [rows_ahead(drafts) for drafts in (0, 1, 5)] == [2, 4, 12]

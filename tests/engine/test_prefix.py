"""Prefix reuse: only the same tokens under the same identity hit, at any length; what is in use stays."""

from hypothesis import given
from hypothesis import strategies as st
from simulated_runner import SimulatedRunner, make_request

from quickseek.engine.blocks import BlockPool
from quickseek.engine.prefix import PrefixCache
from quickseek.engine.request import Request
from quickseek.engine.scheduler import Scheduler, SchedulerLimits

TOKENS = [(i * 11) % 97 + 2 for i in range(64)]


def holder(pool: BlockPool, tokens: list[int], salt: str = "") -> Request:
    """A request that owns the blocks of its tokens."""
    request = make_request(tokens, salt=salt)
    request.block_table = pool.allocate(pool.blocks_for(len(tokens)))
    request.num_computed = len(tokens)
    return request


def cache(blocks: int = 64, snapshots: int = 4, **options: int) -> PrefixCache:
    return PrefixCache(BlockPool(blocks, 8), range(3, 3 + snapshots), "model", **options)


def lookup(prefix: PrefixCache, tokens: list[int], salt: str = "") -> tuple[int, int | None, bool]:
    """(first row to run, slot of the snapshot, whether a block is copied)."""
    hit = prefix.lookup(make_request(tokens, salt=salt))
    if hit is None:
        return 0, None, False
    return hit.start, hit.snapshot and hit.snapshot.slot, hit.partial is not None


@given(length=st.integers(1, 40), shared=st.integers(0, 40), rest=st.integers(0, 24))
def test_a_hit_is_the_whole_snapshot_or_all_but_its_last_row(length: int, shared: int, rest: int) -> None:
    prefix = cache()
    slot = prefix.save(holder(prefix.pool, TOKENS[:length]), length, cycle=0)
    prompt = TOKENS[:shared] + [1] * rest
    if not prompt:
        return
    expected = 0
    if shared >= length and len(prompt) > length:
        expected = length
    elif shared >= length - 1 and len(prompt) >= length:
        expected = length - 1
    assert lookup(prefix, prompt) == ((expected, slot, expected % 8 > 0) if expected else (0, None, False))


def test_the_longest_snapshot_is_used() -> None:
    prefix = cache()
    request = holder(prefix.pool, TOKENS[:40])
    slots = {length: prefix.save(request, length, cycle=0) for length in (8, 21, 23, 40)}
    for tokens, start in ((TOKENS[:41], 40), (TOKENS[:40], 39), (TOKENS[:30], 23), (TOKENS[:22], 21), (TOKENS[:9], 8)):
        used = next(length for length in (40, 23, 21, 8) if length - 1 <= start)
        assert lookup(prefix, tokens) == (start, slots[used], start % 8 > 0)
    assert lookup(prefix, TOKENS[:5]) == (0, None, False)


def test_another_token_salt_or_identity_does_not_hit() -> None:
    prefix = cache()
    prefix.save(holder(prefix.pool, TOKENS[:20], salt="a"), 20, cycle=0)
    assert lookup(prefix, TOKENS[:30], salt="a")[0] == 20
    assert lookup(prefix, TOKENS[:30])[0] == 0
    assert lookup(prefix, TOKENS[:30], salt="b")[0] == 0
    assert lookup(prefix, [TOKENS[0] + 1, *TOKENS[1:30]], salt="a")[0] == 0
    other = PrefixCache(prefix.pool, range(20, 22), "another")
    request = make_request(TOKENS[:20], salt="a")
    assert prefix.names(make_request(TOKENS[:20], salt="a"), 2) != other.names(request, 2)


def test_a_name_depends_on_every_token_before_it() -> None:
    prefix = cache()
    names = prefix.names(make_request(TOKENS[:32]), 4)
    for place in range(32):
        changed = list(TOKENS[:32])
        changed[place] += 1
        others = prefix.names(make_request(changed), 4)
        same = [mine == other for mine, other in zip(names, others, strict=True)]
        assert same == [block <= place // 8 for block in range(5)]


def test_the_same_prefix_is_kept_once() -> None:
    prefix = cache()
    assert prefix.save(holder(prefix.pool, TOKENS[:20]), 20, cycle=0) is not None
    available = prefix.pool.available
    twin = holder(prefix.pool, TOKENS[:20])
    assert prefix.save(twin, 20, cycle=1) is None
    prefix.pool.release(twin.block_table)
    assert prefix.pool.available == available


def test_the_least_recently_used_snapshot_gives_its_slot_but_not_while_a_cycle_uses_it() -> None:
    prefix = cache(snapshots=2)
    first, second, third = (holder(prefix.pool, [start, *TOKENS[:10]]) for start in (1, 2, 3))
    slots = [prefix.save(first, 11, cycle=0), prefix.save(second, 11, cycle=0)]
    assert prefix.save(third, 11, cycle=0) is None
    prefix.completed = 0
    hit = prefix.lookup(make_request([1, *TOKENS[:20]]))
    assert hit is not None and hit.snapshot is not None
    prefix.use(hit.snapshot, cycle=1)
    assert prefix.save(third, 11, cycle=1) == slots[1]
    assert lookup(prefix, [2, *TOKENS[:20]])[0] == 0
    assert lookup(prefix, [1, *TOKENS[:20]])[0] == 11


def test_snapshots_make_room_for_blocks_only_where_that_helps() -> None:
    prefix = cache(blocks=9, snapshots=4)
    running, gone = holder(prefix.pool, TOKENS[:20]), holder(prefix.pool, TOKENS[20:40])
    prefix.save(running, 20, cycle=0)
    prefix.save(gone, 20, cycle=0)
    prefix.pool.release(gone.block_table)
    prefix.evict_for(5)
    assert prefix.pool.available == 2, "the cycle that copies has not completed"
    prefix.completed = 0
    prefix.evict_for(2)
    assert len(prefix.snapshots) == 2
    prefix.evict_for(8, needed=prefix.snapshots[1])
    assert len(prefix.snapshots) == 2
    prefix.evict_for(8)
    assert prefix.pool.available == 5
    assert lookup(prefix, TOKENS[:30])[0] == 20, "its blocks are a running request's: dropping it frees nothing"


def test_replay_is_off_unless_asked_for() -> None:
    for window, start in ((None, 0), (10, 22), (31, 1), (32, 0)):
        prefix = cache() if window is None else cache(replay_window=window)
        request = holder(prefix.pool, TOKENS[:39])
        prefix.publish(request)
        prefix.pool.release(request.block_table)
        assert lookup(prefix, TOKENS[:50]) == (start, None, False)


def test_a_replayed_start_suppresses_the_rows_it_has_and_hides_the_window_before_it() -> None:
    pool = BlockPool(32, 8)
    prefix = PrefixCache(pool, range(3, 3), "model", replay_window=10)
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=96)
    scheduler = Scheduler(limits, pool, prefix)

    def run(request: Request) -> list[tuple[int, int, int, int]]:
        scheduler.add(request)
        chunks = []
        while request.num_computed < len(request.prompt_ids):
            tick = scheduler.schedule()
            for chunk in tick.prefills:
                chunks.append((chunk.start, chunk.count, chunk.replayed, chunk.oldest))
                scheduler.prefilled(chunk)
            scheduler.completed(tick.cycle)
        scheduler.abort(request.request_id)
        return chunks

    assert run(make_request(TOKENS[:20])) == [(0, 8, 0, 0), (8, 8, 0, 0), (16, 4, 0, 0)]
    second = make_request(TOKENS[:40])
    assert run(second) == [(6, 8, 8, 6), (14, 8, 2, 6), (22, 8, 0, 6), (30, 8, 0, 6), (38, 2, 0, 6)]
    assert second.cached_tokens == 6
    assert run(make_request(TOKENS[:41]))[0] == (30, 8, 8, 30)
    assert pool.available == pool.usable


def test_a_request_that_comes_back_counts_its_first_start_only() -> None:
    runner = SimulatedRunner(max_num_seqs=1, snapshots=4)
    lesser = runner.add(make_request(TOKENS[1:21], 30, priority=1))
    for _ in range(4):
        runner.step()
    runner.add(make_request(TOKENS[30:40], 2))
    runner.drain()
    assert lesser.preemptions == 1 and lesser.cached_tokens == 0
    assert [r.length for tick in runner.ticks for r in tick.restores if r.request is lesser][-1] >= 19

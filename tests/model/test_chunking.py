"""However a prompt is cut and batched, the rows are the same (spec/model.md 6.12; "float64" of spec/equality.md)."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compare import assert_float64
from model_helpers import (
    FEW_ITERATIONS,
    Driver,
    Selections,
    alone,
    assert_state_equal,
    config_of,
    differs,
    exact_model,
    prompt,
    recorded_selections,
)
from quickseek.config import ModelConfig

LONGEST = 72
"""Past every border of the tiny model: window 8, 8 groups at ratio 1 and 2, 16 candidate positions, blocks of 4."""

CONFIGS = {
    "tiny": config_of(**FEW_ITERATIONS),
    # An odd window, lists longer than a window, and no candidates.
    "window 5": config_of(sliding_window=5, index_topk=11, candidate_source_layer_id=-1, **FEW_ITERATIONS),
    # Engram on the first layer and on a KV source; three sources; candidate blocks that are rarely full.
    "three sources": config_of(
        compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(2, 4, 5),
        index_source_layer_ids=(2, 3, 4, 5, 7),
        candidate_source_layer_id=5,
        candidate_topk_blocks=3,
        candidate_block_size=3,
        engram_layer_ids=(0, 4),
        **FEW_ITERATIONS,
    ),
    # Decoder only: every position has an entry of its own from layer 0 on.
    "ratio 1": config_of(
        compress_ratios=(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(0, 4),
        index_source_layer_ids=(0, 4, 6),
        engram_layer_ids=(),
        engram_num_embeddings=(),
        **FEW_ITERATIONS,
    ),
}
TINY = CONFIGS["tiny"]
EXAMPLES = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def run_chunks(driver: Driver, ids: Tensor, chunks: list[int]) -> tuple[Tensor, Selections, dict[str, Tensor]]:
    slot = driver.state.acquire()
    selections: Selections = {}
    with recorded_selections(driver.model, selections):
        parts = [driver.feed({slot: chunk})[slot] for chunk in ids.split(chunks)]
    state = driver.visible(slot)
    driver.release(slot)
    return torch.cat(parts), selections, state


def assert_chunks_equal_whole(config: ModelConfig, ids: Tensor, chunks: list[int]) -> None:
    whole = alone(ids, config)
    logits, selections, state = run_chunks(Driver(exact_model(config), max_length=LONGEST), ids, chunks)
    assert_float64(logits, whole.logits, f"logits in chunks {chunks}")
    assert selections == whole.selections
    assert_state_equal(state, whole.state, f"chunks {chunks}")


@st.composite
def compositions(draw: st.DrawFn) -> list[int]:
    """Chunk sizes that add up to at most ``LONGEST``; single rows and long chunks are both common."""
    sizes = draw(st.lists(st.one_of(st.just(1), st.integers(2, 9), st.integers(10, 40)), min_size=1, max_size=12))
    total, kept = 0, []
    for size in sizes:
        if total + size > LONGEST:
            break
        kept.append(size)
        total += size
    return kept


@EXAMPLES
@given(compositions(), st.integers(0, 3))
def test_a_prompt_in_any_chunks_equals_the_whole_prompt(chunks: list[int], seed: int) -> None:
    assert_chunks_equal_whole(TINY, prompt(sum(chunks), seed), chunks)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunks", [[7, 1, 13, 2, 5, 20, 12], [1] * 26, [33, 1, 1, 1], [2, 3] * 9])
def test_other_layouts_of_layers_can_be_cut_into_chunks_too(name: str, chunks: list[int]) -> None:
    assert_chunks_equal_whole(CONFIGS[name], prompt(sum(chunks), 5), chunks)


def test_every_cut_in_two_equals_the_whole_prompt() -> None:
    """Of one request each, 13 of which run together."""
    whole = alone(prompt(40), TINY)
    for first in (1, 14, 27):
        driver = Driver(exact_model(TINY), max_requests=13, max_length=LONGEST)
        cuts = {driver.state.acquire(): cut for cut in range(first, first + 13)}
        selections: Selections = {}
        with recorded_selections(driver.model, selections, list(cuts)):
            before = driver.feed({slot: prompt(40)[:cut] for slot, cut in cuts.items()})
            after = driver.feed({slot: prompt(40)[cut:] for slot, cut in cuts.items()})
        for slot, cut in cuts.items():
            assert_float64(torch.cat((before[slot], after[slot])), whole.logits, f"logits cut at {cut}")
            chosen = {(layer, 0, place): rows for (layer, of, place), rows in selections.items() if of == slot}
            assert chosen == whole.selections, f"cut at {cut}"
            assert_state_equal(driver.visible(slot), whole.state, f"cut at {cut}")


def test_token_by_token_equals_the_whole_prompt() -> None:
    assert_chunks_equal_whole(TINY, prompt(LONGEST), [1] * LONGEST)


@settings(EXAMPLES, max_examples=8)
@given(st.data())
def test_requests_that_join_leave_and_reuse_slots_equal_each_alone(data: st.DataObject) -> None:
    driver = Driver(exact_model(TINY), max_requests=3, max_length=LONGEST)
    waiting = [prompt(data.draw(st.integers(1, 44)), seed) for seed in range(1, data.draw(st.integers(2, 5)) + 1)]
    running: dict[int, tuple[Tensor, Tensor, Selections]] = {}
    while waiting or running:
        if waiting and len(running) < driver.max_requests and (not running or data.draw(st.booleans())):
            slot = driver.state.acquire()
            running[slot] = (waiting.pop(), torch.empty(0, driver.model.config.vocab_size, dtype=torch.float64), {})
        order = data.draw(st.permutations(sorted(running)))
        chosen = order[: data.draw(st.integers(1, len(order)))]
        step = {}
        for slot in chosen:
            ids, done, _ = running[slot]
            step[slot] = ids[len(done) : len(done) + data.draw(st.integers(1, 24))]
        selections: Selections = {}
        with recorded_selections(driver.model, selections, chosen):
            logits = driver.feed(step)
        for (layer, slot, position), chosen_rows in selections.items():
            running[slot][2][layer, 0, position] = chosen_rows
        for slot, found in logits.items():
            ids, done, seen = running[slot]
            running[slot] = (ids, torch.cat((done, found)), seen)
            if len(done) + len(found) == len(ids):
                expected = alone(ids, TINY)
                assert_float64(running[slot][1], expected.logits, f"logits of a request of {len(ids)}")
                assert seen == expected.selections
                assert_state_equal(driver.visible(slot), expected.state)
                driver.release(slot)
                del running[slot]


def test_unequal_lengths_in_one_batch_equal_each_alone_at_every_border() -> None:
    for lengths in ([1, 2, 3, 4], [7, 8, 9, 10], [15, 16, 17, 18], [31, 32, 33, 1], [64, 1, 2, 65]):
        driver = Driver(exact_model(TINY), max_length=LONGEST)
        prompts = {driver.state.acquire(): prompt(count, count) for count in lengths}
        logits = driver.feed(prompts)
        for slot, ids in prompts.items():
            assert_float64(logits[slot], alone(ids, TINY).logits, f"{len(ids)} of {lengths}")
            assert_state_equal(driver.visible(slot), alone(ids, TINY).state)


CACHES = ["window", "global_kv", "index_k", "open_group", "token_history"]


@pytest.mark.parametrize("cache", CACHES)
def test_losing_any_cache_between_chunks_is_noticed(cache: str) -> None:
    ids = prompt(50)
    driver = Driver(exact_model(TINY), max_length=LONGEST)
    slot = driver.state.acquire()
    driver.feed({slot: ids[:25]})
    for name, storage in driver.state.caches.items():
        if name.endswith(cache):
            storage.tensor[slot].zero_()
    rest = driver.feed({slot: ids[25:]})[slot]
    assert differs(rest, alone(ids, TINY).logits[25:])


def test_a_wrong_position_and_a_request_mixed_up_with_another_are_noticed() -> None:
    ids = prompt(30)
    driver = Driver(exact_model(TINY), max_length=LONGEST)
    first, second = driver.state.acquire(), driver.state.acquire()
    driver.feed({first: ids[:20], second: prompt(20, 1)})
    rest = driver.run({second: ids[20:], first: ids[20:]})
    assert differs(rest[second], alone(ids, TINY).logits[20:])
    assert_float64(rest[first], alone(ids, TINY).logits[20:])
    driver.state.commit(first, 1)
    assert differs(driver.run({first: ids[20:]})[first], alone(ids, TINY).logits[20:])

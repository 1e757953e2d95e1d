"""A verify step that accepts any number of drafts leaves plain decode unchanged (spec/model.md 9; design.md 4.4).

Drafts are forced: the first n are the tokens that plain decode is given, the rest are wrong.
"""

from collections.abc import Sequence
from functools import cache

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
    assert_state_equal,
    config_of,
    differs,
    exact_model,
    prompt,
    recorded_selections,
)
from quickseek.model import state as state_module

DRAFTS = 5
LENGTH = 96
SEEDS = (0, 1, 2)
CONFIG = config_of(**FEW_ITERATIONS)

State = dict[str, Tensor]


@cache
def plain_decodes() -> dict[int, tuple[Tensor, list[State], Selections]]:
    """``plain_decode`` of all seeds, which take their steps together."""
    driver = Driver(exact_model(CONFIG), max_length=LENGTH)
    slots = {driver.state.acquire(): seed for seed in SEEDS}
    logits = {slot: list[Tensor]() for slot in slots}
    states = {slot: [driver.visible(slot)] for slot in slots}
    selections: Selections = {}
    with recorded_selections(driver.model, selections, list(slots)):
        for place in range(LENGTH):
            found = driver.feed({slot: prompt(LENGTH, seed)[place].view(1) for slot, seed in slots.items()})
            for slot in slots:
                logits[slot].append(found[slot])
                states[slot].append(driver.visible(slot))
    own = {slot: {(k[0], 0, k[2]): v for k, v in selections.items() if k[1] == slot} for slot in slots}
    return {seed: (torch.cat(logits[slot]), states[slot], own[slot]) for slot, seed in slots.items()}


def plain_decode(seed: int) -> tuple[Tensor, list[State], Selections]:
    """Logits [LENGTH, V], the visible state after 0..LENGTH tokens, and selections, one token a step."""
    return plain_decodes()[seed]


def verify_rows(ids: Tensor, length: int, accepted: int, drafts: int = DRAFTS) -> Tensor:
    """The anchor at position ``length`` of ``ids``, ``accepted`` true drafts, then wrong ones."""
    rows = ids[length : length + 1 + drafts].clone()
    rows[accepted + 1 :] = (rows[accepted + 1 :] + 97) % 500 + 8
    return rows


def verify(driver: Driver, steps: dict[int, tuple[int, int]]) -> dict[int, Tensor]:
    """One step that accepts ``steps[slot] = (seed, accepted)``, committed; its logits up to the last accepted row."""
    rows = {s: verify_rows(prompt(LENGTH, seed), driver.state.length(s), n) for s, (seed, n) in steps.items()}
    logits = driver.run(rows)
    for slot, (_, accepted) in steps.items():
        driver.state.commit(slot, accepted + 1)
    return {slot: logits[slot][: steps[slot][1] + 1] for slot in steps}


def test_a_draft_of_any_length_leaves_plain_decode_unchanged_at_every_prompt_length() -> None:
    logits, states, selections = plain_decode(0)
    together = 5
    driver = Driver(exact_model(CONFIG), max_requests=together * (DRAFTS + 1), max_length=LENGTH)
    # 1 and 2 are shorter than the look-back; 35 is past window, list, candidate pool and the rings' own length.
    for first in range(1, 36, together):
        cases = {
            driver.state.acquire(): (length, accepted)
            for length in range(first, first + together)
            for accepted in range(DRAFTS + 1)
        }
        driver.feed({slot: prompt(length) for slot, (length, _) in cases.items()})
        seen: Selections = {}
        with recorded_selections(driver.model, seen, list(cases)):
            found = verify(driver, {slot: (0, accepted) for slot, (_, accepted) in cases.items()})
        ends = {slot: length + accepted + 1 for slot, (length, accepted) in cases.items()}
        for slot, end in ends.items():
            length, accepted = cases[slot]
            what = f"{accepted} accepted at length {length}"
            assert_float64(found[slot], logits[length:end], what)
            chosen = {(k[0], 0, k[2]): v for k, v in seen.items() if k[1] == slot and k[2] < end}
            assert chosen == {k: v for k, v in selections.items() if length <= k[2] < end}, what
            assert_state_equal(driver.visible(slot), states[end], what)
        # Two more plain tokens read everything that the rejected rows might have spoiled.
        for more in range(2):
            after = driver.feed({slot: prompt(LENGTH)[end + more].view(1) for slot, end in ends.items()})
            for slot, end in ends.items():
                length, accepted = cases[slot]
                what = f"token {more} after {accepted} accepted at length {length}"
                assert_float64(after[slot], logits[end + more : end + more + 1], what)
        for slot in cases:
            driver.release(slot)


def test_every_pair_of_steps_leaves_plain_decode_unchanged() -> None:
    logits, states, _ = plain_decode(1)
    for first in range(DRAFTS + 1):
        driver = Driver(exact_model(CONFIG), max_requests=DRAFTS + 1, max_length=LENGTH)
        slots = {driver.state.acquire(): second for second in range(DRAFTS + 1)}
        driver.feed({slot: prompt(LENGTH, 1)[:15] for slot in slots})
        verify(driver, dict.fromkeys(slots, (1, first)))
        found = verify(driver, {slot: (1, second) for slot, second in slots.items()})
        start = 15 + first + 1
        for slot, second in slots.items():
            assert_float64(found[slot], logits[start : start + second + 1], f"{first} then {second}")
            assert_state_equal(driver.visible(slot), states[start + second + 1], f"{first} then {second}")


def run_long(accepts: Sequence[Sequence[int]], driver: Driver) -> None:
    """Three requests verify together, each accepting its own counts, until none has room; compared at every step."""
    slots = {driver.state.acquire(): seed for seed in SEEDS}
    for slot, seed in slots.items():
        driver.feed({slot: prompt(LENGTH, seed)[: 1 + 3 * seed]})
    for counts in accepts:
        steps = {
            slot: (seed, count)
            for (slot, seed), count in zip(slots.items(), counts, strict=True)
            if driver.state.length(slot) + DRAFTS + 1 <= LENGTH
        }
        if not steps:
            return
        before = {slot: driver.state.length(slot) for slot in steps}
        for slot, found in verify(driver, steps).items():
            logits, states, _ = plain_decode(steps[slot][0])
            end = driver.state.length(slot)
            assert_float64(found, logits[before[slot] : end], f"rows {before[slot]}..{end}")
            assert_state_equal(driver.visible(slot), states[end], f"length {end}")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.lists(st.tuples(*[st.integers(0, DRAFTS)] * 3), min_size=8, max_size=40))
def test_any_accept_counts_in_a_long_batched_run_leave_plain_decode_unchanged(accepts: list[tuple[int, ...]]) -> None:
    run_long(accepts, Driver(exact_model(CONFIG), max_length=LENGTH))


@pytest.mark.parametrize("drafts", [1, 2, 3, 7])
def test_other_numbers_of_drafts_up_to_the_slack_of_the_rings_work_too(drafts: int) -> None:
    logits, states, _ = plain_decode(2)
    driver = Driver(exact_model(CONFIG), max_length=LENGTH)
    slot = driver.state.acquire()
    driver.feed({slot: prompt(LENGTH, 2)[:13]})
    for accepted in [*range(drafts + 1), *range(drafts + 1)]:
        start = driver.state.length(slot)
        if start + drafts + 1 > LENGTH:
            break
        found = driver.run({slot: verify_rows(prompt(LENGTH, 2), start, accepted, drafts)})[slot]
        driver.state.commit(slot, accepted + 1)
        assert_float64(found[: accepted + 1], logits[start : start + accepted + 1])
        assert_state_equal(driver.visible(slot), states[start + accepted + 1])


def test_a_verify_step_beside_plain_decode_and_a_prompt_changes_neither() -> None:
    driver = Driver(exact_model(CONFIG), max_length=LENGTH)
    slots = {driver.state.acquire(): seed for seed in SEEDS}
    (a, b, c) = slots
    driver.feed({a: prompt(LENGTH, 0)[:20], b: prompt(LENGTH, 1)[:11]})
    step = {
        a: verify_rows(prompt(LENGTH, 0), 20, 2),
        b: prompt(LENGTH, 1)[11:12],
        c: prompt(LENGTH, 2)[:30],
    }
    found = driver.run(step)
    for slot, count in ((a, 3), (b, 1), (c, 30)):
        driver.state.commit(slot, count)
        logits, states, _ = plain_decode(slots[slot])
        end = driver.state.length(slot)
        assert_float64(found[slot][:count], logits[end - count : end])
        assert_state_equal(driver.visible(slot), states[end])


# ---------------------------------------------------------------------------------------------- negative controls


@pytest.mark.parametrize("off_by", [-1, 1])
def test_committing_one_row_too_few_or_too_many_is_noticed(off_by: int) -> None:
    logits, states, _ = plain_decode(0)
    driver = Driver(exact_model(CONFIG), max_length=LENGTH)
    slot = driver.state.acquire()
    driver.feed({slot: prompt(20)})
    driver.run({slot: verify_rows(prompt(LENGTH), 20, 2)})
    driver.state.commit(slot, 3 + off_by)
    visible = driver.visible(slot)
    assert any(differs(visible[name], states[23][name]) for name in visible)
    assert differs(driver.run({slot: prompt(LENGTH)[23:24]})[slot], logits[23:24])


def test_rings_without_slack_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "SLACK", 0)
    with pytest.raises(AssertionError):
        run_long([(0, 0, 0), (1, 1, 1), (0, 2, 0)] * 4, Driver(exact_model(CONFIG), max_length=LENGTH))


def test_a_wrong_token_among_the_accepted_ones_is_noticed() -> None:
    logits, _, _ = plain_decode(0)
    driver = Driver(exact_model(CONFIG), max_length=LENGTH)
    slot = driver.state.acquire()
    driver.feed({slot: prompt(20)})
    found = driver.run({slot: verify_rows(prompt(LENGTH), 20, 2)})[slot]
    assert_float64(found[:3], logits[20:23])
    assert differs(found[3], logits[23])

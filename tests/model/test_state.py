"""Request slots, lengths and what a context refuses (spec/model.md 6.9; design: state by absolute position)."""

import pytest
import torch

from compare import assert_float64
from model_helpers import FLOAT64, Driver, alone, config_of, exact_model, poison, prompt
from quickseek.errors import PromptError
from quickseek.model.context import PAGED_GROUP, SLOT_GROUP
from quickseek.model.state import ContiguousState, cache_specs
from quickseek.numerics import Numerics
from quickseek.ops.cache import SLACK


def state_of(max_requests: int = 2, max_length: int = 32) -> ContiguousState:
    return ContiguousState(config_of(), FLOAT64, max_requests=max_requests, max_length=max_length, draft=True)


def test_the_caches_of_a_model_are_those_of_the_specification() -> None:
    specs = cache_specs(config_of(), FLOAT64, draft=True)
    windows = {f"layers.{layer}.window" for layer in range(8)} | {f"mtp.{stage}.window" for stage in range(3)}
    paged = {f"layers.{source}.{kind}" for source in (2, 4) for kind in ("global_kv", "index_k")}
    # Only a source of ratio 2 has open groups.
    assert specs.keys() == windows | paged | {"layers.2.open_group", "token_history"}
    assert {specs[name].ring for name in windows} == {8 + SLACK}
    assert {specs[name].ratio for name in paged if name.startswith("layers.2")} == {2}
    assert all((specs[name].group == PAGED_GROUP) == (name in paged) for name in specs)
    assert all((specs[name].ring == 0) == (name in paged) for name in specs)
    assert specs["token_history"].group == SLOT_GROUP


def test_packed_records_have_the_released_sizes_at_the_released_widths() -> None:
    config = config_of(head_dim=512, qk_rope_head_dim=64, index_head_dim=128)
    specs = cache_specs(config, Numerics.trained(), draft=False)
    sizes = {kind: specs[f"layers.2.{kind}"].codec.record for kind in ("window", "global_kv", "index_k")}
    assert sizes == {"window": 528, "global_kv": 288, "index_k": 68}
    assert specs["layers.2.open_group"].codec.dtype == torch.float32


def test_slots_are_given_once_and_come_back_empty() -> None:
    state = state_of()
    first, second = state.acquire(), state.acquire()
    assert {first, second} == {1, 2}, "slot 0 is scratch"
    with pytest.raises(RuntimeError, match="all 2 request slots are taken"):
        state.acquire()
    state.commit(first, 7)
    assert (state.length(first), state.length(second)) == (7, 0)
    state.release(first)
    assert state.acquire() == first
    assert state.length(first) == 0


@pytest.mark.parametrize("slot", [0, 2, 3, -1])
def test_a_slot_that_no_one_holds_is_refused_by_every_call(slot: int) -> None:
    state = state_of()
    assert state.acquire() == 1
    for call in (
        lambda: state.release(slot),
        lambda: state.length(slot),
        lambda: state.commit(slot, 1),
        lambda: state.context([slot], [1]),
        lambda: state.draft_context([slot]),
    ):
        with pytest.raises(ValueError, match=f"slot {slot} is not a request's"):
            call()


def test_releasing_a_slot_twice_is_refused() -> None:
    state = state_of()
    slot = state.acquire()
    state.release(slot)
    with pytest.raises(ValueError, match="is not a request's"):
        state.release(slot)


def test_a_step_past_the_length_of_the_state_is_refused_before_it_runs() -> None:
    state = state_of(max_length=10)
    slot = state.acquire()
    state.commit(slot, 10)
    with pytest.raises(PromptError, match="reaches position 10: the state holds 10 positions"):
        state.context([slot], [1])
    with pytest.raises(ValueError, match="commit of 1 rows at length 10"):
        state.commit(slot, 1)
    with pytest.raises(ValueError, match="commit of -1 rows"):
        state.commit(slot, -1)


def test_a_request_twice_in_a_step_or_without_rows_is_refused() -> None:
    state = state_of()
    slot, other = state.acquire(), state.acquire()
    with pytest.raises(ValueError, match="expected each request once"):
        state.context([slot, slot], [1, 1])
    with pytest.raises(ValueError, match="at least one row for each request"):
        state.context([slot, other], [1, 0])
    with pytest.raises(ValueError, match="at least one row for each request"):
        state.context([], [])


@pytest.mark.parametrize("length", [1, 2, 7, 31, 32])
def test_a_state_filled_to_its_last_position_gives_the_same_rows(length: int) -> None:
    driver = Driver(exact_model(), max_requests=1, max_length=length)
    slot = driver.state.acquire()
    logits = [driver.feed({slot: part})[slot] for part in prompt(length).split(5)]
    assert_float64(torch.cat(logits), alone(prompt(length)).logits)


def test_uncommitted_steps_leave_no_trace() -> None:
    driver = Driver(exact_model())
    slot = driver.state.acquire()
    driver.feed({slot: prompt(20)})
    for seed in range(1, 5):
        driver.run({slot: prompt(8, seed)})
    assert_float64(driver.feed({slot: prompt(40)[20:]})[slot], alone(prompt(40)).logits[20:])


def test_what_other_requests_hold_is_never_read() -> None:
    driver = Driver(exact_model())
    slot, other = driver.state.acquire(), driver.state.acquire()
    driver.feed({slot: prompt(20), other: prompt(33, 1)})
    poison(driver.state, other)
    poison(driver.state, 0)
    assert_float64(driver.feed({slot: prompt(40)[20:]})[slot], alone(prompt(40)).logits[20:])


def test_poison_reaches_whatever_reads_it() -> None:
    driver = Driver(exact_model())
    slot = driver.state.acquire()
    driver.feed({slot: prompt(20)})
    poison(driver.state, slot)
    assert driver.run({slot: prompt(24)[20:]})[slot].isnan().all()


def test_a_stage_of_a_pipeline_holds_caches_of_its_layers_only() -> None:
    first = cache_specs(config_of(), FLOAT64, draft=False, layers=range(4))
    second = cache_specs(config_of(), FLOAT64, draft=False, layers=range(4, 8))
    whole = cache_specs(config_of(), FLOAT64, draft=False)
    assert first.keys() | second.keys() == whole.keys()
    assert first.keys() & second.keys() == {"token_history"}

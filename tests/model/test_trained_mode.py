"""Trained mode on a CPU: packed caches hold the fake-quantised values, to the bit (spec/model.md 4, 6.10)."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compare import assert_bits
from model_helpers import Driver, config_of, poison, prompt, token_map
from quickseek import formats
from quickseek.checkpoint.miniature import write_miniature
from quickseek.model.causal_lm import CausalLM, load_model
from quickseek.numerics import Numerics
from quickseek.ops.cache import CacheView

PACKED = Numerics.trained()
PLAIN = Numerics(dtype=torch.bfloat16, packed_weights=True, quantize_caches=True)
UNQUANTISED = Numerics(dtype=torch.bfloat16, packed_weights=True)
LENGTH = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Numerics, CausalLM]:
    """The miniature as loaded from its packed checkpoint, with three ways to hold caches."""
    directory: Path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_miniature(directory, "tiny")
    made = {}
    for numerics in (PACKED, PLAIN, UNQUANTISED):
        model, _ = load_model(directory, numerics, draft=True)
        model.set_token_map(token_map(config_of()))
        made[numerics] = model
    return made


def run(model: CausalLM, chunks: list[int]) -> tuple[Driver, int, Tensor]:
    driver = Driver(model)
    slot = driver.state.acquire()
    return driver, slot, torch.cat([driver.feed({slot: part})[slot] for part in prompt(LENGTH).split(chunks)])


def values(driver: Driver, slot: int) -> dict[str, Tensor]:
    """The visible state as BF16 values, records decoded."""
    decoded = {}
    for name, records in driver.visible(slot).items():
        codec = driver.state.caches[name].codec
        quantised = name.endswith(("window", "global_kv", "index_k"))
        decoded[name] = codec.decode(records, torch.bfloat16) if quantised else records
    return decoded


@pytest.mark.parametrize("chunks", [[LENGTH], [25, 1, 1, 6, 1, 26], [*[1] * 26, 34]])
def test_packed_caches_equal_plain_caches_of_fake_quantised_values_to_the_bit(
    models: dict[Numerics, CausalLM], chunks: list[int]
) -> None:
    packed, slot, logits = run(models[PACKED], chunks)
    plain, other, expected = run(models[PLAIN], chunks)
    assert_bits(logits, expected, "logits")
    assert logits.dtype == torch.float32 and bool(logits.isfinite().all())
    found, wanted = values(packed, slot), values(plain, other)
    for name in wanted:
        assert_bits(found[name], wanted[name], name)


def test_caches_without_quantisation_are_noticed(models: dict[Numerics, CausalLM]) -> None:
    with pytest.raises(AssertionError):
        assert_bits(run(models[UNQUANTISED], [LENGTH])[2], run(models[PACKED], [LENGTH])[2])


def test_drafts_from_packed_rings_equal_those_from_plain_rings(models: dict[Numerics, CausalLM]) -> None:
    proposed = []
    for numerics in (PACKED, PLAIN):
        driver, slot, _ = run(models[numerics], [LENGTH])
        context, last = driver.state.draft_context([slot])
        model = driver.model
        assert model.draft is not None and model.backbone.embed is not None
        proposed.append(model.draft.propose(torch.tensor([217]), last, model.backbone.embed, model.head, context))
    assert_bits(proposed[0].logits, proposed[1].logits)
    assert_bits(proposed[0].confidence, proposed[1].confidence)
    assert torch.equal(proposed[0].tokens, proposed[1].tokens)


def test_the_same_call_gives_the_same_bits_again(models: dict[Numerics, CausalLM]) -> None:
    assert_bits(run(models[PACKED], [25, 35])[2], run(models[PACKED], [25, 35])[2])


def test_every_cached_value_survives_being_quantised_again(models: dict[Numerics, CausalLM]) -> None:
    driver, slot, _ = run(models[PLAIN], [LENGTH])
    again = {
        "window": formats.fake_quantize_a8,
        "global_kv": formats.fake_quantize_q4k,
        "index_k": formats.fake_quantize_q4i,
    }
    checked = 0
    for name, held in values(driver, slot).items():
        function = again.get(name.rsplit(".", 1)[-1])
        if function is not None:
            assert_bits(function(held), held, name)
            checked += 1
    assert checked == 11 + 2 * 2
    spoiled = values(driver, slot)["layers.0.window"].clone()
    spoiled[0, 0] += spoiled[0].abs().max() * 2.0**-7
    with pytest.raises(AssertionError):
        assert_bits(formats.fake_quantize_a8(spoiled), spoiled)


def test_one_flipped_bit_of_a_record_is_noticed(models: dict[Numerics, CausalLM]) -> None:
    driver, slot, _ = run(models[PACKED], [LENGTH])
    expected = driver.run({slot: prompt(4, 1)})[slot]
    records = driver.state.caches["layers.4.global_kv"].tensor[slot]
    records[:LENGTH, 0] ^= 8
    with pytest.raises(AssertionError):
        assert_bits(driver.run({slot: prompt(4, 1)})[slot], expected)


def test_verify_rows_and_batches_stay_close_to_plain_decode(models: dict[Numerics, CausalLM]) -> None:
    # BF16 sums depend on the number of rows, so this is no equality of bits; selections may swap near ties.
    alone = run(models[PACKED], [LENGTH])[2]
    driver, slot, chunked = run(models[PACKED], [50, 6, 1, 1, 1, 1])
    distance = (chunked - alone).abs().flatten() / alone.std()
    assert float(distance.quantile(0.5)) < 0.05, "median, in standard deviations of the logits"
    poison(driver.state, slot)
    assert bool(driver.run({slot: prompt(4)})[slot].isnan().any())


@pytest.mark.parametrize("placement", ["after", "before"])
def test_both_placements_of_the_routing_weight_run_and_differ_by_rounding_only(
    models: dict[Numerics, CausalLM], placement: str
) -> None:
    model = models[PACKED]
    other = CausalLM(
        config_of(),
        Numerics(
            dtype=torch.bfloat16,
            packed_weights=True,
            quantize_caches=True,
            packed_caches=True,
            routed_weight=placement,
        ),
        draft=True,
    )
    other.load_state_dict(model.state_dict(), strict=True)
    for ours, theirs in zip(other.backbone.layers, model.backbone.layers, strict=True):
        if theirs.engram is not None:
            ours.engram.table = theirs.engram.table
    other.backbone.finalize_mhc_broadcast_weights()
    other.set_token_map(token_map(config_of()))
    found, expected = run(other, [LENGTH])[2], run(model, [LENGTH])[2]
    distance = (found - expected).abs().flatten() / expected.std()
    assert (float(distance.max()) == 0.0) == (placement == "after")
    assert float(distance.quantile(0.5)) < 0.3


def test_records_are_seen_as_caches_see_them(models: dict[Numerics, CausalLM]) -> None:
    driver, slot, _ = run(models[PACKED], [LENGTH])
    view: CacheView = driver.state.context([slot], [1]).view("layers.0.window")
    positions = torch.arange(LENGTH - 7, LENGTH)
    seen = view.gather(torch.zeros_like(positions), view.ring_rows(positions), torch.bfloat16)
    assert_bits(seen, values(driver, slot)["layers.0.window"])

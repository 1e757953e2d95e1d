"""What was never written, and what another request spoilt, cannot influence a result."""

import pytest
import torch
from torch import Tensor

import golden_data
from compare import assert_bits, assert_relative
from golden_data import golden
from model_driver import Batch
from quickseek.model.causal_lm import CausalLM
from quickseek.numerics import Numerics

MODES = [golden_data.EXACT, golden_data.CACHE_QUANTISED, Numerics.trained()]
SIZES = (9, 1, 7, 30, 1, 1, 15)


def poison(batch: Batch) -> None:
    """Fill every cache with NaN: values, packed codes and their scales alike; histories with an id that is none."""
    for cache in batch.state.caches.values():
        tensor = cache.tensor
        tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 255 if tensor.dtype == torch.uint8 else 10**6)


def run(batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits of a prompt in chunks, and of the drafts after it."""
    logits = batch.chunks(golden("exact.len64")["ids"], SIZES)
    return logits, batch.draft([5]).logits


@pytest.mark.parametrize("numerics", MODES, ids=["exact", "quantised caches", "packed caches"])
def test_caches_that_begin_as_nan_give_the_same_bits(numerics: Numerics) -> None:
    model = golden_data.base_model(numerics)
    clean, spoilt = Batch(model), Batch(model)
    poison(spoilt)
    for ours, theirs in zip(run(spoilt), run(clean), strict=True):
        assert ours.isfinite().all()
        assert_bits(ours, theirs)


@pytest.mark.parametrize("numerics", MODES, ids=["exact", "quantised caches", "packed caches"])
def test_poison_in_a_record_that_is_read_is_noticed(numerics: Numerics) -> None:
    model = golden_data.base_model(numerics)
    for name in ("layers.0.window", "layers.4.global_kv", "layers.6.index_k", "layers.2.open_group"):
        batch = Batch(model)
        batch.run(golden("exact.len64")["ids"][:31])
        tensor = batch.state.caches[name].tensor
        tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 255)
        clean = Batch(model)
        clean.run(golden("exact.len64")["ids"][:31])
        with pytest.raises(AssertionError):
            assert_bits(batch.run(torch.tensor([5])), clean.run(torch.tensor([5])), name)


def test_a_spoilt_request_leaves_the_others_of_its_batch_alone(exact_model: CausalLM) -> None:
    ids = golden("exact.len64")["ids"]
    prompts = [ids[:20], ids[20:33], ids[33:]]
    embeddings = exact_model.backbone.embed_input_ids(torch.cat(prompts))
    outputs = []
    for spoil in (False, True):
        batch = Batch(exact_model, size=3)
        inputs = embeddings.clone()
        inputs[20:33] = torch.nan if spoil else inputs[20:33]
        logits = batch.run(prompts, inputs_embeds=inputs)
        more = batch.run([ids[:2], ids[:3], ids[:1]])
        outputs.append((logits, more, batch.draft([1, 2, 3]).logits))
    (clean, clean_more, clean_drafts), (logits, more, drafts) = outputs
    assert logits[20:33].isnan().any(-1).all(), "the spoilt request shows it"
    assert more[2:5].isnan().any() and drafts[1].isnan().any()
    others = [*range(20), *range(33, 64)]
    # Not to the bit: a spoilt row goes to other experts, whose products are then of other sizes.
    assert_relative(logits[others], clean[others], 1e-5, "prompts")
    assert_relative(more[[0, 1, 5]], clean_more[[0, 1, 5]], 1e-5, "next steps")
    assert_relative(drafts[[0, 2]], clean_drafts[[0, 2]], 1e-5, "drafts")


def test_a_slot_that_is_used_again_begins_afresh(exact_model: CausalLM) -> None:
    ids = golden("exact.len64")["ids"]
    batch = Batch(exact_model)
    first = batch.chunks(ids, SIZES)
    batch.state.release(batch.slots[0])
    batch.slots = [batch.state.acquire()]
    assert_bits(batch.chunks(ids, SIZES), first)

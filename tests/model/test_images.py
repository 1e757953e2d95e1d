"""Image spans: dead for the n-gram hash, a zero gate, routing by the image bias (spec/model.md 7.1, 8.3, 13)."""

import pytest
import torch
from torch import Tensor, nn

from compare import assert_bits, assert_float64
from model_helpers import Driver, assert_state_equal, config_of, differs, exact_model, prompt
from quickseek.config import ModelConfig
from quickseek.model.causal_lm import CausalLM
from quickseek.model.engram import NgramHashState
from quickseek.model.moe import Router
from quickseek.ops.engram import DEAD

IMAGE = 300
LENGTH = 40
SPANS = [range(5, 9), range(12, 13), range(20, 33)]
LOOKBACK = 3


def config() -> ModelConfig:
    return config_of(image_token_id=IMAGE)


def ids_with_images() -> Tensor:
    ids = prompt(LENGTH, 4)
    ids[ids == IMAGE] += 1
    for span in SPANS:
        ids[span.start : span.stop] = IMAGE
    return ids


def image_embeddings(model: CausalLM, ids: Tensor) -> Tensor:
    """Embedding rows [T, H] in which image positions carry vectors of their own, as a vision tower would give."""
    rows = model.backbone.embed_input_ids(ids).clone()
    generator = torch.Generator().manual_seed(1)
    rows[ids == IMAGE] = torch.randn(int((ids == IMAGE).sum()), rows.shape[1], generator=generator, dtype=rows.dtype)
    return rows


def run(
    chunks: list[int], *, lookback: bool = False, model: CausalLM | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [LENGTH, V] and the state of the prompt in chunks; ``lookback`` gives the ids before each chunk."""
    model = exact_model(config()) if model is None else model
    driver, ids = Driver(model), ids_with_images()
    slot, parts, start = driver.state.acquire(), [], 0
    embeddings = image_embeddings(model, ids)
    for count in chunks:
        part = slice(start, start + count)
        given = lookback_of(ids, start).unsqueeze(0) if lookback else None
        parts.append(
            driver.feed({slot: ids[part]}, inputs_embeds=embeddings[part], lookback_token_ids=given)[slot]
        )
        start += count
    return torch.cat(parts), driver.visible(slot)


def lookback_of(ids: Tensor, start: int) -> Tensor:
    """Raw ids before position ``start``, nearest first, -1 before the sequence."""
    return torch.tensor([int(ids[start - k]) if start >= k else -1 for k in range(1, LOOKBACK + 1)])


CUTS = [[LENGTH], [1] * LENGTH, [5, 4, 4, 27], [6, 1, 5, 1, 8, 10, 9], [21, 1, 1, 1, 9, 1, 6], [32, 2, 6]]


@pytest.mark.parametrize("chunks", CUTS[1:])
def test_image_spans_may_be_cut_anywhere(chunks: list[int]) -> None:
    whole, state = run([LENGTH])
    logits, found = run(chunks)
    assert_float64(logits, whole)
    assert_state_equal(found, state)


@pytest.mark.parametrize("chunks", CUTS)
def test_given_lookback_ids_equal_the_history_of_the_caches(chunks: list[int]) -> None:
    with_history, expected = run(chunks)
    given, state = run(chunks, lookback=True)
    assert_float64(given, with_history)
    assert_state_equal(state, expected)


def test_given_lookback_ids_serve_a_batch_of_unequal_lengths() -> None:
    model = exact_model(config_of())
    history, given = Driver(model), Driver(model)
    lengths = {history.state.acquire(): 1, history.state.acquire(): 2, history.state.acquire(): 17}
    for slot, length in lengths.items():
        assert given.state.acquire() == slot
        for driver in (history, given):
            driver.feed({slot: prompt(length, slot)})
    step = {slot: prompt(length + 4, slot)[length:] for slot, length in lengths.items()}
    ids = torch.stack([lookback_of(prompt(length, slot), length) for slot, length in lengths.items()])
    given.state.caches["token_history"].tensor.fill_(77)
    expected = history.run(step)
    for slot, logits in given.run(step, lookback_token_ids=ids).items():
        assert_float64(logits, expected[slot])
    wrong = given.run(step, lookback_token_ids=ids.flip(1))
    assert all(differs(wrong[slot], expected[slot]) for slot in step)


def test_hashing_without_history_and_without_lookback_ids_is_not_built() -> None:
    model = exact_model(config())
    driver = Driver(model)
    slot = driver.state.acquire()
    del driver.state.caches["token_history"]
    with pytest.raises(NotImplementedError, match="NgramHashState"):
        driver.run({slot: prompt(4)})
    assert driver.run({slot: prompt(4)}, lookback_token_ids=torch.full((1, LOOKBACK), -1))[slot].isfinite().all()


def hashes_of(ids: Tensor) -> list[Tensor]:
    model = exact_model(config())
    driver = Driver(model)
    context = driver.state.context([driver.state.acquire()], [len(ids)])
    return model.backbone.hash_ngrams(ids, model.backbone.hashes.is_image(ids), context)


def test_a_dead_position_pads_its_own_hash_and_those_that_look_back_over_it() -> None:
    ids = prompt(12, 4).clone()
    ids[6] = IMAGE
    for dead, plain in zip(hashes_of(ids), hashes_of(prompt(12, 4)), strict=True):
        changed = (dead != plain).any(1)
        assert changed.nonzero().flatten().tolist() == [6, 7, 8, 9]
    # What lies before a span is out of reach: the hash after it is that of a sequence which begins there.
    for dead, fresh in zip(hashes_of(ids), hashes_of(prompt(12, 4)[7:]), strict=True):
        assert torch.equal(dead[7:10], fresh[:3])


def test_the_gate_of_a_dead_position_is_zero_and_of_its_neighbours_is_not() -> None:
    model, dead = exact_model(config()), ids_with_images() == IMAGE
    entered: list[tuple[Tensor, Tensor]] = []
    engrams = [layer.engram for layer in model.backbone.layers if layer.engram is not None]
    handles = [m.register_forward_hook(lambda _, arguments, out: entered.append((arguments[0], out))) for m in engrams]
    run([LENGTH], model=model)
    for handle in handles:
        handle.remove()
    assert len(entered) == 2
    for before, after in entered:
        assert_bits(after[dead], before[dead].contiguous())
        assert ((after != before).flatten(1).any(1) == ~dead).all()


class SpyOnRouters:
    """Records which rows each router takes by the image bias, and its choices."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[Router, Tensor, Tensor | None, Tensor]] = []
        self.handles = [
            module.register_forward_hook(lambda m, a, out: self.calls.append((m, a[0], a[1], out.experts)))
            for module in model.modules()
            if isinstance(module, Router)
        ]

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()


def test_image_rows_are_routed_by_the_image_bias_and_weighed_without_it() -> None:
    model, dead = exact_model(config()), ids_with_images() == IMAGE
    spy = SpyOnRouters(model)
    run([LENGTH], model=model)
    spy.stop()
    assert len(spy.calls) == model.config.num_hidden_layers
    differing = 0
    for router, x, rows, experts in spy.calls:
        assert rows is not None and torch.equal(rows, dead)
        scores = torch.sqrt(torch.nn.functional.softplus(x @ router.weight.T))
        for row in range(LENGTH):
            bias = router.bias_vl if dead[row] else router.bias
            best = torch.topk(scores[row] + bias, model.config.num_experts_per_tok).indices
            other = torch.topk(scores[row] + (router.bias if dead[row] else router.bias_vl), 3).indices
            assert set(experts[row].tolist()) == set(best.tolist())
            differing += set(other.tolist()) != set(best.tolist())
    assert differing > LENGTH  # the two biases would not choose alike


def test_a_draft_stage_never_takes_the_image_bias() -> None:
    model = exact_model(config())
    driver, ids = Driver(model), ids_with_images()
    slot = driver.state.acquire()
    driver.feed({slot: ids[:33]}, inputs_embeds=image_embeddings(model, ids)[:33])
    spy = SpyOnRouters(model.draft)
    context, last = driver.state.draft_context([slot])
    model.draft.propose(torch.tensor([IMAGE]), last, model.backbone.embed, model.head, context)
    spy.stop()
    assert len(spy.calls) == 3
    assert all(not router.uses_image_bias and rows is None for router, _, rows, _ in spy.calls)


def test_image_embeddings_take_the_place_of_token_rows_and_matter() -> None:
    driver, ids = Driver(exact_model(config())), ids_with_images()
    slot = driver.state.acquire()
    assert differs(driver.run({slot: ids})[slot], run([LENGTH])[0])


def test_a_model_without_an_image_token_treats_every_id_as_text() -> None:
    hashes = NgramHashState(config_of())
    assert not hashes.is_image(ids_with_images()).any()
    hashes.set_token_map(torch.arange(512))
    compressed = hashes.compress(torch.tensor([IMAGE, 5]), torch.tensor([True, False]))
    assert compressed.tolist() == [DEAD, 5]
    spy = SpyOnRouters(exact_model())
    driver = Driver(exact_model())
    driver.run({driver.state.acquire(): ids_with_images()})
    spy.stop()
    assert all(rows is None for _, _, rows, _ in spy.calls)

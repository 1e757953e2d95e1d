"""The training forward is the stock model: equal logits, states, selections and drafts in float64."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from miniature.attention import Faults
from miniature.backbone import States, backbone, logits, turns
from miniature.drafter import draft
from miniature.layers import Hashing
from miniature.rounding import Rounding
from miniature.weights import stacked, values
from model_driver import Batch
from model_helpers import Selections, config_of, exact_model, logical_weights, prompt, recorded_selections, token_map
from quickseek.config import ModelConfig

EXACT = Rounding(on=False)
TOLERANCE = 1e-9
LENGTH = 60
"""Longer than window (8), list (8) and candidate pool (16), and no multiple of the window."""


@lru_cache
def parts(name: str) -> tuple[ModelConfig, Mapping[str, Tensor], Mapping[str, Tensor], Hashing]:
    """Configuration, values of backbone and drafter in float64, and hashing."""
    config = config_of(name)
    weights = stacked(config, logical_weights(config))
    of = [values(config, weights, torch.float64, EXACT, draft=part) for part in (False, True)]
    return config, of[0], of[1], Hashing.of(config, token_map(config))


def trained(name: str, ids: Tensor, changed: Mapping[str, Tensor] | None = None, **options: object) -> States:
    config, ours, _, hashing = parts(name)
    ours = {**ours, **(changed or {})}
    return backbone(config, ours, hashing, ids, EXACT, **options)  # type: ignore[arg-type]


def stock_logits(name: str, ids: Tensor) -> Tensor:
    batch = Batch(exact_model(config_of(name)), max_length=128)
    return batch.run(ids)


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


@pytest.mark.parametrize("name", ["tiny", "tiny-tp"])
@pytest.mark.parametrize("length", [LENGTH, 59, 17, 1])
def test_logits_of_a_sequence_are_the_stock_models(name: str, length: int) -> None:
    _, ours, _, _ = parts(name)
    ids = torch.stack([prompt(length), prompt(length, 3)])
    states = trained(name, ids)
    for row in range(2):
        assert far(logits(ours, states.hidden[row]), stock_logits(name, ids[row])) < TOLERANCE


def test_auxiliary_states_are_the_stock_models() -> None:
    model = exact_model()
    batch = Batch(model, max_length=128)
    context = batch.state.context(batch.slots, [LENGTH])
    _, aux = model.backbone(prompt(LENGTH), context.rows.positions, context=context)
    assert far(trained("tiny", prompt(LENGTH)[None]).aux[0], torch.cat(aux, -1)) < TOLERANCE


def test_at_this_length_lists_and_candidates_are_a_choice() -> None:
    config, model, seen = config_of(), exact_model(), Selections()
    with recorded_selections(model, seen):
        Batch(model, max_length=128).run(prompt(LENGTH))
    lists, blocks = seen["layers.4", 0, LENGTH - 1]
    assert len(lists) == config.index_topk < LENGTH and blocks is not None
    assert len(blocks) * config.candidate_block_size < LENGTH


@pytest.mark.parametrize("fault", ["engram", "global_kv", "candidates", "pre"])
def test_a_mechanism_that_is_left_out_is_noticed(fault: str) -> None:
    _, ours, _, _ = parts("tiny")
    states = trained("tiny", prompt(LENGTH)[None], faults=replace(Faults(), **{fault: True}))
    assert far(logits(ours, states.hidden[0]), stock_logits("tiny", prompt(LENGTH))) > 1e-3


@pytest.mark.parametrize("name", ["layers.3.attn.wkv.weight", "layers.4.attn.indexer.wk.weight", "norm.weight"])
def test_a_weight_that_differs_is_noticed(name: str) -> None:
    _, ours, _, _ = parts("tiny")
    states = trained("tiny", prompt(LENGTH)[None], {name: ours[name].flip(0)})
    assert far(logits(ours, states.hidden[0]), stock_logits("tiny", prompt(LENGTH))) > 1e-3


@pytest.mark.parametrize("name", ["tiny", "tiny-tp"])
@pytest.mark.parametrize("length", [LENGTH, 30, 3])
def test_drafts_at_an_anchor_are_the_stock_models(name: str, length: int) -> None:
    config, ours, drafter, _ = parts(name)
    batch = Batch(exact_model(config), max_length=128)
    batch.run(prompt(length))
    found = batch.draft([217])
    previous = torch.cat((torch.tensor([[217]]), found.tokens[:, :-1]), 1)
    whole = torch.cat((prompt(length), torch.tensor([217, 7, 7])))[None]
    aux = trained(name, whole).aux
    turn = turns(config, length + 8, torch.float64, aux.device)[False]
    # A second anchor shows that anchors do not see each other.
    anchors = torch.tensor([[length - 1, 1]])
    both = torch.stack((previous, torch.full_like(previous, 9)), 1)
    drafts = draft(config, drafter, ours, aux, anchors, both, turn, EXACT)
    assert far(drafts.logits[:, 0], found.logits) < TOLERANCE
    assert far(torch.sigmoid(drafts.confidence[:, 0]), found.confidence) < TOLERANCE
    shifted = draft(config, drafter, ours, aux, anchors - 1, both, turn, EXACT)
    assert far(shifted.logits[:, 0], found.logits) > 1e-3

"""From prompts to tokens: drafts of any quality, batches, chunks and ranks give the tokens of plain decoding."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64, assert_tokens
from model_helpers import FLOAT64, Driver, config_of, differs, exact_model, logical_weights, prompt, token_map
from quickseek.engine.offline import OfflineEngine
from quickseek.engine.request import Request
from quickseek.model.causal_lm import CausalLM
from quickseek.model.dspark import Drafts
from quickseek.model.loader import TensorSource
from quickseek.model.state import ContiguousState
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import SoloWorld, World
from quickseek.sampling_params import SamplingParams

PROMPTS = [prompt(count, count + 50).tolist() for count in (1, 2, 7, 16, 33)]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, temperature=1.1, seed=7, ignore_eos=True)


def run(params: SamplingParams, engine: type[OfflineEngine] = OfflineEngine, **options: Any) -> list[Request]:
    model = exact_model()
    requests = [Request.create(ids, params, model.config, 128) for ids in PROMPTS]
    for _ in engine(model, **options).run(requests):
        pass
    return requests


@cache
def plain(params: SamplingParams) -> list[list[int]]:
    return [request.output_ids for request in run(params, max_num_seqs=1)]


class Oracle:
    """Proposes what each request will say, but with ``quality`` of the drafts right and the rest wrong."""

    def __init__(self, answers: Sequence[list[int]], quality: float) -> None:
        self.texts = [ids + answer for ids, answer in zip(PROMPTS, answers, strict=True)]
        self.quality, self.random = quality, random.Random(3)

    def __call__(self, anchors: Tensor, last: Tensor, *_: Any, count: int) -> Drafts:
        rows = [self._after(*pair, count) for pair in zip(anchors.tolist(), last.tolist(), strict=True)]
        tokens = torch.tensor(rows)
        return Drafts(tokens, torch.empty(0), torch.empty(0))

    def _after(self, anchor: int, last: int, count: int) -> list[int]:
        text = next((text for text in self.texts if text[last + 1 : last + 2] == [anchor]), [])
        known = (text[last + 2 : last + 2 + count] + [9] * count)[:count]
        return [token if self.random.random() < self.quality else (token + 1) % 500 for token in known]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("quality", [0.0, 0.6, 0.9, 1.0])
def test_drafts_of_any_quality_give_the_tokens_of_plain_decoding(
    params: SamplingParams, quality: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(params)
    monkeypatch.setattr(exact_model().draft, "propose", Oracle(expected, quality))
    requests = run(params, num_speculative_tokens=5, max_num_seqs=3, chunk=6)
    for request, tokens in zip(requests, expected, strict=True):
        assert_tokens(request.output_ids, tokens)
    accepted = sum(request.accepted for request in requests) / sum(request.drafted for request in requests)
    assert (accepted > quality**2 / 4) if quality else (accepted < 0.05), f"{accepted} of the drafts were accepted"


class Credulous(OfflineEngine):
    """Takes every draft at its word: what a broken acceptance would do."""

    def _accept(self, request: Request, targets: Sequence[int], state: ContiguousState) -> list[int]:
        return super()._accept(request, [*request.drafts, targets[-1]], state)


def test_accepting_wrong_drafts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(GREEDY)
    monkeypatch.setattr(exact_model().draft, "propose", Oracle(expected, 0.6))
    requests = run(GREEDY, Credulous, num_speculative_tokens=5)
    with pytest.raises(AssertionError):
        for request, tokens in zip(requests, expected, strict=True):
            assert_tokens(request.output_ids, tokens)


# ---------------------------------------------------------------------------------------------- ranks


def on_ranks(world: World) -> dict[str, Tensor]:
    """Prompts in chunks, a verify step and a draft pass on one rank."""
    config = config_of()
    model = CausalLM(config, FLOAT64, world=world, draft=True)
    model.load(TensorSource(logical_weights(config)))
    model.set_token_map(token_map(config))
    return everything(model)


def everything(model: CausalLM) -> dict[str, Tensor]:
    driver = Driver(model)
    a, b = driver.state.acquire(), driver.state.acquire()
    out = {"first": torch.cat(list(driver.feed({a: prompt(30), b: prompt(9, 1)}).values()))}
    out["verify"] = torch.cat(list(driver.feed({b: prompt(15, 1)[9:], a: prompt(36)[30:]}).values()))
    context, last = driver.state.draft_context([a, b])
    assert model.draft is not None and model.backbone.embed is not None
    drafts = model.draft.propose(torch.tensor([217, 5]), last, model.backbone.embed, model.head, context)
    return out | {"drafts": drafts.tokens, "draft logits": drafts.logits, "confidence": drafts.confidence}


def test_two_ranks_equal_one_and_each_other_to_the_bit() -> None:
    expected = everything(exact_model())
    first, second = spawn(on_ranks, 2)
    for name, tensor in expected.items():
        assert_float64(first[name], tensor, name)
        assert_bits(second[name], first[name], name)


class Deaf(SoloWorld):
    """Rank 0 of two that never hears from its peer."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        return torch.cat([x, x], dim)


def test_a_rank_that_works_with_its_share_alone_is_noticed() -> None:
    found, expected = on_ranks(Deaf()), everything(exact_model())
    assert differs(found["first"], expected["first"]) and differs(found["verify"], expected["verify"])

"""From prompts to tokens: drafts of any quality, batches, chunks and ranks give the tokens of plain decoding."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64, assert_tokens
from model_helpers import FLOAT64, Driver, config_of, differs, exact_model, logical_weights, prompt, token_map
from quickseek import LLM, SamplingParams
from quickseek.checkpoint.miniature import write_miniature
from quickseek.model.causal_lm import CausalLM
from quickseek.model.dspark import Drafts
from quickseek.model.loader import TensorSource
from quickseek.ops import sampling
from quickseek.ops.sampling import Verified
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import SoloWorld, World

PROMPTS = [prompt(count, count + 50).tolist() for count in (1, 2, 7, 16, 33)]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float64",
    "max_model_len": 128,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "kv_cache_memory_bytes": 64 << 20,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_miniature(path, "tiny")
    return path


@pytest.fixture(scope="module")
def plain(directory: Path) -> list[list[int]]:
    """Each prompt alone, one token a step."""
    llm = LLM(directory, **(OPTIONS | {"max_num_seqs": 1, "enable_prefix_caching": False}))
    return [llm.generate([ids], GREEDY)[0].token_ids for ids in PROMPTS]


@pytest.fixture(scope="module")
def speculating(directory: Path) -> LLM:
    return LLM(directory, **OPTIONS, num_speculative_tokens=5)


class Oracle:
    """Proposes what each request will say, but with ``quality`` of the drafts right and the rest wrong."""

    def __init__(self, answers: Sequence[list[int]], quality: float) -> None:
        self.texts = [ids + answer for ids, answer in zip(PROMPTS, answers, strict=True)]
        self.quality, self.random = quality, random.Random(3)

    def __call__(self, anchors: Tensor, last: Tensor, *_: Any, count: int, **__: Any) -> Drafts:
        rows = [self._after(*pair, count) for pair in zip(anchors.tolist(), last.tolist(), strict=True)]
        return Drafts(torch.tensor(rows), torch.empty(0), torch.full((len(rows), count), 0.5))

    def _after(self, anchor: int, last: int, count: int) -> list[int]:
        text = next((text for text in self.texts if text[last + 1 : last + 2] == [anchor]), [])
        known = (text[last + 2 : last + 2 + count] + [9] * count)[:count]
        return [token if self.random.random() < self.quality else (token + 1) % 500 for token in known]


@pytest.mark.parametrize("quality", [0.0, 0.6, 0.9, 1.0])
def test_drafts_of_any_quality_give_the_tokens_of_plain_decoding(
    quality: float, speculating: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculating.model.draft, "propose", Oracle(plain, quality))
    outputs = speculating.generate(PROMPTS, GREEDY)
    for output, tokens in zip(outputs, plain, strict=True):
        assert_tokens(output.token_ids, tokens)
    accepted = sum(output.accepted for output in outputs) / sum(output.drafted for output in outputs)
    assert (accepted > quality**2 / 4) if quality else (accepted < 0.05), f"{accepted} of the drafts were accepted"


def test_accepting_wrong_drafts_is_noticed(
    speculating: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def credulous(chosen: Tensor, drafts: Tensor, draft_counts: Tensor) -> Verified:
        return match(torch.cat((drafts, chosen[:, -1:]), 1), drafts, draft_counts)

    match = sampling.match
    monkeypatch.setattr(sampling, "match", credulous)
    monkeypatch.setattr(speculating.model.draft, "propose", Oracle(plain, 0.6))
    outputs = speculating.generate(PROMPTS, GREEDY)
    with pytest.raises(AssertionError):
        for output, tokens in zip(outputs, plain, strict=True):
            assert_tokens(output.token_ids, tokens)


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

"""The offline loop: what a request gets must not depend on who runs beside it, on chunks, or on speculation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quickseek.checkpoint.miniature import miniature_config, miniature_tensors
from quickseek.engine.offline import OfflineEngine
from quickseek.engine.request import Request
from quickseek.model.causal_lm import CausalLM
from quickseek.model.loader import TensorSource
from quickseek.numerics import Numerics
from quickseek.sampling_params import SamplingParams

CONFIG = miniature_config("tiny")
PROMPTS = [[3, 40, 77, 91], [5] * 9, [(i * 31) % 500 + 3 for i in range(23)], [400]]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    built = CausalLM(CONFIG, Numerics.exact(torch.float64), draft=True)
    built.load(TensorSource(miniature_tensors(CONFIG)))
    built.set_token_map(torch.tensor([t if t < 3 else 3 + (t - 3) // 2 for t in range(CONFIG.vocab_size)]))
    return built


def run(model: CausalLM, prompts: list[list[int]], params: SamplingParams, **options: int) -> list[list[int]]:
    requests = [Request.create(prompt, params, CONFIG, 512) for prompt in prompts]
    for _ in OfflineEngine(model, **options).run(requests):
        pass
    assert all(request.slot is None and request.finish_reason for request in requests)
    return [request.output_ids for request in requests]


def alone(model: CausalLM, params: SamplingParams) -> list[list[int]]:
    return [run(model, [prompt], params)[0] for prompt in PROMPTS]


GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=1.3, top_p=0.9, seed=11, ignore_eos=True)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 4},
        {"max_num_seqs": 2, "chunk": 5},
        {"num_speculative_tokens": 5},
        {"num_speculative_tokens": 2, "chunk": 7},
    ],
    ids=["batch", "chunks", "five drafts", "two drafts in chunks"],
)
def test_tokens_do_not_depend_on_batch_chunks_or_speculation(
    model: CausalLM, params: SamplingParams, options: dict[str, int]
) -> None:
    assert run(model, PROMPTS, params, **options) == alone(model, params)


def test_another_seed_gives_other_tokens(model: CausalLM) -> None:
    other = SamplingParams(max_tokens=20, temperature=1.3, top_p=0.9, seed=12, ignore_eos=True)
    assert run(model, PROMPTS, other) != alone(model, SAMPLED)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_drafts_that_happen_to_be_right_are_accepted_and_change_nothing(model: CausalLM, data: st.DataObject) -> None:
    """Random weights accept almost no draft, so drafts are forced: right ones up to a random count, then wrong."""
    expected = alone(model, GREEDY)[2]
    requests = [Request.create(PROMPTS[2], GREEDY, CONFIG, 512)]
    engine = OfflineEngine(model, num_speculative_tokens=5)

    def propose(running: list[Request], _state: object) -> None:
        for request in running:
            done = len(request.output_ids)
            right = data.draw(st.integers(0, 5))
            request.drafts = [
                token if i < right else (token + 1) % CONFIG.vocab_size
                for i, token in enumerate(expected[done : done + 5])
            ][: request.limit - done - 1]

    engine._propose = propose  # type: ignore[method-assign]
    for _ in engine.run(requests):
        pass
    assert requests[0].output_ids == expected


def test_stop_ids_and_length_end_a_request(model: CausalLM) -> None:
    tokens = alone(model, GREEDY)[0]
    stop = tokens[7]
    request = Request.create(
        PROMPTS[0], SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=(stop,)), CONFIG, 512
    )
    for _ in OfflineEngine(model, num_speculative_tokens=3).run([request]):
        pass
    assert request.finish_reason == "stop" and request.output_ids == tokens[: tokens.index(stop) + 1]
    request = Request.create(PROMPTS[0], GREEDY, CONFIG, max_model_len=10)
    for _ in OfflineEngine(model, num_speculative_tokens=5).run([request]):
        pass
    assert request.finish_reason == "length" and request.output_ids == tokens[:6]

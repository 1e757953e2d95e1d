"""Answers that are judged together are judged as each alone."""

import random

import pytest
import torch
from torch import Tensor

from engine_cases import CLOSE_CALL, behind_the_best, written
from judging import AT_ONCE, Answer, behind_each, judged
from quickseek import LLM, SamplingParams

PROMPTS = [[0, *range(20, 20 + count)] for count in (3, 40, 17)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = written(tmp_path_factory.mktemp("checkpoint"), "tiny-tp")
    return LLM(folder, mode="trained", max_model_len=128, max_num_seqs=3, kv_cache_memory_bytes=64 << 20)


def drawn(count: int, vocabulary: int) -> list[Answer]:
    chooser = random.Random(count)
    return [
        (chooser.choice(PROMPTS), [chooser.randrange(8, vocabulary) for _ in range(chooser.randint(1, 20))])
        for _ in range(count)
    ]


def test_many_answers_at_once_on_several_processes_are_judged_as_each_alone(llm: LLM) -> None:
    answers = drawn(AT_ONCE + 3, llm.config.vocab_size)
    alone = [behind_the_best(llm.model, [prompt], [answer]) for prompt, answer in answers]
    together = behind_each(llm.model, answers)
    token_map = llm.model.backbone.hashes.token_map
    assert token_map is not None
    shared = judged(llm._directory, token_map, answers, processes=2)
    for found in (together, shared):
        assert [len(one) for one in found] == [len(answer) for _, answer in answers]
        assert alike(found, alone) > 0.9
    # Negative control: no answer is judged as another.
    assert alike([one.flip(0) for one in together], alone) < 0.3


def alike(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The share of tokens judged as wanted; another order of summation, in a step of other rows, moves the others."""
    apart = (torch.cat(found) - torch.cat(wanted)).abs()
    return float((apart < 1e-3).double().mean()) if apart.max() < CLOSE_CALL else 0.0


def test_what_the_model_answers_is_not_behind_and_anything_else_is(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    answers = [(prompt, out.token_ids) for prompt, out in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True)]
    own = torch.cat(behind_each(llm.model, answers))
    assert float((own == 0).double().mean()) > 0.9
    backwards = torch.cat(behind_each(llm.model, [(prompt, answer[::-1]) for prompt, answer in answers]))
    assert float(backwards.max()) > CLOSE_CALL

"""Ranks whose logits differ in the last place take the same tokens: what rank 0 chose is what all commit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine_cases import written
from quickseek.llm import LLM
from quickseek.parallel.virtual import VirtualWorld, run_virtual
from quickseek.sampling_params import SamplingParams

PROMPTS = [[0, *range(20, 20 + count)] for count in (3, 17, 9)]
OPTIONS: dict[str, Any] = {"device": "cpu", "tensor_parallel_size": 2, "max_model_len": 64, "max_num_seqs": 3}
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("checkpoint"), "tiny-tp")


def answers(
    world: VirtualWorld, directory: Path, drafts: int, params: SamplingParams, together: bool, perturbed: bool
) -> list[list[int]]:
    """Tokens on this rank of logits with many ties; ``perturbed``: rank 1 has them decided by its last places."""
    llm = LLM(directory, world=world, num_speculative_tokens=drafts, **OPTIONS)

    def change(_: nn.Module, __: Any, logits: Tensor) -> Tensor:
        coarse = (logits * 2).round() / 2
        if not perturbed or world.rank == 0:
            return coarse
        odd = torch.arange(coarse.shape[-1]) % 2 == 1
        return torch.where(odd, torch.nextafter(coarse, torch.full_like(coarse, torch.inf)), coarse)

    llm.model.head.register_forward_hook(change)
    if not together:
        world.broadcast = lambda x, source=0: x  # type: ignore[method-assign]
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


def run(directory: Path, *settings: Any) -> list[list[list[int]]]:
    found: list[list[list[int]]] = run_virtual(answers, 2, directory, *settings, timeout_s=300.0)
    return found


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_logits_that_differ_in_the_last_place_give_the_same_tokens(
    directory: Path, drafts: int, params: SamplingParams
) -> None:
    first, second = run(directory, drafts, params, True, True)
    assert first == second
    assert [len(answer) for answer in first] == [params.max_tokens] * len(PROMPTS)
    if params is GREEDY:
        assert first == run(directory, drafts, params, True, False)[0], "they are not those of rank 0"


def test_without_the_choice_of_rank_0_they_would_part(directory: Path) -> None:
    first, second = run(directory, 0, GREEDY, False, True)
    assert first != second

"""Ranks whose logits differ in the last place take the same tokens: what rank 0 chose is what all commit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine_cases import written
from quickseek.engine.cycle import Needs
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


def broadcasts(world: VirtualWorld, directory: Path, drafts: int) -> tuple[list[list[int]], Tensor, Tensor]:
    """Shapes that D broadcasts in each cycle of an answer, and what rank 0's numbers become on this rank."""
    llm = LLM(directory, world=world, num_speculative_tokens=drafts, **OPTIONS)
    cycle, broadcast, shapes = llm.runner.cycle, world.broadcast, list[list[int]]()

    def told(x: Tensor, source: int = 0) -> Tensor:
        shapes.append(list(x.shape))
        return broadcast(x, source)

    world.broadcast = told  # type: ignore[method-assign]
    step = cycle.verify(torch.tensor([0, 0]), 32)
    shapes.clear()
    cycle.decide(step, Needs.of([]))
    asked = list(shapes)
    odd = [[float("nan"), -0.0], [1e-45, 3.0e38]] if world.rank == 0 else [[1.0, 2.0], [3.0, 4.0]]
    tokens, numbers = cycle._told(torch.tensor([[5 + world.rank], [-1]]), torch.tensor(odd, dtype=torch.float32))
    return asked, tokens, numbers


def test_a_cycle_asks_rank_0_for_its_choice_and_once_for_all_of_its_drafts(directory: Path) -> None:
    for drafts, wanted in ((0, [[2, 3]]), (3, [[2, 9], [2, 6]])):
        for asked, tokens, numbers in run_virtual(broadcasts, 2, directory, drafts, timeout_s=300.0):
            assert asked == wanted
            assert tokens.tolist() == [[5], [-1]] and numbers.dtype == torch.float32
            expected = torch.tensor([[float("nan"), -0.0], [1e-45, 3.0e38]])
            assert torch.equal(numbers.view(torch.int32), expected.view(torch.int32)), "bits of rank 0"

"""The engine on a GPU: decode steps from graphs, the same tokens as without them and as the CPU reference's."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from quickseek.checkpoint.miniature import write_miniature
from quickseek.engine.answer import RequestOutput
from quickseek.engine.runner import Runner
from quickseek.errors import ConfigError
from quickseek.llm import LLM
from quickseek.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

OPTIONS = {"max_model_len": 512, "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 6}
PROMPTS = [[0, *range(20, 20 + count)] for count in (3, 40, 17, 120, 65)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module", params=["tiny", "tiny-tp", "mid"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("checkpoint") / request.param
    write_miniature(path, request.param)
    return path


@dataclass
class Answers:
    outputs: list[RequestOutput]

    @property
    def tokens(self) -> list[list[int]]:
        return [output.token_ids for output in self.outputs]


def answers(llm: LLM, params: SamplingParams = GREEDY, prompts: list[list[int]] = PROMPTS) -> Answers:
    outputs = llm.generate(prompts, params)
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return Answers(outputs)


def eager(llm: LLM) -> None:
    """Switch graphs off for what follows."""
    llm.runner.graphs = None


def same_until_a_close_call(found: Answers, expected: Answers, eps: float = 0.5) -> int:
    """Tokens agree up to the first one whose two best logits were within ``eps``; how many answers agree whole."""
    whole = 0
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert theirs.logprobs is not None
        for number, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
            top = theirs.logprobs[number].top
            if a != b:
                assert top[0][1] - top[1][1] < eps, f"token {number}: {a}, expected {b}, margin {top}"
                break
        else:
            whole += 1
    return whole


@pytest.mark.parametrize("drafts", [0, 5])
def test_tokens_are_those_of_the_cpu_reference(directory: Path, drafts: int) -> None:
    gpu = LLM(directory, device="cuda", num_speculative_tokens=drafts, decode_backend="stock", **OPTIONS)
    cpu = LLM(directory, mode="trained", decode_backend="stock", **OPTIONS)
    found, expected = answers(gpu), answers(cpu)
    whole = same_until_a_close_call(found, expected)
    print(f"{directory.name}, {drafts} drafts: {whole} of {len(PROMPTS)} answers agree to their end")
    assert gpu.runner.graphs is None or gpu.runner.graphs.replays > 0
    with pytest.raises(AssertionError, match="margin"):
        same_until_a_close_call(Answers(found.outputs[::-1]), expected, eps=0.0)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replays_give_what_eager_steps_give_bit_for_bit(directory: Path, drafts: int, temperature: float) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, top_p=0.9, seed=3, ignore_eos=True)
    llm = LLM(directory, device="cuda", num_speculative_tokens=drafts, decode_backend="stock", **OPTIONS)
    replayed = answers(llm, params).tokens
    graphs = llm.runner.graphs
    assert graphs is not None and graphs.replays > 10
    assert answers(llm, params).tokens == replayed, "a second run"
    count = graphs.replays
    eager(llm)
    assert answers(llm, params).tokens == replayed, "eager steps"
    assert graphs.replays == count


def test_requests_that_come_and_go_leave_each_other_alone(directory: Path) -> None:
    llm = LLM(directory, device="cuda", num_speculative_tokens=2, decode_backend="stock", **OPTIONS)
    alone = [answers(llm, prompts=[ids]).tokens[0] for ids in PROMPTS]
    together = answers(llm)
    for ours, output in zip(alone, together.outputs, strict=True):
        assert output.logprobs is not None
        for number, (a, b) in enumerate(zip(ours, output.token_ids, strict=True)):
            if a != b:
                top = output.logprobs[number].top
                assert top[0][1] - top[1][1] < 0.5, f"token {number} in a batch: {b}, alone {a}"
                break


def test_after_start_nothing_is_allocated_by_replays(directory: Path) -> None:
    llm = LLM(directory, device="cuda", decode_backend="stock", **OPTIONS)
    runner: Runner = llm.runner
    assert runner.graphs is not None
    answers(llm)
    before = torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved()
    answers(llm)
    assert (torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved()) == before


def test_exact_arithmetic_on_a_gpu_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="exact arithmetic runs on a CPU"):
        LLM(directory, device="cuda", mode="exact")

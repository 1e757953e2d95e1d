"""The engine on a GPU: decode steps from graphs, the same tokens as without them and as the CPU reference's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_cases import CLOSE_CALL, OWN_SHARE, behind_the_best, reference_of
from quickseek.engine.request import Status
from quickseek.engine.runner import Runner
from quickseek.errors import ConfigError
from quickseek.llm import LLM
from quickseek.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"device": "cuda", "max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}
OPTIONS |= {"jit_warmup": False, "max_num_seqs": 6, "decode_backend": "stock", "enable_prefix_caching": False}
PROMPTS = [[0, *range(20, 20 + count)] for count in (3, 40, 17, 120, 65)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def answers(llm: LLM, params: SamplingParams = GREEDY, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("drafts", [0, 5])
def test_tokens_are_those_of_the_cpu_reference(directory: Path, drafts: int) -> None:
    llm = LLM(directory, num_speculative_tokens=drafts, **OPTIONS)
    found = answers(llm)
    assert llm.runner.graphs is not None and llm.runner.graphs.replays > 3
    model = reference_of(directory, llm.model.backbone.hashes.token_map)
    behind = behind_the_best(model, PROMPTS, found)
    print(
        f"{directory.name}, {drafts} drafts: {float((behind == 0).double().mean()):.1%} the reference's own choice, "
        f"the others at most {float(behind.max()):.2f} standard deviations behind"
    )
    assert behind.max() < CLOSE_CALL and (behind == 0).double().mean() > OWN_SHARE
    wrong = behind_the_best(model, PROMPTS, [answer[::-1] for answer in found])
    assert wrong.max() > CLOSE_CALL and (wrong == 0).double().mean() < 0.3


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replays_give_what_eager_steps_give_bit_for_bit(directory: Path, drafts: int, temperature: float) -> None:
    """Where lists of selected positions are equally wide, as here: graphs size them by the block tables, eager steps by
    the positions reached, and another width may add in another order."""
    params = SamplingParams(max_tokens=24, temperature=temperature, top_p=0.9, seed=3, ignore_eos=True)
    llm = LLM(directory, num_speculative_tokens=drafts, **OPTIONS)
    replayed = answers(llm, params)
    graphs = llm.runner.graphs
    assert graphs is not None and graphs.replays > 3
    assert answers(llm, params) == replayed, "a second run"
    count = graphs.replays
    llm.runner.graphs = None
    assert answers(llm, params) == replayed, "eager steps"
    assert graphs.replays == count
    other = replace(params, seed=4) if temperature else replace(params, logit_bias={replayed[0][3]: -100.0})
    assert answers(llm, other) != replayed, "the comparison cannot fail"


def test_requests_that_come_and_go_leave_each_other_alone(directory: Path) -> None:
    llm = LLM(directory, num_speculative_tokens=2, **OPTIONS)
    model = reference_of(directory, llm.model.backbone.hashes.token_map)
    short = [PROMPTS[number % 3] for number in range(9)]
    found = answers(llm, prompts=short)
    assert behind_the_best(model, short, found).max() < CLOSE_CALL, "nine requests in six slots"
    mixed_up = behind_the_best(model, short, [*found[1:], found[0]])
    assert mixed_up.max() > CLOSE_CALL, "an answer to another's prompt is not noticed"


def allocated_by_decoding(llm: LLM, ticks: int) -> int:
    """Allocations on the GPU while requests do nothing but decode and take new blocks."""
    runner: Runner = llm.runner
    requests = llm._requests(PROMPTS, replace(GREEDY, max_tokens=64))
    for request in requests:
        runner.add(request)
    for _ in range(6):
        runner.step()
    blocks = sum(len(request.block_table) for request in requests)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(ticks):
        runner.step()
    count = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert all(request.state is Status.DECODE for request in requests)
    assert sum(len(request.block_table) for request in requests) > blocks, "no table was written"
    while not runner.idle:
        runner.step()
    return int(count)


def test_nothing_is_allocated_by_replays(directory: Path) -> None:
    llm = LLM(directory, **OPTIONS)
    assert llm.runner.graphs is not None
    assert allocated_by_decoding(llm, 20) == 0
    llm.runner.graphs = None
    assert allocated_by_decoding(llm, 20) > 0, "eager steps allocate, and it is not noticed"


def test_exact_arithmetic_on_a_gpu_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="exact arithmetic runs on a CPU"):
        LLM(directory, mode="exact", **OPTIONS)

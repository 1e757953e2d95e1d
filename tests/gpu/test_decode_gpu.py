"""The specialized decode on one GPU: captured in the engine's graphs, beside the stock layers on the same device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compare import LogitDistance, assert_bits, assert_model, logit_distance
from engine_cases import CLOSE_CALL, OWN_SHARE, behind_the_best, reference_of
from quickseek.engine.graphs import CudaGraphs
from quickseek.llm import LLM
from quickseek.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu
pytest.importorskip("cutlass")

OPTIONS: dict[str, Any] = {"device": "cuda", "max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}
OPTIONS |= {"jit_warmup": False, "max_num_seqs": 4, "enable_prefix_caching": False}
PROMPTS = [[0, *range(20, 20 + count)] for count in (3, 40, 17, 120)]
PARAMS = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


def specialized(directory: Path, drafts: int = 0) -> LLM:
    return LLM(directory, decode_backend="latency_specialized", num_speculative_tokens=drafts, **OPTIONS)


@torch.inference_mode()
def step_logits(llm: LLM, executor: bool) -> Tensor:
    """Logits of one step of four requests in the middle of their answers, by the executor or the stock layers."""
    cycle, backbone = llm.runner.cycle, llm.model.backbone
    kept, backbone.executor = backbone.executor, backbone.executor if executor else None
    try:
        graphs = CudaGraphs(cycle, [4])
        graphs._slots.copy_(torch.arange(1, 5, device="cuda"))
        graph, step = graphs._captured(lambda: cycle.verify(graphs._slots, cycle.pools.reach))
        graph.replay()
        first = step.logits.clone()
        graph.replay()
        assert_bits(step.logits, first, "a second replay")
        return first.flatten(0, 1).cpu()
    finally:
        backbone.executor = kept


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_captured_step_has_the_logits_of_the_stock_layers(directory: Path, drafts: int) -> None:
    llm = specialized(directory, drafts)
    for ids in PROMPTS:
        llm.runner.add(llm._requests([ids], PARAMS)[0])
    # The next row of each request lies in a block that it owns: rows of two without one would share scratch.
    for _ in range(9):
        llm.runner.step()
    stock, ours = step_logits(llm, executor=False), step_logits(llm, executor=True)
    print(f"{directory.name}, {drafts} drafts: {logit_distance(ours, stock)}")
    assert_model(ours, stock, LogitDistance(0.2, 1.5))
    with pytest.raises(AssertionError, match="distance"):
        assert_model(ours.roll(1, 0), stock, LogitDistance(0.2, 1.5))


@pytest.mark.parametrize("drafts", [0, 5])
def test_answers_are_plausible_to_the_reference(directory: Path, drafts: int) -> None:
    llm = specialized(directory, drafts)
    assert llm.executor is not None and llm.executor.runs > 0
    outputs = llm.generate(PROMPTS, PARAMS)
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    assert llm.runner.graphs is not None and llm.runner.graphs.replays > 3
    model = reference_of(directory, llm.model.backbone.hashes.token_map)
    tokens = [output.token_ids for output in outputs]
    behind = behind_the_best(model, PROMPTS, tokens)
    print(f"{directory.name}, {drafts} drafts: {float((behind == 0).double().mean()):.1%}, {float(behind.max()):.2f}")
    assert behind.max() < CLOSE_CALL and (behind == 0).double().mean() > OWN_SHARE
    assert behind_the_best(model, PROMPTS, [answer[::-1] for answer in tokens]).max() > CLOSE_CALL

"""The specialized decode on one GPU: captured in the engine's graphs, beside the stock layers on the same device."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_model, logit_distance
from quickseek.checkpoint.miniature import write_miniature
from quickseek.engine.graphs import CudaGraphs
from quickseek.llm import LLM
from quickseek.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu
pytest.importorskip("cutlass")

OPTIONS = {"device": "cuda", "max_model_len": 512, "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 4}
PROMPTS = [[0, *range(20, 20 + count)] for count in (3, 40, 17, 120)]
PARAMS = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module", params=["tiny", "tiny-tp", "mid"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("checkpoint") / request.param
    write_miniature(path, request.param)
    return path


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
    for _ in range(8):
        llm.runner.step()
    stock, ours = step_logits(llm, executor=False), step_logits(llm, executor=True)
    print(f"{directory.name}, {drafts} drafts: {logit_distance(ours, stock)}")
    bound = logit_distance(stock, stock)
    assert_model(ours, stock, type(bound)(0.2, 1.5))
    with pytest.raises(AssertionError, match="distance"):
        assert_model(ours.roll(1, 0), stock, type(bound)(0.2, 1.5))


@pytest.mark.parametrize("drafts", [0, 5])
def test_answers_are_those_of_the_stock_decode_up_to_close_calls(directory: Path, drafts: int) -> None:
    ours = specialized(directory, drafts)
    stock = LLM(directory, decode_backend="stock", **OPTIONS)
    assert ours.executor is not None and ours.executor.runs > 0 and stock.executor is None
    whole = 0
    for found, expected in zip(ours.generate(PROMPTS, PARAMS), stock.generate(PROMPTS, PARAMS), strict=True):
        assert found.error is expected.error is None and expected.logprobs is not None
        for number, (a, b) in enumerate(zip(found.token_ids, expected.token_ids, strict=True)):
            top = expected.logprobs[number].top
            if a != b:
                assert top[0][1] - top[1][1] < 0.5, f"token {number}: {a}, stock {b}, margin {top}"
                break
        else:
            whole += 1
    assert ours.runner.graphs is not None and ours.runner.graphs.replays > 3
    print(f"{directory.name}, {drafts} drafts: {whole} of {len(PROMPTS)} answers agree to their end")

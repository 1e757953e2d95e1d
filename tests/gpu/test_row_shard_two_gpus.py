"""Selections divided between two GPUs, in the engine's graphs, beside the replicated ones on the same devices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compare import LogitDistance, assert_bits, assert_model, logit_distance
from engine_cases import CLOSE_CALL, OWN_SHARE, behind_the_best, reference_of, written
from quickseek.engine.graphs import CudaGraphs
from quickseek.llm import LLM
from quickseek.model.attention import Attention
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import World
from quickseek.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu2, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
pytest.importorskip("cutlass")

OPTIONS: dict[str, Any] = {"device": "cuda", "tensor_parallel_size": 2, "max_model_len": 512, "max_num_seqs": 8}
OPTIONS |= {"jit_warmup": False}
OPTIONS |= {"kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False, "num_speculative_tokens": 3}
PROMPTS = [[0, *range(20, 20 + count)] for count in (3, 40, 17, 120, 9, 77, 31, 64)]
PARAMS = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
SOURCES = 3
"""Index sources of the miniature."""


def loaded(world: World, directory: str, **options: Any) -> LLM:
    return LLM(directory, world=world, decode_backend="latency_specialized", **OPTIONS, **options)


@torch.inference_mode()
def captured(llm: LLM, divided: bool) -> tuple[Tensor, list[Tensor], int, int]:
    """One recorded step of eight requests: logits, sorted lists by index source, selections divided, gathers fused."""
    executor, cycle = llm.executor, llm.runner.cycle
    assert executor is not None and executor.row_shard is not None
    shard, lists, original = executor.row_shard, [], Attention.attended
    before = shard.runs, shard.fused

    def attended(self: Attention, latent: Tensor, kv: Tensor, shared: Any, context: Any) -> Tensor:
        if self.indexer is not None:
            lists.append(shared.lists.sort(-1).values)
        return original(self, latent, kv, shared, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attention, "attended", attended)
        patch.setattr(executor, "row_shard", shard if divided else None)
        graphs = CudaGraphs(cycle, [8])
        graphs._slots.copy_(torch.arange(1, 9, device="cuda"))
        graph, step = graphs._captured(lambda: cycle.verify(graphs._slots, cycle.pools.reach))
    graph.replay()
    first = step.logits.clone()
    for _ in range(20):
        graph.replay()
    assert_bits(step.logits, first, "replays")
    # The step ran once before it was captured.
    recorded = [numbers.cpu() for numbers in lists[-SOURCES:]]
    return first.flatten(0, 1).cpu(), recorded, shard.runs - before[0], shard.fused - before[1]


def both(world: World, directory: str) -> dict[str, Any]:
    llm = loaded(world, directory)
    for ids in PROMPTS:
        llm.runner.add(llm._requests([ids], PARAMS)[0])
    for _ in range(9):
        llm.runner.step()
    return {"divided": captured(llm, True), "replicated": captured(llm, False)}


def share_of_equal(ours: Tensor, theirs: Tensor) -> float:
    """The share of each row's list that is in the other's too, over all rows."""
    pairs = zip(ours.tolist(), theirs.tolist(), strict=True)
    return sum(len(set(mine) & set(other)) / len(set(other)) for mine, other in pairs) / len(ours)


def test_a_captured_step_selects_and_computes_as_with_replicated_selections(tmp_path: Path) -> None:
    ranks = spawn(both, 2, str(written(tmp_path, "tiny-tp")), device="cuda", timeout_s=300)
    for rank in ranks:
        logits, lists, runs, fused = rank["divided"]
        # Once before the capture, and once in it; lists of three layers, candidate blocks of one.
        assert (runs, fused) == (2 * SOURCES, 2 * (SOURCES + 1))
        stock, wanted, runs, _ = rank["replicated"]
        assert runs == 0
        shares = [share_of_equal(ours, theirs) for ours, theirs in zip(lists, wanted, strict=True)]
        print(f"equal lists: {shares}; logits: {logit_distance(logits, stock)}")
        assert min(shares) > 0.95
        assert share_of_equal(lists[0].roll(len(lists[0]) // 2, 0), wanted[0]) < 0.95
        assert_model(logits, stock, LogitDistance(0.2, 1.5))
        for ours, theirs in zip(lists, ranks[0]["divided"][1], strict=True):
            assert torch.equal(ours, theirs)


def answers(world: World, directory: str, off: str) -> dict[str, Any]:
    llm = loaded(world, directory, decode_paths_off=off)
    assert llm.executor is not None
    full, padded = (llm.generate(prompts, PARAMS) for prompts in (PROMPTS, PROMPTS[:6]))
    shard = llm.executor.row_shard
    return {
        "tokens": [output.token_ids for output in (*full, *padded)],
        "errors": [output.error for output in (*full, *padded)],
        "divided": shard.runs if shard else 0,
        "replays": llm.runner.graphs.replays if llm.runner.graphs else 0,
        "map": llm.model.backbone.hashes.token_map.cpu(),
    }


@pytest.mark.parametrize("off", ["", "row_shard"])
def test_answers_are_plausible_to_the_reference_with_the_path_on_and_off_and_batches_padded(
    tmp_path: Path, off: str
) -> None:
    directory = written(tmp_path, "tiny-tp")
    first, second = spawn(answers, 2, str(directory), off, device="cuda", timeout_s=300)
    prompts = [*PROMPTS, *PROMPTS[:6]]
    assert first["tokens"] == second["tokens"] and first["errors"] == [None] * len(prompts)
    assert (first["divided"] > 0) == (off == "") and first["replays"] > 10
    model = reference_of(directory, first["map"])
    behind = behind_the_best(model, prompts, first["tokens"])
    print(f"off {off!r}: {float((behind == 0).double().mean()):.1%}, at most {float(behind.max()):.2f}")
    # Of as many tokens as these a few lie further behind, whoever chooses them.
    assert behind.quantile(0.98) < CLOSE_CALL and (behind == 0).double().mean() > OWN_SHARE
    backwards = behind_the_best(model, prompts, [answer[::-1] for answer in first["tokens"]])
    assert backwards.quantile(0.98) > CLOSE_CALL

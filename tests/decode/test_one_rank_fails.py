"""A fault on one rank of two, in any part of a step: it raises its error, its peer one that names it, nobody waits."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine_cases import written
from quickseek import LLM, SamplingParams
from quickseek.decode.attention import AttentionStep, DraftAttentionStep
from quickseek.decode.boundary import Boundaries, BoundaryAllReduce
from quickseek.decode.engram import EngramPrefetch
from quickseek.decode.executor import SpecializedDecode
from quickseek.decode.moe import MoEStep
from quickseek.engine.answer import Answer
from quickseek.engine.cycle import Cycle
from quickseek.engine.pools import Pools
from quickseek.engine.scheduler import Scheduler
from quickseek.errors import RankFailure
from quickseek.model.attention import Attention
from quickseek.model.backbone import DeepseekV4Model
from quickseek.model.dspark import DraftHead
from quickseek.model.engram import Engram
from quickseek.model.hyper_connections import HyperConnections
from quickseek.model.moe import MixtureOfExperts
from quickseek.model.vocabulary import VocabParallelHead
from quickseek.ops.collectives import AllReduceMHC, LamportAllGather
from quickseek.parallel.faults import PeersLost
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import DistributedWorld, World

ENGINE, TICK = "a step of the engine", "a tick of the engine"
STEP, DRAFT, GATHER = (
    "a step of the specialized decode",
    "a draft pass of the specialized decode",
    "the gather of logits",
)
PARTS: list[tuple[type, str, str]] = [
    (DeepseekV4Model, "share", STEP),
    (EngramPrefetch, "lookup", STEP),
    (EngramPrefetch, "forward", STEP),
    (Engram, "gather", STEP),
    (Boundaries, "first", STEP),
    (Boundaries, "sublayer", STEP),
    (Boundaries, "post_only", STEP),
    (BoundaryAllReduce, "__call__", STEP),
    (AllReduceMHC, "finalize", STEP),
    (HyperConnections, "forward", STEP),
    (AttentionStep, "run", STEP),
    (Attention, "attended", STEP),
    (MoEStep, "run", STEP),
    (MixtureOfExperts, "routed_part", STEP),
    (DraftAttentionStep, "run", DRAFT),
    (LamportAllGather, "__call__", GATHER),
    (VocabParallelHead, "forward", ENGINE),
    (SpecializedDecode, "embed", ENGINE),
    (SpecializedDecode, "plan", ENGINE),
    (DraftHead, "propose", ENGINE),
    (DraftHead, "write_context", ENGINE),
    (Cycle, "decide", ENGINE),
    (Answer, "take", ENGINE),
    (Pools, "check_guards", TICK),
    (Scheduler, "schedule", TICK),
]
"""A method that fails in its second decode step on rank 1, and what is being run then."""
LIMIT_S = 20.0
"""From a fault to the end of both ranks; a fraction of a second, but on a machine that does much else."""
PROMPTS = [[0, *range(8, 8 + count)] for count in (3, 11)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"decode_backend": "latency_specialized", "num_speculative_tokens": 3, "dtype": "float32"}
OPTIONS |= {"max_model_len": 128, "max_num_seqs": 2, "kv_cache_memory_bytes": 64 << 20}


class Planted(RuntimeError):
    """The exception of these tests."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("checkpoint"), "tiny-tp")


def plant(patch: pytest.MonkeyPatch, llm: LLM, owner: type, name: str, times: list[float]) -> None:
    """Make a method raise once the executor has run a step; ``times`` takes the moment."""
    original = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        assert llm.executor is not None and llm.executor.draft is not None
        if llm.executor.draft.runs and not times:
            times.append(time.time())
            raise Planted(f"{owner.__name__}.{name}")
        return original(*args, **kwargs)

    patch.setattr(owner, name, failing)


def ended(llm: LLM) -> dict[str, Any]:
    """How a rank's service ends: the error, and that of a second attempt, its cause, and when it came."""
    told: dict[str, Any] = {"errors": [], "cause": None}
    for _ in range(2):
        try:
            told["answers"] = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        except PeersLost as lost:
            told["errors"].append(str(lost))
            told["cause"] = told["cause"] or repr(lost.__cause__)
            told.setdefault("ended", time.time())
    return told


def fail_alone(world: World, directory: str, parts: list[tuple[type, str, str]]) -> list[dict[str, Any]]:
    """For each part: how this rank's service ends when it fails on rank 1. Each has connections of its own."""
    torch.set_num_threads(1)
    groups = [dist.new_group([0, 1]) for _ in parts]
    found = []
    for group, (owner, name, _) in zip(groups, parts, strict=True):
        llm = LLM(directory, world=DistributedWorld("cpu", group), tensor_parallel_size=2, **OPTIONS)
        times: list[float] = []
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 1:
                plant(patch, llm, owner, name, times)
            found.append(ended(llm) | {"failed": times, "open": llm.executor and llm.executor.streams.open})
    return found


def test_a_rank_that_fails_alone_in_any_part_is_named_with_its_error_by_all(directory: Path) -> None:
    first, second = spawn(fail_alone, 2, str(directory), PARTS, timeout_s=300)
    for (owner, name, what), peer, failed in zip(PARTS, first, second, strict=True):
        cause = f"{owner.__name__}.{name}"
        text = f"rank 1 failed in {what}: Planted: {cause}"
        assert failed["errors"] == peer["errors"] == [text, text], cause
        assert failed["cause"] == f"Planted('{cause}')" and peer["cause"] == "None"
        assert len(failed["failed"]) == 1 and not peer["failed"]
        waited = [one["ended"] - failed["failed"][0] for one in (peer, failed)]
        assert max(waited) < LIMIT_S, (cause, waited)
        assert failed["open"] == peer["open"] == []
        assert "answers" not in failed and "answers" not in peer


def test_ranks_without_a_fault_answer_alike(directory: Path) -> None:
    """Negative control: what is planted is what ends the service."""
    first, second = spawn(fail_alone, 2, str(directory), [(SpecializedDecode, "refresh", STEP)])
    assert first[0]["errors"] == second[0]["errors"] == []
    assert first[0]["answers"] == second[0]["answers"] and len(first[0]["answers"][1]) == GREEDY.max_tokens


def serve(world: World, directory: str) -> None:
    llm = LLM(directory, world=world, tensor_parallel_size=2, **OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            plant(patch, llm, MoEStep, "run", [])
        llm.generate(PROMPTS, GREEDY)


def test_what_a_user_sees_names_the_rank_and_its_cause_before_those_of_its_peers(directory: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        spawn(serve, 2, str(directory), timeout_s=200)
    assert time.monotonic() - begun < 100
    told = str(caught.value)
    assert caught.value.rank == 1 and told.startswith("rank 1 raised:\n")
    own, _, peers = told.partition("\nrank 0 raised:\n")
    assert "Planted: MoEStep.run" in own and "in failing" in own
    assert peers.rstrip().endswith(f"PeersLost: rank 1 failed in {STEP}: Planted: MoEStep.run")


def fail_together(world: World, directory: str) -> tuple[list[str | None], list[list[int]], list[list[int]]]:
    """Errors of requests when all ranks fail alike, the answers after that, and those that are right."""
    llm = LLM(directory, world=world, tensor_parallel_size=2, **OPTIONS)
    wanted = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, llm, MoEStep, "run", [])
        errors = [output.error for output in llm.generate(PROMPTS, GREEDY)]
    return errors, [output.token_ids for output in llm.generate(PROMPTS, GREEDY)], wanted


def test_ranks_that_fail_alike_end_requests_and_serve_on(directory: Path) -> None:
    for errors, answers, wanted in spawn(fail_together, 2, str(directory)):
        assert "Planted: MoEStep.run" in errors and set(errors) <= {"Planted: MoEStep.run", None}
        assert answers == wanted

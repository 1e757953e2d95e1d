"""Through the engine: the tokens of the stock decode, and how many of its steps the executor ran."""

from functools import cache
from typing import Any

import pytest

from quickseek import LLM, SamplingParams
from quickseek.checkpoint.miniature import write_miniature
from quickseek.decode.draft import DraftDecode
from quickseek.decode.executor import SpecializedDecode
from quickseek.decode.head import LogitsGather
from quickseek.errors import DecodeUnsupported, RankDisagreement
from quickseek.model.backbone import DeepseekV4Model
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import SoloWorld, World

PROMPTS = [[0, *range(8, 8 + count)] for count in (3, 11, 26)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float64",
    "max_model_len": 128,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 20,
    "kv_cache_memory_bytes": 64 << 20,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny-tp"
    write_miniature(path, "tiny-tp")
    return str(path)


def tokens(world: World, directory: str, backend: str, **options: Any) -> tuple[list[list[int]], int, int, int]:
    """Greedy tokens; forwards of the backbone, and how many of them and of the draft passes the executor ran."""
    llm = LLM(directory, world=world, tensor_parallel_size=world.size, decode_backend=backend, **OPTIONS, **options)
    forwards = []
    llm.model.backbone.register_forward_hook(lambda *_: forwards.append(1))
    outputs = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    if llm.executor is None:
        assert llm.model.backbone.executor is None
        return outputs, len(forwards), 0, 0
    return outputs, len(forwards), llm.executor.runs, llm.executor.draft.runs if llm.executor.draft else 0


@cache
def stock_tokens(directory: str, drafts: int = 0) -> list[list[int]]:
    """What one rank without an executor answers."""
    answers, _, runs, draft_runs = tokens(SoloWorld(), directory, "stock", num_speculative_tokens=drafts)
    assert runs == draft_runs == 0
    return answers


@pytest.mark.parametrize("drafts", [0, 3])
def test_auto_gives_the_tokens_of_stock_and_runs_every_decode_step(directory, drafts):
    wanted = stock_tokens(directory, drafts)
    found, forwards, runs, draft_runs = tokens(SoloWorld(), directory, "auto", num_speculative_tokens=drafts)
    assert found == wanted
    # Three prompts of 42 tokens in chunks of 20 take at least three eager steps; every other one is a decode step.
    print(f"{runs} of {forwards} steps ran in the executor, {draft_runs} draft passes")
    assert 0 < runs <= forwards - 3 and runs >= 0.7 * forwards
    assert draft_runs == (runs if drafts else 0)


def both_ways(world: World, directory: str) -> list[Any]:
    """Tokens of both backends on one rank of several, in float32, in which logits go through the Lamport gather."""
    options = {"num_speculative_tokens": 3, "dtype": "float32"}
    kept = OPTIONS | options
    found = []
    for backend in ("stock", "latency_specialized"):
        llm = LLM(directory, world=world, tensor_parallel_size=world.size, decode_backend=backend, **kept)
        found.append([output.token_ids for output in llm.generate(PROMPTS, GREEDY)])
    assert isinstance(llm.executor, SpecializedDecode) and isinstance(llm.executor.gather, LogitsGather)
    return [*found, llm.executor.runs, llm.executor.gather.fused]


def test_two_ranks_give_the_tokens_of_stock_with_the_gather_of_logits_in_use(directory):
    first, second = spawn(both_ways, 2, directory, timeout_s=300)
    assert first == second
    stock, specialized, runs, gathers = first
    # Every step has logits of the target and of three drafts.
    assert specialized == stock and runs > 0 and gathers > 3 * runs


def test_a_fault_in_the_executor_changes_tokens(directory, monkeypatch):
    """Negative control: the comparison would see an executor that is wrong."""
    wanted = stock_tokens(directory)
    original = SpecializedDecode.run

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs).flip(-1)

    monkeypatch.setattr(SpecializedDecode, "run", wrong)
    found, _, runs, _ = tokens(SoloWorld(), directory, "auto")
    assert runs > 0 and found != wanted
    assert [answer[0] for answer in found] == [answer[0] for answer in wanted], "prompts run the stock layers"


@pytest.mark.parametrize("part", [SpecializedDecode, DraftDecode])
def test_a_step_that_fails_in_the_executor_ends_its_requests_and_later_ones_are_right(directory, monkeypatch, part):
    llm = LLM(directory, decode_backend="latency_specialized", num_speculative_tokens=3, **OPTIONS)
    original, calls = part.run, []

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        calls.append(part)
        if len(calls) == 3:
            raise RuntimeError("planted")
        return out

    monkeypatch.setattr(part, "run", failing)
    outputs = llm.generate(PROMPTS, GREEDY)
    failed = [output for output in outputs if output.error is not None]
    assert failed and all("planted" in output.error for output in failed)
    for output, wanted in zip(outputs, stock_tokens(directory), strict=True):
        assert output.token_ids == wanted[: len(output.token_ids)]
        assert (output.finish_reason == "error") == (len(output.token_ids) < len(wanted))
    assert llm.executor is not None and llm.executor.streams.open == []
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == stock_tokens(directory)


def test_prompts_never_reach_the_executor(directory, monkeypatch):
    counted = []
    original = DeepseekV4Model.forward

    def forward(self: Any, ids: Any, *args: Any, context: Any, **kwargs: Any) -> Any:
        before = self.executor.runs
        out = original(self, ids, *args, context=context, **kwargs)
        counted.append((context.num_prefills, self.executor.runs - before))
        return out

    monkeypatch.setattr(DeepseekV4Model, "forward", forward)
    tokens(SoloWorld(), directory, "auto")
    assert {runs for prefills, runs in counted if prefills} == {0}
    assert {runs for prefills, runs in counted if not prefills} == {1}


def test_what_is_missing_refuses_or_falls_back(directory):
    adaptive = {"num_speculative_tokens": 3, "draft_confidence_threshold": 0.2}
    with pytest.raises(DecodeUnsupported, match=r"needs a fixed number of drafts to verify, .*\(found 0.2\)\.$"):
        LLM(directory, decode_backend="latency_specialized", **OPTIONS, **adaptive)
    found, _, runs, _ = tokens(SoloWorld(), directory, "auto", **adaptive)
    assert runs == 0 and found == stock_tokens(directory)


def disagree(world: World, directory: str) -> str:
    try:
        backend = ("stock", "auto")[world.rank]
        LLM(directory, world=world, tensor_parallel_size=2, decode_backend=backend, **OPTIONS)
    except RankDisagreement as error:
        return str(error)
    return "no error"


def test_ranks_that_were_given_different_backends_all_say_so(directory):
    assert spawn(disagree, 2, directory) == ["ranks disagree on decode_backend (rank 0: 'stock'; rank 1: 'auto')"] * 2

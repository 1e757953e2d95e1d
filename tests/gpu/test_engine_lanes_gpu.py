"""The engine on a GPU beside its free lane: what goes between replays leaves them, and is left by them, as it was."""

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_cases import CLOSE_CALL, behind_the_best, finished, reference_of, written
from quickseek.engine.async_engine import AsyncEngine
from quickseek.engine.cycle import Cycle, Needs
from quickseek.engine.graphs import CudaGraphs
from quickseek.engine.request import Request
from quickseek.engine.runner import Runner, RunnerOptions
from quickseek.llm import LLM
from quickseek.model.causal_lm import CausalLM
from quickseek.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"device": "cuda", "max_model_len": 256, "kv_cache_memory_bytes": 256 << 20}
OPTIONS |= {"jit_warmup": False, "max_num_seqs": 4, "decode_backend": "stock", "num_speculative_tokens": 3}
PROMPTS = [[0, *range(20, 20 + count)] for count in (3, 40, 17, 65)]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("checkpoint"), "tiny")


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(directory, **OPTIONS)


@pytest.fixture(scope="module")
def reference(directory: Path, llm: LLM) -> CausalLM:
    return reference_of(directory, llm.model.backbone.hashes.token_map)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> Runner:
    """A runner that keeps no prefix, so that runs repeat bit for bit."""
    return runner_of(llm)


def runner_of(llm: LLM, num_blocks: int | None = None, **options: Any) -> Runner:
    plan = llm.runner.plan if num_blocks is None else replace(llm.runner.plan, num_blocks=num_blocks)
    chosen = RunnerOptions(**{"prefix_caching": False, **options})
    return Runner(llm.model, llm.tokenizer, plan, "lanes", chosen)


def requests(llm: LLM, params: SamplingParams, prompts: Sequence[list[int]] = PROMPTS) -> list[Request]:
    return llm._requests(prompts, params)


def graphs_of(runner: Runner) -> CudaGraphs:
    assert runner.graphs is not None
    return runner.graphs


def tokens(runner: Runner, asked: Sequence[Request]) -> list[list[int]]:
    return [output.token_ids for output in finished(runner, asked)]


def eagerly(runner: Runner, run: Callable[[], Any]) -> Any:
    """What ``run`` gives while the runner replays nothing."""
    graphs, runner.graphs = runner.graphs, None
    try:
        return run()
    finally:
        runner.graphs = graphs


def assert_plausible(reference: CausalLM, prompts: list[list[int]], answers: list[list[int]]) -> None:
    behind = behind_the_best(reference, prompts, answers)
    print(f"{float((behind == 0).double().mean()):.1%}, at most {float(behind.max()):.2f} behind")
    assert behind.max() < CLOSE_CALL
    assert behind_the_best(reference, prompts, [answer[::-1] for answer in answers]).max() > CLOSE_CALL


# ------------------------------------------------------------------------------------------ V replayed, D not

EAGER_D = {
    "logprobs": (replace(SAMPLED, logprobs=3), replace(SAMPLED, logprobs=3, seed=4)),
    "penalties": (replace(GREEDY, presence_penalty=1.5, repetition_penalty=1.3), GREEDY),
    "bias": (replace(GREEDY, logit_bias={40: 4.0, 41: 4.0}), GREEDY),
    "min_tokens": (replace(SAMPLED, min_tokens=12, stop_token_ids=tuple(range(20, 148))), SAMPLED),
}
"""What needs a D of its own, and requests that get other tokens."""


@pytest.mark.parametrize("kind", EAGER_D)
def test_a_replayed_v_with_an_eager_d_gives_what_eager_steps_give(llm: LLM, plain: Runner, kind: str) -> None:
    def run(params: SamplingParams) -> list[tuple[list[int], Any]]:
        return [(output.token_ids, output.logprobs) for output in finished(plain, requests(llm, params))]

    params, other = EAGER_D[kind]
    graphs = graphs_of(plain)
    before = graphs.replays
    found = run(params)
    assert graphs.replays > before and all(needs != Needs.of(requests(llm, params)) for _, needs in graphs._decide)
    assert eagerly(plain, lambda: run(params)) == found
    assert all((logprobs is not None) == (kind == "logprobs") for _, logprobs in found)
    assert [answer for answer, _ in run(other)] != [answer for answer, _ in found], "the comparison cannot fail"


def test_sampled_drafts_come_from_a_captured_d_as_from_an_eager_one(llm: LLM) -> None:
    runner = runner_of(llm, sampled_drafts=True)
    graphs = graphs_of(runner)
    assert any(needs == Needs.of(requests(llm, SAMPLED)) for _, needs in graphs._decide)
    found = tokens(runner, requests(llm, SAMPLED))
    count = graphs.replays
    assert count > 3
    assert eagerly(runner, lambda: tokens(runner, requests(llm, SAMPLED))) == found and graphs.replays == count
    assert tokens(runner, requests(llm, replace(SAMPLED, seed=4))) != found, "the comparison cannot fail"


# ------------------------------------------------------------------------------------------ between replays


def test_a_grammar_between_free_requests_binds_its_own_alone(llm: LLM, plain: Runner, reference: CausalLM) -> None:
    pytest.importorskip("xgrammar")
    pattern = "[ab]{4}"
    masked = requests(llm, SamplingParams(max_tokens=20, temperature=0.0, regex=pattern), PROMPTS[:1])
    free = requests(llm, replace(GREEDY, max_tokens=40), PROMPTS[1:3])
    graphs = graphs_of(plain)
    before = graphs.replays
    first, bound, second = finished(plain, [free[0], *masked, free[1]])
    assert re.fullmatch(pattern, bound.text) and bound.finish_reason == "stop"
    assert graphs.replays > before, "nothing was replayed once the grammar was done"
    assert_plausible(reference, PROMPTS[1:3], [first.token_ids, second.token_ids])
    assert not re.fullmatch(pattern, finished(plain, requests(llm, GREEDY, PROMPTS[:1]))[0].text)


def test_preemption_and_abort_between_replays_leave_the_others_alone(llm: LLM, reference: CausalLM) -> None:
    runner = runner_of(llm, num_blocks=10)
    params = replace(GREEDY, max_tokens=40)
    asked = requests(llm, params, PROMPTS[1:3] * 2)
    answers = tokens(runner, asked)
    assert sum(request.preemptions for request in asked) > 0, "nothing was preempted: the test shows nothing"
    assert_plausible(reference, PROMPTS[1:3] * 2, answers)
    kept, dropped = requests(llm, params, PROMPTS[1:3])
    runner.add(dropped)
    runner.add(kept)
    count = graphs_of(runner).replays
    for _ in range(5):
        runner.step()
    runner.abort(dropped.request_id)
    finished(runner, [])
    assert graphs_of(runner).replays > count and kept.finish_reason == "length"
    assert_plausible(reference, [PROMPTS[1]], [kept.output_ids])


def test_a_restored_prefix_between_replays_is_the_one_that_was_kept(llm: LLM, reference: CausalLM) -> None:
    runner = runner_of(llm, prefix_caching=True)
    prompt = PROMPTS[3]
    tokens(runner, requests(llm, GREEDY, [prompt]))
    longer = [*prompt, 90, 91, 92]
    again = requests(llm, GREEDY, [longer, PROMPTS[1]])
    answers = tokens(runner, again)
    assert again[0].cached_tokens == len(prompt) and again[1].cached_tokens == 0
    assert_plausible(reference, [longer, PROMPTS[1]], answers)
    # The same prefix again, as it is and then spoiled: what is restored is what is read.
    ending = [*prompt, 93, 94, 95]

    def repeated() -> list[list[int]]:
        asked = requests(llm, GREEDY, [ending])
        found = tokens(runner, asked)
        assert asked[0].cached_tokens >= len(prompt)
        return found

    first, kept = repeated(), repeated()
    assert_plausible(reference, [ending], first)
    assert repeated() == kept
    for cache in runner.pools.caches.values():
        cache.tensor.zero_()
    assert repeated() != kept, "spoiling is not noticed"


# ------------------------------------------------------------------------------------------ start, threads, the end


def test_a_capture_that_fails_says_so_and_spoils_no_other_graph(
    llm: LLM, plain: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, expected = Cycle.decide, tokens(plain, requests(llm, GREEDY))

    def fail(self: Cycle, *arguments: Any, **named: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise MemoryError("planted")
        return real(self, *arguments, **named)

    monkeypatch.setattr(Cycle, "decide", fail)
    with pytest.raises(MemoryError, match="planted") as caught:
        runner_of(llm)
    assert caught.value.__notes__ == ["while the decode graphs for 4 requests were captured"]
    monkeypatch.undo()
    assert tokens(plain, requests(llm, GREEDY)) == expected
    assert tokens(runner_of(llm), requests(llm, GREEDY)) == expected


def test_a_runner_may_step_on_another_thread_than_it_was_made_on(llm: LLM, plain: Runner) -> None:
    expected = tokens(plain, requests(llm, GREEDY))
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: tokens(plain, requests(llm, GREEDY))).result() == expected
        assert tokens(thread.submit(lambda: runner_of(llm)).result(), requests(llm, GREEDY)) == expected
    engine = AsyncEngine(runner_of(llm))

    async def together(params: SamplingParams) -> list[list[int]]:
        outputs = await asyncio.gather(*map(engine.generate, requests(llm, params, PROMPTS[:1])))
        return [output.token_ids for output in outputs]

    try:
        alone = tokens(plain, requests(llm, GREEDY, PROMPTS[:1]))
        assert asyncio.run(together(GREEDY)) == alone
        assert asyncio.run(together(replace(SAMPLED, seed=9))) != alone, "the comparison cannot fail"
    finally:
        engine.close()


def test_an_interrupted_model_goes_on_in_the_same_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    expected = [output.token_ids for output in llm.generate(PROMPTS[:1], GREEDY)]
    before, graphs = torch.cuda.memory_allocated(), llm.runner.graphs
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(graphs, "run", interrupt)
        llm.generate(PROMPTS[:1], GREEDY)
    assert [output.token_ids for output in llm.generate(PROMPTS[:1], GREEDY)] == expected
    assert llm.runner.graphs is graphs and torch.cuda.memory_allocated() <= before + (1 << 20)

"""Greedy tokens are those of plain decoding, whatever runs beside a request and however it is run (float64)."""

import random
import sys
from dataclasses import replace
from types import FrameType

import pytest
import torch
from micro import GREEDY, alone, assert_nothing_leaks, finish_all, make_request, make_runner, micro_config, tokens_of

from quickseek.engine.cycle import Cycle, Needs
from quickseek.engine.grammar import TokenMasks
from quickseek.engine.pools import PoolOverrun
from quickseek.errors import ConfigError, PromptError
from quickseek.model.backbone import DeepseekV4Model
from quickseek.ops.rows import StepRows
from quickseek.sampling_params import SamplingParams

SHUFFLE = random.Random(5)
PROMPTS = [[SHUFFLE.randrange(20, 500) for _ in range(length)] for length in (1, 2, 7, 8, 9, 15, 23, 40)]


@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 4, 5])
def test_a_batch_with_any_number_of_drafts_is_plain_decoding(drafts: int) -> None:
    runner = make_runner(drafts=drafts)
    assert tokens_of(runner, [make_request(prompt) for prompt in PROMPTS]) == [alone(prompt) for prompt in PROMPTS]
    assert_nothing_leaks(runner)


def test_every_split_of_a_prompt_into_chunks_is_plain_decoding() -> None:
    prompt = PROMPTS[-2]
    for chunk in range(1, len(prompt) + 1):
        runner = make_runner(snapshots=0, max_num_seqs=1, max_num_batched_tokens=chunk)
        assert tokens_of(runner, [make_request(prompt)]) == [alone(prompt)], f"chunks of {chunk}"


@pytest.mark.parametrize("drafts", [0, 5])
def test_a_warm_cache_is_a_cold_one_at_even_and_odd_lengths(drafts: int) -> None:
    runner = make_runner(drafts=drafts, snapshots=6)
    prompt = PROMPTS[-2]
    first = make_request(prompt)
    assert tokens_of(runner, [first]) == [alone(prompt)] and first.cached_tokens == 0
    answer = alone(prompt)
    for extra in range(1, 5):
        # The conversation goes on: from the end of the answer, and from the end of the prompt.
        longer = [*prompt, *answer, *range(30, 30 + extra)]
        again = make_request(longer)
        assert tokens_of(runner, [again]) == [alone(longer)] and again.cached_tokens >= len(prompt)
        branch = [*prompt, *range(60 + 10 * extra, 60 + 11 * extra)]
        again = make_request(branch)
        assert tokens_of(runner, [again]) == [alone(branch)] and again.cached_tokens == len(prompt)
    repeated = make_request(prompt)
    assert tokens_of(runner, [repeated]) == [alone(prompt)] and repeated.cached_tokens == len(prompt) - 1
    assert_nothing_leaks(runner)


def test_a_salt_keeps_prefixes_apart() -> None:
    runner = make_runner()
    tokens_of(runner, [make_request(PROMPTS[-1], cache_salt="a")])
    for salt in ("b", "", "\ud800"):
        other = make_request(PROMPTS[-1], cache_salt=salt)
        assert tokens_of(runner, [other]) == [alone(PROMPTS[-1])] and other.cached_tokens == 0


def test_snapshots_inside_a_prompt_serve_a_shared_beginning() -> None:
    runner = make_runner(snapshot_interval=16, snapshots=8)
    shared = PROMPTS[-1][:37]
    tokens_of(runner, [make_request([*shared, 21, 22, 23])])
    other = make_request([*shared, 400, 401])
    assert tokens_of(runner, [other]) == [alone([*shared, 400, 401])] and other.cached_tokens == 32


def test_a_spoiled_snapshot_would_be_noticed() -> None:
    """Negative control of the warm cache tests."""
    runner = make_runner(snapshots=6)
    prompt = PROMPTS[-2]
    tokens_of(runner, [make_request(prompt)])
    for slot in runner.plan.snapshot_slots:
        runner.pools.caches["layers.1.window"].tensor[slot] += 1.0
    longer = [*prompt, 33, 34]
    assert tokens_of(runner, [make_request(longer)]) != [alone(longer)]


def test_approximate_reuse_is_off_by_default_and_reuses_blocks_without_a_snapshot() -> None:
    runner = make_runner(approximate_prefix=True, snapshots=1)
    prompt = PROMPTS[-1]
    tokens_of(runner, [make_request(prompt)])
    tokens_of(runner, [make_request(PROMPTS[5])])
    branch = make_request([*prompt[:34], 77, 78, 79])
    tokens_of(runner, [branch])
    # Four full blocks of 8 match; the last window of 8 is replayed.
    assert branch.cached_tokens == 24
    assert_nothing_leaks(runner)


@pytest.mark.parametrize("drafts", [0, 3])
def test_preemption_by_recomputation_changes_no_token(drafts: int) -> None:
    runner = make_runner(drafts=drafts, num_blocks=14, max_num_seqs=4, snapshots=2)
    params = replace(GREEDY, max_tokens=24)
    requests = [make_request(prompt, params) for prompt in PROMPTS[2:7]]
    assert tokens_of(runner, requests) == [alone(prompt, 24) for prompt in PROMPTS[2:7]]
    assert sum(request.preemptions for request in requests) > 0, "nothing was preempted: the test shows nothing"
    assert_nothing_leaks(runner)


def test_a_more_important_request_goes_first() -> None:
    runner = make_runner(max_num_seqs=1, snapshots=0)
    late, early = make_request(PROMPTS[3], priority=5), make_request(PROMPTS[4], priority=1)
    runner.add(late)
    runner.add(early)
    order = []
    while not runner.idle:
        order += [update.output.request_id for update in runner.step() if update.output.finished]
    assert order == [early.request_id, late.request_id]


def test_an_abort_at_any_tick_frees_everything_and_leaves_others_alone() -> None:
    for tick in range(12):
        runner = make_runner(drafts=2, max_num_batched_tokens=16)
        kept, dropped = make_request(PROMPTS[6]), make_request(PROMPTS[7])
        runner.add(kept)
        runner.add(dropped)
        outputs = {}
        for number in range(200):
            if number == tick:
                update = runner.abort(dropped.request_id)
                assert update is None or update.output.finish_reason == "abort"
                assert runner.abort(dropped.request_id) is None
            if runner.idle:
                break
            for update in runner.step():
                outputs[update.output.request_id] = update.output
        assert outputs[kept.request_id].token_ids == alone(PROMPTS[6])
        assert_nothing_leaks(runner)


def test_ends_on_the_device_and_limits_are_exact() -> None:
    expected = alone(PROMPTS[6])
    stop = expected[5]
    for drafts in (0, 5):
        runner = make_runner(drafts=drafts)
        params = replace(GREEDY, stop_token_ids=(stop,))
        runner.add(make_request(PROMPTS[6], params))
        runner.add(make_request(PROMPTS[6], replace(GREEDY, max_tokens=7)))
        ended = {}
        while not runner.idle:
            for update in runner.step():
                if update.output.finished:
                    ended[update.output.finish_reason] = update.output
        assert ended["stop"].token_ids == expected[: expected.index(stop) + 1] and ended["stop"].stop_reason == stop
        assert ended["length"].token_ids == expected[:7]


def test_min_tokens_forbids_ends_until_then() -> None:
    expected = alone(PROMPTS[6])
    params = replace(GREEDY, stop_token_ids=(expected[1],), min_tokens=6)
    for drafts in (0, 4):
        tokens = tokens_of(make_runner(drafts=drafts), [make_request(PROMPTS[6], params)])[0]
        assert len(tokens) >= 6 and expected[1] not in tokens[:5]


SAMPLED = SamplingParams(max_tokens=12, temperature=1.2, top_p=0.9, top_k=50, min_p=0.01, seed=4, ignore_eos=True)
PENALISED = replace(SAMPLED, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias={40: 3.0})


@pytest.mark.parametrize("params", [SAMPLED, PENALISED, replace(PENALISED, temperature=0.0)])
def test_sampled_and_penalised_tokens_do_not_depend_on_company_or_greedy_drafts(params: SamplingParams) -> None:
    expected = [tokens_of(make_runner(snapshots=0), [make_request(prompt, params)])[0] for prompt in PROMPTS[2:6]]
    for drafts, blocks in ((0, 14), (3, None), (5, 16)):
        runner = make_runner(drafts=drafts, num_blocks=blocks)
        assert tokens_of(runner, [make_request(prompt, params) for prompt in PROMPTS[2:6]]) == expected
    other = replace(params, seed=5)
    if not params.greedy:
        assert tokens_of(make_runner(), [make_request(prompt, other) for prompt in PROMPTS[2:6]]) != expected


def test_sampled_drafts_and_confidence_keep_greedy_requests_as_they_are() -> None:
    for options in ({"sampled_drafts": True}, {"confidence": 0.5}, {"sampled_drafts": True, "confidence": 0.2}):
        runner = make_runner(drafts=5, **options)
        mixed = [make_request(PROMPTS[3]), make_request(PROMPTS[4], SAMPLED), make_request(PROMPTS[5])]
        tokens = tokens_of(runner, mixed)
        assert tokens[0] == alone(PROMPTS[3]) and tokens[2] == alone(PROMPTS[5]) and len(tokens[1]) == 12
        assert_nothing_leaks(runner)


def test_log_probabilities_come_with_every_token_and_as_many_alternatives_as_asked() -> None:
    runner = make_runner(drafts=3)
    asked, more = (
        make_request(PROMPTS[4], replace(GREEDY, logprobs=2)),
        make_request(PROMPTS[5], replace(GREEDY, logprobs=4)),
    )
    outputs = {}
    for request in (asked, more):
        runner.add(request)
    while not runner.idle:
        for update in runner.step():
            outputs[update.output.request_id] = update.output
    rows = outputs[asked.request_id].logprobs
    assert rows is not None and [row.token_id for row in rows] == alone(PROMPTS[4])
    assert all(row.rank == 1 and len(row.top) == 2 and row.top[0] == (row.token_id, row.logprob) for row in rows)
    assert all(len(row.top) == 4 for row in outputs[more.request_id].logprobs or [])


def test_a_stop_string_is_found_late_and_nothing_after_it_is_shown() -> None:
    runner = make_runner(drafts=5)
    plain = make_request(PROMPTS[6], replace(GREEDY, max_tokens=30))
    runner.add(plain)
    text = ""
    while not runner.idle:
        text = "".join([text, *(update.text for update in runner.step())])
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    request = make_request(PROMPTS[6], replace(GREEDY, max_tokens=30, stop=stop))
    runner.add(request)
    shown, output = "", None
    while not runner.idle:
        for update in runner.step():
            shown, output = shown + update.text, update.output
    assert output is not None and output.finish_reason == "stop" and output.stop_reason == stop
    assert shown == output.text == text[: text.index(stop)]
    assert_nothing_leaks(runner)


def test_one_request_that_fails_fails_alone() -> None:
    runner = make_runner(drafts=2)
    bad, good = make_request(PROMPTS[3]), make_request(PROMPTS[4])
    runner.add(bad)
    runner.add(good)

    def explode(*_: object) -> None:
        raise ValueError("planted")

    runner.answers[bad.request_id].take = explode  # type: ignore[method-assign, assignment]
    outputs = {}
    while not runner.idle:
        for update in runner.step():
            outputs[update.output.request_id] = update.output
    assert outputs[bad.request_id].finish_reason == "error" and "planted" in (outputs[bad.request_id].error or "")
    assert outputs[good.request_id].token_ids == alone(PROMPTS[4])
    assert_nothing_leaks(runner)


@pytest.mark.parametrize("part", ["_restore", "_prefill", "_decode", "_masks"])
def test_a_tick_that_fails_ends_its_requests_and_the_runner_goes_on(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(drafts=2)
    planted = {"_restore": (runner.state, "begin"), "_prefill": (runner.cycle, "prefill")}
    planted |= {"_decode": (runner.cycle, "decide"), "_masks": (TokenMasks, "fill")}
    target, name = planted[part]
    real, calls = getattr(target, name), []

    def explode(*arguments: object, **named: object) -> object:
        calls.append(name)
        if len(calls) == (2 if part == "_decode" else 1):
            raise MemoryError("planted")
        return real(*arguments, **named)

    monkeypatch.setattr(target, name, explode)
    budget = 50 if part == "_masks" else None
    bad = make_request(PROMPTS[3], replace(GREEDY, thinking_token_budget=budget))
    good = make_request(PROMPTS[4], priority=1)
    runner.add(bad)
    outputs = {}
    for tick in range(200):
        if tick == 3:
            runner.add(good)
        for update in runner.step():
            outputs[update.output.request_id] = update.output
    assert outputs[bad.request_id].finish_reason == "error" and "planted" in (outputs[bad.request_id].error or "")
    assert outputs[good.request_id].token_ids == alone(PROMPTS[4])
    assert_nothing_leaks(runner)


def test_numbers_that_no_tensor_holds_do_no_harm() -> None:
    runner = make_runner()
    huge = replace(GREEDY, max_tokens=10**30, min_tokens=10**30, ignore_eos=False, thinking_token_budget=10**30)
    request = make_request(PROMPTS[3], huge)
    assert len(tokens_of(runner, [request])[0]) == request.limit
    assert_nothing_leaks(runner)


def test_a_request_that_can_never_fit_is_refused_with_what_would() -> None:
    runner = make_runner(num_blocks=5)
    with pytest.raises(PromptError, match=r"at most 3\d together"):
        runner.add(make_request(PROMPTS[-1], replace(GREEDY, max_tokens=50)))
    with pytest.raises(ConfigError, match="stop_token_ids"):
        runner.add(make_request(PROMPTS[0], replace(GREEDY, stop_token_ids=(512,))))
    assert not runner.answers


def test_a_write_outside_a_pool_names_the_step() -> None:
    runner = make_runner()
    runner.add(make_request(PROMPTS[3]))
    runner.step()
    memory, size = runner.pools._guards["layers.3.global_kv"]
    memory[256 + size] = 0
    with pytest.raises(PoolOverrun, match=r"step 1 wrote after the pool layers\.3\.global_kv"):
        runner.step()
    # The canary is whole again: what comes after is not blamed.
    assert tokens_of(runner.renewed(), [make_request(PROMPTS[3])]) == [alone(PROMPTS[3])]


HOST_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero")


def test_nothing_in_v_and_d_reads_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turning a tensor into a host value is an error, except inside a CPU reference."""
    readers: list[str] = []

    def guard(name: str) -> None:
        original = getattr(torch.Tensor, name)

        def guarded(self: torch.Tensor, *args: object, **kwargs: object) -> object:
            frame = sys._getframe(1)
            while frame.f_back is not None and "quickseek" not in frame.f_code.co_filename:
                frame = frame.f_back
            readers.append(frame.f_code.co_filename)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, guarded)

    runner = make_runner(drafts=3)
    for prompt in PROMPTS[2:5]:
        runner.add(make_request(prompt, PENALISED))
    runner.step()
    slots = torch.tensor([request.slot for request in runner.scheduler.running])
    needs = Needs.of(runner.scheduler.running)
    for name in HOST_READS:
        guard(name)
    with torch.inference_mode():
        decision = runner.cycle.decide(runner.cycle.verify(slots, 64), needs)
    assert readers, "the references read on a CPU: if nothing is seen, the guard guards nothing"
    assert all(reader.endswith("reference.py") for reader in readers), readers
    readers.clear()
    decision.tokens.tolist()
    assert readers


def engine_opcodes(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Opcodes of engine code that launch one cycle of ``count`` requests that decoded together before."""
    runner = make_runner(snapshots=0, max_num_seqs=count)
    for number in range(count):
        runner.add(make_request([30 + number, 40], replace(GREEDY, max_tokens=30)))
    for _ in range(6):
        runner.step()
    seen = [0]

    def trace(frame: FrameType, event: str, _: object) -> object:
        if "quickseek/engine" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        seen[0] += event == "opcode"
        return trace

    tick, read = runner.scheduler.schedule(), runner._read
    monkeypatch.setattr(runner.scheduler, "schedule", lambda: tick)
    monkeypatch.setattr(runner, "_read", lambda cycle: [])
    assert len(tick.decodes) == count and not tick.table_updates
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        runner.step()
    finally:
        sys.settrace(before)
    assert seen[0] > 100 and read(tick.cycle)
    return seen[0]


def test_launching_a_batch_again_runs_no_python_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_opcodes(2, monkeypatch) == engine_opcodes(4, monkeypatch)
    original = Cycle.verify

    def asking(self: Cycle, slots: torch.Tensor, max_length: int, drafts: int | None = None) -> object:
        for _ in range(slots.shape[0]):
            Needs.of([])
        return original(self, slots, max_length, drafts)

    monkeypatch.setattr(Cycle, "verify", asking)
    assert engine_opcodes(2, monkeypatch) != engine_opcodes(4, monkeypatch), "work per request is not noticed"


def test_engram_ids_of_a_split_prompt_are_the_whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, seen = PROMPTS[-2], []
    prepare, prefill = DeepseekV4Model.prepare_embeddings, Cycle.prefill

    def record(self: DeepseekV4Model, hashes: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        seen.append(hashes[0].clone())
        return prepare(self, hashes)

    def forgetful(
        self: Cycle, slots: torch.Tensor, ids: torch.Tensor, rows: StepRows, lookback: torch.Tensor, **rest: object
    ) -> torch.Tensor:
        return prefill(self, slots, ids, rows, torch.full_like(lookback, -1), **rest)  # type: ignore[arg-type]

    def ids_in_chunks(size: int) -> torch.Tensor:
        seen.clear()
        runner = make_runner(snapshots=0, max_num_batched_tokens=size)
        runner.add(make_request(prompt, replace(GREEDY, max_tokens=1)))
        finish_all(runner)
        return torch.cat(seen)[: len(prompt)]

    monkeypatch.setattr(DeepseekV4Model, "prepare_embeddings", record)
    whole = ids_in_chunks(len(prompt))
    assert len(whole) == len(prompt) and micro_config().engram_layout.lookback == 3
    for size in range(1, len(prompt)):
        assert torch.equal(ids_in_chunks(size), whole), f"chunks of {size}"
    monkeypatch.setattr(Cycle, "prefill", forgetful)
    assert not torch.equal(ids_in_chunks(5), whole), "losing the look-back is not noticed"

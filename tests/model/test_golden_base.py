"""The golden checkpoint in exact float32 against tests/golden/base (tolerances: its README, section 6)."""

import pytest
import torch

import compare
from golden_check import Run, compare_case, compare_draft
from golden_data import DRAFT_LENGTHS, LENGTHS, golden
from model_driver import Batch
from quickseek.model.causal_lm import CausalLM
from recorder import Recorder

EXACT_TOLERANCE = 1e-5
"""Typical for another float32 program; a semantic error is far above 1e-4."""


@pytest.fixture(scope="module")
def exact_runs(exact_model: CausalLM) -> dict[int, Run]:
    return {length: Run(exact_model, golden(f"exact.len{length}")["ids"]) for length in LENGTHS}


# ---------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("length", LENGTHS)
def test_every_tensor_of_a_prompt_is_the_golden_one(exact_runs: dict[int, Run], length: int) -> None:
    worst = compare_case(exact_runs[length], golden(f"exact.len{length}"), EXACT_TOLERANCE)
    print(f"exact.len{length}: largest relative error {worst:.1e}")


@pytest.mark.parametrize("length", DRAFT_LENGTHS)
def test_every_tensor_of_a_draft_is_the_golden_one(exact_model: CausalLM, length: int) -> None:
    run = Run(exact_model, golden(f"exact.len{length}")["ids"])
    want = golden(f"exact.draft{length}")
    assert int(run.logits[-1].argmax()) == int(want["anchor"])
    worst = compare_draft(run, want, EXACT_TOLERANCE)
    print(f"exact.draft{length}: largest relative error {worst:.1e}")


def test_confidence_reads_the_state_before_the_last_norm(exact_model: CausalLM) -> None:
    want = golden("exact.draft64")
    drafts = Run(exact_model, golden("exact.len64")["ids"]).batch.draft([int(want["anchor"])])
    with pytest.raises(AssertionError, match="relative error"):
        compare.assert_relative(
            torch.logit(drafts.confidence[0].double()), want["confidence_logit_normed_input"], EXACT_TOLERANCE
        )


@pytest.mark.parametrize(
    "sizes",
    # Single tokens from the first to past every border (48 positions of candidates), and after a long chunk.
    [(*(1,) * 52, 124, *(1,) * 24), (17, 1, 64, 3, 33, 2, 80)],
    ids=["token by token", "chunks"],
)
def test_decoding_in_pieces_is_the_full_forward(
    exact_model: CausalLM, exact_runs: dict[int, Run], sizes: tuple[int, ...]
) -> None:
    whole = exact_runs[200]
    with Recorder(exact_model) as recorder:
        logits = Batch(exact_model).chunks(golden("exact.len200")["ids"], sizes)
    compare.assert_relative(logits, whole.logits, 1e-5, "logits")
    compare.assert_relative(logits, golden("exact.len200")["logits"], 1e-5, "logits")
    for name, value in recorder.joined().items():
        if name.endswith(("topk", "candidates", "router.index")):
            compare.assert_selections(value, whole.kept[name], name)


def test_rows_of_a_batch_of_unequal_lengths_are_the_golden_ones(exact_model: CausalLM) -> None:
    want = golden("exact.batch")
    prompts = [row[:length] for row, length in zip(want["ids"], want["lengths"].tolist(), strict=True)]
    parts = Batch(exact_model, size=2).run(prompts).split([len(prompt) for prompt in prompts])
    for row, logits in enumerate(parts):
        compare.assert_relative(logits, want[f"logits.{row}"], EXACT_TOLERANCE, f"row {row}")


# ---------------------------------------------------------------------------------------------- greedy


def test_greedy_tokens_and_the_draft_at_every_length_are_the_golden_ones(exact_model: CausalLM) -> None:
    want = golden("exact.greedy")
    batch, tokens, drafts = Batch(exact_model), list[int](), list[list[int]]()
    logits = batch.run(want["prompt"])
    for _ in range(48):
        tokens.append(int(logits[-1].argmax()))
        top = logits[-1].topk(2).values
        compare.assert_relative(top[0] - top[1], want["gap"][len(tokens) - 1], 1e-3, "gap")
        drafts.append(batch.draft([tokens[-1]]).tokens[0].tolist())
        logits = batch.run(torch.tensor(tokens[-1:]))
    compare.assert_tokens(tokens, want["tokens"].tolist())
    assert drafts == want["draft_tokens"].tolist()
    accepted = [agreeing(drafts[i], tokens[i + 1 :]) for i in range(48)]
    known = want["accepted"] >= 0
    assert torch.equal(torch.tensor(accepted)[known], want["accepted"][known])


def test_speculative_decoding_emits_the_greedy_tokens_on_the_golden_schedule(exact_model: CausalLM) -> None:
    want = golden("exact.greedy")
    batch, schedule = Batch(exact_model), list[list[int]]()
    tokens = [int(batch.run(want["prompt"])[-1].argmax())]
    for _ in range(want["schedule"].shape[0]):
        length = batch.state.length(batch.slots[0])
        drafts = batch.draft(tokens[-1:]).tokens[0]
        logits = batch.run(torch.cat((torch.tensor(tokens[-1:]), drafts)), commit=0)
        chosen = logits.argmax(1).tolist()
        count = agreeing(drafts.tolist(), chosen)
        batch.state.commit(batch.slots[0], count + 1)
        schedule.append([length, count])
        tokens += chosen[: count + 1]
    assert schedule == want["schedule"].tolist()
    compare.assert_tokens(tokens[:48], want["tokens"].tolist())


def agreeing(drafts: list[int], following: list[int]) -> int:
    """How many drafts equal the tokens that follow, counted from the first."""
    count = 0
    while count < min(len(drafts), len(following)) and drafts[count] == following[count]:
        count += 1
    return count


# ---------------------------------------------------------------------------------------------- image


def test_a_prompt_with_an_image_span_is_the_golden_one(exact_model: CausalLM) -> None:
    want = golden("exact.image")
    assert exact_model.config.image_token_id == 511
    assert torch.equal(want["ids"] == 511, want["token_types"] >= 0)
    with Recorder(exact_model) as recorder:
        logits = Batch(exact_model).run(want["ids"], inputs_embeds=want["embeddings"])
    compare.assert_relative(logits, want["logits"], EXACT_TOLERANCE, "logits")
    compared = 0
    for name, expected in want.items():
        if name.endswith("router.index") or name == "engram_hash":
            assert torch.equal(recorder.last[name], expected.to(torch.int64)), name
            compared += 1
    assert compared == 10


def test_an_image_span_that_is_taken_for_text_is_noticed(exact_model: CausalLM) -> None:
    want = golden("exact.image")
    ids = torch.where(want["ids"] == 511, 510, want["ids"])
    logits = Batch(exact_model).run(ids, inputs_embeds=want["embeddings"])
    with pytest.raises(AssertionError, match="relative error"):
        compare.assert_relative(logits, want["logits"], 1e-4, "logits")

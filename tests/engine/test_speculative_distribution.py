"""Speculation through the whole engine keeps the target's distribution (equality.md, *distribution*)."""

from collections.abc import Iterator

import pytest
import torch
from micro import GREEDY, make_request, make_runner, micro_config, micro_model, tokens_of

from quickseek.model.state import ContiguousState
from quickseek.ops import sampling
from quickseek.ops.sampling import SparseDistribution
from quickseek.sampling_params import SamplingParams

IDS = list(range(40, 48))
PROMPT = [21, 300, 57, 88]
TEMPERATURE = 1.5


@pytest.fixture(autouse=True)
def eight_ids(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Target and drafter may choose among 8 ids only."""
    model = micro_model(True)
    original = model.head.forward

    def masked(hidden: torch.Tensor) -> torch.Tensor:
        logits = original(hidden)
        kept = torch.full_like(logits, -torch.inf)
        kept[:, IDS] = logits[:, IDS]
        return kept

    monkeypatch.setattr(model.head, "forward", masked)
    yield


def target_distribution() -> torch.Tensor:
    """P(second, third token) [8, 8] of answers, from plain forwards over every beginning."""
    model, config = micro_model(True), micro_config()
    state = ContiguousState(config, model.numerics, max_requests=64, max_length=16, draft=True)
    slots = [state.acquire() for _ in range(64)]
    rows = [[*PROMPT, a, b] for a in IDS for b in IDS]
    context = state.context(slots, [len(row) for row in rows], num_prefills=64)
    with torch.inference_mode():
        hidden, _ = model.backbone(torch.tensor(rows).flatten(), context.rows.positions, context=context)
        chances = torch.softmax(model.logits(hidden)[:, IDS] / TEMPERATURE, -1).view(8, 8, len(PROMPT) + 2, 8)
    first, second, third = (chances[:, :, len(PROMPT) - 1 + i] for i in range(3))
    # Axes: first token, second token.
    joint = first[0, 0].view(8, 1, 1) * second[:, 0].view(8, 8, 1) * third
    return joint.sum(0)


def draws(count: int, *, drafts: int, sampled: bool) -> torch.Tensor:
    """How often each (second, third token) came, [8, 8]."""
    runner = make_runner(drafts=drafts, max_num_seqs=256, snapshots=0, sampled_drafts=sampled)
    table = torch.zeros(8, 8)
    for first in range(0, count, 512):
        requests = [
            make_request(PROMPT, SamplingParams(max_tokens=4, temperature=TEMPERATURE, seed=seed, ignore_eos=True))
            for seed in range(first, min(first + 512, count))
        ]
        for tokens in tokens_of(runner, requests):
            table[tokens[1] - IDS[0], tokens[2] - IDS[0]] += 1
        accepted = sum(request.accepted for request in requests)
        assert accepted > len(requests) // 20, "hardly any draft was accepted: this shows nothing"
    return table


def chi_square_p(table: torch.Tensor, expected: torch.Tensor) -> float:
    """Upper tail of the chi-square statistic with 63 degrees of freedom."""
    count = table.sum()
    statistic = ((table - count * expected) ** 2 / (count * expected)).sum()
    return float(torch.special.gammaincc(torch.tensor(31.5, dtype=torch.float64), statistic.to(torch.float64) / 2))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy drafts", "sampled drafts"])
def test_answers_follow_the_target_whatever_the_drafts(sampled: bool) -> None:
    assert chi_square_p(draws(2048, drafts=3, sampled=sampled), target_distribution()) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy drafts", "sampled drafts"])
def test_twenty_thousand_answers_follow_the_target(sampled: bool) -> None:
    assert chi_square_p(draws(20_000, drafts=3, sampled=sampled), target_distribution()) > 1e-3


def test_a_wrong_q_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the acceptance test is given the drafter's probabilities of the neighbouring ids."""
    original = sampling.verify

    def wrong(target: torch.Tensor, tokens: torch.Tensor, q: SparseDistribution | None, *rest: torch.Tensor) -> object:
        if q is None:  # the first token of an answer has no drafts before it
            return original(target, tokens, q, *rest)
        return original(target, tokens, SparseDistribution(q.ids, q.probabilities.roll(1, -1)), *rest)

    monkeypatch.setattr(sampling, "verify", wrong)
    assert chi_square_p(draws(2048, drafts=3, sampled=True), target_distribution()) < 1e-6


def test_greedy_requests_are_untouched_by_the_mask() -> None:
    tokens = tokens_of(make_runner(drafts=3, sampled_drafts=True), [make_request(PROMPT, GREEDY)])[0]
    assert set(tokens) <= set(IDS)

"""Speculation keeps the target's distribution (spec/equality.md, *distribution*; spec/model.md 10.4).

A Markov chain stands for the target and another for the drafter. 20,000 requests, which differ in their seeds only, run
cycles until they have two tokens; the 64 pairs are held against the chain itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from compare import assert_distribution
from quickseek.ops import sampling
from quickseek.ops.sampling import verify_reference

DRAWS, VOCABULARY, IDS = 20_000, 40, torch.tensor([3, 7, 8, 15, 21, 30, 36, 39])
FIRST = 101
"""Position of the first token; nothing is special about it."""

Proposal = tuple[Tensor, sampling.SparseDistribution | Tensor | None]
FORMS = ("greedy drafts", "greedy drafts as one-hot Q", "sampled drafts", "sampled drafts as dense Q")


@dataclass(frozen=True)
class Setting:
    """Parameters that all requests have."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def probabilities(self, logits: Tensor) -> Tensor:
        rows = logits.shape[0]
        wide = {"dtype": torch.float64}
        return sampling.probabilities(
            logits,
            torch.full((rows,), self.temperature, **wide),
            torch.full((rows,), self.top_p, **wide),
            top_k=torch.full((rows,), self.top_k),
            min_p=torch.full((rows,), self.min_p, **wide),
        )


SETTINGS = (Setting(), Setting(temperature=0.7, top_p=0.9), Setting(temperature=1.4, top_k=5, min_p=0.05))


def chain(seed: int, *, allowed: bool) -> Tensor:
    """Logits [V, V] of the next id after each id, masked to the eight ids if ``allowed``."""
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 1.2
    if allowed:
        never = torch.ones(VOCABULARY, dtype=torch.bool)
        never[IDS] = False
        logits[:, never] = -math.inf
    return logits


TARGET = chain(1, allowed=True)
# Alike, so that drafts are often right, but not the same, and now and then an id that the target never says.
DRAFTER = torch.where(TARGET.isfinite(), TARGET, -2.0) + 0.9 * chain(2, allowed=False)


def propose(form: str, setting: Setting, anchors: Tensor, seeds: Tensor, positions: Tensor, count: int) -> Proposal:
    """Drafts [B, k] after ``anchors`` and the Q to verify them with."""
    previous, tokens, parts = anchors, [], []
    temperature = setting.temperature if form.startswith("sampled") else 0.0
    for number in range(count):
        previous, kept = sampling.draft_distribution(
            DRAFTER[previous], torch.full(anchors.shape, temperature), seeds, positions + number
        )
        tokens.append(previous)
        parts.append(kept)
    sparse = sampling.SparseDistribution(*(torch.stack(part, 1) for part in zip(*parts, strict=True)))
    if form == "greedy drafts":
        return torch.stack(tokens, 1), None
    dense = torch.zeros(len(anchors), count, VOCABULARY, dtype=torch.float64).scatter_add(2, *sparse)
    return torch.stack(tokens, 1), dense if form.endswith("dense Q") else sparse


def two_tokens(form: str, setting: Setting, verify: Callable[..., sampling.Verified], drafts: int = 2) -> Tensor:
    """int64 [DRAWS, 2]: the first two tokens of every request after id 0, chosen in cycles of ``drafts`` drafts."""
    seeds = torch.arange(DRAWS) * 7919
    output = torch.full((DRAWS, 2 + drafts + 1), -1)
    length = torch.zeros(DRAWS, dtype=torch.int64)
    for _ in range(2):
        anchors = torch.where(length == 0, 0, output.gather(1, (length - 1).clamp_min(0).unsqueeze(1)).squeeze(1))
        tokens, draft = propose(form, setting, anchors, seeds, FIRST + length, drafts)
        before = torch.cat((anchors.unsqueeze(1), tokens), 1)
        target = setting.probabilities(TARGET[before.flatten()]).view(DRAWS, drafts + 1, VOCABULARY)
        counts = seeds % (drafts + 1)  # fewer drafts may be verified than were made
        found = verify(target, tokens, draft, seeds, FIRST + length, counts)
        assert bool((found.accepted <= counts).all())
        rows = torch.arange(drafts + 1)
        inside = rows <= found.accepted.unsqueeze(1)
        assert torch.equal(found.tokens >= 0, inside)
        # What a request beyond its two tokens would do next does not matter here.
        done = (length >= 2).unsqueeze(1)
        places = torch.where(inside & ~done, length.unsqueeze(1) + rows, output.shape[1] - 1)
        output = output.scatter(1, places, torch.where(inside & ~done, found.tokens, -1))
        length = torch.where(done.squeeze(1), length, length + found.accepted + 1)
    assert bool((length >= 2).all())
    return output[:, :2]


def check(pairs: Tensor, setting: Setting) -> None:
    """Chi-square of the 64 pairs against the target's chain."""
    transitions = setting.probabilities(TARGET)
    first, second = transitions[0, IDS], transitions[IDS][:, IDS]
    index = torch.full((VOCABULARY,), -1)
    index[IDS] = torch.arange(len(IDS))
    cells = index[pairs[:, 0]] * len(IDS) + index[pairs[:, 1]]
    assert bool((cells >= 0).all())
    assert_distribution(cells, (first.unsqueeze(1) * second).flatten())


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_two_tokens_follow_the_target_whatever_the_drafts(form: str, setting: Setting) -> None:
    check(two_tokens(form, setting, sampling.verify), setting)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("form", FORMS[1:])
def test_a_mutant_that_skips_the_residual_distribution_is_noticed(
    form: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.zeros(DRAWS, VOCABULARY, dtype=torch.float64)
    monkeypatch.setattr(verify_reference, "_dense_row", lambda *_: whole)
    with pytest.raises(AssertionError, match="chi-square"):
        check(two_tokens(form, setting, sampling.verify), setting)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_mutant_that_draws_again_after_a_rejected_greedy_draft_is_noticed(setting: Setting) -> None:
    def mutant(target: Tensor, *arguments: Tensor) -> sampling.Verified:
        found, counts = sampling.verify(target, *arguments), arguments[-1]
        row = target.gather(1, found.accepted.view(-1, 1, 1).expand(-1, 1, VOCABULARY)).squeeze(1)
        again = torch.multinomial(row, 1, generator=torch.Generator().manual_seed(5))
        rejected = (found.accepted < counts).unsqueeze(1)
        place = found.accepted.unsqueeze(1)
        token = torch.where(rejected, again, found.tokens.gather(1, place))
        return sampling.Verified(found.accepted, found.tokens.scatter(1, place, token))

    with pytest.raises(AssertionError, match="chi-square"):
        check(two_tokens("greedy drafts", setting, mutant), setting)


def test_sampled_drafts_of_the_target_itself_are_always_accepted() -> None:
    seeds, positions = torch.arange(500), torch.zeros(500, dtype=torch.int64)
    logits = TARGET[torch.zeros(500, dtype=torch.int64)]
    tokens, kept = sampling.draft_distribution(logits, torch.ones(500), seeds, positions)
    target = Setting().probabilities(logits).unsqueeze(1).expand(-1, 2, -1)
    sparse = sampling.SparseDistribution(*(part.unsqueeze(1) for part in kept))
    found = sampling.verify(target, tokens.unsqueeze(1), sparse, seeds, positions, torch.ones(500, dtype=torch.int64))
    # P and Q were rounded apart, so a number just under 1 may reject.
    assert found.accepted.sum() >= 499


# ------------------------------------------------------------------------------------------ single cases


def one_hot(ids: list[list[int]]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(ids), VOCABULARY).to(torch.float64)


@pytest.mark.parametrize("form", ["none", "sparse", "dense"])
def test_greedy_requests_accept_while_drafts_equal_the_argmax(form: str) -> None:
    drafts = [[3, 4, 5], [3, 9, 5], [8, 4, 5], [3, 4, 5]]
    best = [[3, 4, 5, 6]] * 4
    counts = torch.tensor([3, 3, 3, 1])
    tokens = torch.tensor(drafts)
    dense = one_hot(drafts)
    sparse = sampling.SparseDistribution(tokens.unsqueeze(2), torch.ones(4, 3, 1, dtype=torch.float64))
    draft = {"none": None, "sparse": sparse, "dense": dense}[form]
    found = sampling.verify(one_hot(best), tokens, draft, torch.arange(4), torch.arange(4), counts)
    assert found.accepted.tolist() == [3, 1, 0, 1]
    assert found.tokens.tolist() == [[3, 4, 5, 6], [3, 4, -1, -1], [3, -1, -1, -1], [3, 4, -1, -1]]
    matched = sampling.match(torch.tensor(best), tokens, counts)
    assert torch.equal(found.tokens, matched.tokens)
    assert torch.equal(found.accepted, matched.accepted)


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    seeds, positions = torch.arange(2), torch.tensor([5, 6])
    temperature = torch.tensor([0.0, 1.0])
    logits = DRAFTER[torch.tensor([3, 7])]
    tokens, kept = sampling.draft_distribution(logits, temperature, seeds, positions)
    assert tokens[0] == sampling.greedy(logits)[0]
    assert kept.probabilities[0].tolist() == [1.0] + [0.0] * (VOCABULARY - 1)
    assert kept.probabilities[1].sum().item() == pytest.approx(1.0)
    assert (kept.probabilities[1] > 0).sum() == VOCABULARY


@pytest.mark.parametrize("form", FORMS)
def test_without_drafts_the_token_is_the_one_of_plain_decoding(form: str) -> None:
    setting = Setting(temperature=0.9, top_p=0.95)
    seeds, positions = torch.arange(300), torch.arange(300) * 2
    logits = TARGET[IDS[torch.arange(300) % 8]]
    plain = sampling.sample(
        logits, torch.full((300,), 0.9, dtype=torch.float64), torch.full((300,), 0.95, dtype=torch.float64),
        seeds, positions, sampling.PURPOSE_TOKEN,
    )  # fmt: skip
    tokens, draft = propose(form, setting, IDS[torch.arange(300) % 8], seeds, positions, 1)
    target = setting.probabilities(logits).unsqueeze(1).expand(-1, 2, -1)
    found = sampling.verify(target, tokens, draft, seeds, positions, torch.zeros(300, dtype=torch.int64))
    assert torch.equal(found.tokens[:, 0], plain)
    none = torch.zeros(300, 0, dtype=torch.int64)
    empty = None if draft is None else torch.zeros(300, 0, VOCABULARY, dtype=torch.float64)
    found = sampling.verify(target[:, :1], none, empty, seeds, positions, torch.zeros(300, dtype=torch.int64))
    assert torch.equal(found.tokens[:, 0], plain)


def test_greedy_drafts_leave_the_tokens_of_a_seed_as_they_are() -> None:
    plain = two_tokens("greedy drafts", Setting(), sampling.verify, drafts=1)
    more = two_tokens("greedy drafts", Setting(), sampling.verify, drafts=4)
    assert torch.equal(plain, more)
    sampled = two_tokens("sampled drafts", Setting(), sampling.verify, drafts=1)
    assert not torch.equal(plain, sampled)


@pytest.mark.parametrize("side", ["target", "drafter"])
def test_a_broken_row_reaches_no_other_request(side: str) -> None:
    def run(rows: slice, broken: bool) -> sampling.Verified:
        seeds, positions = torch.arange(6)[rows], torch.arange(6)[rows] + 9
        anchors = IDS[:6][rows]
        drafter, target = DRAFTER[anchors], TARGET[anchors]
        if broken:
            (drafter if side == "drafter" else target)[2] = math.nan
        tokens, kept = sampling.draft_distribution(drafter, torch.ones(len(anchors)), seeds, positions)
        chances = Setting().probabilities(target).unsqueeze(1).repeat(1, 2, 1)
        sparse = sampling.SparseDistribution(*(part.unsqueeze(1) for part in kept))
        counts = torch.ones(len(anchors), dtype=torch.int64)
        return sampling.verify(chances, tokens.unsqueeze(1), sparse, seeds, positions, counts)

    whole, broken = run(slice(0, 6), False), run(slice(0, 6), True)
    others = torch.tensor([0, 1, 3, 4, 5])
    assert torch.equal(broken.tokens[others], whole.tokens[others])
    assert torch.equal(broken.accepted[others], whole.accepted[others])
    assert broken.accepted[2] == 0
    assert 0 <= int(broken.tokens[2, 0]) < VOCABULARY


def test_a_draft_of_a_broken_drafter_is_replaced_by_a_token_of_the_target() -> None:
    seeds, positions = torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.int64)
    broken = torch.full((DRAWS, VOCABULARY), math.nan)
    tokens, kept = sampling.draft_distribution(broken, torch.ones(DRAWS), seeds, positions)
    target = Setting().probabilities(TARGET[:1]).unsqueeze(1).expand(DRAWS, 2, -1)
    sparse = sampling.SparseDistribution(*(part.unsqueeze(1) for part in kept))
    found = sampling.verify(target, tokens.unsqueeze(1), sparse, seeds, positions, torch.ones(DRAWS, dtype=torch.int64))
    assert_distribution(found.tokens[:, 0], target[0, 0])


def test_drafts_come_from_the_64_most_likely_ids_and_q_says_so() -> None:
    torch.manual_seed(4)
    logits = torch.randn(1, 300, dtype=torch.float64).expand(DRAWS, -1) * 0.3
    seeds, positions = torch.arange(DRAWS), torch.ones(DRAWS, dtype=torch.int64)
    tokens, kept = sampling.draft_distribution(logits, torch.full((DRAWS,), 0.8), seeds, positions)
    top = set(torch.topk(logits[0], 64).indices.tolist())
    assert kept.ids.shape == (DRAWS, 64)
    assert set(kept.ids[0].tolist()) == top
    dense = torch.zeros(300, dtype=torch.float64).scatter(0, kept.ids[0], kept.probabilities[0])
    assert_distribution(tokens, dense)
    with pytest.raises(AssertionError):
        assert_distribution(tokens, torch.softmax(logits[0], -1))


def test_a_tensor_of_another_shape_is_named() -> None:
    target, drafts, ones = torch.zeros(2, 3, 5), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="target_probabilities"):
        sampling.verify(target[:, :2], drafts, None, ones, ones, ones)
    with pytest.raises(ValueError, match="draft_probabilities"):
        sampling.verify(target, drafts, torch.zeros(2, 2, 4), ones, ones, ones)
    with pytest.raises(ValueError, match="draft_counts"):
        sampling.verify(target, drafts, None, ones, ones, ones[:1])

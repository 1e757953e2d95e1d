"""Distributions, draws and log-probabilities of single rows."""

import math

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_distribution, assert_float64
from quickseek.ops import sampling

INF = math.inf


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def chances(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Tensor:
    rows = logits.shape[0]
    return sampling.probabilities(
        logits,
        torch.full((rows,), temperature, dtype=torch.float64),
        torch.full((rows,), top_p, dtype=torch.float64),
        top_k=torch.full((rows,), top_k),
        min_p=torch.full((rows,), min_p, dtype=torch.float64),
    )


def oracle(logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float) -> list[float]:
    """Temperature, min_p, top_k, top_p of one row, in plain Python."""
    if temperature == 0:
        return [float(token == logits.index(max(logits))) for token in range(len(logits))]
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    order = [token for token in order if weights[token] >= min_p * weights[order[0]]]
    order = order[: top_k if top_k > 0 else None]
    total, before, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if kept and before >= top_p * total:
            break
        kept.append(token)
        before += weights[token]
    return [weights[token] / before if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [(1.0, 0, 0.0), (0.8, -1, 0.0), (0.9, 5, 0.1), (1.0, 3, 0.3)])
def test_probabilities_equal_plain_python(temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, 30, dtype=torch.float64) * 2
    actual = chances(logits, temperature, top_p, top_k, min_p)
    rows = [oracle(values, temperature, top_p, top_k, min_p) for values in logits.tolist()]
    assert_float64(actual, torch.tensor(rows, dtype=torch.float64))
    if temperature and (top_k > 0 or min_p):
        other = chances(logits, temperature, top_p)
        assert not torch.allclose(actual, other)


def test_rows_have_parameters_of_their_own() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 12, dtype=torch.float64)
    temperature, top_k = torch.tensor([0.0, 0.5, 1.5]), torch.tensor([0, 2, -1])
    together = sampling.probabilities(logits, temperature, torch.ones(3), top_k=top_k)
    for number in range(3):
        one = slice(number, number + 1)
        alone = sampling.probabilities(logits[one], temperature[one], torch.ones(1), top_k=top_k[one])
        assert_bits(together[one], alone)
    assert (together > 0).sum(1).tolist() == [1, 2, 12]


def test_ties_go_to_the_lowest_ids() -> None:
    tied = row(1.0, 3.0, 3.0, 3.0)
    assert sampling.greedy(tied).tolist() == [1]
    assert chances(tied, temperature=0.0).tolist() == [[0, 1, 0, 0]]
    assert chances(tied, top_k=2).tolist() == [[0, 0.5, 0.5, 0]]
    assert chances(tied, top_p=0.3).tolist() == [[0, 1, 0, 0]]
    assert sampling.log_probabilities(tied, torch.tensor([3]), 2).ids.tolist() == [[1, 2]]


def test_an_id_at_minus_infinity_is_never_chosen() -> None:
    logits = row(-INF, 0.0, -INF, 0.0, -INF).expand(2000, -1)
    tokens = sampling.sample(
        logits, torch.full((2000,), 5.0), torch.ones(2000), torch.arange(2000), torch.zeros(2000, dtype=torch.int64), 0
    )
    assert_distribution(tokens, torch.tensor([0, 0.5, 0, 0.5, 0]))


@pytest.mark.parametrize("broken", [(math.nan, 0.0, 1.0), (-INF, -INF, -INF), (INF, 0.0, 0.0)])
def test_a_row_without_a_choice_is_told_and_reaches_no_other_row(broken: tuple[float, ...]) -> None:
    logits = torch.cat((row(0.1, 0.2, 0.3), row(*broken), row(1.0, -1.0, 0.5)))
    assert sampling.valid(logits).tolist() == [True, False, True]
    for temperature in (0.0, 1.0):
        found = chances(logits, temperature, top_p=0.9)
        assert found[1].tolist() == [0, 0, 0]
        for number in (0, 2):
            assert_bits(found[number : number + 1], chances(logits[number : number + 1], temperature, top_p=0.9))
    tokens = sampling.sample(logits, torch.ones(3), torch.ones(3), torch.arange(3), torch.arange(3), 0)
    assert tokens[1].item() == 0
    assert bool((sampling.greedy(logits) < 3).all())


def test_the_same_arguments_always_give_the_same_token() -> None:
    torch.manual_seed(2)
    logits = torch.randn(50, 40)
    arguments = (torch.full((50,), 1.1), torch.full((50,), 0.95), torch.arange(50), torch.arange(50) * 3)
    together = sampling.sample(logits, *arguments, sampling.PURPOSE_TOKEN)
    assert_bits(together, sampling.sample(logits, *arguments, sampling.PURPOSE_TOKEN))
    order = torch.randperm(50)
    shuffled = sampling.sample(logits[order], *(part[order] for part in arguments), sampling.PURPOSE_TOKEN)
    assert_bits(shuffled, together[order])
    assert not torch.equal(together, sampling.sample(logits, *arguments, sampling.PURPOSE_RESIDUAL))


def test_numbers_of_different_purposes_seeds_and_positions_are_unrelated() -> None:
    seeds, positions = torch.arange(4000), torch.full((4000,), 7)
    purposes = (sampling.PURPOSE_TOKEN, sampling.PURPOSE_DRAFT, sampling.PURPOSE_ACCEPT, sampling.PURPOSE_RESIDUAL)
    numbers = torch.stack([sampling.uniform(seeds, positions, purpose) for purpose in purposes])
    numbers = torch.cat((numbers, sampling.uniform(seeds, positions + 1, 0).unsqueeze(0)))
    correlation = torch.corrcoef(numbers) - torch.eye(5, dtype=torch.float64)
    assert correlation.abs().max() < 4 / math.sqrt(4000)
    assert torch.corrcoef(torch.stack((numbers[0], numbers[0])))[0, 1] > 0.99
    assert 0 <= float(numbers.min()) < float(numbers.max()) < 1


def test_log_probabilities_are_the_logarithms_of_softmax_with_ranks() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 9)
    tokens = torch.tensor([0, 8, 3, 3, 5, 1])
    found = sampling.log_probabilities(logits, tokens, 4)
    for number, values in enumerate(logits.to(torch.float64).tolist()):
        total = math.log(sum(math.exp(value) for value in values))
        order = sorted(range(9), key=lambda token: -values[token])
        assert found.chosen[number].item() == pytest.approx(values[tokens[number]] - total, abs=1e-5)
        assert found.rank[number].item() == order.index(int(tokens[number])) + 1
        assert found.ids[number].tolist() == order[:4]
        assert found.values[number].tolist() == pytest.approx([values[token] - total for token in order[:4]], abs=1e-5)
    assert sampling.log_probabilities(logits, tokens, 0).ids.shape == (6, 0)
    with pytest.raises(ValueError, match="top = 10"):
        sampling.log_probabilities(logits, tokens, 10)


def test_a_parameter_of_another_length_is_named() -> None:
    with pytest.raises(ValueError, match="top_k"):
        sampling.probabilities(torch.zeros(2, 3), torch.ones(2), torch.ones(2), top_k=torch.zeros(3))

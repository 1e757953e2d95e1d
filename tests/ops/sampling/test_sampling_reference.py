"""Random numbers by counter, and that a single draw follows its distribution (spec/equality.md 2)."""

import pytest
import torch
from torch import Tensor

import compare
from quickseek.ops import sampling as door
from quickseek.ops.sampling import philox, reference

DRAWS = 20_000
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_its_published_known_answers(counter: str, key: str, answer: str) -> None:
    found = philox.philox(words(counter), words(key))  # type: ignore[arg-type]
    assert [f"{int(word):08x}" for word in found] == answer.split()


def test_another_round_count_misses_the_known_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "_ROUNDS", 9)
    counter, key, answer = KNOWN_ANSWERS[2]
    found = philox.philox(words(counter), words(key))  # type: ignore[arg-type]
    assert f"{int(found[0]):08x}" != answer.split()[0]


def numbers(seed: int = 3, purpose: int = 0, first: int = 0, count: int = DRAWS) -> Tensor:
    return door.uniform(torch.full((count,), seed), torch.arange(first, first + count), purpose)


def test_numbers_are_uniform_below_one() -> None:
    found = numbers()
    assert found.dtype == torch.float64 and (found >= 0).all() and (found < 1).all()
    compare.assert_distribution((found * 64).long(), torch.full((64,), 1 / 64))
    pairs = (found[:-1] * 8).long() * 8 + (found[1:] * 8).long()
    compare.assert_distribution(pairs[::2], torch.full((64,), 1 / 64), "neighbouring positions")


def test_seeds_of_more_than_32_bits_differ_in_every_bit() -> None:
    base = numbers(seed=5, count=4)
    for bit in (0, 31, 32, 62):
        assert not torch.equal(numbers(seed=5 ^ (1 << bit), count=4), base)
    assert numbers(seed=-1, count=4).isfinite().all()


def logits_and_chance() -> tuple[Tensor, Tensor]:
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, -torch.inf, 2.0, 0.2, -0.3])
    return logits, torch.softmax(logits.double(), 0)


def draw(probability: Tensor, uniform: Tensor) -> Tensor:
    return reference.draw(probability.expand(uniform.shape[0], -1), uniform)


def test_draws_follow_the_probabilities() -> None:
    _, chance = logits_and_chance()
    compare.assert_distribution(draw(chance, numbers()), chance)


def test_a_skewed_draw_is_noticed() -> None:
    _, chance = logits_and_chance()
    with pytest.raises(AssertionError, match="chi-square"):
        compare.assert_distribution(draw(chance, numbers() ** 1.05), chance)
    with pytest.raises(AssertionError, match="chi-square"):
        compare.assert_distribution(draw(chance, numbers(first=7) * 0 + 0.5), chance)


def test_an_id_of_probability_zero_is_never_drawn() -> None:
    chance = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    edges = torch.tensor([0.0, 0.5, 1.0 - 2.0**-53, 0.25, 1.0], dtype=torch.float64)
    assert set(draw(chance, edges).tolist()) == {1, 3}


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [-torch.inf, -torch.inf, 0.0, 0.0]])
    assert door.greedy(logits).tolist() == [1, 0, 2]
    assert door.greedy(logits.to(torch.bfloat16)).tolist() == [1, 0, 2]


def test_a_spoilt_row_leaves_the_choice_of_others_alone() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    clean = door.greedy(logits)
    logits[2] = torch.nan
    spoilt = door.greedy(logits)
    assert torch.equal(spoilt[[0, 1, 3]], clean[[0, 1, 3]])

"""Sampling kernels: the door's own tests run on them, and they give what the reference gives."""

import math

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64
from op_cases import normal, poisoned_outputs
from quickseek.ops import sampling
from quickseek.ops.sampling import reference

# isort: split
from test_sampling_choice import (  # noqa: F401
    oracle,
    test_a_row_without_a_choice_is_told_and_reaches_no_other_row,
    test_log_probabilities_are_the_logarithms_of_softmax_with_ranks,
    test_rows_have_parameters_of_their_own,
    test_ties_go_to_the_lowest_ids,
)
from test_sampling_reference import (  # noqa: F401
    test_greedy_takes_the_lowest_of_equal_logits,
    test_numbers_are_uniform_below_one,
    test_seeds_of_more_than_32_bits_differ_in_every_bit,
)
from test_sampling_verify import (  # noqa: F401
    test_a_broken_row_reaches_no_other_request,
    test_greedy_and_sampled_requests_share_a_batch,
    test_greedy_requests_accept_while_drafts_equal_the_argmax,
)

kernels = pytest.importorskip("quickseek.ops.sampling.triton")
INF = math.inf


@pytest.fixture(autouse=True)
def kernels_behind_the_door(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cuda":
        pytest.skip("the tests of tests/gpu run these on a GPU")
    monkeypatch.setattr(sampling, "form", lambda *_: kernels)


def one_each(values: list[float], rows: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).repeat(rows)[:rows]


def settings(rows: int, top_k: list[int], top_p: list[float]) -> tuple[Tensor, ...]:
    """Temperature, top_p, top_k and min_p of rows that take the values in turn."""
    temperature, min_p = one_each([1.0, 0.6, 0.0, 1.7], rows), one_each([0.0, 0.02, 0.3], rows)
    return temperature, one_each(top_p, rows), torch.tensor(top_k).repeat(rows)[:rows], min_p


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 8), (torch.bfloat16, 3)])
def test_distributions_are_those_of_the_reference(dtype: torch.dtype, rows: int) -> None:
    logits = (2 * normal(rows, 150, seed=3)).to(dtype)
    logits[2, ::2] = -INF
    logits[-1] = logits[-1].round()
    with poisoned_outputs():
        found = kernels.probabilities(logits, *settings(rows, [0, 20, -1, 3], [1.0, 0.9, 0.5]))
    expected = reference.probabilities(logits, *settings(rows, [0, 20, -1, 3], [1.0, 0.9, 0.5]))
    assert_float64(found, expected)
    assert torch.equal(found > 0, expected > 0)
    for top_k, top_p in (([9, 20, -1, 3], [1.0, 0.9, 0.5]), ([0, 20, -1, 3], [1.0, 0.7, 0.5])):
        with pytest.raises(AssertionError, match="relative error"):
            assert_float64(found, reference.probabilities(logits, *settings(rows, top_k, top_p)))


def test_distributions_of_float64_equal_plain_python() -> None:
    logits = 2 * normal(4, 30, seed=5)
    wide = {"dtype": torch.float64}
    temperature, top_p, min_p = ([0.6, 1.0, 2.0, 0.0], [0.8, 0.9, 1.0, 0.5], [0.0, 0.1, 0.3, 0.0])
    top_k = [-1, 5, 3, 0]
    found = kernels.probabilities(
        logits, torch.tensor(temperature, **wide), torch.tensor(top_p, **wide), torch.tensor(top_k),
        torch.tensor(min_p, **wide),
    )  # fmt: skip
    rows = zip(logits.tolist(), temperature, top_p, top_k, min_p, strict=True)
    wanted = torch.tensor([oracle(*row) for row in rows], **wide)
    assert_float64(found, wanted)
    with pytest.raises(AssertionError, match="relative error"):
        assert_float64(found, wanted.roll(1, 1))


def test_ties_across_ranges_are_filled_in_the_order_of_ids() -> None:
    logits = torch.zeros(5, 150)
    logits[:, 7] = 1.0
    logits[4, 7] = -0.0
    ones = torch.ones(5)
    top_p = torch.tensor([1.0, 0.5, 1.0, 0.0, 0.305])
    top_k = torch.tensor([70, 0, 1, 0, 100])
    found = kernels.probabilities(logits, ones, top_p, top_k)
    expected = reference.probabilities(logits, ones, top_p, top_k)
    assert_float64(found, expected)
    assert torch.equal(found > 0, expected > 0)
    assert (found > 0).sum(1).tolist() == [70, 75, 1, 1, 31]


def test_draws_are_those_of_the_reference() -> None:
    chances = torch.softmax(3 * normal(24, 150, seed=6), -1)
    chances[::3, :70] = 0.0
    chances[1, 30:] = 0.0
    chances[2] = 0.0
    numbers = torch.rand(24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    numbers[3:9] = torch.tensor([0.0, 0.0, 1.0 - 2.0**-53, 1.0, 0.5, 1.0])
    with poisoned_outputs():
        found = kernels.draw(chances, numbers)
    assert_bits(found, reference.draw(chances, numbers))
    assert found[2] == 0 and bool((chances.gather(1, found.unsqueeze(1))[[0, 1, *range(3, 24)]] > 0).all())
    assert not torch.equal(found, reference.draw(chances, 1 - numbers))


@pytest.mark.parametrize(("vocabulary", "count"), [(150, 64), (40, 40), (300, 70)])
def test_the_most_likely_ids_are_those_of_the_reference(vocabulary: int, count: int) -> None:
    logits = normal(3, vocabulary, seed=7).float()
    logits[1] = logits[1].round()
    logits[2, 5:] = -INF
    temperature = torch.tensor([0.8, 0.0, 1.0])
    with poisoned_outputs():
        found = kernels.most_likely(logits, temperature, count)
    expected = reference.most_likely(logits, temperature, count)
    assert_bits(found.ids, expected.ids)
    assert_float64(found.probabilities, expected.probabilities)
    with pytest.raises(AssertionError):
        assert_bits(found.ids, reference.most_likely(-logits, temperature, count).ids)


def test_log_probabilities_are_those_of_the_reference() -> None:
    logits, tokens = normal(3, 150, seed=8).float(), torch.tensor([0, 149, 70])
    logits[1] = logits[1].round()
    with poisoned_outputs():
        found = kernels.log_probabilities(logits, tokens, 5)
    expected = reference.log_probabilities(logits, tokens, 5)
    assert_bits(found.ids, expected.ids)
    assert_bits(found.rank, expected.rank)
    assert (found.values - expected.values).abs().max() < 1e-6 and (found.chosen - expected.chosen).abs().max() < 1e-6
    assert not torch.equal(found.rank, reference.log_probabilities(logits, tokens.flip(0), 5).rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_greedy_is_the_reference_on_every_kind_of_row(dtype: torch.dtype) -> None:
    logits = normal(9, 150, seed=9).to(dtype)
    logits[1] = -INF
    logits[2], logits[2, 100:] = -0.0, 0.0
    logits[3, 149], logits[4, 70:] = INF, logits[4].amax()
    logits[5, 90] = math.nan
    logits[6], logits[6, 3] = -1e30, -1e-30
    logits[7] = -logits[7].abs()
    with poisoned_outputs():
        found = kernels.greedy(logits)
    assert_bits(found, reference.greedy(logits))
    assert found[1] == found[2] == found[5] == 0 and found[3] == 149
    assert not torch.equal(found, reference.greedy(logits.roll(1, 1)))


def test_random_numbers_are_those_of_the_reference_bit_for_bit() -> None:
    seeds = torch.tensor([0, -1, 2**62 + 12345, 77, -(2**63)]).repeat(40)
    positions = torch.arange(200) * 2**33 + 5
    for purpose in (0, 3):
        found = kernels.uniform(seeds, positions, purpose)
        assert_bits(found, reference.uniform(seeds, positions, purpose))
        with pytest.raises(AssertionError, match="differ in bits"):
            assert_bits(found, reference.uniform(seeds, positions, purpose + 1))


@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_matching_is_that_of_the_reference(drafts: int) -> None:
    generator = torch.Generator().manual_seed(drafts)
    chosen = torch.randint(0, 2, (12, drafts + 1), generator=generator)
    tokens = torch.randint(0, 2, (12, drafts), generator=generator)
    counts = torch.randint(0, drafts + 1, (12,), generator=generator)
    with poisoned_outputs():
        found = kernels.match(chosen, tokens, counts)
    for ours, theirs in zip(found, reference.match(chosen, tokens, counts), strict=True):
        assert_bits(ours, theirs)
    if drafts:
        assert not torch.equal(found.tokens, reference.match(chosen, 1 - tokens, counts).tokens)


def test_another_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="logits has dtype"):
        kernels.greedy(torch.zeros(1, 3, dtype=torch.float16))
    with pytest.raises(ValueError, match="seeds has dtype"):
        kernels.uniform(torch.zeros(3), torch.zeros(3, dtype=torch.int64), 0)

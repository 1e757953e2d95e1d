"""Each comparison of ``compare`` accepts what it should and fails on a fault of the kind that it is there to catch."""

import math

import pytest
import torch

import compare


def nudged(x: torch.Tensor, by: float) -> torch.Tensor:
    out = x.clone()
    out.view(-1)[3] += by
    return out


REFERENCE = torch.linspace(-2.0, 3.0, 48, dtype=torch.float64).view(6, 8)


def test_bits_accepts_equal_bytes_and_rejects_one_flipped_bit() -> None:
    x = torch.tensor([1.0, math.nan, -0.0, 3.0, 5.0])
    compare.assert_bits(x, x.clone())
    flipped = x.clone()
    flipped.view(torch.int32)[0] ^= 1
    with pytest.raises(AssertionError, match="1 of 5 elements differ in bits; element 0"):
        compare.assert_bits(flipped, x)


def test_bits_tells_zeros_apart_unless_asked_not_to() -> None:
    zero, minus_zero = torch.zeros(2), torch.tensor([0.0, -0.0])
    compare.assert_bits(minus_zero, zero, sign_of_zero=False)
    with pytest.raises(AssertionError, match="element 1"):
        compare.assert_bits(minus_zero, zero)


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)])
def test_bits_rejects_another_shape_or_dtype(other: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="expected"):
        compare.assert_bits(other, torch.zeros(2))


def test_printed_allows_half_a_unit_in_the_last_place_and_no_more() -> None:
    compare.assert_printed(torch.tensor([0.12344999, -5e-8], dtype=torch.float64), "0.12345 -0.0000001")
    compare.assert_printed(torch.tensor([1.953125e-5], dtype=torch.float64), "1.95312532e-5")
    with pytest.raises(AssertionError, match=r"\[0\]"):
        compare.assert_printed(torch.tensor([0.1234561], dtype=torch.float64), "0.12345")
    with pytest.raises(AssertionError, match="2 values, 1 printed"):
        compare.assert_printed(torch.zeros(2), "0.0")
    with pytest.raises(AssertionError, match="nan"):
        compare.assert_printed(torch.tensor([math.nan]), "0.0")


def test_last_place_reads_exponents() -> None:
    assert compare.last_place("0.25") == pytest.approx(1e-2)
    assert compare.last_place("45") == 1.0
    assert compare.last_place("5.6805294e-7") == pytest.approx(1e-14)


def test_float64_allows_rounding_and_rejects_a_change_in_the_ninth_place() -> None:
    compare.assert_float64(nudged(REFERENCE, 1e-11), REFERENCE)
    with pytest.raises(AssertionError, match="relative error"):
        compare.assert_float64(nudged(REFERENCE, 1e-9), REFERENCE)
    with pytest.raises(AssertionError, match="relative error inf"):
        compare.assert_float64(nudged(REFERENCE, math.nan), REFERENCE)


def test_float64_wants_float64_and_identical_integers() -> None:
    compare.assert_float64(torch.arange(3), torch.arange(3))
    with pytest.raises(AssertionError, match="is for float64"):
        compare.assert_float64(torch.zeros(2), torch.zeros(2))
    with pytest.raises(AssertionError, match="1 elements differ"):
        compare.assert_float64(torch.tensor([0, 1]), torch.tensor([0, 2]))


def test_relative_error_lets_equal_infinities_be_equal() -> None:
    masked = torch.tensor([1.0, -math.inf])
    assert compare.relative_error(masked, masked) == 0.0
    assert compare.relative_error(torch.tensor([1.0, 2.0]), masked) == math.inf
    assert compare.relative_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_selections_are_sets_and_a_swapped_member_fails() -> None:
    compare.assert_selections(torch.tensor([[3, 1, -1]]), torch.tensor([[1, 3]]))
    with pytest.raises(AssertionError, match=r"row 0 has \[2\] instead of \[3\]"):
        compare.assert_selections(torch.tensor([[2, 1]]), torch.tensor([[1, 3]]))
    with pytest.raises(AssertionError, match="1 rows, expected 2"):
        compare.assert_selections(torch.tensor([[1]]), torch.tensor([[1], [1]]))


def test_op_selections_forgive_members_at_the_border_only() -> None:
    scores = torch.tensor([[5.0, 1.001, 1.0, 0.0, -math.inf]])
    assert compare.assert_op_selections(torch.tensor([[0, 2]]), scores, 2, eps=0.01) == 1
    assert compare.assert_op_selections(torch.tensor([[0, 1, 2, 3, -1]]), scores, 5, eps=0.0) == 0
    with pytest.raises(AssertionError, match="from the border"):
        compare.assert_op_selections(torch.tensor([[0, 3]]), scores, 2, eps=0.01)
    with pytest.raises(AssertionError, match="from the border"):
        compare.assert_op_selections(torch.tensor([[1, 2]]), scores, 2, eps=0.01)
    with pytest.raises(AssertionError, match="1 members, expected 2"):
        compare.assert_op_selections(torch.tensor([[0, -1]]), scores, 2, eps=0.01)


def test_op_allows_a_bf16_rounding_and_rejects_four() -> None:
    compare.assert_op(REFERENCE.to(torch.bfloat16), REFERENCE)
    with pytest.raises(AssertionError, match="1 of 48 are outside"):
        compare.assert_op(nudged(REFERENCE, 2.0**-4), REFERENCE)
    with pytest.raises(AssertionError, match="expected"):
        compare.assert_op(nudged(REFERENCE, math.nan), REFERENCE)


def test_op_of_a_sum_of_products_takes_the_tighter_bound() -> None:
    terms = torch.full_like(REFERENCE, 8.0)
    compare.assert_op(nudged(REFERENCE, 1e-6), REFERENCE, terms=terms)
    loose = nudged(REFERENCE, 2.0**-7)
    compare.assert_op(loose, REFERENCE)
    with pytest.raises(AssertionError, match="outside"):
        compare.assert_op(loose, REFERENCE, terms=terms)


@pytest.mark.parametrize("value", [1.0, 1.9921875, 2.546875, -0.3125, 2.0**-100])
def test_op_lets_a_rounded_sum_be_the_next_bfloat16_and_no_other(value: float) -> None:
    reference = torch.full((4,), value, dtype=torch.bfloat16)
    terms = torch.zeros(4)
    bits = reference.view(torch.int16)
    for step in (1, -1):
        if value in (1.0, 2.0**-100) and step < 0:
            continue  # below a power of two BF16 values are twice as close
        compare.assert_op((bits + step).view(torch.bfloat16), reference, terms=terms)
        with pytest.raises(AssertionError, match="outside"):
            compare.assert_op((bits + 2 * step).view(torch.bfloat16), reference, terms=terms)
    with pytest.raises(AssertionError, match="outside"):
        compare.assert_op(nudged(reference.double(), 2.0**-7 * value), reference.double(), terms=terms)


def test_model_bounds_median_and_tail_separately() -> None:
    bound = compare.LogitDistance(median=0.01, p99=0.05)
    noise = torch.sin(torch.arange(48, dtype=torch.float64)).view(6, 8) * 1e-3
    found = compare.assert_model(REFERENCE + noise, REFERENCE, bound)
    assert 0 < found.median < found.p99
    with pytest.raises(AssertionError, match="distance"):
        compare.assert_model(nudged(REFERENCE, 5.0), REFERENCE, bound)
    with pytest.raises(AssertionError, match="distance"):
        compare.assert_model(REFERENCE + 0.03, REFERENCE, bound)


def test_tokens_are_identical_without_margins() -> None:
    compare.assert_tokens([1, 2, 3], [1, 2, 3])
    with pytest.raises(AssertionError, match="position 2 has 4"):
        compare.assert_tokens([1, 2, 4], [1, 2, 3])
    with pytest.raises(AssertionError, match="2 tokens, expected 3"):
        compare.assert_tokens([1, 2], [1, 2, 3])


def test_tokens_may_part_where_the_margin_is_small_and_not_before() -> None:
    assert compare.assert_tokens([1, 9, 9], [1, 2, 3], [1.0, 0.001, 1.0], eps=0.01) == 1
    with pytest.raises(AssertionError, match="position 0"):
        compare.assert_tokens([7, 2, 3], [1, 2, 3], [1.0, 0.001, 1.0], eps=0.01)
    with pytest.raises(AssertionError, match="position 1"):
        compare.assert_tokens([1, 9, 9], [1, 2, 3], [1.0, 0.5, 1.0], eps=0.01)


def test_distribution_accepts_true_draws_and_rejects_a_shifted_one() -> None:
    chance = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
    draws = torch.multinomial(chance, 20_000, replacement=True, generator=torch.Generator().manual_seed(1))
    assert compare.assert_distribution(draws, chance) > 1e-3
    with pytest.raises(AssertionError, match="chi-square"):
        compare.assert_distribution(draws, torch.tensor([0.42, 0.28, 0.2, 0.1, 0.0]))
    with pytest.raises(AssertionError, match="chi-square"):
        compare.assert_distribution(torch.cat((draws, torch.tensor([4]))), chance)
    with pytest.raises(AssertionError, match="beyond"):
        compare.assert_distribution(torch.tensor([7]), chance)


def test_chi_square_agrees_with_a_value_from_tables() -> None:
    # The 5 % point of chi-square with 3 degrees of freedom is 7.815.
    counts = torch.tensor([100.0, 100.0, 100.0, 100.0])
    shift = math.sqrt(7.815 * 100 / 2)
    found = compare.chi_square_p(counts + torch.tensor([shift, -shift, 0.0, 0.0]), torch.full((4,), 0.25))
    assert found == pytest.approx(0.05, abs=2e-4)

"""What "equal" means (spec/equality.md 2): every comparison of the tests is one of these.

Each raises AssertionError with the largest deviation and where it is. A NaN where a number is expected always fails.
What a kind tolerates (members near a border, tokens under a margin) is printed, so that it can be seen to stay small.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT64_TOLERANCE = 1e-10
PRINTED_SLACK = 1e-9
LEAST_P = 1e-3
SMALLEST_EXPECTED = 5.0
"""Expected draws of a cell below which the chi-square approximation is poor; smaller cells are pooled."""


# ---------------------------------------------------------------------------------------------- bits


def assert_bits(actual: Tensor, expected: Tensor, what: str = "tensor", *, sign_of_zero: bool = True) -> None:
    """*bits*: same shape, dtype and bytes; ``sign_of_zero`` False lets -0 equal +0."""
    _same_form(actual, expected, what)
    assert actual.dtype == expected.dtype, f"{what} has dtype {actual.dtype}: expected {expected.dtype}"
    if not sign_of_zero:
        actual, expected = actual + 0.0, expected + 0.0
    different = (_bytes(actual) != _bytes(expected)).any(-1)
    if different.any():
        first = int(torch.nonzero(different)[0])
        values = actual.flatten()[first].item(), expected.flatten()[first].item()
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} elements differ in bits; "
            f"element {first} is {values[0]!r}, expected {values[1]!r}"
        )


def _bytes(x: Tensor) -> Tensor:
    flat = x.contiguous().flatten()
    return flat.view(torch.uint8).view(flat.shape[0], x.element_size())


# ---------------------------------------------------------------------------------------------- printed


def assert_printed(actual: Tensor, digits: str, what: str = "values") -> None:
    """*printed*: equal to printed decimals, to half a unit in the last printed place of each plus 1e-9.

    ``digits``: the numbers as printed, separated by spaces, one per element of ``actual``.
    """
    words = digits.split()
    values = actual.flatten().to(torch.float64).tolist()
    assert len(values) == len(words), f"{what}: {len(values)} values, {len(words)} printed"
    for number, (value, word) in enumerate(zip(values, words, strict=True)):
        bound = 0.5 * last_place(word) + PRINTED_SLACK
        assert abs(value - float(word)) <= bound, f"{what}[{number}] = {value!r}: printed {word}, allowed {bound:.1e}"


def last_place(word: str) -> float:
    """The unit in the last printed place of a decimal, with or without an exponent."""
    mantissa, _, exponent = word.lower().partition("e")
    return float(10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])))


# ---------------------------------------------------------------------------------------------- relative


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / max |expected| over one tensor; infinity for a NaN, 0 for empty tensors."""
    if expected.numel() == 0:
        return 0.0
    wide, reference = actual.to(torch.float64), expected.to(torch.float64)
    difference = torch.where(wide == reference, 0.0, (wide - reference).abs())
    error = float((difference.max() / reference[reference.isfinite()].abs().max().clamp_min(1e-300)).item())
    return float("inf") if error != error else error


def assert_relative(actual: Tensor, expected: Tensor, tolerance: float, what: str = "tensor") -> float:
    """Relative error of a whole tensor (as ``relative_error``) at most ``tolerance``; returns it."""
    _same_form(actual, expected, what)
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{what}: relative error {error:.3e}, allowed {tolerance:.1e}"
    return error


def assert_float64(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """*float64*: two exact-mode runs agree to 1e-10 of the largest value; integers and masks are identical."""
    _same_form(actual, expected, what)
    assert actual.dtype == expected.dtype, f"{what} has dtype {actual.dtype}: expected {expected.dtype}"
    if not actual.dtype.is_floating_point:
        assert torch.equal(actual, expected), f"{what}: {int((actual != expected).sum())} elements differ"
        return
    assert actual.dtype == torch.float64, f"{what} has dtype {actual.dtype}: this comparison is for float64"
    assert_relative(actual, expected, FLOAT64_TOLERANCE, what)


# ---------------------------------------------------------------------------------------------- selections


def member_sets(lists: Tensor) -> list[frozenset[int]]:
    """The members of each row of an integer list [T, k]; negative entries are none."""
    return [frozenset(number for number in row if number >= 0) for row in lists.tolist()]


def assert_selections(actual: Tensor, expected: Tensor, what: str = "selections") -> None:
    """The same members in every row of [T, k] and [T, k']; order and padding with negatives mean nothing."""
    ours, theirs = member_sets(actual), member_sets(expected)
    assert len(ours) == len(theirs), f"{what}: {len(ours)} rows, expected {len(theirs)}"
    wrong = [row for row in range(len(ours)) if ours[row] != theirs[row]]
    if wrong:
        row = wrong[0]
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(ours)} rows differ; row {row} has {sorted(ours[row] - theirs[row])} "
            f"instead of {sorted(theirs[row] - ours[row])}"
        )


def assert_op_selections(actual: Tensor, scores: Tensor, k: int, eps: float, what: str = "selections") -> int:
    """*op*, of selections: the top ``k`` of reference ``scores`` [T, N], except members within ``eps`` of the border.

    ``actual`` [T, k] of indices, negative: none; scores of -inf cannot be selected. Prints and returns how many
    members differ.
    """
    swapped = 0
    for row, chosen in enumerate(member_sets(actual)):
        values = scores[row].to(torch.float64)
        count = min(k, int((values > -torch.inf).sum()))
        assert len(chosen) == count, f"{what}: row {row} has {len(chosen)} members, expected {count}"
        order = torch.sort(values, descending=True, stable=True).indices[:count].tolist()
        border = float(values[order[-1]]) if count else 0.0
        for number in chosen ^ frozenset(order):
            distance = abs(float(values[number]) - border)
            assert distance <= eps, f"{what}: row {row}, member {number} is {distance:.3e} from the border, eps {eps}"
        swapped += len(chosen - frozenset(order))
    print(f"{what}: {swapped} members differ within eps = {eps}")
    return swapped


# ---------------------------------------------------------------------------------------------- op


def op_bound(reference: Tensor, terms: Tensor | None = None) -> Tensor:
    """Allowed deviation of each element: 2^-7 (rms + |ref|); for a sum of products also 2^-8 |ref| + 2^-21 terms.

    ``terms``: sum of the absolute products behind each element; the tighter of the two bounds holds. Sums on both sides
    of the middle between two BF16 values are rounded apart, by 2^-8 to 2^-7 of them: a BF16 reference may be one off.
    """
    size = reference.to(torch.float64).abs()
    bound = 2.0**-7 * (size.square().mean().sqrt() + size)
    if terms is None:
        return bound
    rounding = 2.0**-8 * size
    if reference.dtype == torch.bfloat16:
        # frexp: size = mantissa 2^exponent with a mantissa from 1/2 on, of 8 bits.
        spacing = torch.exp2(torch.frexp(size).exponent.to(torch.float64) - 8)
        rounding = torch.where(size > 0, torch.maximum(rounding, spacing), rounding)
    return torch.minimum(bound, rounding + 2.0**-21 * terms.to(torch.float64))


def assert_op(actual: Tensor, reference: Tensor, what: str = "output", *, terms: Tensor | None = None) -> None:
    """*op*: one op in trained mode against its reference on the same inputs, within ``op_bound``."""
    _same_form(actual, reference, what)
    difference = (actual.to(torch.float64) - reference.to(torch.float64)).abs()
    excess = difference - op_bound(reference, terms)
    if not bool((excess <= 0).all()):
        worst = int(torch.where(excess.isnan(), torch.inf, excess).argmax())
        raise AssertionError(
            f"{what}: element {worst} is {actual.flatten()[worst].item()!r}, "
            f"expected {reference.flatten()[worst].item()!r}; {int((~(excess <= 0)).sum())} of {excess.numel()} "
            "are outside the bound"
        )


# ---------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class LogitDistance:
    """``median`` and ``p99`` over all logits of abs(difference) / std(reference logits)."""

    median: float
    p99: float


def logit_distance(actual: Tensor, reference: Tensor) -> LogitDistance:
    """How far teacher-forced logits [T, V] are from the reference's."""
    wide = reference.to(torch.float64)
    scaled = ((actual.to(torch.float64) - wide).abs() / wide.std()).flatten()
    return LogitDistance(float(scaled.quantile(0.5)), float(scaled.quantile(0.99)))


def assert_model(actual: Tensor, reference: Tensor, bound: LogitDistance, what: str = "logits") -> LogitDistance:
    """*model*: median and P99 distance of teacher-forced logits within a recorded bound; returns the distance."""
    _same_form(actual, reference, what)
    found = logit_distance(actual, reference)
    inside = found.median <= bound.median and found.p99 <= bound.p99
    assert inside, f"{what}: distance {found}, allowed {bound}"
    return found


# ---------------------------------------------------------------------------------------------- tokens


def assert_tokens(
    actual: Sequence[int],
    expected: Sequence[int],
    margins: Sequence[float] | None = None,
    eps: float = 0.0,
    what: str = "tokens",
) -> int:
    """*tokens*: identical; with ``margins``, up to the first position whose reference top-two margin is under ``eps``.

    ``margins``: the reference's top-1 minus top-2 logit at each position. Prints and returns how many margins of the
    reference are under eps. A difference at a margin of eps or more fails.
    """
    under = [] if margins is None else [i for i, margin in enumerate(margins) if margin < eps]
    stop = min(under, default=len(expected))
    if len(actual) < min(stop, len(expected)) or (not under and len(actual) != len(expected)):
        raise AssertionError(f"{what}: {len(actual)} tokens, expected {len(expected)}")
    for position in range(stop):
        assert actual[position] == expected[position], (
            f"{what}: position {position} has {actual[position]}, expected {expected[position]}"
        )
    if margins is not None:
        print(f"{what}: {len(under)} of {len(expected)} margins are under eps = {eps}; compared {stop} tokens")
    return len(under)


# ---------------------------------------------------------------------------------------------- distribution


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """P value of observed counts [N] under ``probabilities`` [N]; cells of under 5 expected draws are pooled.

    A draw in a cell of probability 0 gives 0.
    """
    observed, chance = counts.cpu().to(torch.float64), probabilities.cpu().to(torch.float64)
    if bool((observed[chance == 0] > 0).any()):
        return 0.0
    expected = chance / chance.sum() * observed.sum()
    small = expected < SMALLEST_EXPECTED
    pooled = [torch.stack((v[small].sum(), *v[~small])) if small.any() else v for v in (observed, expected)]
    filled = pooled[1] > 0
    observed, expected = pooled[0][filled], pooled[1][filled]
    statistic = ((observed - expected).square() / expected).sum()
    freedom = torch.tensor((observed.numel() - 1) / 2.0, dtype=torch.float64, device=observed.device)
    return 1.0 if freedom == 0 else float(torch.special.gammaincc(freedom, statistic / 2))


def assert_distribution(draws: Tensor, probabilities: Tensor, what: str = "draws") -> float:
    """*distribution*: integer draws [D] follow ``probabilities`` [N] by chi-square, p above 1e-3; returns p."""
    counts = torch.bincount(draws.flatten(), minlength=probabilities.numel())
    assert counts.numel() == probabilities.numel(), f"{what}: a draw lies beyond the {probabilities.numel()} cells"
    p = chi_square_p(counts, probabilities.flatten())
    assert p > LEAST_P, f"{what}: chi-square p = {p:.2e}, expected above {LEAST_P} ({counts.tolist()})"
    return p


def _same_form(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, f"{what} has shape {tuple(actual.shape)}: expected {tuple(expected.shape)}"

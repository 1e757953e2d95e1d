"""Sampling by kernels on drawn logits, parameters and layouts."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compare import assert_relative
from drawn_memory import FEW, assert_same, both, by_interpreter, indices, layouts, numbers
from quickseek.ops import sampling
from quickseek.ops.sampling import Bias, Ends, LogProbabilities, Penalties, SparseDistribution

pytestmark = by_interpreter
SPECIAL = (0.0, -0.0, torch.nan, torch.inf, -torch.inf, -torch.inf, 30.0)
"""No number so near to another that their probabilities are equal: kernels go by the logit, the reference by the id."""
dtypes = st.sampled_from((torch.bfloat16, torch.float32, torch.float64))
vocabularies = st.one_of(st.integers(1, 70), st.integers(71, 300))


@st.composite
def logits_of(draw: st.DrawFn, rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    x: Tensor = draw(numbers((rows, vocabulary), dtype, SPECIAL, 3))
    if rows and draw(st.booleans()):
        x[draw(st.integers(0, rows - 1))] = draw(st.sampled_from((-torch.inf, 2.0)))
    return x


def each(rows: int, *choices: float) -> st.SearchStrategy[Tensor]:
    """One of the numbers for each row."""
    return st.lists(st.sampled_from(choices), min_size=rows, max_size=rows).map(
        lambda values: torch.tensor(values, dtype=torch.float64)
    )


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    """float64 within rounding, zeros and NaN where the reference has them."""
    assert found.dtype == expected.dtype and torch.equal(found.isnan(), expected.isnan()), what
    assert torch.equal(found == 0, expected == 0), f"{what}: other members"
    assert_relative(found.nan_to_num(), expected.nan_to_num(), 1e-6 if found.dtype == torch.float32 else 1e-12, what)


@FEW
@given(st.data(), st.integers(0, 4), vocabularies, dtypes, layouts)
def test_distributions_and_draws_are_those_of_the_reference(
    data: st.DataObject, rows: int, vocabulary: int, dtype: torch.dtype, layout: tuple[int, str]
) -> None:
    logits = data.draw(logits_of(rows, vocabulary, dtype))
    temperature = data.draw(each(rows, 0.0, 1.0, 0.6, 1.7, 0.01, 50.0))
    top_p = data.draw(each(rows, 1.0, 0.9137, 0.5077, 0.1031, 1e-9))
    top_k, min_p = data.draw(indices((rows,), -1, vocabulary + 2)), data.draw(each(rows, 0.0, 0.0203, 0.3071))

    def call(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor | None, min_p: Tensor | None) -> Tensor:
        return sampling.probabilities(logits, temperature, top_p, top_k=top_k, min_p=min_p)

    both_limits = data.draw(st.booleans())
    limits = (top_k, min_p) if both_limits else (None, None)
    ran = both(call, (logits, temperature, top_p, *limits), layout)
    if ran is not None:
        assert_close(ran.found, ran.expected, "probabilities")

    keys = data.draw(indices((2, rows), -(2**62), 2**62))

    def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return sampling.sample(logits, temperature, top_p, seeds, positions, sampling.PURPOSE_TOKEN)

    drawn = both(draw, (logits, temperature, top_p, keys[0], keys[1]), layout)
    if drawn is not None:
        assert_same(drawn.found, drawn.expected, "tokens")
    for call_row in (sampling.greedy, sampling.valid):
        chosen = both(call_row, (logits,), layout)
        if chosen is not None:
            assert_same(chosen.found, chosen.expected, call_row.__name__)


@FEW
@given(st.data(), st.integers(0, 4), vocabularies, dtypes, layouts)
def test_log_probabilities_and_drafts_are_those_of_the_reference(
    data: st.DataObject, rows: int, vocabulary: int, dtype: torch.dtype, layout: tuple[int, str]
) -> None:
    logits = data.draw(logits_of(rows, vocabulary, dtype))
    if dtype == torch.float64:
        logits = logits.float().double()  # logarithms of neighbours in float64 may be equal
    valid, top = sampling.valid(logits), data.draw(st.integers(0, min(vocabulary, 90)))
    tokens = data.draw(indices((rows,), 0, vocabulary - 1))

    def call(logits: Tensor, tokens: Tensor) -> LogProbabilities:
        return sampling.log_probabilities(logits, tokens, top)

    ran = both(call, (logits, tokens), layout)
    if ran is not None:
        for name, found, expected in zip(LogProbabilities._fields, ran.found, ran.expected, strict=True):
            if expected.dtype == torch.int64:
                assert_same(found[valid], expected[valid], name)
            else:
                finite = expected.isfinite() & valid.view(-1, *[1] * (expected.dim() - 1))
                assert (found[finite] - expected[finite]).abs().le(1e-6 * (1 + expected[finite].abs())).all(), name
                assert torch.equal(found.isneginf()[valid], expected.isneginf()[valid]), name

    keys, temperature = data.draw(indices((2, rows), 0, 2**62)), data.draw(each(rows, 0.0, 1.0, 0.6, 50.0))
    drafted = both(sampling.draft_distribution, (logits, temperature, keys[0], keys[1]), layout)
    if drafted is not None:
        (token, held), (expected_token, expected_held) = drafted.found, drafted.expected
        assert_same(held.ids, expected_held.ids, "ids of drafts")
        assert_close(held.probabilities, expected_held.probabilities, "Q")
        assert_same(token, expected_token, "drafts")


@FEW
@given(st.data(), st.integers(0, 3), st.integers(0, 5), st.integers(2, 90), st.integers(0, 2), layouts)
def test_drafts_are_accepted_and_replaced_as_by_the_reference(
    data: st.DataObject, batch: int, count: int, vocabulary: int, kind: int, layout: tuple[int, str]
) -> None:
    def chances(*shape: int) -> Tensor:
        x = torch.softmax(data.draw(numbers((*shape, vocabulary), torch.float64, (), 2)), -1)
        return torch.where(x < x.amax(-1, keepdim=True) / 50, 0, x)

    target, tokens = chances(batch, count + 1), data.draw(indices((batch, count), 0, vocabulary - 1))
    counts, keys = data.draw(indices((batch,), 0, count)), data.draw(indices((2, batch), 0, 2**62))
    source: SparseDistribution | Tensor | None = None
    if kind:
        source = chances(batch, count)
        if kind == 2:
            kept = source.topk(min(5, vocabulary), -1)
            source = SparseDistribution(kept.indices, kept.values)
    ran = both(sampling.verify, (target, tokens, source, keys[0], keys[1], counts), layout)
    if ran is not None:
        for name, found, expected in zip(ran.expected._fields, ran.found, ran.expected, strict=True):
            assert_same(found, expected, name)
    chosen = target.argmax(-1) if data.draw(st.booleans()) else tokens.new_zeros(batch, count + 1)
    chosen[:, :-1] = torch.where(tokens % 3 > 0, tokens, chosen[:, :-1])
    matched = both(sampling.match, (chosen, tokens, counts), layout)
    if matched is not None:
        for name, found, expected in zip(matched.expected._fields, matched.found, matched.expected, strict=True):
            assert_same(found, expected, name)


@FEW
@given(st.data(), st.integers(1, 3), st.integers(1, 70), st.integers(0, 3), dtypes, layouts)
def test_adjusted_logits_are_those_of_the_reference(
    data: st.DataObject, rows: int, vocabulary: int, drafts: int, dtype: torch.dtype, layout: tuple[int, str]
) -> None:
    logits = data.draw(logits_of(rows, vocabulary, dtype))
    slots = data.draw(indices((rows,), 0, 3))
    generator = torch.Generator().manual_seed(vocabulary)
    penalties = Penalties(
        torch.randint(0, 3, (4, vocabulary), generator=generator, dtype=torch.int32),
        torch.rand(4, vocabulary, generator=generator) < 0.5,
        slots,
        data.draw(indices((rows, drafts), -1, vocabulary - 1)),
        data.draw(each(rows, 0.0, 0.7, -1.0)),
        data.draw(each(rows, 0.0, 0.7, -1.0)),
        data.draw(each(rows, 1.0, 1.3, 0.5)),
    )
    bias = Bias(torch.arange(-1, vocabulary - 1).repeat(rows, 1), data.draw(numbers((rows, vocabulary), torch.float32)))
    bitmask = data.draw(indices((rows, -(-vocabulary // 32)), -(2**31), 2**31 - 1)).int()
    ends = Ends(data.draw(indices((rows, 2), -1, vocabulary - 1)), slots > 1)

    def call(logits: Tensor, penalties: Penalties, bias: Bias, bitmask: Tensor, ends: Ends) -> Tensor:
        return sampling.adjust(logits, penalties=penalties, bias=bias, bitmask=bitmask, ends=ends)

    ran = both(call, (logits, penalties, bias, bitmask, ends), layout)
    if ran is not None:
        assert_same(ran.found, ran.expected)

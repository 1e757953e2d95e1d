"""Penalties, bias, grammar masks and forbidden ends, against plain Python."""

import math
import random

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_relative
from quickseek.ops import sampling

SLOTS, VOCABULARY, DRAFTS = 3, 70, 2


class Case:
    """Random requests: each slot's prompt, answer and parameters, and the rows of a step with two drafts each."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)

        def some_ids(most: int) -> list[int]:
            return [draw.randrange(10) for _ in range(draw.randrange(most))]

        self.prompts = [some_ids(5) for _ in range(SLOTS)]
        self.answers = [some_ids(5) for _ in range(SLOTS)]
        self.slots = [2, 0, 1, 0]
        self.drafts = [[draw.randrange(10) for _ in range(DRAFTS)] for _ in self.slots]
        self.params = [
            (draw.choice((0.0, 1.5)), draw.choice((0.0, -0.75)), draw.choice((1.0, 1.7))) for _ in self.slots
        ]
        torch.manual_seed(seed)
        self.logits = torch.randn(len(self.slots) * (DRAFTS + 1), VOCABULARY, dtype=torch.float64)

    def penalties(self) -> sampling.Penalties:
        counts = torch.zeros(SLOTS, VOCABULARY, dtype=torch.int32)
        seen = torch.zeros(SLOTS, VOCABULARY, dtype=torch.bool)
        for slot in range(SLOTS):
            for token in self.answers[slot]:
                counts[slot, token] += 1
            seen[slot, self.prompts[slot]] = True
        of_rows = torch.tensor(self.params).repeat_interleave(DRAFTS + 1, 0)
        return sampling.Penalties(
            counts,
            seen,
            torch.tensor(self.slots).repeat_interleave(DRAFTS + 1),
            sampling.drafts_before(torch.tensor(self.drafts)),
            presence=of_rows[:, 0],
            frequency=of_rows[:, 1],
            repetition=of_rows[:, 2],
        )

    def expected(self, *, drafts_count: bool = True) -> Tensor:
        rows = []
        for request, slot in enumerate(self.slots):
            presence, frequency, repetition = self.params[request]
            for row in range(DRAFTS + 1):
                answer = self.answers[slot] + (self.drafts[request][:row] if drafts_count else [])
                values = []
                for token, logit in enumerate(self.logits[len(rows)].tolist()):
                    if token in answer or token in self.prompts[slot]:
                        logit = logit / repetition if logit > 0 else logit * repetition
                    logit -= frequency * answer.count(token)
                    logit -= presence if token in answer else 0.0
                    values.append(logit)
                rows.append(values)
        return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_penalties_equal_plain_python_and_row_r_counts_drafts_1_to_r(seed: int) -> None:
    case = Case(seed)
    adjusted = sampling.adjust(case.logits, penalties=case.penalties())
    assert_relative(adjusted, case.expected(), 1e-6)  # the parameters are float32
    with pytest.raises(AssertionError):
        assert_relative(adjusted, case.expected(drafts_count=False), 1e-6)


def test_drafts_before_a_row_are_the_earlier_ones_only() -> None:
    before = sampling.drafts_before(torch.tensor([[4, 5], [6, 7]]))
    assert before.tolist() == [[-1, -1], [4, -1], [4, 5], [-1, -1], [6, -1], [6, 7]]
    assert sampling.drafts_before(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)


def test_neutral_parameters_change_no_bit_and_the_input_is_kept() -> None:
    case = Case(0)
    case.params = [(0.0, 0.0, 1.0)] * len(case.slots)
    rows = case.logits.shape[0]
    before = case.logits.clone()
    none = torch.full((rows, 3), -1)
    adjusted = sampling.adjust(
        case.logits,
        penalties=case.penalties(),
        bias=sampling.Bias(none, torch.ones(rows, 3)),
        bitmask=torch.full((rows, 3), -1, dtype=torch.int32),
        ends=sampling.Ends(none, torch.ones(rows, dtype=torch.bool)),
    )
    assert_bits(adjusted, before)
    assert_bits(case.logits, before)
    case.params[0] = (0.5, 0.0, 1.0)
    with pytest.raises(AssertionError):
        assert_bits(sampling.adjust(case.logits, penalties=case.penalties()), before)


def test_logits_of_minus_infinity_stay_so_under_every_penalty() -> None:
    case = Case(1)
    case.params = [(2.0, 2.0, 1.9)] * len(case.slots)
    case.logits[:, :10] = -math.inf
    adjusted = sampling.adjust(case.logits, penalties=case.penalties())
    assert bool((adjusted[:, :10] == -math.inf).all())
    assert not bool(adjusted.isnan().any())


def test_bias_is_added_to_the_ids_it_names() -> None:
    logits = torch.zeros(2, 6)
    bias = sampling.Bias(torch.tensor([[5, 0], [2, -1]]), torch.tensor([[1.5, -100.0], [3.0, 9.0]]))
    adjusted = sampling.adjust(logits, bias=bias)
    assert adjusted.tolist() == [[-100.0, 0, 0, 0, 0, 1.5], [0, 0, 3.0, 0, 0, 0]]


def test_a_bitmask_leaves_exactly_the_ids_whose_bits_are_set() -> None:
    draw = random.Random(3)
    allowed = [{draw.randrange(VOCABULARY) for _ in range(9)} | {31, 63} for _ in range(4)]
    words = [[sum(1 << bit for bit in range(32) if word * 32 + bit in row) for word in range(3)] for row in allowed]
    bitmask = torch.tensor([[word - 2**32 if word >= 2**31 else word for word in row] for row in words]).to(torch.int32)
    adjusted = sampling.adjust(torch.zeros(4, VOCABULARY), bitmask=bitmask)
    assert [set(torch.nonzero(row == 0).flatten().tolist()) for row in adjusted] == allowed
    other = sampling.adjust(torch.zeros(4, VOCABULARY), bitmask=bitmask ^ 1)
    assert [set(torch.nonzero(row == 0).flatten().tolist()) for row in other] != allowed


def test_ends_are_forbidden_where_asked_unless_nothing_else_is_left() -> None:
    logits = torch.zeros(3, 4)
    complete = torch.tensor([[-1], [-1], [0b0100]], dtype=torch.int32)
    ends = sampling.Ends(torch.tensor([[2, 3], [2, 3], [2, -1]]), torch.tensor([True, False, True]))
    adjusted = sampling.adjust(logits, bitmask=complete, ends=ends)
    never = -math.inf
    assert adjusted.tolist() == [[0, 0, never, never], [0, 0, 0, 0], [never, never, 0, never]]


def test_half_precision_logits_are_adjusted_in_float32() -> None:
    assert sampling.adjust(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize(
    ("field", "shape"),
    [("prompt_seen", (3, 3)), ("output_counts", (3, 3)), ("slots", (1,)), ("drafts", (1, 2)), ("presence", (1,))],
)
def test_a_penalty_tensor_of_another_shape_is_named(field: str, shape: tuple[int, ...]) -> None:
    case = Case(0)
    with pytest.raises(ValueError, match=field):
        sampling.adjust(case.logits, penalties=case.penalties()._replace(**{field: torch.zeros(shape)}))


def test_a_bitmask_of_another_width_is_named() -> None:
    with pytest.raises(ValueError, match="bitmask"):
        sampling.adjust(torch.zeros(1, 33), bitmask=torch.zeros(1, 1, dtype=torch.int32))

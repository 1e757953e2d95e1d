"""Router, experts and finalisation (spec/model.md 7)."""

import math

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64, assert_op, assert_printed
from op_cases import assert_nan_stays, normal
from quickseek import formats
from quickseek.ops import moe as door
from quickseek.ops.linear import Fp4Weight
from quickseek.ops.moe import ExpertWeights, Routing, UnfinalizedMoE
from quickseek.ops.moe.reference import router_scores

EXPERTS, TOP, HIDDEN, INNER, LIMIT = 6, 3, 8, 4, 0.8


def routed(x: Tensor, weight: Tensor, bias: Tensor | None = None, top_k: int = TOP, **options: Tensor) -> Routing:
    bias = torch.zeros(weight.shape[0]) if bias is None else bias
    return door.route(x, weight, bias, top_k=top_k, scale=1.5, **options)


def from_logits(logits: Tensor, bias: Tensor | None = None, top_k: int = TOP) -> Routing:
    """Routing of rows whose router logits are given."""
    return routed(logits, torch.eye(logits.shape[1], dtype=logits.dtype), bias, top_k)


# ---------------------------------------------------------------------------------------------- router


def test_scores_are_the_printed_ones() -> None:
    found = router_scores(torch.tensor([-30.0, 0.0, 3.0, 20.0], dtype=torch.float64))
    assert_printed(found, "3.059e-7 0.83255461 1.74602043 4.47213596")
    assert_printed(router_scores(torch.tensor([-30.0], dtype=torch.float32)), "3.059e-7")
    assert torch.log(1 + torch.exp(torch.tensor(-30.0))) == 0, "the plain form underflows in float32"


def test_weights_are_renormalised_and_scaled_scores() -> None:
    logits = normal(5, EXPERTS)
    found = from_logits(logits)
    for row in range(5):
        scores = {e: math.sqrt(math.log1p(math.exp(float(logits[row, e])))) for e in range(EXPERTS)}
        best = sorted(scores, key=lambda e: (-scores[e], e))[:TOP]
        assert found.experts[row].tolist() == best
        total = sum(scores[e] for e in best)
        assert found.weights[row].tolist() == pytest.approx([1.5 * scores[e] / total for e in best], rel=1e-12)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = normal(4, EXPERTS), torch.zeros(EXPERTS, dtype=torch.float64)
    bias[int(logits[0].argmin())] = 10.0
    found = from_logits(logits, bias)
    assert found.experts[0, 0] == logits[0].argmin()
    chosen = router_scores(logits).gather(1, found.experts)
    assert_float64(found.weights, 1.5 * chosen / chosen.sum(1, keepdim=True))


def test_rows_of_images_take_their_own_bias() -> None:
    logits = normal(4, EXPERTS)
    text, image = normal(EXPERTS, seed=3), normal(EXPERTS, seed=4)
    rows = torch.tensor([False, True, True, False])
    weight = torch.eye(EXPERTS, dtype=torch.float64)
    found = routed(logits, weight, text, image_bias=image, image_rows=rows)
    for row in range(4):
        assert_bits(found.experts[row], from_logits(logits[row : row + 1], image if rows[row] else text).experts[0])
    assert not torch.equal(found.experts, routed(logits, weight, text).experts), "the two biases choose differently"


def test_equal_logits_go_to_the_lowest_experts() -> None:
    for value in (0.0, -50.0, 50.0):
        found = from_logits(torch.full((2, EXPERTS), value))
        assert found.experts.tolist() == [[0, 1, 2]] * 2
        assert found.weights.flatten().tolist() == pytest.approx([0.5] * 6)


@pytest.mark.parametrize("value", [-50.0, -80.0, -200.0])
def test_logits_far_below_zero_give_finite_weights(value: float) -> None:
    found = from_logits(torch.full((1, EXPERTS), value))
    scores = TOP * math.exp(value / 2)
    assert float(found.weights.sum()) == pytest.approx(1.5 * scores / (scores + 1e-20), rel=1e-5, abs=1e-20)


def test_one_logit_above_many_at_minus_fifty_takes_the_weight() -> None:
    logits = torch.full((1, EXPERTS), -50.0)
    logits[0, 4] = 1.0
    found = from_logits(logits)
    assert found.experts[0].tolist() == [4, 0, 1]
    assert found.weights[0].tolist() == pytest.approx([1.5, 0.0, 0.0], abs=1e-6)


def test_a_temperature_divides_the_logits() -> None:
    x = normal(3, EXPERTS)
    weight, bias = torch.eye(EXPERTS, dtype=torch.float64), torch.zeros(EXPERTS)
    found = door.route(x, weight, bias, top_k=2, scale=1.5, temperature=2.0)
    assert_bits(found.weights, from_logits(x / 2, top_k=2).weights)


def test_bf16_rows_are_routed_in_float32() -> None:
    x, weight = normal(3, HIDDEN, dtype=torch.bfloat16), normal(EXPERTS, HIDDEN, seed=1, dtype=torch.bfloat16)
    found = routed(x, weight)
    assert found.weights.dtype == torch.float32
    assert_bits(found.experts, routed(x.double(), weight.double()).experts)


def test_a_nan_row_of_the_router_stays_in_its_row() -> None:
    weight = normal(EXPERTS, HIDDEN, seed=1)
    assert_nan_stays(lambda x: routed(x, weight).weights, normal(4, HIDDEN), 2)
    x = normal(4, HIDDEN)
    clean = routed(x, weight).experts
    x[2] = torch.nan
    spoilt = routed(x, weight).experts
    assert_bits(spoilt[[0, 1, 3]], clean[[0, 1, 3]])
    assert ((spoilt[2] >= 0) & (spoilt[2] < EXPERTS)).all(), "experts of a spoilt row still exist"


# ---------------------------------------------------------------------------------------------- experts


def plain_weights(dtype: torch.dtype = torch.float64) -> ExpertWeights:
    return ExpertWeights(
        normal(EXPERTS, 2 * INNER, HIDDEN, seed=5, dtype=dtype), normal(EXPERTS, HIDDEN, INNER, seed=6, dtype=dtype)
    )


def expected_row(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """One expert by the definition: the gate is clamped from above only."""
    gate, up = (w13 @ x).chunk(2)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return w2 @ (gate / (1 + torch.exp(-gate)) * up)


def whole(x: Tensor, routing: Routing, weights: ExpertWeights, place: str) -> Tensor:
    routed = door.routed_experts(x, routing, weights, limit=LIMIT, routed_weight=place)
    return door.finalize(routed, torch.zeros_like(x))


@pytest.mark.parametrize("place", ["after", "before"])
def test_the_sum_of_the_chosen_experts_is_the_definition(place: str) -> None:
    x, weights = 2 * normal(7, HIDDEN), plain_weights()
    routing = routed(x, normal(EXPERTS, HIDDEN, seed=1))
    expected = torch.zeros_like(x)
    for row in range(7):
        for expert, weight in zip(routing.experts[row].tolist(), routing.weights[row], strict=True):
            expected[row] += weight * expected_row(x[row], weights.w13[expert], weights.w2[expert])  # type: ignore[index]
    assert_float64(whole(x, routing, weights, place), expected)
    wrong = Routing(routing.experts, routing.weights.flip(1))
    with pytest.raises(AssertionError):
        assert_float64(whole(x, wrong, weights, place), expected)


def test_rows_are_unweighted_after_and_weighted_before_the_down_projection() -> None:
    x, weights = normal(3, HIDDEN), plain_weights()
    routing = routed(x, normal(EXPERTS, HIDDEN, seed=1))
    after = door.routed_experts(x, routing, weights, limit=LIMIT)
    before = door.routed_experts(x, routing, weights, limit=LIMIT, routed_weight="before")
    assert_bits(after.weights, routing.weights)
    assert (before.weights == 1).all()
    assert_float64(before.rows[before.index], after.rows[after.index] * routing.weights.unsqueeze(-1))


def test_an_expert_without_rows_and_one_with_all_of_them() -> None:
    x, weights = normal(5, HIDDEN), plain_weights()
    routing = Routing(torch.tensor([[3]] * 5), torch.ones(5, 1, dtype=torch.float64))
    expected = torch.stack([expected_row(row, weights.w13[3], weights.w2[3]) for row in x])  # type: ignore[index]
    assert_float64(whole(x, routing, weights, "after"), expected)


@pytest.mark.parametrize("place", ["after", "before"])
@pytest.mark.parametrize("absent", [-1, EXPERTS])
def test_a_slot_of_an_expert_that_does_not_exist_adds_nothing(absent: int, place: str) -> None:
    x, weights = normal(4, HIDDEN), plain_weights()
    chosen, weight = torch.tensor([[3, 0], [5, 3], [0, 5], [5, 1]]), normal(4, 2, seed=2)
    without = chosen.clone()
    without[1, 0] = without[2, 1] = without[3, 0] = without[3, 1] = absent
    found = door.routed_experts(x, Routing(without, weight), weights, limit=LIMIT, routed_weight=place)
    assert ((found.index < 0) == (without == absent)).all()
    assert found.index[found.index >= 0].sort().values.tolist() == [0, 1, 2, 3]
    assert found.rows.shape == (8, HIDDEN), "as many rows as slots"
    expected = whole(x, Routing(chosen, weight.masked_fill(without == absent, 0.0)), weights, "after")
    assert_float64(door.finalize(found, torch.zeros_like(x)), expected)
    with pytest.raises(AssertionError):
        assert_float64(whole(x, Routing(chosen, weight), weights, place), expected)


def test_a_step_without_rows_has_none_of_experts() -> None:
    routing = Routing(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.float64))
    found = door.routed_experts(normal(0, HIDDEN), routing, plain_weights(), limit=LIMIT)
    assert found.rows.shape == (0, HIDDEN) and found.index.shape == (0, 2)


def test_finalisation_skips_absent_slots_and_adds_the_shared_expert() -> None:
    rows, shared = normal(3, HIDDEN), normal(2, HIDDEN, seed=1)
    rows[2] = torch.nan
    weights = torch.tensor([[0.5, 2.0], [1.0, 3.0]], dtype=torch.float64)
    index = torch.tensor([[1, -1], [-1, 0]])
    expected = torch.stack((0.5 * rows[1], 3.0 * rows[0])) + shared
    assert_float64(door.finalize(UnfinalizedMoE(rows, weights, index), shared), expected)


def test_finalisation_rounds_once() -> None:
    rows = torch.full((3, 4), 2.0**-9, dtype=torch.bfloat16)
    routed = UnfinalizedMoE(rows, torch.ones(1, 3), torch.arange(3, dtype=torch.int32).unsqueeze(0))
    out = door.finalize(routed, torch.ones(1, 4, dtype=torch.bfloat16))
    assert_bits(out, torch.full((1, 4), 1 + 2.0**-7, dtype=torch.bfloat16))


def test_the_shared_expert_has_no_weight() -> None:
    x, weights = normal(4, HIDDEN), plain_weights()
    w13, w2 = weights.w13[0], weights.w2[0]  # type: ignore[index]
    expected = torch.stack([expected_row(row, w13, w2) for row in x])
    assert_float64(door.shared_expert(x, w13, w2, limit=LIMIT), expected)


def test_packed_experts_quantise_both_of_their_inputs() -> None:
    w13, w2 = normal(2, 64, 32, seed=1, dtype=torch.float32), normal(2, 32, 32, seed=2, dtype=torch.float32)
    codes = [formats.quantize_fp4_rows(w) for w in (w13, w2)]
    values = [formats.dequantize_fp4_rows(*c, torch.float64) for c in codes]
    x = normal(3, 32, dtype=torch.bfloat16)
    routing = Routing(torch.tensor([[1], [0], [1]]), torch.ones(3, 1))
    out = whole(x, routing, ExpertWeights(*(Fp4Weight(*c) for c in codes)), "after")
    for row, expert in enumerate([1, 0, 1]):
        inputs = formats.fake_quantize_a8(x[row]).double()
        gate, up = (values[0][expert] @ inputs).to(torch.bfloat16).float().chunk(2)
        hidden = (torch.nn.functional.silu(gate.clamp_max(LIMIT)) * up.clamp(-LIMIT, LIMIT)).to(torch.bfloat16)
        hidden = formats.fake_quantize_a8(hidden).double()
        assert_op(out[row], values[1][expert] @ hidden, terms=values[1][expert].abs() @ hidden.abs())


@pytest.mark.parametrize("place", ["after", "before"])
def test_a_nan_row_of_the_experts_stays_in_its_row(place: str) -> None:
    weights, routing = plain_weights(), routed(normal(6, HIDDEN), normal(EXPERTS, HIDDEN, seed=1))
    assert_nan_stays(lambda x: whole(x, routing, weights, place), normal(6, HIDDEN), 3)


def test_the_mixture_is_differentiable() -> None:
    x, gate, weights = normal(3, HIDDEN), normal(EXPERTS, HIDDEN, seed=1), plain_weights()
    inputs = tuple(p.clone().requires_grad_() for p in (x, gate, weights.w13, weights.w2))

    def run(x: Tensor, gate: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        shared = door.shared_expert(x, w13[0], w2[0], limit=LIMIT)
        return door.finalize(door.routed_experts(x, routed(x, gate), ExpertWeights(w13, w2), limit=LIMIT), shared)

    assert torch.autograd.gradcheck(run, inputs)


def test_shapes_that_do_not_fit_are_named() -> None:
    weight = normal(EXPERTS, HIDDEN)
    with pytest.raises(ValueError, match=r"x has shape \(2, 7\): expected \[\*, 8\]"):
        routed(normal(2, 7), weight)
    with pytest.raises(ValueError, match=r"bias has shape \(5,\): expected \[6\]"):
        routed(normal(2, HIDDEN), weight, torch.zeros(5))

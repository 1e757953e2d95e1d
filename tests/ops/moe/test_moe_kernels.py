"""Kernels of the mixture of experts against their reference (spec/model.md 7)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op, assert_op_selections
from moe_cases import down_terms, drawn, moved, packed_experts, packed_matrix, routing_of, rows_of
from op_cases import normal, poisoned_outputs
from quickseek import formats
from quickseek.ops.linear import Fp4Weight
from quickseek.ops.moe import ExpertWeights, Routing, UnfinalizedMoE, reference
from quickseek.ops.moe.cute_fragments import code_place

kernels = pytest.importorskip("quickseek.ops.moe.triton")

LIMIT, SCALE = 1.5, 1.5


def run(device: torch.device, name: str, *arguments: Any) -> Any:
    """A kernel form's result, on a CPU; outputs are poisoned before."""
    there = [moved(a, device) if isinstance(a, Tensor) or hasattr(a, "__dataclass_fields__") else a for a in arguments]
    with poisoned_outputs():
        out = getattr(kernels, name)(*there)
    return moved(out, torch.device("cpu"))


# ---------------------------------------------------------------------------------------------- router


def routed(device: torch.device, x: Tensor, weight: Tensor, bias: Tensor, top_k: int, *image: Tensor) -> Routing:
    found: Routing = run(device, "route", x, weight, bias, top_k, SCALE, 1.0, *(image or (None, None)))
    return found


def same_route(found: Routing, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """``found`` has the experts and weights of the reference; ``bias`` [T, E]: what selection adds in each row."""
    top_k = found.experts.shape[1]
    scores = reference.router_scores(x.double() @ weight.double().T)
    assert_op_selections(found.experts, scores + bias.double(), top_k, eps=1e-5)
    chosen = scores.gather(1, found.experts)
    expected = chosen / (chosen.sum(1, keepdim=True) + reference.WEIGHT_FLOOR) * SCALE
    torch.testing.assert_close(found.weights, expected.float(), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(("rows", "hidden", "experts", "top_k"), [(1, 96, 6, 3), (6, 160, 33, 6), (70, 72, 40, 1)])
def test_routes_are_those_of_the_reference(
    device: torch.device, rows: int, hidden: int, experts: int, top_k: int
) -> None:
    x, weight = rows_of(rows, hidden), normal(experts, hidden, seed=1, dtype=torch.bfloat16) / 4
    bias = normal(experts, seed=2, dtype=torch.float32) / 8
    found = routed(device, x, weight, bias, top_k)
    same_route(found, x, weight, bias.expand(rows, -1))
    assert found.experts.dtype == torch.int64
    with pytest.raises(AssertionError):
        same_route(Routing((found.experts + 1) % experts, found.weights), x, weight, bias.expand(rows, -1))
    with pytest.raises(AssertionError):
        same_route(Routing(found.experts, found.weights * 1.001), x, weight, bias.expand(rows, -1))


def test_rows_of_images_take_their_own_bias_in_kernels(device: torch.device) -> None:
    x, weight = rows_of(5, 96), normal(12, 96, seed=1, dtype=torch.bfloat16) / 4
    text, image = normal(12, seed=2, dtype=torch.float32), normal(12, seed=3, dtype=torch.float32)
    rows = torch.tensor([False, True, True, False, True])
    found = routed(device, x, weight, text, 3, image, rows)
    same_route(found, x, weight, torch.where(rows[:, None], image, text))
    with pytest.raises(AssertionError):
        same_route(found, x, weight, text.expand(5, -1))


def with_logits(device: torch.device, logits: Tensor, top_k: int = 3) -> Routing:
    """Routes of rows with these BF16 logits."""
    experts = logits.shape[1]
    return routed(device, logits.bfloat16(), torch.eye(experts).bfloat16(), torch.zeros(experts), top_k)


@pytest.mark.parametrize("value", [0.0, -50.0, 50.0, -80.0, -170.0])
def test_equal_logits_go_to_the_lowest_experts_in_kernels(device: torch.device, value: float) -> None:
    found = with_logits(device, torch.full((2, 10), value))
    assert found.experts.tolist() == [[0, 1, 2]] * 2
    score = float(reference.router_scores(torch.tensor(value, dtype=torch.float64)))
    expected = SCALE * score / (3 * score + reference.WEIGHT_FLOOR)
    assert found.weights.flatten().tolist() == pytest.approx([expected] * 6, rel=1e-4)


def test_one_logit_above_many_at_minus_fifty_takes_the_weight_in_kernels(device: torch.device) -> None:
    logits = torch.full((1, 10), -50.0)
    logits[0, 4] = 1.0
    found = with_logits(device, logits)
    assert found.experts[0].tolist() == [4, 0, 1]
    assert found.weights[0].tolist() == pytest.approx([SCALE, 0.0, 0.0], abs=1e-6)


def test_scores_are_accurate_over_the_range_of_logits(device: torch.device) -> None:
    logits = torch.cat((torch.linspace(-30, 30, 57), torch.tensor([-20.0, -19.9, -20.1, 1e-3, -1e-3, 100.0, -100.0])))
    logits = logits.bfloat16().float().unsqueeze(0)
    found = with_logits(device, logits, top_k=64)
    scores = reference.router_scores(logits[0].double())
    ratio = found.weights[0].double() / found.weights[0, 0].double() * scores.max()
    torch.testing.assert_close(ratio, scores[found.experts[0]], rtol=2e-5, atol=1e-25)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ratio, scores[found.experts[0]] * 1.0001, rtol=2e-5, atol=1e-25)


def test_a_nan_row_of_the_router_chooses_experts_that_exist_and_leaves_the_others(device: torch.device) -> None:
    x, weight = rows_of(4, 96), normal(9, 96, seed=1, dtype=torch.bfloat16)
    clean = routed(device, x, weight, torch.zeros(9), 3)
    x[2, 5] = torch.nan
    spoilt = routed(device, x, weight, torch.zeros(9), 3)
    others = [0, 1, 3]
    assert_bits(spoilt.experts[others], clean.experts[others])
    assert_bits(spoilt.weights[others], clean.weights[others])
    assert spoilt.experts[2].tolist() == [0, 1, 2] and spoilt.weights[2].isnan().all()
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(spoilt.weights, clean.weights)


def hard_choices(experts: int) -> Tensor:
    """Logits [5, experts] of few values: all over; best around multiples of 32; all best in one warp; equal; rising."""
    logits = torch.full((5, experts), -1.0)
    number = torch.arange(experts)
    logits[0] = normal(experts, seed=4).round().float()
    logits[1, (number % 32 >= 30) | (number % 32 < 2)] = 2.0
    logits[2] = torch.where(number // 32 % 4 == min(1, experts // 32), 3.0 + logits[0].abs(), logits[0] - 3.0)
    logits[4] = number / 64 - 4
    return logits


@pytest.mark.parametrize(
    ("experts", "top_k"),
    [(384, 6), (384, 1), (512, 8), (300, 8), (130, 6), (97, 7), (33, 8), (8, 8), (8, 1), (64, 64), (1, 1)],
)
def test_wherever_the_best_and_their_equals_are_the_lowest_are_chosen_in_order(
    device: torch.device, experts: int, top_k: int
) -> None:
    logits = hard_choices(experts)
    found = with_logits(device, logits, top_k)
    scores = reference.router_scores(logits.bfloat16().double())
    expected = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    assert_bits(found.experts, expected, "experts")
    chosen = scores.gather(1, expected)
    weights = (chosen / chosen.sum(1, keepdim=True) * SCALE).float()
    torch.testing.assert_close(found.weights, weights, rtol=2e-5, atol=0)
    if experts > 1:
        highest = experts - 1 - scores.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        with pytest.raises(AssertionError, match="differ in bits"):
            assert_bits(found.experts, highest, "experts")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.weights * 1.0001, weights, rtol=2e-5, atol=0)


def test_a_nan_is_chosen_like_infinity_and_experts_at_minus_infinity_before_none(device: torch.device) -> None:
    x, weight = torch.ones(1, 64).bfloat16(), torch.zeros(140, 64).bfloat16()
    bias = torch.full((140,), -torch.inf)
    bias[77], bias[135], bias[5], bias[131], bias[132] = torch.inf, torch.nan, 1e30, -1e30, -0.0
    found = routed(device, x, weight, bias, 8)
    assert found.experts.tolist() == [[77, 135, 5, 132, 131, 0, 1, 2]]
    assert found.weights[0].tolist() == pytest.approx([SCALE / 8] * 8, rel=1e-5)


def test_a_temperature_divides_the_logits_in_kernels(device: torch.device) -> None:
    x, weight, bias = rows_of(3, 96), normal(40, 96, seed=1, dtype=torch.bfloat16) / 4, torch.zeros(40)
    found = run(device, "route", x, weight, bias, 4, SCALE, 2.0, None, None)
    halved = routed(device, x, weight / 2, bias, 4)
    assert_bits(found.experts, halved.experts, "experts")
    assert_bits(found.weights, halved.weights, "weights")
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(found.weights, routed(device, x, weight, bias, 4).weights, "weights")


# ---------------------------------------------------------------------------------------------- experts


def same_experts(found: UnfinalizedMoE, x: Tensor, routing: Routing, weights: ExpertWeights) -> None:
    """``found`` is the reference's, rows in its order."""
    expected = reference.routed_experts(x, routing, weights, LIMIT, "after")
    assert_bits(found.index, expected.index, "index")
    assert_bits(found.weights, routing.weights, "weights")
    assert_op(found.rows, expected.rows, "rows")
    difference = (found.rows.double() - expected.rows.double()).abs()
    # A product before the SwiGLU that rounds the other way moves a few values; the rest obey the bound of a product.
    bound = 2.0**-8 * expected.rows.double().abs() + 2.0**-21 * down_terms(x, routing, weights, LIMIT)
    print(f"rows: {int((difference > bound).sum())} of {difference.numel()} moved with their inputs")
    assert (difference > bound).double().mean() < 0.05


def check_experts(device: torch.device, chosen: Tensor, hidden: int, inner: int, experts: int) -> None:
    x, weights, routing = rows_of(chosen.shape[0], hidden), packed_experts(experts, hidden, inner), routing_of(chosen)
    found = run(device, "routed_experts", x, routing, weights, LIMIT, "after")
    same_experts(found, x, routing, weights)
    with pytest.raises(AssertionError, match="outside"):
        same_experts(UnfinalizedMoE(found.rows.roll(1, 1), found.weights, found.index), x, routing, weights)


@pytest.mark.parametrize(
    ("rows", "hidden", "inner", "experts", "top_k"),
    [(1, 96, 32, 6, 3), (3, 1088, 96, 7, 2), (8, 64, 64, 4, 3), (20, 96, 32, 8, 3)],
)
def test_expert_rows_are_those_of_the_reference(
    device: torch.device, rows: int, hidden: int, inner: int, experts: int, top_k: int
) -> None:
    check_experts(device, drawn(rows, experts, top_k), hidden, inner, experts)


@pytest.mark.parametrize("experts", [5, 10])
def test_all_rows_may_go_to_one_expert(device: torch.device, experts: int) -> None:
    check_experts(device, torch.full((19, 1), 3), 96, 32, experts)


def test_one_expert_may_take_every_slot_of_every_row(device: torch.device) -> None:
    check_experts(device, torch.full((5, 3), 2), 64, 32, 4)


def test_a_long_step_finds_its_tiles_by_expert(device: torch.device) -> None:
    check_experts(device, drawn(180, 60, 3), 64, 32, 60)


def test_a_prefill_has_tiles_of_many_rows(device: torch.device) -> None:
    chosen = torch.randint(0, 5, (180, 3), generator=torch.Generator().manual_seed(1))
    chosen[chosen == 2] = 4
    check_experts(device, chosen, 32, 96, 5)


@pytest.mark.parametrize("rows", [2, 180])
def test_a_slot_without_an_expert_has_no_row(device: torch.device, rows: int) -> None:
    x, weights, chosen = rows_of(rows, 64), packed_experts(4, 64, 32), drawn(rows, 4, 3)
    chosen[0, 1], chosen[1, 0] = -1, 4
    found = run(device, "routed_experts", x, routing_of(chosen), weights, LIMIT, "after")
    assert found.index[0, 1] == found.index[1, 0] == -1 and int((found.index < 0).sum()) == 2
    kept = found.index.flatten()[found.index.flatten() >= 0].sort().values
    assert kept.tolist() == list(range(rows * 3 - 2))
    assert found.rows[kept].isfinite().all() and found.rows[-2:].isnan().all(), "rows of none stay as they were"


@pytest.mark.parametrize("absent", [1, 40])
def test_tiles_that_no_expert_needs_are_written_as_empty(device: torch.device, absent: int) -> None:
    rows, experts = 180, 4
    chosen = drawn(rows, experts, 3)
    chosen[:absent] = -1
    slots = chosen.numel()
    tiles = torch.full((slots // 16 + experts, 3), 2, dtype=torch.int32, device=device)
    index, tokens = (torch.empty(slots, dtype=torch.int32, device=device) for _ in range(2))
    x = torch.zeros(rows, 32, dtype=torch.bfloat16, device=device)
    arguments = x, chosen.to(device), x.clone(), None, index, tokens, tiles
    kernels.prepare[(experts,)](*arguments, slots, 3, experts, 32, experts, 1, BY_EXPERT=True, ROWS=16)
    owners = tiles[:, 0].cpu()
    counts = [int((chosen == expert).sum()) for expert in range(experts)]
    assert [int((owners == expert).sum()) for expert in range(experts)] == [-(-count // 16) for count in counts]
    assert int((owners == -1).sum()) == len(owners) - sum(-(-count // 16) for count in counts) > 0


@pytest.mark.parametrize("hidden", [96, 1088])
def test_rows_are_prepared_as_codes_and_scales_for_products_in_registers(device: torch.device, hidden: int) -> None:
    rows, chosen = 3, drawn(3, 4, 2)
    x = rows_of(rows, hidden)
    x[1, 40] = torch.nan
    codes = torch.full((rows, hidden), 0x55, dtype=torch.uint8, device=device)
    factors = torch.full((rows, hidden // 32), -1.0, device=device)
    index, tokens = (torch.empty(6, dtype=torch.int32, device=device) for _ in range(2))
    tiles, chunks = torch.empty(6, 3, dtype=torch.int32, device=device), -(-hidden // 1024)
    arguments = x.to(device), chosen.to(device), codes, factors, index, tokens, tiles
    kernels.prepare[(6 + rows * chunks,)](*arguments, 6, 2, 4, hidden, 6, chunks, BY_EXPERT=False, ROWS=8)
    expected, scales = formats.quantize_a8(x)
    placed = codes.cpu().unflatten(1, (-1, 32))[..., code_place(torch.arange(32))].flatten(1)
    assert_bits(placed & 0x7F, expected.view(torch.uint8) & 0x7F)
    numbers = ~expected.float().isnan()
    assert_bits(placed[numbers], expected.view(torch.uint8)[numbers])
    assert_bits(factors.cpu(), formats.e8m0_to_float32(scales))
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(codes.cpu() & 0x7F, expected.view(torch.uint8) & 0x7F)


@pytest.mark.parametrize("rows", [6, 12, 40])
def test_a_nan_row_of_the_experts_stays_in_its_row_in_kernels(device: torch.device, rows: int) -> None:
    x, weights, routing = rows_of(rows, 64), packed_experts(3, 64, 32), routing_of(drawn(rows, 3, 1))
    clean = run(device, "routed_experts", x, routing, weights, LIMIT, "after")
    x[2, 3] = torch.nan
    spoilt = run(device, "routed_experts", x, routing, weights, LIMIT, "after")
    mine = int(spoilt.index[2, 0])
    others = [row for row in range(rows) if row != mine]
    assert_bits(spoilt.rows[others], clean.rows[others])
    assert spoilt.rows[mine].isnan().any()
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(spoilt.rows, clean.rows)


def test_every_code_has_its_value_at_scales_of_every_size(device: torch.device) -> None:
    """A unit vector through two matrices whose columns hold one code each."""
    codes, bytes_ = torch.arange(16, dtype=torch.uint8), torch.tensor([66, 90, 120, 127, 180], dtype=torch.uint8)
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    w13 = torch.zeros(5, 64, 16, dtype=torch.uint8)
    w13[:, [0, 32], 0] = 0x2
    w2 = torch.zeros(5, 32, 16, dtype=torch.uint8)
    w2[:, :16, 0], w2[:, 16:, 0] = codes, codes << 4
    w2_scales = bytes_.view(5, 1, 1).expand(5, 32, 1).contiguous()
    weights = ExpertWeights(Fp4Weight(w13, torch.full((5, 64, 1), 127, dtype=torch.uint8)), Fp4Weight(w2, w2_scales))
    routing = routing_of(torch.arange(5).unsqueeze(0))
    found = run(device, "routed_experts", x, routing, weights, 10.0, "after")
    expected = reference.routed_experts(x, routing, weights, 10.0, "after")
    assert (expected.rows[:, 1:8] > 0).all() and (expected.rows[:, 16:] == 0).all()
    torch.testing.assert_close(found.rows, expected.rows, rtol=2.0**-8, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.rows.roll(1, 1), expected.rows, rtol=2.0**-8, atol=0)


def test_a_nan_scale_of_an_expert_spoils_its_own_rows_only(device: torch.device) -> None:
    x, weights, routing = rows_of(6, 64), packed_experts(3, 64, 32), routing_of(drawn(6, 3, 1))
    clean = run(device, "routed_experts", x, routing, weights, LIMIT, "after")
    assert isinstance(weights.w2, Fp4Weight)
    weights.w2.scales[1, 5, 0] = formats.E8M0_NAN
    spoilt = run(device, "routed_experts", x, routing, weights, LIMIT, "after")
    hit = torch.zeros(6, 64, dtype=torch.bool)
    hit[spoilt.index[routing.experts == 1], 5] = True
    assert hit.any() and spoilt.rows[hit].isnan().all()
    assert_bits(spoilt.rows[~hit], clean.rows[~hit])
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(spoilt.rows, clean.rows)


@pytest.mark.parametrize("rows", [6, 20])
def test_the_same_call_gives_the_same_bits(device: torch.device, rows: int) -> None:
    x, weights, routing = rows_of(rows, 64), packed_experts(4, 64, 32), routing_of(drawn(rows, 4, 3))
    first = run(device, "routed_experts", x, routing, weights, LIMIT, "after")
    assert_bits(run(device, "routed_experts", x, routing, weights, LIMIT, "after").rows, first.rows)
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(run(device, "routed_experts", x, routing, weights, LIMIT / 2, "after").rows, first.rows)


# ---------------------------------------------------------------------------------------------- shared, finalisation


@pytest.mark.parametrize("rows", [1, 5])
def test_the_swiglu_of_the_shared_expert_is_quantised_as_by_the_reference(device: torch.device, rows: int) -> None:
    x, w13, w2 = 3 * rows_of(rows, 96), packed_matrix(128, 96), packed_matrix(96, 64)
    expected = reference.expert(x, w13, w2, LIMIT)
    found = expert_on(device, x, w13, w2)
    assert_op(found, expected)
    with pytest.raises(AssertionError, match="outside"):
        assert_op(expert_on(device, x, w13, w2, 2 * LIMIT), expected)


def expert_on(device: torch.device, x: Tensor, w13: Any, w2: Any, limit: float = LIMIT) -> Tensor:
    out: Tensor = run(device, "expert", x, w13, w2, limit)
    return out


def test_a_nan_row_of_the_shared_expert_stays_in_its_row(device: torch.device) -> None:
    x, w13, w2 = rows_of(4, 96), packed_matrix(128, 96), packed_matrix(96, 64)
    clean = expert_on(device, x, w13, w2)
    x[1, 2] = torch.nan
    spoilt = expert_on(device, x, w13, w2)
    assert_bits(spoilt[[0, 2, 3]], clean[[0, 2, 3]])
    assert spoilt[1].isnan().all()
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(spoilt, clean)


@pytest.mark.parametrize(("rows", "columns", "top_k"), [(1, 64, 3), (5, 1056, 6)])
def test_finalisation_is_that_of_the_reference(device: torch.device, rows: int, columns: int, top_k: int) -> None:
    values = normal(rows * top_k + 1, columns, dtype=torch.bfloat16)
    values[-1] = torch.nan
    index = torch.randperm(rows * top_k, generator=torch.Generator().manual_seed(1)).view(rows, top_k).int()
    index[0, 1], index[rows - 1, 0] = -1, -1
    weights = normal(rows, top_k, seed=2, dtype=torch.float32)
    weights[0, 1] = torch.nan
    routed, shared = UnfinalizedMoE(values, weights, index), normal(rows, columns, seed=3, dtype=torch.bfloat16)
    expected = reference.finalize(routed, shared)
    terms = reference.finalize(UnfinalizedMoE(values.abs(), weights.abs(), index), shared.abs())
    found = run(device, "finalize", routed, shared)
    assert_op(found, expected, terms=terms)
    with pytest.raises(AssertionError, match="outside"):
        assert_op(run(device, "finalize", routed, shared.roll(1, 1)), expected, terms=terms)


def test_finalisation_rounds_once_in_kernels(device: torch.device) -> None:
    rows = torch.full((3, 4), 2.0**-9, dtype=torch.bfloat16)
    routed = UnfinalizedMoE(rows, torch.ones(1, 3), torch.arange(3, dtype=torch.int32).unsqueeze(0))
    out = run(device, "finalize", routed, torch.ones(1, 4, dtype=torch.bfloat16))
    assert_bits(out, torch.full((1, 4), 1 + 2.0**-7, dtype=torch.bfloat16))
    assert not torch.equal(out, torch.ones(1, 4, dtype=torch.bfloat16)), "three roundings would give one"


def test_an_empty_step_launches_nothing(device: torch.device) -> None:
    x, weight = rows_of(0, 64), normal(4, 64, dtype=torch.bfloat16)
    routing = routed(device, x, weight, torch.zeros(4), 2)
    found = run(device, "routed_experts", x, routing, packed_experts(4, 64, 32), LIMIT, "after")
    assert found.rows.shape == (0, 64) and run(device, "finalize", found, x).shape == (0, 64)


def test_arguments_that_kernels_do_not_take_are_named(device: torch.device) -> None:
    x, weights, routing = rows_of(2, 64), packed_experts(4, 64, 32), routing_of(drawn(2, 4, 2))
    assert isinstance(weights.w2, Fp4Weight)
    with pytest.raises(ValueError, match="routed_weight = 'before': expected 'after'"):
        kernels.routed_experts(x, routing, weights, LIMIT, "before")
    with pytest.raises(ValueError, match=r"x has dtype torch.float32: expected torch.bfloat16"):
        kernels.routed_experts(x.float(), routing, weights, LIMIT, "after")
    with pytest.raises(ValueError, match="w13 is Tensor: expected Fp4Weight"):
        kernels.routed_experts(x, routing, ExpertWeights(normal(4, 64, 64), weights.w2), LIMIT, "after")
    with pytest.raises(ValueError, match=r"w13 has shape \(4, 64, 32\): expected \[4, 64, 48\]"):
        kernels.routed_experts(
            rows_of(2, 96), routing, ExpertWeights(weights.w13, packed_experts(4, 96, 32).w2), 1, "after"
        )
    expanded = Fp4Weight(weights.w2.codes[:1].expand(4, -1, -1), weights.w2.scales)
    with pytest.raises(ValueError, match=r"w2 has strides \(0, 16, 1\): expected contiguous"):
        kernels.routed_experts(x, routing, ExpertWeights(weights.w13, expanded), LIMIT, "after")
    with pytest.raises(ValueError, match=r"top_k = 5: expected 1 to the 4 experts"):
        kernels.route(x, normal(4, 64, dtype=torch.bfloat16), torch.zeros(4), 5, SCALE, 1.0, None, None)

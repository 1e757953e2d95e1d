"""Linear layers and experts by kernels, on drawn shapes, rows, routes and weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compare import assert_op_selections, op_bound
from drawn_memory import FEW, assert_numbers, assert_same, both, by_interpreter, layouts, numbers
from linear_cases import KINDS, quantized, terms, weight_of
from moe_cases import packed_experts, routing_of
from quickseek.ops import linear, moe
from quickseek.ops.linear import Weight
from quickseek.ops.moe import UnfinalizedMoE, reference
from quickseek.ops.moe import triton as kernels

pytestmark = by_interpreter
BF16, FP32 = torch.bfloat16, torch.float32


def assert_after_a8(found: Tensor, expected: Tensor, what: str) -> None:
    """*op*, but where a last bit of an activation changes its E4M3 code, four times as far in few places."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan()), f"{what}: NaN in other places"
    for number, (ours, theirs) in enumerate(zip(found.flatten(0, -2), expected.flatten(0, -2), strict=True)):
        if theirs.isnan().any():
            continue
        bound = op_bound(theirs)
        apart = (ours.double() - theirs.double()).abs()
        assert (apart <= 4 * bound).all() and (apart > bound).double().mean() <= 0.1, f"{what}: row {number}"


@FEW
@given(
    st.data(), st.sampled_from(KINDS), st.one_of(st.integers(0, 17), st.sampled_from((33, 65))), st.integers(1, 70),
    st.integers(1, 7), st.booleans(), layouts,
)  # fmt: skip
def test_products_are_those_of_the_reference(
    data: st.DataObject, kind: str, rows: int, outputs: int, blocks: int, quantise: bool, layout: tuple[int, str]
) -> None:
    inner = 32 * blocks if kind != "bf16" else 8 * blocks + data.draw(st.integers(0, 7))
    weight = weight_of(kind, outputs, inner, seed=data.draw(st.integers(0, 99)))
    x = data.draw(numbers((rows, inner), BF16, (0.0, -0.0, 1000.0, torch.nan, 2.0**-30)))
    x = x if not rows or rows % 3 else x.unflatten(0, (3, -1))

    def call(x: Tensor, weight: Weight) -> Tensor:
        return linear.linear(x, weight, quantize_input=quantise)

    ran = both(call, (x, weight), layout)
    if ran is not None:
        behind = terms(x.flatten(0, -2).nan_to_num(), weight, quantise)
        assert_numbers(ran.found, ran.expected, terms=behind.view(ran.expected.shape).nan_to_num())
    if kind != "bf16":
        codes = quantized(x)
        given_codes = both(linear.linear, (codes, weight), layout)
        if given_codes is not None:
            assert_numbers(given_codes.found, given_codes.expected, "product of codes")


@FEW
@given(
    st.data(), st.integers(0, 20), st.integers(1, 40), st.integers(1, 200), st.sampled_from((BF16, FP32)),
    st.sampled_from((BF16, FP32)), layouts,
)  # fmt: skip
def test_wide_products_are_those_of_the_reference(
    data: st.DataObject, rows: int, outputs: int, inner: int, left: torch.dtype, right: torch.dtype,
    layout: tuple[int, str],
) -> None:  # fmt: skip
    x = data.draw(numbers((rows, inner), left, (0.0, torch.nan, 1000.0)))
    weight = data.draw(numbers((outputs, inner), right, (0.0,), 2))
    ran = both(linear.linear_wide, (x, weight), layout)
    if ran is not None:
        behind = x.nan_to_num().double().abs() @ weight.double().abs().T
        assert_numbers(ran.found, ran.expected, terms=behind)


@FEW
@given(
    st.data(), st.sampled_from(KINDS), st.sampled_from((1, 3, 16, 17, 40)), st.integers(1, 3), st.integers(1, 40),
    st.integers(1, 4), layouts,
)  # fmt: skip
def test_grouped_products_are_those_of_the_reference(
    data: st.DataObject, kind: str, rows: int, groups: int, outputs: int, blocks: int, layout: tuple[int, str]
) -> None:
    weight = weight_of(kind, groups * outputs, 32 * blocks)
    x = data.draw(numbers((rows, groups, 32 * blocks), BF16, (0.0, torch.nan)))
    ran = both(linear.grouped_linear, (x, weight), layout)
    if ran is not None:
        assert_numbers(ran.found, ran.expected)


@FEW
@given(
    st.data(), st.one_of(st.integers(0, 20), st.just(65)), st.integers(1, 70), st.integers(1, 200), st.booleans(),
    layouts,
)  # fmt: skip
def test_routes_are_those_of_the_reference(
    data: st.DataObject, rows: int, experts: int, hidden: int, images: bool, layout: tuple[int, str]
) -> None:
    x, weight = data.draw(numbers((rows, hidden), BF16, (0.0,), 2)), data.draw(numbers((experts, hidden), BF16, (), 1))
    bias, image_bias = (data.draw(numbers((experts,), FP32, (0.0, -torch.inf, 3.0), 1)) for _ in range(2))
    image_rows = torch.rand(rows, generator=torch.Generator().manual_seed(hidden)) < 0.5
    top_k, temperature = data.draw(st.integers(1, min(8, experts))), data.draw(st.sampled_from((1.0, 0.7)))

    def call(x: Tensor, weight: Tensor) -> moe.Routing:
        return moe.route(
            x, weight, bias, top_k=top_k, scale=1.5, temperature=temperature,
            image_bias=image_bias if images else None, image_rows=image_rows if images else None,
        )  # fmt: skip

    ran = both(call, (x, weight), layout)
    if ran is None or not rows:
        return
    scores = reference.router_scores((x.float() @ weight.float().T) / temperature)
    added = torch.where(image_rows.unsqueeze(1), image_bias, bias) if images else bias
    # No top_k experts need be left of those at -inf: all the same, as many are chosen.
    keys = (scores + added).double().clamp_min(-1e30)
    assert_op_selections(ran.found.experts, keys, top_k, 1e-4 * float(1 + scores.max()))
    chosen = scores.gather(1, ran.found.experts).double()
    assert_numbers(ran.found.weights, (chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 1.5).float(), "weights")


@FEW
@given(st.data(), st.integers(1, 40), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.booleans(), layouts)
def test_expert_rows_and_their_sums_are_those_of_the_reference(
    data: st.DataObject, rows: int, experts: int, hidden: int, inner: int, by_expert: bool, layout: tuple[int, str]
) -> None:
    top_k = data.draw(st.integers(1, experts))
    drawn = torch.rand(rows, experts, generator=torch.Generator().manual_seed(hidden))
    chosen = drawn.argsort(1)[:, :top_k].contiguous() % data.draw(st.integers(1, experts))
    weights = packed_experts(experts, 32 * hidden, 32 * inner, seed=data.draw(st.integers(0, 9)))
    x = data.draw(numbers((rows, 32 * hidden), BF16, (0.0, torch.nan, 100.0), 3))
    limit = data.draw(st.sampled_from((0.5, 10.0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FEW_SLOTS", 0 if by_expert else kernels.FEW_SLOTS)
        ran = both(lambda *a: moe.routed_experts(*a, limit=limit), (x, routing_of(chosen), weights), layout)
    if ran is None:
        return
    found, expected = ran.found, ran.expected
    # The rows of one expert may have any order among equal slots, not their numbers.
    assert_same(found.index, expected.index, "index")
    assert_after_a8(found.rows, expected.rows, "rows of experts")

    absent = torch.rand(rows, top_k, generator=torch.Generator().manual_seed(rows)) < 0.2
    expected = UnfinalizedMoE(expected.rows, expected.weights, torch.where(absent, -1, expected.index))
    summed = both(moe.finalize, (expected, data.draw(numbers((rows, 32 * hidden)))), layout)
    if summed is not None:
        assert_numbers(summed.found, summed.expected, "sums")


@FEW
@given(st.data(), st.sampled_from(KINDS), st.sampled_from((0, 1, 5, 17)), st.integers(1, 3), st.integers(1, 3), layouts)
def test_the_shared_expert_is_that_of_the_reference(
    data: st.DataObject, kind: str, rows: int, hidden: int, inner: int, layout: tuple[int, str]
) -> None:
    w13, w2 = weight_of(kind, 64 * inner, 32 * hidden), weight_of(kind, 32 * hidden, 32 * inner)
    x = data.draw(numbers((rows, 32 * hidden), BF16, (0.0, torch.nan), 2))
    ran = both(lambda *a: moe.shared_expert(*a, limit=5.0), (x, w13, w2), layout)
    if ran is not None:
        assert_after_a8(ran.found, ran.expected, "shared expert")


def test_a_fault_in_a_few_places_or_a_large_one_anywhere_is_noticed() -> None:
    expected = torch.randn(2, 400, generator=torch.Generator().manual_seed(0)).to(BF16)
    near = expected + 2 * op_bound(expected).to(BF16)
    few, many, far = (expected.clone() for _ in range(3))
    few[0, :30], many[1, :60], far[1, 7] = near[0, :30], near[1, :60], far[1, 7] + 1
    assert_after_a8(few, expected, "rows")
    for wrong in (many, far):
        with pytest.raises(AssertionError, match="rows: row 1"):
            assert_after_a8(wrong, expected, "rows")

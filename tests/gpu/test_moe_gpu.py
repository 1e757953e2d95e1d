"""Router, experts and finalisation in released shapes on a GPU: values, graphs, repeated runs, weights beyond 2^31."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op, assert_op_selections
from op_cases import poisoned_outputs
from quickseek.ops import moe
from quickseek.ops.forms import cute_form
from quickseek.ops.linear import Fp4Weight, Fp8Weight
from quickseek.ops.moe import ExpertWeights, Routing, UnfinalizedMoE, reference
from quickseek.ops.moe import triton as kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ROWS = (1, 6, 8, 48, 384)
HIDDEN, LIMIT, SCALE = 5120, 10.0, 1.5


def bf16(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)


def packed(experts: int, outputs: int, inputs: int) -> Fp4Weight:
    """Random codes; outputs of unit inputs are of the size of one."""
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8, device="cuda")
    middle = 126 - int(inputs**0.5).bit_length()
    scales = torch.randint(middle - 1, middle + 2, (experts, outputs, inputs // 32), dtype=torch.uint8, device="cuda")
    return Fp4Weight(codes, scales)


@cache
def experts_on_gpu(experts: int, inner: int) -> ExpertWeights:
    torch.cuda.manual_seed(1)
    return ExpertWeights(packed(experts, 2 * inner, HIDDEN), packed(experts, HIDDEN, inner))


def drawn(rows: int, experts: int, top_k: int) -> Routing:
    generator = torch.Generator("cuda").manual_seed(rows)
    keys = torch.rand(rows, experts, generator=generator, device="cuda")
    return Routing(keys.argsort(1)[:, :top_k].contiguous(), torch.rand(rows, top_k, generator=generator, device="cuda"))


def same_bits_again(run: Callable[[], Tensor], out: Tensor) -> None:
    """A second run and a graph's replay leave the bits of ``out``."""
    assert_bits(run(), out, "a second run")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    captured.fill_(torch.nan)
    graph.replay()
    assert_bits(captured, out, "a replay")


# ---------------------------------------------------------------------------------------------- router


@pytest.mark.parametrize("rows", [*ROWS, 2048])
@pytest.mark.parametrize(("experts", "top_k"), [(384, 6), (128, 3), (512, 8), (9, 8)])
def test_routes_in_released_shapes(experts: int, top_k: int, rows: int) -> None:
    x, weight = bf16(rows, HIDDEN), bf16(experts, HIDDEN, seed=1) / 64
    biases = [torch.randn(experts, device="cuda") / 8 for _ in range(2)]
    image = torch.arange(rows, device="cuda") % 3 == 1

    def run() -> Routing:
        return moe.route(x, weight, biases[0], top_k=top_k, scale=SCALE, image_bias=biases[1], image_rows=image)

    with poisoned_outputs():
        found = run()
    scores = reference.router_scores(x.double() @ weight.double().T)
    keys = scores + torch.where(image[:, None], biases[1], biases[0]).double()
    assert_op_selections(found.experts, keys, top_k, eps=1e-5)
    chosen = scores.gather(1, found.experts)
    expected = (chosen / chosen.sum(1, keepdim=True) * SCALE).float()
    torch.testing.assert_close(found.weights, expected, rtol=2e-5, atol=0)
    same_bits_again(lambda: run().weights, found.weights)
    with pytest.raises(AssertionError):
        assert_op_selections((found.experts + 1) % experts, keys, top_k, eps=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.weights * 1.0001, expected, rtol=2e-5, atol=0)


@pytest.mark.parametrize("value", [-50.0, 0.0, 50.0])
def test_equal_logits_go_to_the_lowest_experts_on_a_gpu(value: float) -> None:
    weight, bias = torch.full((384, HIDDEN), value / HIDDEN, device="cuda").bfloat16(), torch.zeros(384, device="cuda")
    found = moe.route(torch.ones(5, HIDDEN, device="cuda").bfloat16(), weight, bias, top_k=6, scale=SCALE)
    assert found.experts.tolist() == [list(range(6))] * 5
    assert found.weights.flatten().tolist() == pytest.approx([SCALE / 6] * 30, rel=1e-4)


# ---------------------------------------------------------------------------------------------- experts


@pytest.fixture(params=["registers", "shared memory"])
def few_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows by the kernels in CuTe DSL, then by those in Triton."""
    if request.param == "registers":
        if cute_form("quickseek.ops.moe") is None:
            pytest.skip("needs nvidia-cutlass-dsl")
        monkeypatch.setattr(kernels, "MOST_CUTE_SLOTS", kernels.FEW_SLOTS)
    else:
        monkeypatch.setattr(kernels, "MOST_CUTE_SLOTS", 0)


def check_experts(x: Tensor, routing: Routing, weights: ExpertWeights) -> None:
    def run() -> UnfinalizedMoE:
        return moe.routed_experts(x, routing, weights, limit=LIMIT)

    with poisoned_outputs():
        found = run()
    expected = reference.routed_experts(x, routing, weights, LIMIT, "after")
    assert_bits(found.index, expected.index, "index")
    assert_op(found.rows, expected.rows, "rows")
    difference = (found.rows.float() - expected.rows.float()).abs()
    moved = (difference > 2.0**-7 * expected.rows.float().abs() + 2.0**-12).float().mean()
    print(f"{x.shape[0]} rows: {float(moved):.2e} of the values differ by more than a rounding")
    assert moved < 0.05
    same_bits_again(lambda: run().rows, found.rows)
    with pytest.raises(AssertionError, match="outside"):
        assert_op(found.rows.roll(1, 1), expected.rows, "rows")


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("rows", [*ROWS, 2048])
def test_experts_in_the_shapes_of_four_ranks(rows: int) -> None:
    check_experts(bf16(rows, HIDDEN), drawn(rows, 384, 6), experts_on_gpu(384, 576))


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("inner", [288, 1152, 2304])
@pytest.mark.parametrize("rows", [2, 5, 40])
def test_experts_of_other_ranks(rows: int, inner: int) -> None:
    check_experts(bf16(rows, HIDDEN), drawn(rows, 12, 3), experts_on_gpu(12, inner))


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 48, 384])
def test_all_rows_may_go_to_the_same_experts(rows: int) -> None:
    experts = torch.tensor([[383, 0, 7, 6, 5, 200]], device="cuda").expand(rows, -1).contiguous()
    check_experts(bf16(rows, HIDDEN), Routing(experts, torch.rand(rows, 6, device="cuda")), experts_on_gpu(384, 576))


@pytest.mark.usefixtures("few_rows")
def test_the_last_expert_of_a_whole_layer_lies_beyond_2_to_the_31() -> None:
    weights = ExpertWeights(packed(384, 4608, HIDDEN), packed(384, HIDDEN, 2304))
    assert isinstance(weights.w2, Fp4Weight) and weights.w2.codes.numel() > 2**31
    experts = torch.tensor([[383, 0], [382, 383]], device="cuda")
    check_experts(bf16(2, HIDDEN), Routing(experts, torch.rand(2, 2, device="cuda")), weights)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("rows", [8, 384])
def test_a_nan_row_leaves_the_others(rows: int) -> None:
    x, routing, weights = bf16(rows, HIDDEN), drawn(rows, 384, 6), experts_on_gpu(384, 576)
    clean = moe.routed_experts(x, routing, weights, limit=LIMIT)
    x[2, 1000] = torch.nan
    spoilt = moe.routed_experts(x, routing, weights, limit=LIMIT)
    mine = torch.zeros(rows * 6, dtype=torch.bool, device="cuda")
    mine[spoilt.index[2]] = True
    assert_bits(spoilt.rows[~mine], clean.rows[~mine])
    assert spoilt.rows[mine].isnan().all()
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(spoilt.rows, clean.rows)


@pytest.mark.parametrize("rows", [1, 6, 8, 60])
def test_both_forms_of_few_rows_agree(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if cute_form("quickseek.ops.moe") is None:
        pytest.skip("needs nvidia-cutlass-dsl")
    x, routing, weights = bf16(rows, HIDDEN), drawn(rows, 384, 6), experts_on_gpu(384, 576)
    routing.experts[0, 1] = -1
    monkeypatch.setattr(kernels, "MOST_CUTE_SLOTS", kernels.FEW_SLOTS)
    found = moe.routed_experts(x, routing, weights, limit=LIMIT)
    monkeypatch.setattr(kernels, "MOST_CUTE_SLOTS", 0)
    other = moe.routed_experts(x, routing, weights, limit=LIMIT)
    assert_bits(found.index, other.index)
    kept = other.index[other.index >= 0]
    assert_op(found.rows[kept], other.rows[kept])
    with pytest.raises(AssertionError, match="outside"):
        assert_op(found.rows[kept].roll(1, 1), other.rows[kept])


# ---------------------------------------------------------------------------------------------- shared, finalisation


@pytest.mark.parametrize("rows", ROWS)
def test_the_shared_expert_in_released_shapes(rows: int) -> None:
    def matrix(outputs: int, inputs: int) -> Fp8Weight:
        codes = bf16(outputs, inputs, seed=outputs).to(torch.float8_e4m3fn)
        scales = torch.randint(120, 123, (outputs // 32, inputs // 32), dtype=torch.uint8, device="cuda")
        return Fp8Weight(codes, scales)

    x, w13, w2 = bf16(rows, HIDDEN), matrix(1152, HIDDEN), matrix(HIDDEN, 576)

    def run() -> Tensor:
        return moe.shared_expert(x, w13, w2, limit=LIMIT)

    with poisoned_outputs():
        out = run()
    expected = reference.expert(x, w13, w2, LIMIT)
    assert_op(out, expected)
    same_bits_again(run, out)
    with pytest.raises(AssertionError, match="outside"):
        assert_op(out.roll(1, 1), expected)


@pytest.mark.parametrize("rows", ROWS)
def test_finalisation_in_released_shapes(rows: int) -> None:
    values, shared = bf16(rows * 6, HIDDEN), bf16(rows, HIDDEN, seed=1)
    index = torch.randperm(rows * 6, device="cuda").view(rows, 6).int()
    index[0, 2] = -1
    routed = UnfinalizedMoE(values, torch.rand(rows, 6, device="cuda"), index)

    def run() -> Tensor:
        return moe.finalize(routed, shared)

    with poisoned_outputs():
        out = run()
    expected = reference.finalize(routed, shared)
    terms = reference.finalize(UnfinalizedMoE(values.abs(), routed.weights, index), shared.abs())
    assert_op(out, expected, terms=terms)
    same_bits_again(run, out)
    with pytest.raises(AssertionError, match="outside"):
        assert_op(out.roll(1, 1), expected, terms=terms)

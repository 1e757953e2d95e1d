"""Linear layers on plain, FP8 and FP4 weights (spec/model.md 3.3, 3.4, 3.6, 6.7)."""

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64, assert_op
from op_cases import assert_nan_stays, normal
from quickseek import formats
from quickseek.ops import linear as door
from quickseek.ops.linear import Fp4Weight, Fp8Weight

X = normal(5, 96, dtype=torch.bfloat16)
PLAIN = normal(64, 96, seed=1, dtype=torch.float32) * 0.1


def packed_weights() -> list[tuple[door.Weight, Tensor]]:
    """Packed weights and their values."""
    fp8, fp4 = formats.quantize_fp8_blocks(PLAIN), formats.quantize_fp4_rows(PLAIN)
    return [
        (Fp8Weight(*fp8), formats.dequantize_fp8_blocks(*fp8, torch.float64)),
        (Fp4Weight(*fp4), formats.dequantize_fp4_rows(*fp4, torch.float64)),
    ]


@pytest.mark.parametrize("case", range(2), ids=["FP8", "FP4"])
def test_a_packed_weight_multiplies_quantised_inputs(case: int) -> None:
    weight, value = packed_weights()[case]
    assert weight.shape == (64, 96)
    inputs = formats.fake_quantize_a8(X).double()
    terms = inputs.abs() @ value.abs().T
    assert_op(door.linear(X, weight), inputs @ value.T, terms=terms)
    plain = door.linear(X, weight, quantize_input=False)
    assert_op(plain, X.double() @ value.T, terms=X.double().abs() @ value.abs().T)
    with pytest.raises(AssertionError, match="outside"):
        assert_op(door.linear(X, weight), X.double() @ value.T, terms=terms)


def test_bf16_products_are_summed_wide_and_rounded_once() -> None:
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    weight = torch.full((1, 4096), 1 / 256, dtype=torch.bfloat16)
    assert door.linear(x, weight).item() == 16.0
    narrow = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(4096):
        narrow = narrow + weight[0, 0]
    assert narrow.item() < 16.0, "a BF16 sum would have stopped growing"


def test_wide_products_promote_both_sides() -> None:
    weight = PLAIN.to(torch.bfloat16)
    out = door.linear_wide(X, weight)
    assert out.dtype == torch.float32
    assert_op(out, X.double() @ weight.double().T)
    assert door.linear_wide(X.double(), weight).dtype == torch.float64


def test_a_grouped_product_is_block_diagonal() -> None:
    x, weight = normal(3, 4, 32), normal(4 * 16, 32, seed=1)
    expected = torch.stack([torch.cat([weight[16 * g : 16 * g + 16] @ row[g] for g in range(4)]) for row in x])
    assert_float64(door.grouped_linear(x, weight), expected)
    with pytest.raises(AssertionError, match="relative error"):
        assert_float64(door.grouped_linear(x.flip(1), weight), expected)


def test_a_grouped_product_never_quantises_its_inputs() -> None:
    weight, value = packed_weights()[0]
    x = normal(3, 2, 96, dtype=torch.bfloat16)
    expected = torch.einsum("tgi,gri->tgr", x.double(), value.view(2, 32, 96)).flatten(1)
    assert_op(door.grouped_linear(x, weight), expected)


@pytest.mark.parametrize("case", range(3), ids=["plain", "FP8", "FP4"])
def test_a_nan_row_stays_in_its_row(case: int) -> None:
    weight = [PLAIN.to(torch.bfloat16), *(weight for weight, _ in packed_weights())][case]
    assert_nan_stays(lambda x: door.linear(x, weight), X, 3)


def test_a_nan_scale_of_a_weight_spoils_its_own_outputs_only() -> None:
    weight, _ = packed_weights()[0]
    clean = door.linear(X, weight)
    weight.scales[0, 1] = formats.E8M0_NAN  # type: ignore[union-attr]
    out = door.linear(X, weight)
    assert out[:, :32].isnan().all()
    assert_bits(out[:, 32:], clean[:, 32:])


def test_products_are_differentiable() -> None:
    x, weight = normal(2, 2, 4).requires_grad_(), normal(6, 4).requires_grad_()
    assert torch.autograd.gradcheck(door.linear, (x, weight))
    assert torch.autograd.gradcheck(door.grouped_linear, (x, weight))


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"x has shape \(5, 96\): expected \[5, 64\]"):
        door.linear(X, PLAIN[:, :64])
    with pytest.raises(ValueError, match=r"x has shape"):
        door.linear_wide(X, PLAIN[:, :64])
    with pytest.raises(ValueError, match="weight has 64 rows: expected a multiple of x's 3 groups"):
        door.grouped_linear(normal(2, 3, 96), PLAIN.double())

"""Linear kernels against their reference (spec/model.md 3.3, 3.4, 3.6, 6.7)."""

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op
from linear_cases import KINDS, inputs, quantized, terms, to, weight_of
from op_cases import assert_nan_stays, normal, poisoned_outputs
from quickseek import formats
from quickseek.ops.linear import Fp8Weight, QuantizedRows, Weight, reference

kernels = pytest.importorskip("quickseek.ops.linear.triton")


def run(device: torch.device, x: Tensor | QuantizedRows, weight: Weight, quantize_input: bool = True) -> Tensor:
    """The kernels' product, on a CPU; outputs are poisoned before."""
    moved = x.to(device) if isinstance(x, Tensor) else QuantizedRows(x.codes.to(device), x.scales.to(device))
    with poisoned_outputs():
        out: Tensor = kernels.linear(moved, to(weight, device), quantize_input)
    return out.cpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inner"), [(1, 40, 96), (6, 96, 576), (12, 33, 288), (18, 72, 160), (65, 72, 320)]
)
def test_a_product_is_that_of_the_reference(
    device: torch.device, kind: str, rows: int, outputs: int, inner: int
) -> None:
    x, weight = inputs(rows, inner), weight_of(kind, outputs, inner)
    for quantize_input in (True, False) if kind != "bf16" else (True,):
        expected = reference.linear(x, weight, quantize_input)
        bound = terms(x, weight, quantize_input)
        out = run(device, x, weight, quantize_input)
        assert_op(out, expected, terms=bound)
        with pytest.raises(AssertionError, match="outside"):
            assert_op(out.roll(1, 1), expected, terms=bound)


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@pytest.mark.parametrize("rows", [3, 11, 20, 65])
def test_rows_that_come_quantised_give_the_same_as_rows_quantised_here(
    device: torch.device, kind: str, rows: int
) -> None:
    x, weight = inputs(rows, 160), weight_of(kind, 64, 160)
    codes = quantized(x)
    assert_op(run(device, codes, weight), reference.linear(x, weight), terms=terms(x, weight, True))
    codes.scales[0, -1] += 1
    with pytest.raises(AssertionError, match="outside"):
        assert_op(run(device, codes, weight), reference.linear(x, weight), terms=terms(x, weight, True))


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 65])
def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device, rows: int) -> None:
    x, weight = inputs(rows, 320), weight_of("fp8", 32, 320)
    out = run(device, x, weight)
    assert_bits(run(device, x, weight), out, "a second run")
    assert_bits(run(device, x.flip(0), weight).flip(0), out, "rows in another order")
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(run(device, x.neg(), weight), out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 17, 65])
def test_a_nan_row_stays_in_its_row(device: torch.device, kind: str, rows: int) -> None:
    weight = weight_of(kind, 40, 96)
    assert_nan_stays(lambda x: run(device, x, weight), inputs(rows, 96), 2)
    with pytest.raises(AssertionError):
        assert_nan_stays(lambda x: run(device, x, weight) + x.sum(), inputs(rows, 96), 2)


@pytest.mark.parametrize("rows", [2, 17, 65])
def test_a_nan_scale_of_a_weight_spoils_its_own_outputs_only(device: torch.device, rows: int) -> None:
    x, weight = inputs(rows, 96), weight_of("fp8", 80, 96)
    assert isinstance(weight, Fp8Weight)
    clean = run(device, x, weight)
    weight.scales[1, 2] = formats.E8M0_NAN
    out = run(device, x, weight)
    assert out[:, 32:64].isnan().all()
    for part in (slice(0, 32), slice(64, 80)):
        assert_bits(out[:, part], clean[:, part])


@pytest.mark.parametrize("rows", [4, 17, 65])
def test_rows_of_a_wider_tensor_and_a_part_of_a_weight_are_read_where_they_are(device: torch.device, rows: int) -> None:
    wide, weight = inputs(rows, 192), weight_of("fp8", 96, 96)
    assert isinstance(weight, Fp8Weight)
    part = Fp8Weight(weight.codes[32:64], weight.scales[1:2])
    x = wide[:, 96:]
    assert_op(run(device, x, part), reference.linear(x, part), terms=terms(x, part, True))
    other = Fp8Weight(weight.codes[32:64], weight.scales[:1])
    with pytest.raises(AssertionError, match="outside"):
        assert_op(run(device, x, other), reference.linear(x, part), terms=terms(x, part, True))


@pytest.mark.parametrize("part", ["values", "weight.codes", "weight.scales"])
def test_a_weight_that_every_step_would_copy_is_refused_before_anything_runs(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = inputs(2, 96), weight_of("fp8", 64, 96)
    assert isinstance(weight, Fp8Weight)
    for kernel in ("_few", "_held", "_many", "_plain", "_prepare_rows", "_values"):
        monkeypatch.setattr(kernels, kernel, None)
    if part == "values":
        for name, run_door in (("weight", kernels.linear_wide), ("weight", lambda x, w: kernels.linear(x, w, True))):
            with pytest.raises(ValueError, match=rf"{name} has strides .*: expected the values of an output side"):
                run_door(x, inputs(96, 64).T)
            with pytest.raises(TypeError, match="subscriptable"):
                run_door(x, inputs(96, 64).T.contiguous())
        return
    gaps = {"codes": weight.codes, "scales": weight.scales}
    gaps[part.removeprefix("weight.")] = gaps[part.removeprefix("weight.")].T.contiguous().T
    with pytest.raises(ValueError, match=rf"{part} has strides"):
        kernels.linear(x, Fp8Weight(**gaps), True)
    with pytest.raises(TypeError, match="subscriptable"):
        kernels.linear(x, weight, True)


def test_zero_rows_and_more_dimensions_keep_their_form(device: torch.device) -> None:
    weight = weight_of("fp8", 64, 32)
    assert run(device, inputs(1, 32)[:0], weight).shape == (0, 64)
    x = inputs(6, 32)
    assert_bits(run(device, x.view(2, 3, 32), weight), run(device, x, weight).view(2, 3, 64))
    assert run(device, x[0], weight).shape == (64,)


@pytest.mark.parametrize("rows", [2, 19])
@pytest.mark.parametrize("x_type", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("w_type", [torch.bfloat16, torch.float32])
def test_a_wide_product_is_fp32(device: torch.device, rows: int, x_type: torch.dtype, w_type: torch.dtype) -> None:
    x, weight = normal(rows, 72, dtype=x_type), normal(20, 72, seed=1, dtype=w_type)
    with poisoned_outputs():
        out = kernels.linear_wide(x.to(device), weight.to(device)).cpu()
    expected = x.double() @ weight.double().T
    bound = 2.0**-21 * (x.double().abs() @ weight.double().abs().T)
    assert out.dtype == torch.float32
    assert ((out.double() - expected).abs() <= bound).all()
    assert ((out.to(torch.bfloat16).double() - expected).abs() > bound).any(), "a rounded result would be told apart"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "groups", "outputs"),
    [(3, 2, 64), (2, 3, 20), (18, 2, 32), (65, 2, 64), (65, 3, 20), (2, 1, 64), (18, 1, 64), (65, 1, 64)],
)
def test_a_grouped_product_is_block_diagonal(
    device: torch.device, kind: str, rows: int, groups: int, outputs: int
) -> None:
    weight, x = weight_of(kind, groups * outputs, 96), normal(rows, groups, 96, dtype=torch.bfloat16)

    def ours(values: Tensor) -> Tensor:
        with poisoned_outputs():
            out: Tensor = kernels.grouped_linear(values.to(device), to(weight, device))
        return out.cpu()

    expected = reference.grouped_linear(x, weight)
    assert_op(ours(x), expected)
    with pytest.raises(AssertionError, match="outside"):
        assert_op(ours(x.flip(1) if groups > 1 else x.neg()), expected)
    assert_nan_stays(ours, x, 1)


def test_split_sums_are_added_in_order(device: torch.device) -> None:
    x, weight = normal(17, 1536, dtype=torch.bfloat16), weight_of("fp8", 32, 1536)
    assert isinstance(weight, Fp8Weight)
    out = run(device, x, weight, False)
    assert_op(out, reference.linear(x, weight, False), terms=terms(x, weight, False))
    assert_bits(run(device, x, weight, False), out)
    less = Fp8Weight(weight.codes[:, :1024], weight.scales[:, :32])
    with pytest.raises(AssertionError, match="outside"):
        assert_op(run(device, x[:, :1024].contiguous(), less, False), reference.linear(x, weight, False))


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_multiplies_where_it_is_quicker(
    kind: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    def refused(*_: object) -> Tensor:
        raise AssertionError("the library was asked")

    monkeypatch.setattr(kernels, "_mm", refused)
    weight = weight_of(kind, 32, 96)
    most = kernels.library_rows(kind, 32 * 96)
    rows = min(most, 70)
    assert run(device, inputs(rows, 96), weight).shape == (rows, 32)
    if kind != "fp4":
        with pytest.raises(AssertionError, match="the library was asked"):
            run(device, inputs(rows + 1, 96), weight)
    assert kernels.library_rows("fp8", 1 << 27) > kernels.library_rows("fp8", 1 << 20)


def test_other_dtypes_are_refused_before_a_launch(device: torch.device) -> None:
    weight = weight_of("fp8", 32, 32, device=device)
    x = torch.zeros(1, 32, device=device)
    for call in (
        lambda: kernels.linear(x, weight),
        lambda: kernels.linear(x.bfloat16(), torch.zeros(32, 32, device=device)),
        lambda: kernels.linear_wide(x.half(), x),
        lambda: kernels.grouped_linear(x.unsqueeze(1), weight),
    ):
        with pytest.raises(ValueError, match="has dtype"):
            call()

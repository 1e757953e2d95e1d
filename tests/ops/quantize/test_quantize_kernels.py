"""Quantisation kernels against the formats, in bits."""

import pytest
import torch
from torch import Tensor

from compare import assert_bits
from op_cases import assert_nan_stays, normal, poisoned_outputs
from quickseek.ops.quantize import reference

kernels = pytest.importorskip("quickseek.ops.quantize.triton")

FAKE = ["fake_quantize_a8", "fake_quantize_q4i", "fake_quantize_q4k"]
SHAPES = [(1, 32), (5, 96), (3, 5, 64), (41, 32)]


def adversarial(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of every size, a row of zeros of both signs, ties, and a NaN and an infinity in the last row."""
    x = normal(*shape) * torch.logspace(-20, 20, shape[0], dtype=torch.float64).view(-1, *[1] * (len(shape) - 1))
    x[shape[0] // 2] = 0.0
    x[shape[0] // 2, ..., 1::2] = -0.0
    x[0, ..., :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[-1, ..., 3], x[-1, ..., -1] = torch.nan, torch.inf
    return x.to(dtype)


def one_nan(x: Tensor) -> Tensor:
    """x with every NaN the same, whatever its sign."""
    return torch.where(x.isnan(), torch.nan, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FAKE)
def test_fake_quantisation_gives_the_values_of_the_format(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    x = adversarial(*shape, dtype=dtype)
    with poisoned_outputs():
        out = getattr(kernels, name)(x.to(device)).cpu()
    expected = one_nan(getattr(reference, name)(x))
    assert_bits(one_nan(out), expected)
    out.view(-1)[0] = 12345.0
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(one_nan(out), expected)


def test_values_that_do_not_lie_in_a_row_are_quantised_alike(device: torch.device) -> None:
    x = adversarial(6, 96)[:, :64]
    for name in FAKE:
        expected = one_nan(getattr(reference, name)(x))
        assert_bits(one_nan(getattr(kernels, name)(x.to(device))).cpu(), expected)
        with pytest.raises(AssertionError, match="differ in bits"):
            assert_bits(one_nan(getattr(kernels, name)(x.flip(1).to(device))).cpu(), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_a8_codes_and_scales_are_those_of_the_format(shape: tuple[int, ...], device: torch.device) -> None:
    x = adversarial(*shape)
    with poisoned_outputs():
        codes, scales = (part.cpu() for part in kernels.quantize_a8(x.to(device)))
    expected, expected_scales = reference.quantize_a8(x)
    assert_bits(scales, expected_scales)
    assert codes.dtype == torch.float8_e4m3fn
    assert_bits(one_nan(codes.float()), one_nan(expected.float()))
    with pytest.raises(AssertionError):
        assert_bits(scales ^ 1, expected_scales)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 4), (129, 5)])
def test_swizzled_scales_are_those_of_the_reference(rows: int, columns: int, device: torch.device) -> None:
    scales = (torch.arange(rows * columns) % 255 + 1).to(torch.uint8).view(rows, columns)
    with poisoned_outputs():
        out = kernels.swizzle_scales(scales.to(device)).cpu()
    assert_bits(out, reference.swizzle_scales(scales))
    with pytest.raises(AssertionError):
        assert_bits(out.flip(0), reference.swizzle_scales(scales))


@pytest.mark.parametrize("name", FAKE)
def test_a_nan_row_leaves_other_rows_alone(name: str, device: torch.device) -> None:
    assert_nan_stays(lambda x: getattr(kernels, name)(x.to(device)).cpu(), normal(4, 64, dtype=torch.bfloat16), 2)


@pytest.mark.parametrize("name", [*FAKE, "quantize_a8"])
def test_a_dtype_that_kernels_do_not_take_is_refused(name: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"x has dtype torch.float64: expected torch.bfloat16 or torch.float32"):
        getattr(kernels, name)(torch.zeros(2, 32, dtype=torch.float64, device=device))

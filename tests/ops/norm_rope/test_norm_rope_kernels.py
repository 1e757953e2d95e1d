"""Norm and rotation kernels against the reference."""

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op
from op_cases import assert_nan_stays, normal, poisoned_outputs
from quickseek.ops import norm_rope as door
from quickseek.ops.norm_rope import Rotation, reference

kernels = pytest.importorskip("quickseek.ops.norm_rope.triton")

EPS = 1e-20
BF16 = torch.bfloat16
POSITIONS = torch.tensor([0, 1, 127, 128, 65535, 1048575])


def frequencies(width: int) -> Tensor:
    return door.rotary_frequencies(width, 160000.0, factor=16.0, original_length=65536)


def turn(rows: int, width: int, device: torch.device | str = "cpu") -> Rotation:
    found = reference.rotation(POSITIONS[-rows:], frequencies(width))
    return Rotation(found.cos.to(device), found.sin.to(device))


def rows_of(rows: int, width: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Rows of very different sizes, one of them zeros of both signs; they lie in a wider tensor."""
    x = normal(rows, width + 5, seed=seed) * torch.logspace(-6, 6, rows, dtype=torch.float64).unsqueeze(1)
    x[rows // 2] = torch.tensor([0.0, -0.0] * (width + 5))[: width + 5] if rows > 1 else x[rows // 2]
    return x.to(dtype)[:, :width]


def assert_rows(actual: Tensor, expected: Tensor, what: str) -> None:
    """*op*, row by row: rows of different sizes may not hide each other's errors."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    for row in range(actual.shape[0]):
        assert_op(actual[row].cpu(), expected[row], f"{what}, row {row}")


def assert_quantised(actual: Tensor, expected: Tensor) -> None:
    """Values of A8 codes whose inputs may differ in a last place: next to each other, and seldom so."""
    actual = actual.cpu()
    different = actual != expected
    assert different.float().mean() <= 0.005, f"{int(different.sum())} of {different.numel()} values differ"
    step = torch.maximum(actual.abs(), expected.abs()).float() / 8
    assert ((actual.float() - expected.float()).abs() <= step).all()


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (6, 32), (5, 200), (3, 129)])
def test_rms_norm_is_the_references(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = rows_of(rows, width, dtype), normal(width, seed=2, dtype=dtype)
    with poisoned_outputs():
        out = kernels.rms_norm(x.to(device), weight.to(device), EPS)
    assert_rows(out, reference.rms_norm(x, weight, EPS), "norm")
    with pytest.raises(AssertionError, match="outside the bound"):
        assert_rows(kernels.rms_norm(x.to(device), (weight * 1.05).to(device), EPS), out.cpu(), "norm")


def test_a_norm_of_more_dimensions_is_that_of_its_rows(device: torch.device) -> None:
    x, weight = normal(3, 4, 24, dtype=BF16).to(device), normal(24, dtype=BF16).to(device)
    assert_bits(kernels.rms_norm(x, weight, EPS).flatten(0, 1), kernels.rms_norm(x.flatten(0, 1), weight, EPS))
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(kernels.rms_norm(x, weight, EPS), kernels.rms_norm(x.flip(0), weight, EPS))


@pytest.mark.parametrize("width", [4, 64])
def test_cos_and_sin_are_right_to_the_last_place_at_any_position(width: int, device: torch.device) -> None:
    positions = torch.cat((POSITIONS, torch.arange(1000, 1030), torch.tensor([999_983, 1 << 19])))
    with poisoned_outputs():
        found = kernels.rotation(positions.to(device), frequencies(width).to(device))
    angles = (positions.float().unsqueeze(1) * frequencies(width)).double()
    for ours, exact in ((found.cos, angles.cos()), (found.sin, angles.sin())):
        assert_bits(ours.cpu(), exact.float())
    exact_products = positions.double().unsqueeze(1) * frequencies(width).double()
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(found.cos.cpu(), exact_products.cos().float())


def test_positions_of_any_shape_turn_alike(device: torch.device) -> None:
    positions = POSITIONS.view(2, 3).to(device)
    found = kernels.rotation(positions, frequencies(8).to(device))
    flat = kernels.rotation(positions.flatten(), frequencies(8).to(device))
    assert found.cos.shape == (2, 3, 4)
    assert_bits(found.sin.flatten(0, 1), flat.sin)
    assert not torch.equal(found.sin, flat.cos.view(2, 3, 4))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("shape", "width"), [((6, 40), 8), ((3, 5, 34), 34), ((2, 20, 64), 64), ((1, 2, 512), 64)])
def test_rotation_is_the_references_in_new_memory_and_in_place(
    shape: tuple[int, ...], width: int, dtype: torch.dtype, inverse: bool, device: torch.device
) -> None:
    x, angle = normal(*shape, dtype=dtype), turn(shape[0], width)
    expected = reference.apply_rope(x, angle, inverse)
    on_device = Rotation(angle.cos.to(device), angle.sin.to(device))
    with poisoned_outputs():
        out = kernels.apply_rope(x.to(device), on_device, inverse).cpu()
    assert_op(out, expected)
    assert_bits(out[..., :-width], x[..., :-width])
    memory = x.to(device, copy=True)
    in_place = kernels.apply_rope_over(memory, on_device, inverse)
    assert in_place.data_ptr() == memory.data_ptr()
    assert_bits(in_place.cpu(), out)
    with pytest.raises(AssertionError, match="outside the bound"):
        assert_op(kernels.apply_rope(x.to(device), on_device, not inverse).cpu(), expected)


def test_channels_that_do_not_turn_keep_nan_and_infinity_to_themselves(device: torch.device) -> None:
    x, angle = normal(2, 2, 16, dtype=BF16), turn(2, 4, device)
    x[0, 0, 3], x[1, 1, 0] = torch.nan, torch.inf
    out = kernels.apply_rope(x.to(device), angle, False).cpu()
    assert int(out.isnan().sum()) == 1 and int(out.isinf().sum()) == 1
    x[0, 0, 13] = torch.nan
    assert int(kernels.apply_rope(x.to(device), angle, False).isnan().sum()) == 3


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("rows", "q_width", "width", "pairs"), [(1, 64, 32, 8), (6, 104, 96, 8), (3, 20, 64, 32)])
def test_latents_are_the_references(
    rows: int, q_width: int, width: int, pairs: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, angle = rows_of(rows, q_width + width, dtype), turn(rows, 2 * pairs)
    weights = normal(q_width, seed=3, dtype=dtype), normal(width, seed=4, dtype=dtype)
    on_device = Rotation(angle.cos.to(device), angle.sin.to(device))
    there = x.to(device), *(weight.to(device) for weight in weights), EPS, on_device
    for quantise in (False, True):
        with poisoned_outputs():
            latent, kv = kernels.normalised_latents(*there, quantise)
        expected, expected_kv = reference.normalised_latents(x, *weights, EPS, angle, quantise)
        assert_rows(latent, expected, "latent")
        (assert_quantised if quantise else lambda a, b: assert_rows(a, b, "kv"))(kv, expected_kv)
        alone = kernels.normalised_kv(x[:, q_width:].to(device), there[2], EPS, on_device, quantise)
        assert_bits(alone, kv)
        with pytest.raises(AssertionError):
            assert_quantised(kv, reference.normalised_latents(x, *weights, EPS, angle, not quantise)[1])


def test_a_nan_row_leaves_other_rows_alone(device: torch.device) -> None:
    weights = normal(32, seed=3, dtype=BF16).to(device), normal(32, seed=4, dtype=BF16).to(device)
    x, angle = normal(4, 64, dtype=BF16), turn(4, 16, device)

    def latents(x: Tensor) -> Tensor:
        return torch.cat(kernels.normalised_latents(x.to(device), *weights, EPS, angle, True), 1).cpu()

    assert_nan_stays(latents, x, 2)
    assert_nan_stays(lambda x: kernels.rms_norm(x[:, :32].to(device), weights[0], EPS).cpu(), x, 1)
    assert_nan_stays(lambda x: kernels.apply_rope(x.to(device), angle, False).cpu(), x, 3)


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    weights = normal(24, seed=3, dtype=BF16).to(device), normal(32, seed=4, dtype=BF16).to(device)
    x, angle = rows_of(6, 56).to(device), turn(6, 16, device)
    whole = kernels.normalised_latents(x, *weights, EPS, angle, True)
    part = kernels.normalised_latents(x[4:5], *weights, EPS, angle[4:5], True)
    for ours, theirs in zip(part, whole, strict=True):
        assert_bits(ours, theirs[4:5])
        with pytest.raises(AssertionError, match="differ in bits"):
            assert_bits(ours, theirs[5:6])


def test_what_kernels_do_not_take_is_refused_by_name(device: torch.device) -> None:
    x, weight, angle = torch.zeros(2, 32, device=device), torch.ones(32, device=device), turn(2, 16, device)
    with pytest.raises(ValueError, match=r"x has dtype torch.float64"):
        kernels.rms_norm(x.double(), weight, EPS)
    with pytest.raises(ValueError, match=r"cos has dtype torch.float64"):
        kernels.apply_rope(x, Rotation(angle.cos.double(), angle.sin), False)
    with pytest.raises(ValueError, match=r"rows have 12 channels: expected an even number, at least the 16 that turn"):
        kernels.apply_rope(x[:, :12], angle, False)
    with pytest.raises(ValueError, match=r"KV rows have 24 channels: expected a multiple of 32"):
        kernels.normalised_kv(x[:, :24], weight[:24], EPS, angle, True)
    with pytest.raises(ValueError, match=r"positions has dtype torch.int32"):
        kernels.rotation(torch.zeros(2, dtype=torch.int32, device=device), weight)

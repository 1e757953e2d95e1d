"""Number formats and quantisers: vectors of spec/model.md 3 and 4, golden vectors, and the edges of the formats."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import compare
from golden_data import golden
from quickseek import formats

Quantise = Callable[[Tensor], Tensor]
Q4K_SCALES = torch.arange(1, 127)


def from_hex(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def ramp(step: float, count: int) -> Tensor:
    """The test vectors of spec/model.md 4: bf16(step * (i - (count - 1) / 2))."""
    return (step * (torch.arange(count, dtype=torch.float64) - (count - 1) / 2)).to(torch.bfloat16)


# ---------------------------------------------------------------------------------------------- scalars


def test_e8m0_bytes_are_powers_of_two_and_the_last_is_nan() -> None:
    values = formats.e8m0_to_float32(torch.arange(256, dtype=torch.int64).to(torch.uint8))
    exact = torch.tensor([2.0 ** (byte - 127) for byte in range(255)], dtype=torch.float64)
    assert torch.equal(values[:255].to(torch.float64), exact)
    assert values[255].isnan()


def test_e4m3_codes_have_the_values_of_the_fn_variant() -> None:
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        value = (mantissa / 8 * 2.0**-6) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        found = float(formats.e4m3_to_float32(torch.tensor([code], dtype=torch.uint8)))
        if code & 0x7F == 0x7F:
            assert found != found
        else:
            assert found == (-value if code >> 7 else value)


def test_e4m3_rounding_saturates_and_keeps_nan() -> None:
    codes = formats.float32_to_e4m3(torch.tensor([1e9, -1e9, 464.0, 449.0, float("inf"), float("nan")]))
    assert codes.float()[:5].tolist() == [448.0, -448.0, 448.0, 448.0, 448.0]
    assert codes.float()[5].isnan()


def test_e2m1_ties_go_to_the_even_code_and_the_sign_of_zero_is_kept() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert formats.float32_to_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert formats.float32_to_e2m1(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]
    above, below = torch.nextafter(ties, torch.tensor(9.0)), torch.nextafter(ties, torch.tensor(0.0))
    assert formats.float32_to_e2m1(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert formats.float32_to_e2m1(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert formats.float32_to_e2m1(torch.tensor([0.0, -0.0, -0.1])).tolist() == [0, 8, 8]


def test_every_e2m1_code_survives_a_round_trip_and_packing() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(formats.float32_to_e2m1(formats.e2m1_to_float32(codes)), codes)
    packed = formats.pack_nibbles(codes)
    assert packed[0] == 0x10, "the even element lies in the low nibble"
    assert torch.equal(formats.unpack_nibbles(packed), codes)
    assert torch.equal(formats.unpack_nibbles(packed.view(torch.int8)), codes)


def test_pow2ceil_is_exact_at_powers_of_two_and_just_above() -> None:
    powers = torch.tensor([2.0**e for e in range(-126, 128)])
    biased = torch.arange(1, 255, dtype=torch.int32)
    assert torch.equal(formats.pow2ceil_exponent(powers), biased)
    assert torch.equal(formats.pow2ceil_exponent(torch.nextafter(powers, torch.tensor(torch.inf))), biased + 1)
    assert torch.equal(formats.pow2ceil_exponent(torch.nextafter(powers, torch.tensor(0.0)))[1:], biased[1:])


# ---------------------------------------------------------------------------------------------- known bytes


def test_known_bytes_of_an_fp8_block_give_the_published_weights() -> None:
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    codes[0, :8] = from_hex("d871f2797069f0e5")
    weight = formats.dequantize_fp8_blocks(
        codes.view(torch.float8_e4m3fn), torch.tensor([[0x73]], dtype=torch.uint8), torch.float32
    )
    published = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert weight[0, :8].tolist() == published


def test_known_bytes_of_an_fp4_row_give_the_published_weights() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :8] = from_hex("a0a8ec4aadaf42aa")
    weight = formats.dequantize_fp4_rows(packed, torch.tensor([[0x78]], dtype=torch.uint8), torch.float32)
    published = (
        "0 -0.0078125 0 -0.0078125 -0.015625 -0.03125 -0.0078125 0.015625 -0.0234375 -0.0078125 -0.046875 -0.0078125 "
        "0.0078125 0.015625 -0.0078125 -0.0078125"
    )
    assert weight[0, :16].tolist() == [float(word) for word in published.split()]
    swapped = formats.dequantize_fp4_rows(
        (packed << 4) | (packed >> 4), torch.tensor([[0x78]], dtype=torch.uint8), torch.float32
    )
    assert not torch.equal(swapped, weight), "the order of nibbles shows"


# ---------------------------------------------------------------------------------------------- quantisers


def test_a8_gives_the_codes_of_the_specification() -> None:
    x = ramp(0.37, 32)
    codes, scales = formats.quantize_a8(x)
    assert x.abs().max() == 5.75
    assert scales.tolist() == [121]
    assert codes.view(torch.uint8)[:6].tolist() == list(bytes.fromhex("fcfbfaf9f8f8"))
    assert formats.fake_quantize_a8(x)[:6].tolist() == [-6.0, -5.5, -5.0, -4.5, -4.0, -4.0]


def test_q4k_gives_the_codes_of_the_specification() -> None:
    x = ramp(0.21, 16)
    packed, scales = formats.quantize_q4k(x)
    assert x.abs().max() == 1.578125
    assert scales.tolist() == [0x28]
    assert formats.unpack_nibbles(packed).tolist() == [15, 15, 14, 14, 13, 12, 11, 9, 1, 3, 4, 5, 6, 6, 7, 7]
    assert torch.equal(packed, from_hex("ffeecd9b31546677"))


def test_q4i_gives_the_codes_of_the_specification() -> None:
    x = ramp(0.21, 32)
    packed, scales = formats.quantize_q4i(x)
    assert x.abs().max() == 3.25
    assert scales.tolist() == [127]
    printed = "13 13 13 13 12 12 12 12 11 11 10 10 9 9 9 8 0 1 1 1 2 2 3 3 4 4 4 4 5 5 5 5"
    assert formats.unpack_nibbles(packed).tolist() == [int(word) for word in printed.split()]


QUANTISERS = [
    ("fp8_g32_e8m0", formats.fake_quantize_a8),
    ("fp4_g32_e8m0", formats.fake_quantize_q4i),
    ("fp4_g16_e4m3", formats.fake_quantize_q4k),
]


@pytest.mark.parametrize(("key", "quantise"), QUANTISERS)
def test_fake_quantisation_gives_the_golden_bits(key: str, quantise: Quantise) -> None:
    want = golden("quantisers")
    compare.assert_bits(quantise(want["x"]), want[key], key)
    for other, wrong in QUANTISERS:
        if other != key:
            with pytest.raises(AssertionError, match="differ in bits"):
                compare.assert_bits(wrong(want["x"]), want[key], key)


@pytest.mark.parametrize("quantise", [q for _, q in QUANTISERS])
def test_quantised_values_are_exact_in_bf16(quantise: Quantise) -> None:
    once = quantise(golden("quantisers")["x"])
    compare.assert_bits(once.to(torch.bfloat16).to(torch.float32), once)


@pytest.mark.parametrize("quantise", [formats.fake_quantize_a8, formats.fake_quantize_q4i])
def test_quantised_values_quantise_to_themselves(quantise: Quantise) -> None:
    once = quantise(golden("quantisers")["x"])
    compare.assert_bits(quantise(once), once)


def test_q4k_quantises_to_itself_unless_its_scale_is_subnormal() -> None:
    """Below 2.5 * 2^-9 a scale is so coarse that the largest code may be 4, which the next scale is not made for."""
    x = golden("quantisers")["x"]
    once = formats.fake_quantize_q4k(x)
    scales = formats.e4m3_to_float32(formats.quantize_q4k(x)[1]).repeat_interleave(16, -1)
    twice = formats.fake_quantize_q4k(once)
    compare.assert_bits(twice[scales >= 3 * 2.0**-9], once[scales >= 3 * 2.0**-9])
    assert not torch.equal(twice, once), "the vectors hold such a group: packed records must be made from raw values"


def test_scales_have_floors_so_that_zeros_and_tiny_values_quantise() -> None:
    zeros = torch.zeros(2, 32)
    a8, q4i, q4k = formats.quantize_a8(zeros), formats.quantize_q4i(zeros), formats.quantize_q4k(zeros)
    # 1e-4 / 448 = 2.2e-7, between 2^-23 and 2^-22; 6 * 2^-126 / 6 = 2^-126; 6 * 2^-9 / 6 = 2^-9, code 1.
    assert a8[1].unique().tolist() == [127 - 22]
    assert q4i[1].unique().tolist() == [1]
    assert q4k[1].unique().tolist() == [1]
    for value in (formats.fake_quantize_a8(zeros), formats.fake_quantize_q4i(zeros), formats.fake_quantize_q4k(zeros)):
        assert torch.equal(value, zeros)
    minus = torch.full((32,), -0.0)
    assert torch.signbit(formats.fake_quantize_q4k(minus)).all()


def test_large_values_saturate_instead_of_overflowing() -> None:
    x = torch.full((32,), 1e30)
    assert (formats.dequantize_q4k(*formats.quantize_q4k(x), torch.float32) == 448.0 * 6.0).all()
    assert formats.fake_quantize_a8(x).isfinite().all()
    assert formats.fake_quantize_q4i(x).isfinite().all()


@pytest.mark.parametrize("scale", Q4K_SCALES.tolist())
def test_q4k_keeps_any_code_under_any_of_its_scales(scale: int) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 1)
    x = formats.dequantize_q4k(formats.pack_nibbles(codes), torch.tensor([[scale]], dtype=torch.uint8), torch.float32)
    packed, scales = formats.quantize_q4k(x)
    compare.assert_bits(formats.dequantize_q4k(packed, scales, torch.float32), x)


@pytest.mark.parametrize(
    ("quantise", "group"),
    [(formats.fake_quantize_a8, 32), (formats.fake_quantize_q4i, 32), (formats.fake_quantize_q4k, 16)],
)
def test_a_nan_marks_its_own_group_and_no_other(quantise: Quantise, group: int) -> None:
    x = golden("quantisers")["x"][:2].clone()
    clean = quantise(x)
    x[0, group + 3] = torch.nan
    marked = quantise(x)
    assert marked[0, group + 3].isnan()
    marked[0, group : 2 * group] = clean[0, group : 2 * group]
    compare.assert_bits(marked, clean)


@pytest.mark.parametrize("quantise", [formats.quantize_a8, formats.quantize_q4i, formats.quantize_q4k])
def test_a_width_that_is_no_multiple_of_the_group_is_refused(quantise: Callable[[Tensor], object]) -> None:
    with pytest.raises(ValueError, match="last dimension 40 is not a multiple of"):
        quantise(torch.zeros(2, 40))


def test_fake_quantisation_passes_gradients_straight_through() -> None:
    x = ramp(0.37, 32).float().requires_grad_()
    for quantise in (formats.fake_quantize_a8, formats.fake_quantize_q4i, formats.fake_quantize_q4k):
        (gradient,) = torch.autograd.grad(quantise(x).sum(), x)
        assert torch.equal(gradient, torch.ones_like(x))


# ---------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (40, 96), (1, 32), (33, 33)])
def test_fp8_blocks_quantise_to_themselves_whatever_the_edges(rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.1
    codes, scales = formats.quantize_fp8_blocks(weight)
    assert codes.shape == weight.shape and scales.shape == (-(-rows // 32), -(-columns // 32))
    value = formats.dequantize_fp8_blocks(codes, scales, torch.float32)
    # E4M3 has three bits of mantissa; its smallest normal is 2^-6 of values scaled to at most 448.
    assert ((value - weight).abs() <= weight.abs() * 2.0**-4 + 2.0**-16).all()
    again = formats.dequantize_fp8_blocks(*formats.quantize_fp8_blocks(value), torch.float32)
    compare.assert_bits(again, value)


def test_fp8_scales_belong_to_blocks_of_32_rows_and_columns() -> None:
    codes = torch.full((64, 64), 1.0).to(torch.float8_e4m3fn)
    scales = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    weight = formats.dequantize_fp8_blocks(codes, scales, torch.float32)
    assert weight[31, 31] == 1 and weight[31, 32] == 2 and weight[32, 31] == 4 and weight[32, 32] == 8


def test_fp4_rows_of_stacked_experts_quantise_to_themselves() -> None:
    weight = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(1))
    packed, scales = formats.quantize_fp4_rows(weight)
    assert packed.shape == (3, 4, 32) and scales.shape == (3, 4, 2)
    value = formats.dequantize_fp4_rows(packed, scales, torch.float32)
    assert ((value - weight).abs().amax() <= weight.abs().amax() / 4).all()
    compare.assert_bits(formats.dequantize_fp4_rows(*formats.quantize_fp4_rows(value), torch.float32), value)

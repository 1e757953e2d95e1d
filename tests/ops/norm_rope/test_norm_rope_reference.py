"""RMSNorm and rotation: the constants of spec/model.md 6.2, and what a rotation must keep."""

import math

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64, assert_relative
from op_cases import assert_nan_stays, normal
from quickseek.ops import norm_rope as door

PAIRS = [1, 8, 15, 16, 20, 24, 31]
YARN = {"factor": 16.0, "original_length": 65536, "beta_fast": 32.0, "beta_slow": 1.0}


def frequencies(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Released frequencies of window-only layers and of layers with global KV."""
    return door.rotary_frequencies(64, 1e4, dtype=dtype), door.rotary_frequencies(64, 160000.0, **YARN, dtype=dtype)


def test_released_frequencies_are_the_printed_ones() -> None:
    """The page prints values that were computed in float32 throughout, so they are off by up to two of its units."""
    plain, scaled = frequencies()
    printed = "0.687656045 0.05 0.00363553851 0.00226562493 0.000296977785 1.95312532e-5 5.6805294e-7"
    for found, words in ((plain[[1, 16, 31]], "0.749894202 0.01 0.000133352145"), (scaled[PAIRS], printed)):
        for value, word in zip(found.tolist(), words.split(), strict=True):
            assert value == pytest.approx(float(word), rel=2.5e-7)
    without = door.rotary_frequencies(64, 160000.0, dtype=torch.float64)[PAIRS]
    assert without[3:].tolist() != pytest.approx([float(word) for word in printed.split()[3:]], rel=1e-2)


def test_yarn_leaves_pairs_below_15_and_divides_those_above_25_by_16() -> None:
    unscaled = door.rotary_frequencies(64, 160000.0, dtype=torch.float64)
    ratio = unscaled / frequencies()[1]
    assert (ratio[:16] == 1).all() and ratio[16] > 1
    assert ratio[24] < 16 and torch.allclose(ratio[25:], torch.tensor(16.0, dtype=torch.float64), rtol=1e-14)
    expected = 1 - (torch.arange(15, 26) - 15) / 10 * (1 - 1 / 16)
    assert_relative(1 / ratio[15:26], expected, 1e-6)


def test_the_corners_of_the_miniature_are_0_and_2() -> None:
    scaled = door.rotary_frequencies(
        16, 160000.0, factor=4.0, original_length=32, beta_fast=32.0, beta_slow=1.0, dtype=torch.float64
    )
    ratio = door.rotary_frequencies(16, 160000.0, dtype=torch.float64) / scaled
    assert ratio[0] == 1 and torch.allclose(ratio[2:], torch.tensor(4.0, dtype=torch.float64))
    assert ratio[1] == pytest.approx(1 / (1 - 0.5 * 0.75))


def test_a_rotation_turns_adjacent_pairs_at_the_end_of_the_head() -> None:
    x, plain = normal(3, 2, 10), door.rotary_frequencies(4, 100.0, dtype=torch.float64)
    out = door.apply_rope(x, door.rotation(torch.tensor([0, 1, 7]), plain))
    assert_bits(out[0], x[0])
    assert_bits(out[..., :6], x[..., :6])
    for row, position in ((1, 1), (2, 7)):
        for pair, angle in enumerate((position * 1.0, position * 0.1)):
            a, b = x[row, :, 6 + 2 * pair], x[row, :, 7 + 2 * pair]
            turned = torch.stack((a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)))
            assert_float64(out[row, :, 6 + 2 * pair : 8 + 2 * pair].T.contiguous(), turned)
    half_split = torch.cat((x[..., :6], x[..., 6::2], x[..., 7::2]), -1)
    with pytest.raises(AssertionError):
        assert_float64(door.apply_rope(half_split, door.rotation(torch.tensor([0, 1, 7]), plain)), out)


def test_the_inverse_rotation_undoes_the_rotation() -> None:
    x, (_, scaled) = normal(4, 3, 128), frequencies()
    turn = door.rotation(torch.tensor([0, 5, 65536, 1_000_000]), scaled)
    there = door.apply_rope(x, turn)
    assert_float64(door.apply_rope(there, turn, inverse=True), x)
    with pytest.raises(AssertionError):
        assert_float64(door.apply_rope(there, turn), x)


def test_scores_depend_on_distances_only() -> None:
    q, k, (plain, _) = normal(1, 64), normal(1, 64, seed=1), frequencies()

    def score(a: int, b: int) -> Tensor:
        turned = [door.apply_rope(x, door.rotation(torch.tensor([p]), plain)) for x, p in ((q, a), (k, b))]
        return (turned[0] * turned[1]).sum()

    assert score(17, 5) == pytest.approx(float(score(1017, 1005)), abs=1e-9)
    assert score(17, 5) != pytest.approx(float(score(17, 6)), abs=1e-3)


def test_angles_are_float32_products_of_position_and_frequency() -> None:
    plain = frequencies(torch.float32)[0]
    turn = door.rotation(torch.tensor([999_999]), plain)
    assert_bits(turn.cos[0], (torch.tensor(999_999.0) * plain).cos())


def test_rows_of_a_rotation_can_be_taken_apart() -> None:
    turn = door.rotation(torch.arange(5), frequencies()[0])
    x = normal(5, 64)
    assert_bits(door.apply_rope(x[2:4], turn[2:4]), door.apply_rope(x, turn)[2:4])


# ---------------------------------------------------------------------------------------------- norm


def test_the_norm_divides_by_the_root_mean_square() -> None:
    x, weight = normal(3, 48), normal(48, seed=1)
    assert_float64(door.rms_norm(x, weight, 0.0), x / x.square().mean(-1, keepdim=True).sqrt() * weight)


def test_rows_of_tiny_values_are_normalised_too() -> None:
    x = normal(2, 64, dtype=torch.float32) * 1e-7
    out = door.rms_norm(x, torch.ones(64), 1e-20)
    assert out.square().mean(-1).tolist() == pytest.approx([1.0, 1.0], rel=1e-4)
    assert door.rms_norm(x, torch.ones(64), 1e-6).square().mean() < 1e-6, "an epsilon of 1e-6 would have hidden them"


def test_a_row_of_zeros_stays_zero() -> None:
    assert (door.rms_norm(torch.zeros(2, 32), torch.ones(32), 1e-20) == 0).all()


def test_bf16_rows_are_normalised_in_float32_and_rounded_once() -> None:
    x, weight = normal(4, 512, dtype=torch.bfloat16), normal(512, seed=1, dtype=torch.bfloat16)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-20) * weight.float()
    assert_bits(door.rms_norm(x, weight, 1e-20), wide.to(torch.bfloat16))


def test_a_nan_row_stays_in_its_row() -> None:
    x, turn = normal(4, 64), door.rotation(torch.arange(4), frequencies()[0])
    assert_nan_stays(lambda x: door.rms_norm(x, torch.ones(64, dtype=torch.float64), 1e-20), x, 1)
    assert_nan_stays(lambda x: door.apply_rope(x, turn), x, 1)


def test_norm_and_rotation_are_differentiable() -> None:
    turn = door.rotation(torch.tensor([3, 9]), door.rotary_frequencies(4, 1e4, dtype=torch.float64))
    x, weight = normal(2, 3, 6).requires_grad_(), normal(6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: door.rms_norm(x, w, 1e-20), (x, weight))
    assert torch.autograd.gradcheck(lambda x: door.apply_rope(x, turn, inverse=True), (x,))


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(3,\): expected \[4\]"):
        door.rms_norm(torch.zeros(2, 4), torch.ones(3), 0.0)
    with pytest.raises(ValueError, match=r"cos has shape"):
        door.apply_rope(torch.zeros(2, 64), door.rotation(torch.arange(3), frequencies()[0]))


def test_frequencies_made_in_inference_or_on_meta_serve_training_on_a_cpu() -> None:
    with torch.inference_mode(), torch.device("meta"):
        made = door.rotary_frequencies(4, 123.0, dtype=torch.float64)
    assert made.device.type == "cpu" and not made.is_inference()
    assert made is door.rotary_frequencies(4, 123.0, dtype=torch.float64), "computed for every forward"
    there = torch.device("meta")
    kept = door.rotary_frequencies(4, 123.0, device=there)
    assert kept.device == there and kept is door.rotary_frequencies(4, 123.0, device=there) and kept is not made

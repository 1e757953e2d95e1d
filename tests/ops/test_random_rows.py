"""Kernels that treat each row by itself, on drawn shapes, numbers and layouts: formats, norms, rotation, mHC, heads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawn_memory import (
    FEW,
    SPECIAL,
    Arena,
    Region,
    assert_numbers,
    assert_same,
    both,
    by_interpreter,
    layouts,
    numbers,
)
from quickseek.ops import head, mhc, norm_rope, quantize
from quickseek.ops.norm_rope import Rotation

pytestmark = by_interpreter
BF16, FP32 = torch.bfloat16, torch.float32
floats = st.sampled_from((BF16, FP32))
shapes = st.lists(st.integers(1, 5), min_size=0, max_size=2).map(tuple)


def turn_of(rows: int, pairs: int, seed: int) -> Rotation:
    angles = torch.randn(rows, pairs, generator=torch.Generator().manual_seed(seed)) * 100
    return Rotation(angles.cos(), angles.sin())


@FEW
@given(st.data(), shapes, st.integers(1, 70), floats, layouts)
def test_formats_have_the_bits_of_the_reference(
    data: st.DataObject, shape: tuple[int, ...], groups: int, dtype: torch.dtype, layout: tuple[int, str]
) -> None:
    kind = data.draw(st.sampled_from(("fake_quantize_a8", "fake_quantize_q4i", "fake_quantize_q4k", "quantize_a8")))
    x = data.draw(numbers((*shape, groups * (16 if kind.endswith("q4k") else 32)), dtype, SPECIAL, 30))
    ran = both(getattr(quantize, kind), (x,), layout)
    assert ran is not None
    for found, expected in zip(*((x,) if isinstance(x, Tensor) else x for x in (ran.found, ran.expected)), strict=True):
        assert_same(found, expected, kind)


@FEW
@given(st.integers(0, 300), st.integers(1, 9), st.integers(0, 99), layouts)
def test_scales_lie_in_their_tiles(rows: int, columns: int, seed: int, layout: tuple[int, str]) -> None:
    scales = torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    ran = both(quantize.swizzle_scales, (scales,), layout)
    assert ran is not None
    assert_same(ran.found, ran.expected)


@FEW
@given(st.data(), shapes, st.integers(1, 90), floats, floats, layouts)
def test_norms_are_the_references(
    data: st.DataObject, shape: tuple[int, ...], width: int, dtype: torch.dtype, weights: torch.dtype,
    layout: tuple[int, str],
) -> None:  # fmt: skip
    x, weight = data.draw(numbers((*shape, width), dtype, SPECIAL)), data.draw(numbers((width,), weights))
    ran = both(lambda x, weight: norm_rope.rms_norm(x, weight, 1e-6), (x, weight), layout)
    assert ran is not None
    assert_numbers(ran.found, ran.expected)


@FEW
@given(st.data(), st.integers(0, 4), shapes, st.integers(1, 40), floats, st.booleans(), st.booleans(), layouts)
def test_rotations_are_the_references(
    data: st.DataObject, rows: int, shape: tuple[int, ...], half: int, dtype: torch.dtype, inverse: bool,
    overwrite: bool, layout: tuple[int, str],
) -> None:  # fmt: skip
    turn = turn_of(rows, data.draw(st.integers(1, half)), half)
    x = data.draw(numbers((rows, *shape, 2 * half), dtype, SPECIAL))

    def call(x: Tensor, turn: Rotation) -> Tensor:
        return norm_rope.apply_rope(x, turn, inverse=inverse, overwrite=overwrite)

    ran = both(call, (x, turn), layout, writes=int(overwrite))
    assert ran is not None
    assert_numbers(ran.found, ran.expected)


@FEW
@given(st.data(), st.integers(0, 4), st.integers(1, 50), st.integers(1, 5), floats, st.booleans(), layouts)
def test_latents_and_kv_rows_are_the_references(
    data: st.DataObject, rows: int, latent: int, groups: int, dtype: torch.dtype, quantise: bool,
    layout: tuple[int, str],
) -> None:  # fmt: skip
    width = 32 * groups if quantise else 2 * groups
    turn = turn_of(rows, data.draw(st.integers(1, width // 2)), latent)
    projected = data.draw(numbers((rows, latent + width), dtype, (*SPECIAL[:5], 1000.0), 3))
    weights = data.draw(numbers((latent,), FP32)), data.draw(numbers((width,), BF16, (0.0, -0.0)))

    def call(projected: Tensor, q_weight: Tensor, kv_weight: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
        return norm_rope.normalised_latents(projected, q_weight, kv_weight, 1e-6, turn, quantise=quantise)

    def call_kv(kv: Tensor, weight: Tensor, turn: Rotation) -> Tensor:
        return norm_rope.normalised_kv(kv, weight, 1e-6, turn, quantise=quantise)

    ran = both(call, (projected, *weights, turn), layout)
    assert ran is not None
    assert_numbers(ran.found[0], ran.expected[0], "latents")
    alone = both(call_kv, (projected[:, latent:], weights[1], turn), layout)
    assert alone is not None
    for found, expected in ((ran.found[1], ran.expected[1]), (alone.found, alone.expected)):
        if quantise:
            # A last bit before quantisation moves a value by a step of the format: an eighth, or the scale's power.
            assert torch.equal(found.isnan(), expected.isnan())
            near = (found.double() - expected.double()).abs() <= expected.double().abs() / 7 + 1e-6
            size = expected.double().abs().unflatten(-1, (-1, 32)).nan_to_num(0).amax(-1, keepdim=True)
            small = (found.double() - expected.double()).abs().unflatten(-1, (-1, 32)) <= size / 200
            assert (near | small.flatten(-2) | expected.isnan() | expected.isinf()).all(), "KV rows"
        else:
            assert_numbers(found, expected, "KV rows")


@FEW
@given(st.data(), st.integers(1, 20), st.integers(0, 40), st.integers(1, 70), st.integers(1, 4), layouts)
def test_mhc_is_the_references(
    data: st.DataObject, half: int, rows: int, hidden: int, iterations: int, layout: tuple[int, str]
) -> None:
    streams = data.draw(numbers((rows, 4, 2 * half), BF16, (0.0, torch.nan, 100.0), 8))
    output = data.draw(numbers((rows, 2 * half), BF16, (0.0, torch.nan, torch.inf)))
    fn, base = data.draw(numbers((24, 8 * half), FP32, (), 1)), data.draw(numbers((24,), FP32, (0.0, 5.0), 1))
    scale = data.draw(numbers((3,), FP32, (), 1))

    def coefficients(streams: Tensor) -> mhc.Mixes:
        return mhc.coefficients(streams, fn, scale, base, norm_eps=1e-6, hc_eps=1e-6, iterations=iterations, hc_mult=4)

    # The weights always lie in a row: they are whole parameters, and refused elsewhere.
    ran = both(coefficients, (streams,), (layout[0] % 2, layout[1]))
    assert ran is not None
    mixes = ran.expected
    for name in ("pre", "post", "comb"):
        assert_numbers(getattr(ran.found, name).flatten(1), getattr(mixes, name).flatten(1), name)
    for call, arguments in (
        (mhc.post, (streams, output, mixes)), (mhc.collapse, (streams, mixes.pre)), (mhc.stream_mean, (streams,))
    ):  # fmt: skip
        ran = both(call, arguments, layout)
        assert ran is not None
        assert_numbers(ran.found, ran.expected, call.__name__)


@FEW
@given(st.data(), st.integers(0, 4), st.integers(1, 1100), st.integers(1, 40), layouts)
def test_confidences_are_the_references(
    data: st.DataObject, rows: int, hidden: int, rank: int, layout: tuple[int, str]
) -> None:
    x, markov = data.draw(numbers((rows, hidden), BF16, SPECIAL, 2)), data.draw(numbers((rows, rank)))
    weight = data.draw(numbers((1, hidden + rank), BF16, (0.0,), 1))
    ran = both(head.confidence, (x, markov, weight), layout)
    assert ran is not None
    assert_numbers(ran.found, ran.expected)


def test_what_is_read_or_written_beside_an_argument_is_noticed() -> None:
    x = torch.arange(6.0).view(2, 3)
    for layout in ("between", "columns", "spread", "rows", "turned"):
        region = Region.place(x, layout)
        assert torch.equal(region.view, x)
        region.assert_untouched(True)
        region.view[1, 2] = 7
        region.assert_untouched(False)
        with pytest.raises(AssertionError, match="not to be written"):
            region.assert_untouched(True)
        region.base[..., -1] = 7
        with pytest.raises(AssertionError, match="not to be written"):
            region.assert_untouched(False)
        arena = Arena(0, layout)
        assert arena.placed(x).sum() == 15 and arena.ordinary == (layout == "between")

    def neighbour(x: Tensor) -> Tensor:
        return torch.as_strided(x, (1,), (1,), x.storage_offset() - 1)

    ran = both(lambda x: neighbour(x) if x.storage_offset() else x[:1], (x[0],), (0, "between"))
    assert ran is not None and ran.found.isnan().all()
    with pytest.raises(AssertionError, match="NaN in other places"):
        assert_numbers(ran.found, ran.expected)

"""Single-pass mHC: the vector of spec/model.md 5.2 and the properties that implementers got wrong."""

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64
from op_cases import assert_nan_stays, normal
from quickseek.ops import mhc as door
from quickseek.ops.mhc import Mixes, reference

N, HIDDEN = 4, 12
OPTIONS = {"norm_eps": 1e-20, "hc_eps": 1e-6, "iterations": 20, "hc_mult": N}


def weights() -> tuple[Tensor, Tensor, Tensor]:
    return normal(24, N * HIDDEN, seed=1) * 0.2, normal(3, seed=2), normal(24, seed=3)


PRINTED = {
    "pre": "0.32766932 0.36441660 0.40281591 0.44244477",
    "post": "0.73753864 0.61471605 0.71441734 0.82070899",
    "comb": ".28928551 .28928560 .19799803 .22342984 .25635773 .25635773 .28928560 .19799799 "
    ".22717790 .22717783 .25635767 .28928560 .22717790 .22717781 .25635776 .28928557",
}


def check_vector(dtype: torch.dtype, iterations: int = 20, hc_eps: float = 1e-6) -> None:
    """The specification's vector, which was computed in float32: equal to a few roundings of that."""
    projected = ((torch.arange(24, dtype=dtype) - 11.5) / 8).unsqueeze(0)
    base = (0.1 * (torch.arange(24) % 5)).to(dtype)
    mixes = reference.mixes_of(projected, torch.tensor([0.5, 1.0, 2.0], dtype=dtype), base, hc_eps, iterations, 4)
    for part, printed in PRINTED.items():
        expected = torch.tensor([float(word) for word in printed.split()], dtype=torch.float64)
        difference = (getattr(mixes, part).flatten().double() - expected).abs().max()
        assert difference < 1e-7, f"{part} is off by {float(difference):.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coefficients_are_the_printed_ones(dtype: torch.dtype) -> None:
    check_vector(dtype)


@pytest.mark.parametrize("changed", [{"iterations": 1}, {"hc_eps": 0.0}])
def test_other_rounds_or_a_missing_epsilon_are_noticed(changed: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match="is off by"):
        check_vector(torch.float64, **changed)  # type: ignore[arg-type]


def test_sinkhorn_ends_on_columns_so_that_only_they_sum_to_one() -> None:
    mixes = reference.mixes_of(3 * normal(50, 24), torch.ones(3), torch.zeros(24), 1e-6, 20, 4)
    columns, rows = mixes.comb.sum(1), mixes.comb.sum(2)
    assert (columns - 1).abs().max() < 2e-6
    assert (rows - 1).abs().max() > 1e-4, "row sums are approximate"


def test_the_norm_runs_over_all_streams_after_the_projection() -> None:
    streams, (fn, scale, base) = normal(3, N, HIDDEN), weights()
    found = door.coefficients(streams, fn, scale, base, **OPTIONS)
    for row in range(3):
        z = streams[row].flatten()
        m = (fn @ z) / z.square().mean().sqrt()
        assert_float64(found.pre[row], torch.sigmoid(m[:4] * scale[0] + base[:4]) + 1e-6)
        assert_float64(found.post[row], 2 * torch.sigmoid(m[4:8] * scale[1] + base[4:8]))
    again = door.coefficients(streams * 1e-3, fn, scale, base, **OPTIONS)
    assert_float64(again.comb, found.comb)


def test_equal_copies_need_only_one_of_them() -> None:
    fn, scale, base = weights()
    row = normal(3, HIDDEN)
    whole = door.coefficients(row.unsqueeze(1).expand(-1, N, -1), fn, scale, base, **OPTIONS)
    short = door.coefficients(row, fn.unflatten(1, (N, -1)).sum(1), scale, base, **OPTIONS)
    for part in ("pre", "post", "comb"):
        assert_float64(getattr(short, part), getattr(whole, part))


def test_spreading_sums_over_the_source_index() -> None:
    streams, output = normal(3, N, HIDDEN), normal(3, HIDDEN, seed=1)
    mixes = Mixes(normal(3, N), normal(3, N, seed=4), normal(3, N, N, seed=5))
    expected = torch.zeros_like(streams)
    for t in range(3):
        for j in range(N):
            expected[t, j] = mixes.post[t, j] * output[t] + sum(mixes.comb[t, i, j] * streams[t, i] for i in range(N))
    assert_float64(door.post(streams, output, mixes), expected)
    with pytest.raises(AssertionError):
        turned = Mixes(mixes.pre, mixes.post, mixes.comb.transpose(1, 2))
        assert_float64(door.post(streams, output, turned), expected)


def test_collapsing_weighs_and_the_mean_does_not() -> None:
    streams, pre = normal(3, N, HIDDEN), normal(3, N, seed=1)
    assert_float64(door.collapse(streams, pre), (pre.unsqueeze(-1) * streams).sum(1))
    assert_float64(door.stream_mean(streams), streams.sum(1) / N)
    one_hot = torch.eye(N, dtype=torch.float64)[:1].expand(3, -1)
    assert_bits(door.collapse(streams, one_hot), streams[:, 0].contiguous())


def test_bf16_streams_are_mixed_wide_and_rounded_once() -> None:
    streams, output = normal(2, N, HIDDEN, dtype=torch.bfloat16), normal(2, HIDDEN, seed=1, dtype=torch.bfloat16)
    fn, scale, base = (w.float() for w in weights())
    mixes = door.coefficients(streams, fn, scale, base, **OPTIONS)
    assert mixes.pre.dtype == mixes.comb.dtype == torch.float32
    wide = Mixes(mixes.pre.double(), mixes.post.double(), mixes.comb.double())
    expected = door.post(streams.double(), output.double(), wide).to(torch.bfloat16)
    assert ((door.post(streams, output, mixes).float() - expected.float()).abs() <= expected.float().abs() / 128).all()


def test_a_nan_row_stays_in_its_row() -> None:
    streams, (fn, scale, base), output = normal(4, N, HIDDEN), weights(), normal(4, HIDDEN)

    def whole(streams: Tensor) -> Tensor:
        mixes = door.coefficients(streams, fn, scale, base, **OPTIONS)
        return torch.cat((door.post(streams, output, mixes), door.collapse(streams, mixes.pre).unsqueeze(1)), 1)

    assert_nan_stays(whole, streams, 2)


def test_huge_streams_give_finite_coefficients() -> None:
    fn, scale, base = (w.float() for w in weights())
    mixes = door.coefficients(normal(2, N, HIDDEN, dtype=torch.bfloat16) * 1e15, fn, 1e3 * scale, base, **OPTIONS)
    assert mixes.pre.isfinite().all() and mixes.comb.isfinite().all()
    assert (mixes.comb.sum(1) - 1).abs().max() < 1e-3


def test_mixing_is_differentiable() -> None:
    streams, (fn, scale, base), output = normal(2, N, 3), weights(), normal(2, 3)
    inputs = (streams, fn[:, : N * 3].contiguous(), scale, base, output)

    def whole(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, output: Tensor) -> Tensor:
        mixes = door.coefficients(streams, fn, scale, base, **{**OPTIONS, "iterations": 3})
        return door.collapse(door.post(streams, output, mixes), mixes.pre)

    assert torch.autograd.gradcheck(whole, tuple(x.clone().requires_grad_() for x in inputs))


def test_shapes_that_do_not_fit_are_named() -> None:
    streams, (fn, scale, base) = normal(2, N, HIDDEN), weights()
    with pytest.raises(ValueError, match=r"fn has shape \(24, 47\): expected \[24, 48\]"):
        door.coefficients(streams, fn[:, 1:], scale, base, **OPTIONS)
    with pytest.raises(ValueError, match="base has shape"):
        door.coefficients(streams, fn, scale, base[1:], **OPTIONS)
    with pytest.raises(ValueError, match="output has shape"):
        door.post(streams, normal(2, 5), Mixes(base, base, base))
    with pytest.raises(ValueError, match="pre has shape"):
        door.collapse(streams, normal(2, 3))


def test_first_streams_are_copies_that_the_pre_mix_collapses_to_the_row_itself() -> None:
    x = torch.randn(3, 5, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    streams, pre = door.first_streams(x, 4)
    assert streams.shape == (3, 4, 5) and pre.dtype == torch.float32
    assert all(torch.equal(streams[:, copy], x) for copy in range(4))
    assert torch.equal(door.collapse(streams, pre), x)
    assert not torch.equal(door.collapse(streams, pre.roll(1, -1) * 2), x)

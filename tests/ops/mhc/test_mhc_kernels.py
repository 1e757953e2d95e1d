"""mHC kernels against their reference (spec/model.md 5)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op, assert_relative
from op_cases import assert_nan_stays, normal, poisoned_outputs
from quickseek.ops.mhc import Mixes, reference

kernels = pytest.importorskip("quickseek.ops.mhc.triton")

N = 4
OPTIONS = (1e-20, 1e-6, 20, N)
BF16 = torch.bfloat16
COEFFICIENTS = 3e-6
"""Relative error of FP32 coefficients: roundings of another order of summation, through gates and Sinkhorn."""


def weights(channels: int) -> tuple[Tensor, Tensor, Tensor]:
    fn = normal(24, channels, seed=1) * (4 / channels) ** 0.5
    return fn.float(), normal(3, seed=2).float(), normal(24, seed=3).float()


def streams_of(rows: int, hidden: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes; where there are several, one is zero but for a -0."""
    x = normal(rows, N, hidden, seed=seed) * torch.logspace(6, -6, rows).view(-1, 1, 1)
    x[rows // 2 :][: rows > 1] = 0.0
    x[rows // 2 :, 0, 0] *= -1.0
    return x.to(BF16)


def coefficients(device: torch.device, streams: Tensor, *parts: Tensor, options: tuple = OPTIONS) -> Mixes:
    with poisoned_outputs():
        found = kernels.coefficients(streams.to(device), *(part.to(device) for part in parts), *options)
    return Mixes(found.pre.cpu(), found.post.cpu(), found.comb.cpu())


def assert_mixes(found: Mixes, expected: Mixes) -> None:
    for part in ("pre", "post", "comb"):
        assert_relative(getattr(found, part), getattr(expected, part), COEFFICIENTS, part)


@pytest.mark.parametrize(("rows", "hidden", "iterations"), [(1, 32, 20), (5, 72, 20), (17, 12, 3), (65, 12, 1)])
def test_coefficients_are_those_of_the_reference(device: torch.device, rows: int, hidden: int, iterations: int) -> None:
    streams, parts, options = streams_of(rows, hidden), weights(N * hidden), (1e-20, 1e-6, iterations, N)
    expected = reference.coefficients(streams, *parts, *options)
    assert_mixes(coefficients(device, streams, *parts, options=options), expected)


@pytest.mark.parametrize("options", [(1e-20, 1e-6, 2, N), (1e-20, 1e-3, 20, N), (1e12, 1e-6, 20, N)])
def test_other_options_and_a_rounded_weight_are_noticed(device: torch.device, options: tuple) -> None:
    streams, (fn, scale, base) = streams_of(1, 32), weights(N * 32)
    expected = reference.coefficients(streams, fn, scale, base, *OPTIONS)
    with pytest.raises(AssertionError, match="relative error"):
        assert_mixes(coefficients(device, streams, fn, scale, base, options=options), expected)
    with pytest.raises(AssertionError, match="relative error"):
        assert_mixes(coefficients(device, streams, fn.to(BF16).float(), scale, base), expected)


def test_equal_copies_need_only_one_of_them(device: torch.device) -> None:
    row, (fn, scale, base) = normal(3, 160, dtype=BF16), weights(N * 160)
    short = fn.unflatten(1, (N, -1)).sum(1)
    expected = reference.coefficients(row, short, scale, base, *OPTIONS)
    assert_mixes(coefficients(device, row, short, scale, base), expected)
    whole = row.unsqueeze(1).expand(-1, N, -1)
    assert_mixes(coefficients(device, whole, fn, scale, base), expected)


@pytest.mark.parametrize("size", [1e-12, 1e15])
def test_tiny_and_huge_streams_give_the_same_coefficients(device: torch.device, size: float) -> None:
    streams, (fn, scale, base) = normal(2, N, 24, dtype=BF16), weights(N * 24)
    scaled = (streams.double() * 2.0 ** round(torch.log2(torch.tensor(size)).item())).to(BF16)
    found = coefficients(device, scaled, fn, 1e3 * scale, base)
    assert found.comb.isfinite().all()
    assert_mixes(found, reference.coefficients(scaled, fn, 1e3 * scale, base, *OPTIONS))


def mixes_of(rows: int) -> Mixes:
    return Mixes(*(normal(rows, *shape, seed=seed).float() for shape, seed in (((N,), 4), ((N,), 5), ((N, N), 6))))


def moved(mixes: Mixes, device: torch.device) -> Mixes:
    return Mixes(mixes.pre.to(device), mixes.post.to(device), mixes.comb.to(device))


@pytest.mark.parametrize(("rows", "hidden"), [(1, 32), (5, 1100), (7, 12)])
def test_spreading_and_collapsing_are_those_of_the_reference(device: torch.device, rows: int, hidden: int) -> None:
    streams, output, mixes = streams_of(rows, hidden), normal(rows, hidden, seed=7, dtype=BF16), mixes_of(rows)
    on = moved(mixes, device)
    with poisoned_outputs():
        spread = kernels.post(streams.to(device), output.to(device), on).cpu()
        collapsed = kernels.collapse(streams.to(device), on.pre).cpu()
        mean = kernels.stream_mean(streams.to(device)).cpu()
    for row in range(rows):  # each by itself: rows differ in size by many powers of ten
        one = slice(row, row + 1)
        part = Mixes(mixes.pre[one], mixes.post[one], mixes.comb[one])
        wide = streams[one].double()
        terms = part.comb.double().abs().transpose(1, 2) @ wide.abs()
        terms += part.post.double().abs().unsqueeze(-1) * output[one].double().abs().unsqueeze(1)
        assert_op(spread[one], reference.post(streams[one], output[one], part), terms=terms)
        terms = part.pre.double().abs().unsqueeze(1) @ wide.abs()
        assert_op(collapsed[one], reference.collapse(streams[one], part.pre), terms=terms.squeeze(1))
        assert_op(mean[one], reference.stream_mean(streams[one]), terms=wide.abs().mean(1))
    turned = Mixes(mixes.pre, mixes.post, mixes.comb.transpose(1, 2))
    with pytest.raises(AssertionError, match="outside"):
        assert_op(spread, reference.post(streams, output, turned))
    with pytest.raises(AssertionError, match="outside"):
        assert_op(collapsed, reference.collapse(streams, mixes.pre.roll(1, -1)))


def test_a_one_hot_collapse_keeps_every_bit_of_its_copy(device: torch.device) -> None:
    x = normal(3, 40, dtype=BF16)
    streams, pre = kernels.first_streams(x.to(device), N)
    assert_bits(kernels.collapse(streams, pre).cpu(), x)
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(kernels.collapse(streams, 2 * pre).cpu(), x)


def test_a_nan_row_stays_in_its_row(device: torch.device) -> None:
    streams, parts, output = normal(4, N, 24, dtype=BF16), weights(N * 24), normal(4, 24, seed=7, dtype=BF16)

    def whole(streams: Tensor) -> Tensor:
        mixes = kernels.coefficients(streams.to(device), *(part.to(device) for part in parts), *OPTIONS)
        spread = kernels.post(streams.to(device), output.to(device), mixes)
        both = torch.cat((spread, kernels.collapse(streams.to(device), mixes.pre).unsqueeze(1)), 1)
        return torch.cat((both.float().flatten(1), mixes.comb.flatten(1)), 1).cpu()

    assert_nan_stays(whole, streams, 2)


def _wrong_streams() -> object:
    return kernels.coefficients(normal(1, N, 8), *weights(N * 8), *OPTIONS)


def _wrong_weight() -> object:
    fn, scale, base = weights(N * 8)
    return kernels.coefficients(normal(1, N, 8, dtype=BF16), fn.to(BF16), scale, base, *OPTIONS)


def _wrong_output() -> object:
    return kernels.post(normal(1, N, 8, dtype=BF16), normal(1, 8), mixes_of(1))


@pytest.mark.parametrize(
    ("call", "name"), [(_wrong_streams, "streams"), (_wrong_weight, "fn"), (_wrong_output, "output")]
)
def test_another_dtype_is_named(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has dtype"):
        call()


@pytest.mark.parametrize("name", ["fn", "scale", "base"])
def test_a_weight_that_would_be_copied_is_refused(name: str, device: torch.device) -> None:
    parts = {part: x.to(device) for part, x in zip(("fn", "scale", "base"), weights(N * 8), strict=True)}
    streams = normal(1, N, 8, dtype=BF16).to(device)
    kernels.coefficients(streams, *parts.values(), *OPTIONS)
    parts[name] = torch.stack((parts[name], parts[name]), -1)[..., 0]
    with pytest.raises(ValueError, match=f"{name} has strides"):
        kernels.coefficients(streams, *parts.values(), *OPTIONS)


def test_an_epsilon_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="expected more than 0"):
        kernels.coefficients(normal(1, N, 8, dtype=BF16), *weights(N * 8), OPTIONS[0], 0.0, *OPTIONS[2:])


def test_another_number_of_copies_is_refused() -> None:
    fn, scale, base = torch.zeros(8, 2 * 8), torch.zeros(3), torch.zeros(8)
    with pytest.raises(NotImplementedError, match="mHC coefficients of 2 copies"):
        kernels.coefficients(torch.zeros(1, 2, 8, dtype=BF16), fn, scale, base, 1e-20, 1e-6, 20, 2)

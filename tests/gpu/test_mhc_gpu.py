"""mHC on a GPU in released shapes: against the reference, in a graph, and bit for bit across batches."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op, assert_relative
from op_cases import poisoned_outputs
from quickseek.ops import mhc
from quickseek.ops.mhc import Mixes, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

N, HIDDEN = 4, 5120
ROWS = (1, 6, 8, 48, 64, 65, 2048)
OPTIONS = {"norm_eps": 1e-20, "hc_eps": 1e-6, "iterations": 20, "hc_mult": N}
CUDA = torch.device("cuda")


def number(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(dtype)


def weights(copies: int = N) -> tuple[Tensor, Tensor, Tensor]:
    fn = number(24, copies * HIDDEN, seed=1) * (4 / (copies * HIDDEN)) ** 0.5
    return fn, number(3, seed=2), number(24, seed=3)


def streams_of(rows: int) -> Tensor:
    return number(rows, N, HIDDEN, seed=rows, dtype=torch.bfloat16)


def assert_mixes(found: Mixes, expected: Mixes, tolerance: float = 2e-5) -> None:
    for part in ("pre", "post", "comb"):
        assert_relative(getattr(found, part), getattr(expected, part).to(torch.float32), tolerance, part)


def wide(streams: Tensor, *parts: Tensor) -> Mixes:
    """The reference in float64."""
    return reference.coefficients(streams.double(), *(part.double() for part in parts), *OPTIONS.values())


def in_a_graph(call: Callable[[], Tensor]) -> Tensor:
    """The output of the second replay of a graph that holds the call; what it writes is spoilt before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    out.fill_(torch.nan)
    graph.replay()
    return out


@pytest.mark.parametrize("rows", ROWS)
def test_released_shapes_agree_with_the_reference(rows: int) -> None:
    streams, parts, output = streams_of(rows), weights(), number(rows, HIDDEN, seed=9, dtype=torch.bfloat16)
    with poisoned_outputs():
        mixes = mhc.coefficients(streams, *parts, **OPTIONS)
        spread, collapsed = mhc.post(streams, output, mixes), mhc.collapse(streams, mixes.pre)
        mean = mhc.stream_mean(streams)
    assert_mixes(mixes, wide(streams, *parts))
    with pytest.raises(AssertionError):
        assert_mixes(mixes, wide(streams, parts[0].to(torch.bfloat16), *parts[1:]))
    assert_op(spread, reference.post(streams, output, mixes))
    assert_op(collapsed, reference.collapse(streams, mixes.pre))
    assert_op(mean, reference.stream_mean(streams))
    with pytest.raises(AssertionError):
        assert_op(mean, reference.collapse(streams, mixes.pre))


def test_equal_copies_need_only_one_of_them() -> None:
    row, parts = number(8, HIDDEN, seed=4, dtype=torch.bfloat16), weights(copies=1)
    assert_mixes(mhc.coefficients(row, *parts, **OPTIONS), wide(row, *parts))
    with pytest.raises(AssertionError):
        assert_mixes(mhc.coefficients(row.roll(1, 0), *parts, **OPTIONS), wide(row, *parts))


@pytest.mark.parametrize("rows", [64, 384])
def test_a_row_depends_on_neither_the_others_nor_their_number(rows: int) -> None:
    streams, parts = streams_of(rows), weights()
    whole = mhc.coefficients(streams, *parts, **OPTIONS)
    for first, last in ((0, 1), (3, 9), (rows - 48, rows)) if rows == 64 else ((1, 130), (300, 384)):
        some = mhc.coefficients(streams[first:last], *parts, **OPTIONS)
        assert_bits(some.comb, whole.comb[first:last])
        assert_bits(some.pre, whole.pre[first:last])
        with pytest.raises(AssertionError):
            assert_bits(some.comb, whole.comb[first + 1 : last + 1] if last < rows else whole.comb[: last - first])


@pytest.mark.parametrize("rows", [1, 6, 384])
def test_a_replayed_graph_gives_the_same_bits(rows: int) -> None:
    streams, parts = streams_of(rows), weights()
    eager = mhc.coefficients(streams, *parts, **OPTIONS)
    assert_bits(mhc.coefficients(streams, *parts, **OPTIONS).comb, eager.comb, "a second run")
    assert_bits(in_a_graph(lambda: mhc.coefficients(streams, *parts, **OPTIONS).comb), eager.comb)
    assert_bits(in_a_graph(lambda: mhc.post(streams, streams[:, 0], eager)), mhc.post(streams, streams[:, 0], eager))
    pre = eager.pre
    assert_bits(in_a_graph(lambda: mhc.collapse(streams, pre)), mhc.collapse(streams, pre))
    with pytest.raises(AssertionError):
        assert_bits(in_a_graph(lambda: mhc.collapse(streams, pre)), mhc.collapse(streams, eager.post))


def test_a_nan_row_stays_in_its_row() -> None:
    for rows in (8, 70):
        streams, parts = streams_of(rows), weights()
        clean = mhc.coefficients(streams, *parts, **OPTIONS)
        streams[5, 1, 7] = torch.nan
        spoilt = mhc.coefficients(streams, *parts, **OPTIONS)
        others = torch.arange(rows) != 5
        assert_bits(spoilt.comb.cpu()[others], clean.comb.cpu()[others])
        assert spoilt.comb[5].isnan().all()

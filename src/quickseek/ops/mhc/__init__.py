"""Single-pass mHC: coefficients, spreading a sublayer's output over the streams, collapsing them (spec/model.md 5)."""

from torch import Tensor

from quickseek.ops.checks import expect_dtype, expect_shape
from quickseek.ops.forms import form
from quickseek.ops.mhc.reference import Mixes as Mixes


def coefficients(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    hc_mult: int,
) -> Mixes:
    """pre [T, n], post [T, n] and comb [T, n, n] (source, target) of streams, in the wide dtype (spec 5.2).

    ``streams``: [T, n, H], or [T, H] when all copies are equal and ``fn`` is summed over them (spec 5.4). ``fn``:
    [n(n+2), channels of a token], ``scale`` [3], ``base`` [n(n+2)].
    """
    width = hc_mult * (hc_mult + 2)
    expect_shape("fn", fn, [width, streams.shape[1:].numel()])
    expect_shape("base", base, [width])
    expect_shape("scale", scale, [3])
    return form(__name__, streams).coefficients(streams, fn, scale, base, norm_eps, hc_eps, iterations, hc_mult)


def first_streams(x: Tensor, hc_mult: int) -> tuple[Tensor, Tensor]:
    """Streams [T, n, H], a view of n copies of x [T, H], and the pre-mix [T, n] that picks the first (spec 5.1)."""
    expect_shape("x", x, [None, None])
    return form(__name__, x).first_streams(x, hc_mult)


def post(streams: Tensor, output: Tensor, mixes: Mixes) -> Tensor:
    """New streams [T, n, H]: ``post[j] * output + sum_i comb[i, j] * streams[i]``, rounded once (spec 5.3)."""
    rows, n, hidden = streams.shape
    expect_shape("output", output, [rows, hidden])
    expect_shape("mixes.post", mixes.post, [rows, n])
    expect_shape("mixes.comb", mixes.comb, [rows, n, n])
    expect_dtype("mixes.post", mixes.post, mixes.comb.dtype)
    return form(__name__, streams).post(streams, output, mixes)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """``sum_i pre[i] * streams[i]``: [T, H] in the streams' dtype (spec 5.3)."""
    expect_shape("pre", pre, streams.shape[:2])
    return form(__name__, streams).collapse(streams, pre)


def stream_mean(streams: Tensor) -> Tensor:
    """The plain mean over the copies [T, H]: what the draft head reads (spec 10.2)."""
    return form(__name__, streams).stream_mean(streams)

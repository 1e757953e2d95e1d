"""Linear and head kernels in released shapes on a GPU: values, graphs, repeated runs, weights beyond 2^31 bytes."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op
from linear_cases import quantized, terms, weight_of
from op_cases import poisoned_outputs
from quickseek import formats
from quickseek.ops import head, linear
from quickseek.ops.linear import Fp8Weight, Weight, dequantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ROWS = (1, 2, 3, 6, 8, 12, 48, 384)
SHAPES = {
    "latents": ("fp8", 1792, 5120),
    "queries": ("fp8", 8192, 1280),
    "output": ("fp8", 5120, 2048),
    "shared down": ("fp8", 5120, 576),
    "index weights": ("bf16", 32, 5120),
    "index keys": ("bf16", 128, 512),
    "FP4": ("fp4", 1152, 5120),
}


@cache
def weight_on_gpu(kind: str, outputs: int, inner: int) -> Weight:
    return weight_of(kind, outputs, inner, device="cuda")


def rows_of(count: int, inner: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, inner, generator=generator, device="cuda").to(torch.bfloat16)


def replayed(run: Callable[[], Tensor]) -> Tensor:
    """What a CUDA graph of ``run`` leaves in its output."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.fill_(torch.nan)
    graph.replay()
    return out


def exact(x: Tensor, weight: Weight, quantize_input: bool = True) -> Tensor:
    """The product in float64, unrounded: two roundings of it to BF16 may differ by more than a right one does."""
    if quantize_input and not isinstance(weight, Tensor):
        x = formats.fake_quantize_a8(x)
    return x.double() @ dequantize(weight, torch.float64).T


def check(run: Callable[[], Tensor], expected: Tensor, bound: Tensor | None = None) -> None:
    """``run`` rounds ``expected``, the same bits twice and from a graph; a column off by one is noticed."""
    with poisoned_outputs():
        out = run()
    assert_op(out, expected, terms=bound)
    assert_bits(run(), out, "a second run")
    assert_bits(replayed(run), out, "a replay")
    with pytest.raises(AssertionError, match="outside"):
        assert_op(out.roll(1, 1), expected, terms=bound)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SHAPES)
def test_released_shapes(name: str, rows: int) -> None:
    kind, outputs, inner = SHAPES[name]
    weight, x = weight_on_gpu(kind, outputs, inner), rows_of(rows, inner)
    bound = terms(x, weight, True)
    check(lambda: linear.linear(x, weight), exact(x, weight), bound)
    if kind == "fp8" and name != "output":
        plain = exact(x, weight, False)
        check(lambda: linear.linear(x, weight, quantize_input=False), plain, terms(x, weight, False))
        codes = quantized(x)
        check(lambda: linear.linear(codes, weight), exact(x, weight), bound)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("outputs", [384, 32320])
def test_wide_products(outputs: int, rows: int) -> None:
    x, weight = rows_of(rows, 5120), rows_of(outputs, 5120, seed=1)
    expected = x.double() @ weight.double().T
    out = head.logits(x, weight)
    # Tensor cores cut each of up to 320 partial sums instead of rounding it.
    bound = 2.0**-18 * (x.double().abs() @ weight.double().abs().T)
    assert out.dtype == torch.float32 and bool(((out.double() - expected).abs() <= bound).all())
    assert bool(((out.to(torch.bfloat16).double() - expected).abs() > bound).any())
    assert_bits(replayed(lambda: head.logits(x, weight)), out, "a replay")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_products(groups: int, rows: int) -> None:
    weight, x = weight_on_gpu("fp8", groups * 1024, 4096), rows_of(rows, groups * 4096)
    grouped = x.unflatten(1, (groups, 4096))
    blocks = dequantize(weight, torch.float64).unflatten(0, (groups, 1024))
    expected = torch.einsum("tgi,gri->tgr", grouped.double(), blocks).flatten(1)
    bound = torch.einsum("tgi,gri->tgr", grouped.double().abs(), blocks.abs()).flatten(1)
    check(lambda: linear.grouped_linear(grouped, weight), expected, bound)


@pytest.mark.parametrize("rows", [3, 17])
def test_weights_beyond_2_31_bytes_are_reached(rows: int) -> None:
    inner, outputs = 5120, 2**31 // 5120 // 32 * 32 + 128
    codes = torch.zeros(outputs, inner, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    scales = torch.full((outputs // 32, inner // 32), 127, dtype=torch.uint8, device="cuda")
    last = weight_of("fp8", 64, inner, device="cuda")
    assert isinstance(last, Fp8Weight)
    codes[-64:], scales[-2:] = last.codes, last.scales
    whole: Weight = Fp8Weight(codes, scales)
    assert codes.numel() > 2**31
    x = rows_of(rows, inner)
    out = linear.linear(x, whole)
    assert_op(out[:, -64:], exact(x, last), terms=terms(x, last, True))
    assert not out[:, :-64].any() and out[:, -64:].any()


@pytest.mark.parametrize("rows", [1, 8])
def test_confidences(rows: int) -> None:
    states, markov, weight = rows_of(rows * 5, 5120).view(rows, 5, 5120), rows_of(rows, 256), rows_of(1, 5376) * 0.02
    expected = head.confidence(states[:, 2].double().cpu(), markov.double().cpu(), weight.double().cpu())
    out = head.confidence(states[:, 2], markov, weight)
    assert (out.double().cpu() - expected).abs().max() < 1e-5
    assert (head.confidence(states[:, 1], markov, weight).double().cpu() - expected).abs().max() > 1e-4
    assert_bits(replayed(lambda: head.confidence(states[:, 2], markov, weight)), out, "a replay")

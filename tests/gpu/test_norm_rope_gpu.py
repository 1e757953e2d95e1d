"""Norms and rotation on a GPU in released shapes: against the reference, in a graph, bit for bit across batches."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op
from op_cases import poisoned_outputs
from quickseek.ops import norm_rope
from quickseek.ops.norm_rope import Rotation, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CUDA, BF16, EPS = torch.device("cuda"), torch.bfloat16, 1e-20
Q_RANK, HEAD, ROPE = 1280, 512, 64
ROWS = (1, 6, 8, 48, 2048)


def number(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(dtype)


def frequencies() -> Tensor:
    return norm_rope.rotary_frequencies(ROPE, 160000.0, factor=16.0, original_length=65536).to(CUDA)


def positions(rows: int) -> Tensor:
    return (torch.arange(rows, device=CUDA) * 524287 + 11) % (1 << 20)


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


@pytest.mark.parametrize("width", [5120, Q_RANK, HEAD, 128])
def test_rms_norm_is_the_references(width: int) -> None:
    weight = number(width, seed=1)
    for rows in ROWS:
        x = number(rows, width + 32, seed=rows)[:, :width]
        with poisoned_outputs():
            out = norm_rope.rms_norm(x, weight, EPS)
        expected = reference.rms_norm(x, weight, EPS)
        assert_op(out, expected)
        with pytest.raises(AssertionError, match="outside the bound"):
            assert_op(out * 1.03, expected)


@pytest.mark.parametrize("rows", ROWS)
def test_cos_and_sin_are_right_to_the_last_place_at_any_position(rows: int) -> None:
    turn = norm_rope.rotation(positions(rows), frequencies())
    angles = (positions(rows).float().unsqueeze(1) * frequencies()).double().cpu()

    def assert_rounded(found: Tensor, exact: Tensor) -> None:
        """Half a unit in the last place off, and hardly more where a number lies between two."""
        unit = torch.ldexp(torch.ones(()), torch.frexp(exact.float()).exponent - 24).double()
        error = (found.cpu().double() - exact).abs() / unit
        assert error.max() <= 0.501, f"{float(error.max())} units in the last place"

    assert_rounded(turn.cos, angles.cos())
    assert_rounded(turn.sin, angles.sin())
    with pytest.raises(AssertionError, match="units in the last place"):
        assert_rounded(turn.cos, (angles + 1e-6).cos())


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_rotation_is_the_references_in_new_memory_and_in_place(heads: int) -> None:
    for rows in ROWS[: 5 if heads == 16 else 3]:
        x, turn = number(rows, heads, HEAD, seed=rows), reference.rotation(positions(rows), frequencies())
        for inverse in (False, True):
            expected = reference.apply_rope(x, turn, inverse)
            with poisoned_outputs():
                out = norm_rope.apply_rope(x, turn, inverse=inverse)
            assert_op(out, expected)
            assert_bits(out[..., :-ROPE], x[..., :-ROPE])
            assert_bits(norm_rope.apply_rope(x.clone(), turn, inverse=inverse, overwrite=True), out)
            with pytest.raises(AssertionError, match="outside the bound"):
                assert_op(norm_rope.apply_rope(x, turn, inverse=not inverse), expected)


@pytest.mark.parametrize("rows", ROWS)
def test_latents_are_the_references(rows: int) -> None:
    x, weights = number(rows, Q_RANK + HEAD, seed=rows), (number(Q_RANK, seed=3), number(HEAD, seed=4))
    turn = reference.rotation(positions(rows), frequencies())
    with poisoned_outputs():
        latent, kv = norm_rope.normalised_latents(x, *weights, EPS, turn, quantise=True)
        _, plain = norm_rope.normalised_latents(x, *weights, EPS, turn, quantise=False)
    expected, expected_kv = reference.normalised_latents(x, *weights, EPS, turn, True)
    assert_op(latent, expected)
    assert_op(plain, reference.normalised_kv(x[:, Q_RANK:], weights[1], EPS, turn, False))
    # A last place of the norm or of the rotation may put a value on the other side of a rounding.
    different = kv != expected_kv
    assert different.float().mean() <= 0.002
    assert ((kv - expected_kv).abs().float() <= torch.maximum(kv.abs(), expected_kv.abs()).float() / 8).all()
    assert (plain != expected_kv).float().mean() > 0.5
    assert_bits(norm_rope.normalised_kv(x[:, Q_RANK:], weights[1], EPS, turn, quantise=True), kv)


def test_a_row_does_not_depend_on_the_others_and_a_nan_stays_in_its_own() -> None:
    x, weights = number(48, Q_RANK + HEAD), (number(Q_RANK, seed=3), number(HEAD, seed=4))
    turn = reference.rotation(positions(48), frequencies())

    def latents(x: Tensor, turn: Rotation) -> Tensor:
        return torch.cat(norm_rope.normalised_latents(x, *weights, EPS, turn, quantise=True), 1)

    whole = latents(x, turn)
    assert_bits(latents(x[7:8], turn[7:8]), whole[7:8])
    x[7, 3] = torch.nan
    spoilt = latents(x, turn)
    assert spoilt[7].isnan().any()
    others = [row for row in range(48) if row != 7]
    assert_bits(spoilt[others], whole[others])
    with pytest.raises(AssertionError):
        assert_bits(spoilt, whole)


@pytest.mark.parametrize("rows", [1, 48])
def test_a_replayed_graph_gives_the_same_bits(rows: int) -> None:
    x, weights = number(rows, Q_RANK + HEAD), (number(Q_RANK, seed=3), number(HEAD, seed=4))
    queries, where = number(rows, 16, HEAD), positions(rows)
    rates = frequencies()

    def call() -> Tensor:
        turn = norm_rope.rotation(where, rates)
        latent, kv = norm_rope.normalised_latents(x, *weights, EPS, turn, quantise=True)
        turned = norm_rope.apply_rope(queries, turn)
        return torch.cat((norm_rope.rms_norm(x, x[0], EPS), latent, kv, turned.flatten(1)), 1)

    eager = call()
    assert_bits(call(), eager, "a second run")
    assert_bits(in_a_graph(call), eager, "a replay")
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(in_a_graph(call).neg(), eager)

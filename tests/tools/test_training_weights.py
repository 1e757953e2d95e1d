"""Fake quantisation of training gives the released formats' values, so the packed checkpoint is what was trained."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compare import assert_bits
from miniature import rounding
from miniature.rounding import Rounding
from miniature.weights import checkpoint_tensors, from_stored, initial, kinds, stacked, values
from model_helpers import config_of, logical_weights
from quickseek import formats
from quickseek.checkpoint.reader import Checkpoint
from quickseek.checkpoint.writer import write_checkpoint
from quickseek.model.loader import TensorSource
from quickseek.ops import linear as linear_op
from quickseek.ops.linear import Fp4Weight, Fp8Weight

ON = Rounding(on=True)
PAIRS: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (rounding.a8_values, formats.fake_quantize_a8),
    (rounding.q4i_values, formats.fake_quantize_q4i),
    (rounding.q4k_values, formats.fake_quantize_q4k),
]


def inputs(dtype: torch.dtype) -> Tensor:
    """Values of many sizes, zeros, ties and the largest of each format."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(400, 64, generator=generator) * torch.logspace(-6, 4, 400).unsqueeze(1)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(8).expand(4, -1)
    return torch.cat((spread, torch.zeros(1, 64), ties, -ties)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
def test_values_are_those_of_the_formats_bit_for_bit(
    pair: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], dtype: torch.dtype
) -> None:
    ours, theirs = pair
    assert_bits(ours(inputs(dtype)), theirs(inputs(dtype)), sign_of_zero=False)
    with pytest.raises(AssertionError):
        assert_bits(ours(inputs(dtype)), theirs(inputs(dtype) * 1.1), sign_of_zero=False)


def test_gradients_pass_straight_through_every_rounding() -> None:
    for rule in (ON.a8, ON.q4i, ON.q4k, lambda x: ON.fp8([x])[0], lambda x: ON.fp4([x])[0]):
        x = torch.randn(32, 64, requires_grad=True)
        slope = torch.randn(32, 64)
        (rule(x) * slope).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, slope)
        assert not torch.equal(rule(x), x)


def test_trained_values_are_what_the_packed_checkpoint_holds() -> None:
    config = config_of()
    weights = initial(config, 5)
    stored = dict(checkpoint_tensors(config, weights))
    found = {part: values(config, weights, torch.bfloat16, ON, draft=part) for part in (False, True)}
    for name, kind in kinds(config).items():
        value = found[name.startswith("mtp.")][name]
        base = name.removesuffix(".weight")
        if kind.stored == "FP4":
            prefix, matrix = base.rsplit(".", 1)
            packed = Fp4Weight(*(stored[f"{prefix}.1.{matrix}.{part}"] for part in ("weight", "scale")))
            assert_bits(value[1], linear_op.dequantize(packed, torch.bfloat16), name, sign_of_zero=False)
        elif kind.stored == "FP8":
            whole = Fp8Weight(stored[name], stored[f"{base}.scale"])
            assert_bits(value, linear_op.dequantize(whole, torch.bfloat16), name, sign_of_zero=False)
        elif kind.stored == "table":
            rows = formats.dequantize_a8(stored[name], stored[f"{base}.scale"], torch.float32)
            assert_bits(ON.a8(value), rows, name, sign_of_zero=False)
        else:
            assert_bits(value, stored[name], name)


def test_the_checkpoint_of_stacked_weights_is_complete_and_reads_back(tmp_path: Path) -> None:
    config = config_of()
    weights = {name: w.to(torch.float32) for name, w in stacked(config, logical_weights(config)).items()}
    write_checkpoint(tmp_path / "model", config, checkpoint_tensors(config, weights))
    checkpoint = Checkpoint.open(tmp_path / "model")
    checkpoint.check(("text", "draft"))
    # Values on the formats' grids come back as they are.
    again = from_stored(config, checkpoint)
    twice = from_stored(config, TensorSource(checkpoint_tensors(config, again)))
    for name, tensor in again.items():
        assert_bits(twice[name], tensor, name, sign_of_zero=False)
    assert float((again["norm.weight"] - weights["norm.weight"]).abs().max()) > 0


def test_starting_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (initial(config_of(), seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])

"""The arithmetic behind the mailboxes agrees with the torch reference and the quantiser, in bits."""

import numpy as np
import pytest
import torch
from mailbox_arithmetic import Bits, boundary, e4m3, finalize, mxfp8, round_bf16, sanitise
from mailbox_cases import HIDDEN, mixes, partials, same, tensor

from quickseek.formats import float32_to_e4m3, quantize_a8
from quickseek.ops.collectives.reference import finalize_routed, mhc_boundary
from quickseek.ops.collectives.spec import Routed
from quickseek.ops.quantize import mxfp8_scale_bytes, swizzle_scales


def routed(rows: int, seed: int, *, absent: bool = False) -> tuple[Bits, np.ndarray, np.ndarray, Bits]:
    chance = np.random.default_rng(seed)
    values = round_bf16(chance.standard_normal((rows * 3, HIDDEN), np.float32))
    index = np.full((rows, 3), -1, np.int32) if absent else chance.integers(0, rows * 3, (rows, 3), np.int32)
    index[::2, 1] = -1
    shared = round_bf16(chance.standard_normal((rows, HIDDEN), np.float32))
    return values, chance.random((rows, 3), np.float32), index, shared


@pytest.mark.parametrize("absent", [False, True])
def test_finalize_agrees_with_the_reference_in_bits(absent):
    values, weights, index, shared = routed(9, 4, absent=absent)
    wanted = finalize_routed(Routed(tensor(values), torch.from_numpy(weights), torch.from_numpy(index), tensor(shared)))
    assert same(sanitise(finalize(values, weights, index, shared)), wanted)
    assert not same(sanitise(finalize(values, weights, index, shared, "index -1 as row -1")), wanted)


def by_torch(total: Bits, parts: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    mixed = [torch.from_numpy(parts[name]) for name in ("post", "comb", "pre")]
    return mhc_boundary(tensor(total), tensor(parts["residual"]), *mixed, tensor(parts["gamma"]), 1e-6)


def test_the_boundary_agrees_with_the_reference_in_bits_of_the_streams():
    parts, total = mixes(6, 1), partials("normal numbers", 1, 6, 1)[0]
    streams, layer_input = boundary(total, **parts, eps=1e-6)
    wanted = by_torch(total, parts)
    assert same(streams, wanted[0])
    # One BF16 step for the norm, whose mean and root are summed and taken in other ways.
    steps = (tensor(layer_input).view(torch.int16).int() - wanted[1].view(torch.int16).int()).abs()
    assert steps.max() <= 1 and steps.float().mean() < 0.02
    turned = boundary(total, **{**parts, "comb": parts["comb"].transpose(0, 2, 1)}, eps=1e-6)
    assert not same(turned[0], wanted[0])


def test_the_mxfp8_copy_agrees_with_the_quantiser_and_zeroes_padding():
    chance = np.random.default_rng(7)
    for rows in (1, 33, 128, 129):
        scaled = chance.standard_normal((rows, 160)) * 10.0 ** chance.integers(-9, 9)
        bits = round_bf16(scaled.astype(np.float32))
        codes, scales = quantize_a8(tensor(bits))
        for fault in ("", "padding not zeroed"):
            found = np.full(mxfp8_scale_bytes(rows, 160), 0xA5, np.uint8)
            assert np.array_equal(mxfp8(bits, found, fault), codes.view(torch.uint8).numpy())
            assert np.array_equal(found, swizzle_scales(scales).numpy()) == (not fault or rows == 128)
    everything = np.concatenate([np.arange(0, 449, 0.03125, np.float32), np.float32(2.0) ** np.arange(-12, 0)])
    assert np.array_equal(e4m3(everything), float32_to_e4m3(torch.from_numpy(everything)).view(torch.uint8).numpy())

"""Deterministic weights against the published check values and a scalar version of the rule."""

import math
from zlib import crc32

import pytest
import torch

from quickseek.checkpoint.miniature import miniature_config
from quickseek.checkpoint.recipe import logical_shapes, logical_weight


def scalar_weight(name: str, shape: tuple[int, ...], index: int) -> float:
    """The rule of spec 15.1 in Python integers."""
    mask = 2**32 - 1
    x = crc32(name.encode()) ^ (index * 0x9E3779B1 & mask)
    x ^= x >> 16
    x = x * 0x85EBCA6B & mask
    x ^= x >> 13
    x = x * 0xC2B2AE35 & mask
    x ^= x >> 16
    z = 2 * x / 2**32 - 1
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return 1 + 0.1 * z
    if name.endswith(("attn_sink", "_base")):
        return z
    if name.endswith("_scale"):
        return 0.75 + 0.25 * z
    if name.endswith("gate.bias"):
        return 0.3 * z
    return math.sqrt(3.0 if name.endswith("embed.weight") else 3.0 / shape[-1]) * z


def test_the_published_check_values_come_out() -> None:
    assert crc32(b"embed.weight") == 0xEEAE0E8C
    embedding = logical_weight("embed.weight", (512, 256))
    assert embedding.dtype == torch.float64
    assert embedding[0, :3].tolist() == [0.9634091699342177, 1.2672732174485988, -1.4820859179080892]
    latent = logical_weight("layers.0.attn.wq_a.weight", (64, 256))
    assert latent[0, :3].tolist() == [0.07995698171636255, 0.08409093827631496, 0.10171796397680899]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.3.attn_norm.weight", (256,)),
        ("layers.1.engram.k_weight", (4, 256)),
        ("layers.0.attn.attn_sink", (8,)),
        ("layers.0.hc_attn_base", (24,)),
        ("layers.0.hc_ffn_scale", (3,)),
        ("layers.0.hc_attn_fn", (24, 1024)),
        ("mtp.1.ffn.gate.bias", (8,)),
        ("mtp.1.ffn.gate.bias_vl", (8,)),
        ("layers.1.engram.embed.weight", (434, 32)),
        ("layers.7.ffn.experts.15.w2.weight", (256, 64)),
    ],
)
def test_each_kind_of_tensor_follows_the_rule_at_every_index(name: str, shape: tuple[int, ...]) -> None:
    weight = logical_weight(name, shape).flatten()
    for index in {*range(min(40, len(weight))), len(weight) - 1, len(weight) // 2}:
        assert weight[index].item() == pytest.approx(scalar_weight(name, shape, index), rel=1e-15)
        assert weight[index].item() != pytest.approx(scalar_weight(name + "x", shape, index), rel=1e-3)


def test_tiny_has_the_published_number_of_parameters() -> None:
    shapes = logical_shapes(miniature_config("tiny"))
    counted = {name: shape for name, shape in shapes.items() if not name.endswith("bias_vl")}
    assert sum(math.prod(shape) for shape in counted.values()) == 10_866_082
    assert len(counted) < len(shapes)

"""Parameters of the training forward: the checkpoint's tensors by name, routed experts stacked, in fp32."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from miniature.rounding import Rounding
from quickseek.checkpoint.inventory import inventory, is_engram_table
from quickseek.checkpoint.recipe import logical_shape
from quickseek.config import ModelConfig
from quickseek.formats import (
    dequantize_a8,
    dequantize_fp4_rows,
    dequantize_fp8_blocks,
    quantize_a8,
    quantize_fp4_rows,
    quantize_fp8_blocks,
)
from quickseek.model.loader import WeightSource

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.weight")

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Kind:
    """How a parameter is stored ("FP8", "FP4", "table", "BF16" or "F32"), and its logical shape."""

    stored: str
    shape: tuple[int, ...]


def kinds(config: ModelConfig) -> dict[str, Kind]:
    """Every parameter; the routed experts of a block are one tensor [E, O, I] named ``...experts.w1.weight``."""
    found: dict[str, Kind] = {}
    for spec in inventory(config).values():
        if spec.dtype == "F8_E8M0":
            continue
        shape = logical_shape(spec)
        match = _EXPERT.fullmatch(spec.name)
        if match:
            count = config.dspark_n_routed_experts if spec.group == "draft" else config.n_routed_experts
            found[f"{match[1]}.{match[3]}.weight"] = Kind("FP4", (count, *shape))
        elif spec.dtype == "F8_E4M3":
            found[spec.name] = Kind("table" if is_engram_table(spec.name) else "FP8", shape)
        else:
            found[spec.name] = Kind(spec.dtype, shape)
    return found


def stacked(config: ModelConfig, logical: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters from logical weights by checkpoint name."""
    found = {}
    for name, kind in kinds(config).items():
        if kind.stored == "FP4":
            prefix, matrix = name.removesuffix(".weight").rsplit(".", 1)
            found[name] = torch.stack([logical[f"{prefix}.{e}.{matrix}.weight"] for e in range(kind.shape[0])])
        else:
            found[name] = logical[name]
    return found


def checkpoint_tensors(config: ModelConfig, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """(name, stored tensor) of the whole inventory: what ``write_checkpoint`` takes."""
    for name, kind in kinds(config).items():
        weight = weights[name].detach().to("cpu", torch.float32)
        base = name.removesuffix(".weight")
        if kind.stored == "FP4":
            prefix, matrix = base.rsplit(".", 1)
            for expert, codes, scales in zip(range(kind.shape[0]), *quantize_fp4_rows(weight), strict=True):
                yield f"{prefix}.{expert}.{matrix}.weight", codes
                yield f"{prefix}.{expert}.{matrix}.scale", scales
        elif kind.stored in ("FP8", "table"):
            codes, scales = (quantize_a8 if kind.stored == "table" else quantize_fp8_blocks)(weight)
            yield name, codes
            yield f"{base}.scale", scales
        else:
            yield name, weight.to(torch.bfloat16 if kind.stored == "BF16" else torch.float32)


def from_stored(config: ModelConfig, checkpoint: WeightSource) -> dict[str, Tensor]:
    """fp32 parameters with the values of stored tensors, such as those of an open checkpoint."""
    found = {}
    for name, kind in kinds(config).items():
        base = name.removesuffix(".weight")
        if kind.stored == "FP4":
            prefix, matrix = base.rsplit(".", 1)
            names = [f"{prefix}.{expert}.{matrix}" for expert in range(kind.shape[0])]
            pairs = [(checkpoint.read(f"{n}.weight"), checkpoint.read(f"{n}.scale")) for n in names]
            found[name] = torch.stack([dequantize_fp4_rows(*pair, dtype=torch.float32) for pair in pairs])
        elif kind.stored in ("FP8", "table"):
            rule = dequantize_a8 if kind.stored == "table" else dequantize_fp8_blocks
            found[name] = rule(checkpoint.read(name), checkpoint.read(f"{base}.scale"), torch.float32)
        else:
            # A copy: what an open checkpoint reads can be memory of its file.
            found[name] = checkpoint.read(name).to(torch.float32, copy=True)
    return found


def values(
    config: ModelConfig, weights: Weights, dtype: torch.dtype, rounding: Rounding, *, draft: bool
) -> dict[str, Tensor]:
    """What a forward multiplies by: quantised weights (differentiable), in ``dtype`` where the model keeps BF16.

    ``draft`` chooses the drafter's tensors or the backbone's. fp32 tensors and tables stay as they are; rows of a
    table are rounded when they are read.
    """
    chosen = {name: kind for name, kind in kinds(config).items() if name.startswith("mtp.") == draft}
    found = {name: weights[name] for name, kind in chosen.items() if kind.stored in ("F32", "table")}
    found |= {name: weights[name].to(dtype) for name, kind in chosen.items() if kind.stored == "BF16"}
    for stored, rule in (("FP8", rounding.fp8), ("FP4", rounding.fp4)):
        names = [name for name, kind in chosen.items() if kind.stored == stored]
        rounded = rule([weights[name] for name in names])
        found |= {name: value.to(dtype) for name, value in zip(names, rounded, strict=True)}
    return found


def initial(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """fp32 starting weights, the same for the same seed.

    The streams start as equal copies; mixing starts near a plain residual connection, with unequal ``post`` so that
    the copies part.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = 2 * (config.num_hidden_layers + config.num_nextn_predict_layers)
    return {name: _initial(config, name, kind, generator, depth) for name, kind in kinds(config).items()}


def _initial(config: ModelConfig, name: str, kind: Kind, generator: torch.Generator, depth: int) -> Tensor:
    noise = torch.randn(kind.shape, generator=generator)
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones(kind.shape)
    if name.endswith(("attn_sink", "gate.bias", "gate.bias_vl", "confidence_head.proj.weight")):
        return torch.zeros(kind.shape)
    if name.endswith("_scale"):
        return torch.full(kind.shape, 0.1)
    if name.endswith("_base"):
        return _mixing_base(config.hc_mult, noise)
    if name.endswith("embed.weight"):
        return noise * 0.5
    spread = 1.0 / sqrt(kind.shape[-1])
    if name.endswith((".wo_b.weight", ".w2.weight")):
        spread /= sqrt(depth)
    return noise * spread


def _mixing_base(n: int, noise: Tensor) -> Tensor:
    pre = torch.full((n,), -1.1)
    post = torch.linspace(-0.75, 0.75, n)
    comb = 4.0 * torch.eye(n)
    return torch.cat((pre, post, comb.flatten())) + 0.1 * noise

"""Deterministic weights that anyone can recompute from a tensor's name and shape (spec/model.md 15.1)."""

import math
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from quickseek.checkpoint.inventory import TensorSpec, inventory
from quickseek.config import ModelConfig


def logical_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """float64 weight of the (unpacked) shape; ``name`` is the checkpoint name. Scales have no logical weight."""
    count = math.prod(shape)
    mean, spread = _distribution(name, shape)
    values = _uniform(name, count) * spread
    if mean:
        values += mean
    return torch.from_numpy(values).reshape(shape)


def logical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to unpacked shape of all tensors that carry weights: the inventory without scales."""
    return {spec.name: logical_shape(spec) for spec in inventory(config).values() if spec.dtype != "F8_E8M0"}


def logical_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape in weights: two of them in each byte of packed FP4."""
    return (*spec.shape[:-1], spec.shape[-1] * 2) if spec.dtype == "I8" else spec.shape


def _uniform(name: str, count: int) -> np.ndarray:
    """float64 values in [-1, 1): a hash of (name, index) in 32-bit arithmetic."""
    x = np.arange(count, dtype=np.uint32)
    x *= np.uint32(0x9E3779B1)
    x ^= np.uint32(crc32(name.encode()))
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x * (2.0 / 2**32) - 1.0


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and half width, chosen by the ending of the name."""
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return 1.0, 0.1
    if name.endswith(("attn_sink", "_base")):
        return 0.0, 1.0
    if name.endswith("_scale"):
        return 0.75, 0.25
    if name.endswith("gate.bias"):
        return 0.0, 0.3
    if name.endswith("embed.weight"):
        return 0.0, math.sqrt(3.0)
    return 0.0, math.sqrt(3.0 / shape[-1])

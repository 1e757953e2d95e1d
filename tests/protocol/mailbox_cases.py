"""Inputs and comparisons of the mailbox tests."""

import numpy as np
import torch
from mailbox_arithmetic import SENTINEL, Bits, round_bf16

HIDDEN, STREAMS = 32, 4
CASES = {
    "normal numbers": lambda chance, shape: round_bf16(chance.standard_normal(shape, np.float32)),
    "all -0": lambda chance, shape: np.full(shape, SENTINEL),
    "round to -0": lambda chance, shape: round_bf16(np.full(shape, chance.choice([-1e-45, -(2.0**-134)]), np.float32)),
    "subnormals": lambda chance, shape: chance.integers(1, 0x80, shape, np.uint16) | chance.choice([0, 0x8000], shape),
    "NaN payloads": lambda chance, shape: chance.integers(0x7F81, 0x8000, shape, np.uint16),
    "infinities": lambda chance, shape: chance.choice(np.array([0x7F80, 0xFF80], np.uint16), shape),
    "-0 in odd halves": lambda chance, shape: np.tile(np.array([0x3F80, 0x8000], np.uint16), shape[0] * shape[1] // 2),
    "-0 in even halves": lambda chance, shape: np.tile(np.array([0x8000, 0x3F80], np.uint16), shape[0] * shape[1] // 2),
    "random bits": lambda chance, shape: chance.integers(0, 0x10000, shape, np.uint16),
    "zeros": lambda chance, shape: np.zeros(shape, np.uint16),
}


def partials(name: str, ranks: int, rows: int, seed: int) -> list[Bits]:
    """Every rank's x [rows, H]."""
    chance = np.random.default_rng([seed, rows])
    return [CASES[name](chance, (rows, HIDDEN)).astype(np.uint16).reshape(rows, HIDDEN) for _ in range(ranks)]


def tensor(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16).copy()).view(torch.bfloat16)


def bits(values: torch.Tensor) -> Bits:
    return values.view(torch.int16).numpy().view(np.uint16)


def same(found: Bits, wanted: torch.Tensor) -> bool:
    """Equal bits; a NaN equals any NaN, for which one of them comes out of a sum is the machine's business."""
    ours = tensor(found)
    equal = ours.view(torch.int16) == wanted.view(torch.int16)
    return bool((equal | (ours.isnan() & wanted.isnan())).all())


def mixes(rows: int, seed: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {
        "residual": round_bf16(chance.standard_normal((rows, STREAMS, HIDDEN), np.float32)),
        "post": chance.random((rows, STREAMS), np.float32),
        "comb": chance.random((rows, STREAMS, STREAMS), np.float32),
        "pre": chance.random((rows, STREAMS), np.float32),
        "gamma": round_bf16(chance.standard_normal(HIDDEN).astype(np.float32)),
    }

"""Philox4x32-10 on int64 tensors: counter-based random numbers that need no state (Salmon et al., 2011)."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32-bit value times a 32-bit constant, without leaving int64."""
    low_product = (a & 0xFFFF) * constant
    high_product = (a >> 16) * constant + (low_product >> 16)
    return high_product >> 16, ((high_product & 0xFFFF) << 16) | (low_product & 0xFFFF)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words (int64 tensors) of a counter and a key of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    counter = (
        positions & _MASK,
        (positions >> 32) & _MASK,
        torch.full_like(positions, purpose),
        torch.zeros_like(positions),
    )
    word0, word1, _, _ = philox(counter, key)
    return ((word0 << 21) | (word1 >> 11)).to(torch.float64) * 2.0**-53

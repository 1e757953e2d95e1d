"""Quantisation in plain PyTorch: the formats themselves, and the swizzled scale layout (spec/decode.md B.6.1)."""

import torch
from torch import Tensor

from quickseek import formats


def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    return formats.quantize_a8(x)


def fake_quantize_a8(x: Tensor) -> Tensor:
    return formats.fake_quantize_a8(x)


def fake_quantize_q4i(x: Tensor) -> Tensor:
    return formats.fake_quantize_q4i(x)


def fake_quantize_q4k(x: Tensor) -> Tensor:
    return formats.fake_quantize_q4k(x)


def swizzle_scales(scales: Tensor) -> Tensor:
    rows, columns = scales.shape
    tiles_down, tiles_across = -(-rows // 128), -(-columns // 4)
    row = torch.arange(rows, device=scales.device)[:, None]
    column = torch.arange(columns, device=scales.device)[None, :]
    tile = (row // 128) * tiles_across + column // 4
    offset = tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4
    out = torch.zeros(tiles_down * tiles_across * 512, dtype=torch.uint8, device=scales.device)
    out[offset.flatten()] = scales.flatten()
    return out

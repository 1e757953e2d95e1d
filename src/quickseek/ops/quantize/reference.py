"""Quantisation in plain PyTorch: the formats themselves, the swizzled scale layout, and records in blocks."""

import torch
from torch import Tensor

from quickseek import formats
from quickseek.ops.cache import SCRATCH, Codec


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


def locate(storage: Tensor, table: Tensor, requests: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Block, and row in it, of ``rows`` of ``requests``."""
    clamped, block_rows = rows.clamp_min(0), storage.shape[1]
    blocks = table[requests, clamped // block_rows]
    return torch.where(rows < 0, SCRATCH, blocks), clamped % block_rows


def write_records(storage: Tensor, table: Tensor, codec: Codec, requests: Tensor, rows: Tensor, values: Tensor) -> None:
    blocks, offsets = locate(storage, table, requests, rows)
    storage[blocks, offsets] = codec.encode(values)


def kept_rows(block_rows: int, requests: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
    """Ring row of each row of a step, int64 [N]; -1 for rows that later rows of the same step replace."""
    return torch.where(positions >= ends[requests] - block_rows, positions % block_rows, -1)


def keep_records(
    storage: Tensor, table: Tensor, codec: Codec, requests: Tensor, positions: Tensor, ends: Tensor, values: Tensor
) -> None:
    rows = kept_rows(storage.shape[1], requests, positions, ends)
    write_records(storage, table, codec, requests, rows, values)


def read_records(
    storage: Tensor, table: Tensor, codec: Codec, requests: Tensor, rows: Tensor, dtype: torch.dtype
) -> Tensor:
    blocks, offsets = locate(storage, table, requests, rows)
    return codec.decode(storage[blocks, offsets], dtype).masked_fill(rows.unsqueeze(-1) < 0, 0.0)

"""The embedding lookup of a decode step in plain PyTorch (spec/decode.md D)."""

import torch
from torch import Tensor


def embed_streams(ids: Tensor, table: Tensor, embedding: Tensor, streams: Tensor) -> None:
    """Write table[ids] into embedding [n, H] and each copy of streams [n, hc, H]; zeros for ids outside the table."""
    known = (ids >= 0) & (ids < table.shape[0])
    rows = table[ids.clamp(0, table.shape[0] - 1).long()]
    embedding.copy_(torch.where(known[:, None], rows, torch.zeros_like(rows)))
    streams.copy_(embedding[:, None].expand_as(streams))

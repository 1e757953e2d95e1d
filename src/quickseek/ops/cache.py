"""Caches as operations see them: records in blocks, addressed through a table (design.md 4.4, spec/model.md 6.10).

A ``CacheView`` serves both kinds of state: rings by request slot (one block a request, row = position modulo the
ring) and paged rows (a block table). Block 0 is scratch: rows that must not be kept are written there.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from quickseek import formats
from quickseek.ops import quantize
from quickseek.ops.checks import expect_dtype, expect_shape

SCRATCH = 0
"""Number of the block, and of the request slot, that absorbs what must not be kept."""
SLACK = 8
"""Positions that a ring holds beyond what is read, so that rejected rows never overwrite live ones."""


class Codec(Protocol):
    """How a row of ``width`` values lies in a record."""

    @property
    def kind(self) -> str:
        """Name of the format: "plain", "a8", "q4k" or "q4i"."""

    @property
    def width(self) -> int:
        """Channels of a row."""

    @property
    def record(self) -> int:
        """Elements of a record."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a record's elements."""

    def encode(self, values: Tensor) -> Tensor:
        """Records [..., record] in ``dtype`` of values [..., width]."""

    def decode(self, records: Tensor, dtype: torch.dtype) -> Tensor:
        """Values [..., width] in ``dtype`` of records [..., record]."""


@dataclass(frozen=True)
class PlainCodec:
    """Values as they are."""

    kind: ClassVar[str] = "plain"
    width: int
    dtype: torch.dtype

    @property
    def record(self) -> int:
        return self.width

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def decode(self, records: Tensor, dtype: torch.dtype) -> Tensor:
        return records.to(dtype)


@dataclass(frozen=True)
class WindowCodec:
    """Window KV: E4M3 bytes, then one E8M0 byte per 32 channels (528 bytes at width 512)."""

    kind: ClassVar[str] = "a8"
    width: int
    dtype: torch.dtype = torch.uint8

    def __post_init__(self) -> None:
        _expect_groups(self.width, formats.BLOCK)

    @property
    def record(self) -> int:
        return self.width + self.width // formats.BLOCK

    def encode(self, values: Tensor) -> Tensor:
        codes, scales = formats.quantize_a8(values)
        return torch.cat((codes.view(torch.uint8), scales), -1)

    def decode(self, records: Tensor, dtype: torch.dtype) -> Tensor:
        return formats.dequantize_a8(records[..., : self.width].contiguous(), records[..., self.width :], dtype)


@dataclass(frozen=True)
class GlobalKvCodec:
    """Global KV: E2M1 pairs, then one E4M3 scale byte per 16 channels (288 bytes at width 512)."""

    kind: ClassVar[str] = "q4k"
    width: int
    dtype: torch.dtype = torch.uint8

    def __post_init__(self) -> None:
        _expect_groups(self.width, formats.GLOBAL_KV_GROUP)

    @property
    def record(self) -> int:
        return self.width // 2 + self.width // formats.GLOBAL_KV_GROUP

    def encode(self, values: Tensor) -> Tensor:
        return torch.cat(formats.quantize_q4k(values), -1)

    def decode(self, records: Tensor, dtype: torch.dtype) -> Tensor:
        half = self.width // 2
        return formats.dequantize_q4k(records[..., :half], records[..., half:].contiguous(), dtype)


@dataclass(frozen=True)
class IndexKeyCodec:
    """Index keys: E2M1 pairs, then one E8M0 byte per 32 channels (68 bytes at width 128)."""

    kind: ClassVar[str] = "q4i"
    width: int
    dtype: torch.dtype = torch.uint8

    def __post_init__(self) -> None:
        _expect_groups(self.width, formats.BLOCK)

    @property
    def record(self) -> int:
        return self.width // 2 + self.width // formats.BLOCK

    def encode(self, values: Tensor) -> Tensor:
        return torch.cat(formats.quantize_q4i(values), -1)

    def decode(self, records: Tensor, dtype: torch.dtype) -> Tensor:
        half = self.width // 2
        return formats.dequantize_q4i(records[..., :half], records[..., half:], dtype)


def _expect_groups(width: int, group: int) -> None:
    if width % group:
        raise ValueError(f"width = {width}: expected a multiple of {group}, as each such group has a scale")


@dataclass(frozen=True)
class CacheView:
    """One cache of the requests of a step.

    ``storage``: [blocks, block_rows, record] in the codec's dtype. ``table``: int64 [B, blocks of a request], the
    block that holds rows ``i * block_rows`` and on of each request of the batch.
    """

    storage: Tensor
    table: Tensor
    codec: Codec

    @property
    def block_rows(self) -> int:
        return self.storage.shape[1]

    def expect_whole(self, name: str, part: Literal["record", "block", "storage"]) -> None:
        """ValueError, naming the cache ``name``, unless kernels can read it: each ``part`` of it without gaps inside.

        Blocks and records may lie apart otherwise, and so may the rows of the table.
        """
        storage, table = self.storage, self.table
        expect_dtype(name, storage, self.codec.dtype)
        expect_shape(name, storage, [None, None, self.codec.record])
        expect_dtype(f"table of {name}", table, torch.int64)
        expect_shape(f"table of {name}", table, [None, None])
        dense = 1
        for dimension in (2, 1, 0)[: ("record", "block", "storage").index(part) + 1]:
            if storage.shape[dimension] > 1 and storage.stride(dimension) != dense:
                raise ValueError(f"{name} has strides {storage.stride()}: expected each {part} without gaps")
            dense *= storage.shape[dimension]
        if table.shape[1] > 1 and table.stride(1) != 1:
            raise ValueError(f"table of {name} has strides {table.stride()}: expected each row without gaps")

    def ring_rows(self, positions: Tensor) -> Tensor:
        """Row of each absolute position when a block is a ring; negative positions stay negative."""
        return torch.where(positions < 0, positions, positions % self.block_rows)

    def write(self, requests: Tensor, rows: Tensor, values: Tensor) -> None:
        """Store values [N, width] at ``rows`` [N] of batch indices ``requests`` [N]; a negative row is not kept."""
        quantize.write_records(self.storage, self.table, self.codec, requests, rows, values)

    def keep(self, requests: Tensor, positions: Tensor, ends: Tensor, values: Tensor) -> None:
        """In a ring, store values [N, width] of a step by absolute ``positions`` [N].

        ``ends`` [B]: one past each request's last position in the step; rows that later ones replace are not stored.
        """
        quantize.keep_records(self.storage, self.table, self.codec, requests, positions, ends, values)

    def gather(self, requests: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Values [*rows.shape, width] at ``rows`` of ``requests`` (broadcastable); zeros where a row is negative."""
        return quantize.read_records(self.storage, self.table, self.codec, requests, rows, dtype)

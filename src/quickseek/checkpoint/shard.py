"""One safetensors file, mapped: the place, dtype and shape of its tensors, and views of them."""

import json
import mmap
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from quickseek.errors import CheckpointError

# The library maps a shard so that it counts as memory that may be written: with the default overcommit rule a shard
# with an n-gram table (98 GB) cannot be opened on a smaller machine. So the library checks the header, and the file
# is mapped here without reserving memory. The constant is missing from `mmap` before Python 3.13.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's payload lies in its file (bytes ``start`` to ``stop``), its safetensors dtype and shape."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Shard:
    """An open shard; nothing but its header is read until a view is touched."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError naming the file if it is truncated, or its header is damaged or lies."""
        self.path = path
        try:
            with safetensors.safe_open(str(path), framework="np"):
                pass
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
                flags = mmap.MAP_PRIVATE | MAP_NORESERVE
                self._mapping = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: truncated or not a safetensors file ({error})") from None
        header.pop("__metadata__", None)
        payload = 8 + length
        self.places: dict[str, Place] = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            self.places[name] = Place(entry["dtype"], tuple(entry["shape"]), payload + start, payload + stop)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def view(self, name: str, dtype: torch.dtype) -> Tensor:
        """The bytes of a tensor as ``dtype`` in the stored shape, without reading them."""
        place = self.places[name]
        payload = self._bytes[place.start : place.stop]
        if place.start % dtype.itemsize:
            payload = payload.clone()  # a header of odd length leaves its tensors unaligned
        return payload.view(dtype).reshape(place.shape)

    def expect_scattered_reads(self, name: str) -> None:
        """Ask the system not to read ahead in a tensor of which single rows will be wanted."""
        place = self.places[name]
        start = place.start // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapping.madvise(mmap.MADV_RANDOM, start, place.stop - start)

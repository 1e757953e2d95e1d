"""Lazy reading of a checkpoint: any slice of any tensor, packed as stored, every name accounted for (spec 3)."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quickseek.checkpoint.inventory import TensorSpec, group_of, inventory, is_engram_table
from quickseek.checkpoint.shard import Shard
from quickseek.checkpoint.shards import open_shards
from quickseek.config import ModelConfig
from quickseek.errors import CheckpointError
from quickseek.formats import E8M0_NAN

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}
"""Stored dtype to the dtype that ``read`` gives: E8M0 scales and packed FP4 codes are raw bytes."""

NAMES_IN_AN_ERROR = 5


class Checkpoint:
    """An open checkpoint directory. Opening it reads headers only; tensors are views of mapped files.

    The views are private to the process and stay valid after the checkpoint is gone. They are meant to be read:
    a page that is written to is copied into anonymous memory, and the file never changes.
    """

    def __init__(self, directory: Path, config: ModelConfig, shards: Mapping[str, Shard]) -> None:
        self.directory, self.config = directory, config
        self.read_names: set[str] = set()
        self._shards = shards
        self._inventory = inventory(config)

    @classmethod
    def open(cls, directory: str | Path, config: ModelConfig | None = None) -> "Checkpoint":
        """Open the checkpoint in ``directory``; ``config`` None reads its config.json.

        Raises ConfigError for the configuration and CheckpointError for missing, damaged or contradicting
        files. Call ``check`` before reading weights.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory")
        config = config or ModelConfig.from_file(directory)
        return cls(directory, config, open_shards(directory))

    @property
    def names(self) -> Collection[str]:
        """Names of all stored tensors, those of optional groups included."""
        return self._shards.keys()

    def file_of(self, name: str) -> Path:
        """The shard that holds a tensor; CheckpointError if none does."""
        return self._shard(name).path

    def _shard(self, name: str) -> Shard:
        if name not in self._shards:
            raise CheckpointError(f"{self.directory}: {name} is missing")
        return self._shards[name]

    def spec(self, name: str) -> TensorSpec:
        """Dtype and (packed) shape of a tensor as stored."""
        place = self._shard(name).places[name]
        return TensorSpec(name, place.dtype, place.shape, group_of(name))

    def check(self, groups: Collection[str] = ("text", "draft")) -> None:
        """Raise CheckpointError unless all tensors of ``groups`` are stored as the configuration calls for.

        Nothing else may be stored, except tensors of the groups "draft" and "vision" that are not asked for.
        """
        wanted = {name: spec for name, spec in self._inventory.items() if spec.group in groups}
        missing = sorted(wanted.keys() - self._shards.keys())
        if missing:
            raise CheckpointError(f"{self.directory}: {_some(missing)} missing")
        extra = sorted(
            name for name in self._shards.keys() - wanted.keys() if group_of(name) in groups or group_of(name) == "text"
        )
        if extra:
            raise CheckpointError(f"{self.file_of(extra[0])}: {_some(extra)} not part of this model")
        wrong = list(self._differences(wanted))
        if wrong:
            more = f"; and {len(wrong) - NAMES_IN_AN_ERROR} more" if len(wrong) > NAMES_IN_AN_ERROR else ""
            raise CheckpointError("; ".join(wrong[:NAMES_IN_AN_ERROR]) + more)

    def _differences(self, wanted: Mapping[str, TensorSpec]) -> Iterator[str]:
        for name, spec in wanted.items():
            stored = self.spec(name)
            if (stored.dtype, stored.shape) != (spec.dtype, spec.shape):
                yield f"{self.file_of(name)}: {name} is {stored}, expected {spec}"

    def read(self, name: str, *slices: slice) -> Tensor:
        """The stored tensor, or the part that ``slices`` (one a dimension, missing ones whole) cut out, as a view.

        Slices count stored elements: bytes of two codes for packed FP4, blocks for scales. Dtypes are those of
        ``TORCH_DTYPES``. Raises ValueError for a slice that leaves the tensor and CheckpointError for a missing
        tensor or a NaN byte in the scales read (those of n-gram tables are not scanned).
        """
        whole = self._whole(name)
        _check_slices(name, slices, whole.shape)
        part = whole[slices] if slices else whole
        if self.spec(name).dtype == "F8_E8M0" and not is_engram_table(name) and bool((part == E8M0_NAN).any()):
            raise CheckpointError(f"{self.file_of(name)}: {name} holds a NaN scale (byte {E8M0_NAN})")
        return part

    def mapped(self, name: str) -> Tensor:
        """The whole tensor as a view for gathering single rows: pages are read when touched, without read-ahead."""
        whole = self._whole(name)
        self._shard(name).expect_scattered_reads(name)
        return whole

    def _whole(self, name: str) -> Tensor:
        stored = self.spec(name)
        if stored.dtype not in TORCH_DTYPES:
            expected = ", ".join(TORCH_DTYPES)
            raise CheckpointError(f"{self.file_of(name)}: {name} has dtype {stored.dtype}: expected {expected}")
        self.read_names.add(name)
        return self._shard(name).view(name, TORCH_DTYPES[stored.dtype])

    def unread(self, groups: Collection[str] = ("text", "draft")) -> list[str]:
        """Tensors of ``groups`` that neither ``read`` nor ``mapped`` has given out yet, sorted."""
        return sorted(
            name for name, spec in self._inventory.items() if spec.group in groups and name not in self.read_names
        )


def _some(names: list[str]) -> str:
    """The first few of many names, as the subject of a sentence."""
    listed = ", ".join(names[:NAMES_IN_AN_ERROR])
    more = len(names) - NAMES_IN_AN_ERROR
    return f"{listed}{f' and {more} more' if more > 0 else ''} {'is' if len(names) == 1 else 'are'}"


def _check_slices(name: str, slices: tuple[slice, ...], shape: torch.Size) -> None:
    # Python clamps slices silently, which would hide a wrong shard size.
    if len(slices) > len(shape):
        raise ValueError(f"{name}: {len(slices)} slices for shape {list(shape)}")
    for dimension, (part, size) in enumerate(zip(slices, shape, strict=False)):
        bounds = [bound for bound in (part.start, part.stop) if bound is not None]
        if any(not 0 <= bound <= size for bound in bounds):
            raise ValueError(f"{name}: {part} leaves dimension {dimension} of {list(shape)}")

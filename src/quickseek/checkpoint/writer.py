"""Writing a checkpoint in the released layout: shards, index, config.json and whatever else belongs to it (spec 3)."""

import json
import os
import secrets
import shutil
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from quickseek.checkpoint.inventory import DTYPE_BYTES, TensorSpec, inventory
from quickseek.checkpoint.reader import TORCH_DTYPES
from quickseek.checkpoint.shards import INDEX_NAME
from quickseek.config import ModelConfig
from quickseek.errors import CheckpointError

DEFAULT_SHARD_BYTES = 4 << 30
WRITTEN_BY = "quickseek"


def write_checkpoint(
    directory: str | Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    files: Mapping[str, str] | None = None,
    sparse: Collection[str] = (),
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write every tensor of the inventory of ``config``, streamed in any order, with the same bytes each time.

    Tensors have the stored shape and the dtype of ``TORCH_DTYPES`` (scales and packed FP4 as uint8); ``sparse``
    names tensors that are all zero bytes and take no room on disk. ``files`` maps further file names to text.

    All is written to a temporary directory beside ``directory`` and renamed at the end; an exception leaves
    neither. Raises CheckpointError if ``directory`` holds anything, unless ``overwrite`` is set and this
    function wrote all of it; and for a tensor that is unknown, given twice, missing or not as the inventory says.
    """
    directory = Path(directory).resolve()
    files = dict(files or {})
    _refuse_to_lose(directory, overwrite)
    specs = inventory(config)
    shards = plan_shards(specs.values(), shard_bytes)
    with _replacing(directory) as target:
        _write_shards(target, shards, specs, tensors, set(sparse))
        files["config.json"] = json.dumps(config.to_dict(), indent=2) + "\n"
        index = {
            "metadata": {
                "total_size": sum(spec.nbytes for spec in specs.values()),
                "written_by": WRITTEN_BY,
                "files": sorted({*files, *shards, INDEX_NAME}),
            },
            "weight_map": {spec.name: shard for shard, members in shards.items() for spec in members},
        }
        files[INDEX_NAME] = json.dumps(index, indent=1) + "\n"
        for name, text in files.items():
            (target / name).write_text(text, encoding="utf-8")


def plan_shards(specs: Iterable[TensorSpec], shard_bytes: int) -> dict[str, list[TensorSpec]]:
    """File name to its tensors in file order: shards of at most ``shard_bytes``, or one larger tensor."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    for group in groups:
        # Wide elements first keeps each tensor aligned to its element size.
        group.sort(key=lambda spec: (-DTYPE_BYTES[spec.dtype], spec.name))
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_shards(
    target: Path,
    shards: Mapping[str, list[TensorSpec]],
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    done: set[str],
) -> None:
    with ExitStack() as stack:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for shard, members in shards.items():
            opened = stack.enter_context((target / shard).open("wb"))
            places |= {key: (opened, offset) for key, offset in _write_header(opened, members).items()}
        for name, tensor in tensors:
            if name not in specs:
                raise CheckpointError(f"{name} is not part of this model")
            if name in done:
                raise CheckpointError(f"{name} was given twice")
            done.add(name)
            spec = specs[name]
            if tensor.dtype != TORCH_DTYPES[spec.dtype] or tuple(tensor.shape) != spec.shape:
                raise CheckpointError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {spec}")
            file, offset = places[name]
            file.seek(offset)
            file.write(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    missing = sorted(specs.keys() - done)
    if missing:
        raise CheckpointError(f"{missing[0]} was not given" + (f", nor {len(missing) - 1} more" if missing[1:] else ""))


def _write_header(file: BinaryIO, members: list[TensorSpec]) -> dict[str, int]:
    """Write the header, size the file, and return where each tensor's payload goes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, offset = {}, 0
    for spec in members:
        starts[spec.name] = offset
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file.write(struct.pack("<Q", len(header)) + header)
    payload = 8 + len(header)
    file.truncate(payload + offset)
    return {name: payload + start for name, start in starts.items()}


@contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """A new directory beside ``directory`` that takes its place at the end, or vanishes with an exception."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        yield partial
        if directory.is_dir() and any(directory.iterdir()):
            _exchange(directory, partial)
        else:
            os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _exchange(directory: Path, replacement: Path) -> None:
    old = replacement.with_suffix(".old")
    directory.rename(old)
    try:
        replacement.rename(directory)
    except BaseException:
        old.rename(directory)
        raise
    shutil.rmtree(old)


def _refuse_to_lose(directory: Path, overwrite: bool) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is a file, expected a new or empty directory")
    present = {path.name for path in directory.iterdir()}
    if not present:
        return
    if not overwrite:
        raise CheckpointError(f"{directory}: is not empty; choose another directory or allow overwriting")
    foreign = sorted(present - _files_written_here(directory))
    if foreign:
        raise CheckpointError(f"{directory}: holds {foreign[0]}, which was not written with it; nothing was changed")


def _files_written_here(directory: Path) -> set[str]:
    try:
        metadata = json.loads((directory / INDEX_NAME).read_text(encoding="utf-8"))["metadata"]
        return set(metadata["files"]) if metadata["written_by"] == WRITTEN_BY else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()

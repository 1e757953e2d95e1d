"""The files of a checkpoint directory: which shard holds which tensor, checked before anything is read.

The `safetensors` library validates headers and maps the files. Its CPU tensors are views of a private mapping
(nothing is read before it is touched, a slice touches only its own pages), so no mapping of our own is needed.
"""

import json
from pathlib import Path
from typing import Any

import safetensors

from quickseek.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def open_shards(directory: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """(tensor name to file name, file name to open handle) of the checkpoint in ``directory``.

    Raises CheckpointError if there is no checkpoint, a shard is absent, damaged or outside the directory, or
    the index and the shards' headers disagree about where a tensor is.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        located = _read_index(index)
        handles = {name: _open(directory / name, listed_in=index) for name in sorted(set(located.values()))}
        _compare(index, located, {name: list(handle.keys()) for name, handle in handles.items()})
        return located, handles
    single = directory / SINGLE_NAME
    if single.is_file():
        handle = _open(single)
        return dict.fromkeys(handle.keys(), SINGLE_NAME), {SINGLE_NAME: handle}
    raise CheckpointError(f"{directory}: {_what_is_there(directory)}")


def _what_is_there(directory: Path) -> str:
    if not directory.is_dir():
        return "no such directory"
    expected = f"expected {INDEX_NAME} or {SINGLE_NAME}"
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".pkl"))
    if pickles:
        return f"holds pickle files ({pickles[0]}), which are never opened; {expected}"
    return f"holds no checkpoint; {expected}"


def _read_index(path: Path) -> dict[str, str]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not a readable JSON file ({error})") from None
    located = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(located, dict):
        raise CheckpointError(f"{path}: expected an object 'weight_map' from tensor names to file names")
    for name, shard in located.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{path}: {name} is in {shard!r}: expected a plain file name in the same directory")
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name} is in {shard!r}: only .safetensors files are opened")
    return located


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise CheckpointError(f"{path}: {key} is listed twice, in {found[key]!r} and {value!r}")
        found[key] = value
    return found


def _open(path: Path, listed_in: Path | None = None) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such shard, but {listed_in} lists it")
    try:
        return safetensors.safe_open(str(path), framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file ({error})") from None


def _compare(index: Path, located: dict[str, str], headers: dict[str, list[str]]) -> None:
    owner: dict[str, str] = {}
    for shard, names in headers.items():
        for name in names:
            if name in owner:
                raise CheckpointError(f"{index.parent}: {name} is in two shards, {owner[name]} and {shard}")
            owner[name] = shard
            if name not in located:
                raise CheckpointError(f"{index.parent / shard}: holds {name}, which {index.name} does not list")
    for name, shard in located.items():
        if owner.get(name) != shard:
            elsewhere = f"; it is in {owner[name]}" if name in owner else ""
            raise CheckpointError(f"{index}: {name} is said to be in {shard}, which does not hold it{elsewhere}")

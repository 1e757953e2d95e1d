"""The files of a checkpoint directory: which shard holds which tensor, checked before anything is read."""

import json
from pathlib import Path
from typing import Any

from quickseek.checkpoint.shard import Shard
from quickseek.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def open_shards(directory: Path) -> dict[str, Shard]:
    """Tensor name to the open shard that holds it, of the checkpoint in ``directory``.

    Raises CheckpointError if there is no checkpoint, a shard is absent, damaged or outside the directory, or
    the index and the shards' headers disagree about where a tensor is.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        located = _read_index(index)
        shards = {name: _open(directory / name, index) for name in sorted(set(located.values()))}
        _compare(index, located, shards)
        return {name: shards[shard] for name, shard in located.items()}
    single = directory / SINGLE_NAME
    if single.is_file():
        shard = Shard(single)
        return dict.fromkeys(shard.places, shard)
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
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, a number too long
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


def _open(path: Path, index: Path) -> Shard:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such shard, but {index} lists it")
    return Shard(path)


def _compare(index: Path, located: dict[str, str], shards: dict[str, Shard]) -> None:
    owner: dict[str, str] = {}
    for shard, opened in shards.items():
        for name in opened.places:
            if name in owner:
                raise CheckpointError(f"{index.parent}: {name} is in two shards, {owner[name]} and {shard}")
            owner[name] = shard
            if name not in located:
                raise CheckpointError(f"{index.parent / shard}: holds {name}, which {index.name} does not list")
    for name, shard in located.items():
        if owner.get(name) != shard:
            elsewhere = f"; it is in {owner[name]}" if name in owner else ""
            raise CheckpointError(f"{index}: {name} is said to be in {shard}, which does not hold it{elsewhere}")

"""Shards written byte by byte, without the code under test, so that they can be wrong on purpose."""

import json
import struct
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden/base/checkpoint"

Raw = dict[str, tuple[str, list[int], bytes]]


def read_raw(path: Path) -> Raw:
    """Name to (dtype, shape, payload) of a shard."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {n: (e["dtype"], e["shape"], body[slice(*e["data_offsets"])]) for n, e in header.items()}


def write_raw(path: Path, tensors: Raw) -> None:
    header, offset = {}, 0
    for name, (dtype, shape, payload) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(payload)]}
        offset += len(payload)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(payload for _, _, payload in tensors.values()))


def write_index(directory: Path, located: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": located}))

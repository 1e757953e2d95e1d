"""Checkpoint directories to damage."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from raw_shards import GOLDEN, Raw, read_raw, write_index, write_raw


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    """A directory with shards a (tensors x, y) and b (tensor z), an index, and the golden config.json."""
    shutil.copy(GOLDEN / "config.json", tmp_path)
    write_raw(tmp_path / "a.safetensors", {"x": ("F32", [2, 3], bytes(24)), "y": ("I8", [4], b"\x80\x01\x02\xff")})
    write_raw(tmp_path / "b.safetensors", {"z": ("BF16", [5], bytes(10))})
    write_index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    return tmp_path


@pytest.fixture
def altered_golden(tmp_path: Path) -> Callable[[Callable[[Raw], None]], Path]:
    """The golden checkpoint in one file, after a change to its tensors."""

    def make(change: Callable[[Raw], None]) -> Path:
        shutil.copy(GOLDEN / "config.json", tmp_path)
        tensors: Raw = {}
        for path in sorted(GOLDEN.glob("*.safetensors")):
            tensors |= read_raw(path)
        change(tensors)
        write_raw(tmp_path / "model.safetensors", tensors)
        return tmp_path

    return make

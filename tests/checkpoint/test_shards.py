"""Damaged, contradicting and hostile checkpoint directories: one error each, naming the file or tensor."""

import json
import struct
from pathlib import Path

import pytest
from raw_shards import write_index, write_raw

from quickseek.checkpoint.reader import Checkpoint
from quickseek.errors import CheckpointError, ConfigError


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    return str(caught.value)


def test_an_intact_directory_opens_with_all_its_names(two_shards: Path) -> None:
    assert set(Checkpoint.open(two_shards).names) == {"x", "y", "z"}


def test_a_single_file_needs_no_index(two_shards: Path) -> None:
    (two_shards / "model.safetensors.index.json").unlink()
    (two_shards / "b.safetensors").rename(two_shards / "model.safetensors")
    assert set(Checkpoint.open(two_shards).names) == {"z"}


def test_a_truncated_shard_is_named(two_shards: Path) -> None:
    path = two_shards / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path}: truncated" in refusal(two_shards)


@pytest.mark.parametrize("size", [0, 3, 8, 20])
def test_a_shard_cut_inside_its_header_is_named(two_shards: Path, size: int) -> None:
    path = two_shards / "b.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert str(path) in refusal(two_shards)


def test_a_shard_of_random_bytes_is_named(two_shards: Path) -> None:
    (two_shards / "a.safetensors").write_bytes(bytes(range(256)))
    assert "a.safetensors: truncated or not a safetensors file" in refusal(two_shards)


@pytest.mark.parametrize("entry", [{"shape": [2, 4]}, {"data_offsets": [0, 20]}, {"data_offsets": [0, 4000]}])
def test_a_header_that_lies_about_a_size_is_refused(two_shards: Path, entry: dict[str, list[int]]) -> None:
    header = {"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | entry}
    text = json.dumps(header).encode()
    (two_shards / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    assert "a.safetensors" in refusal(two_shards)


def test_an_index_that_names_an_absent_shard_is_refused(two_shards: Path) -> None:
    (two_shards / "b.safetensors").unlink()
    message = refusal(two_shards)
    assert "b.safetensors: no such shard" in message and "index.json lists it" in message


def test_a_tensor_in_two_shards_is_refused(two_shards: Path) -> None:
    write_raw(two_shards / "b.safetensors", {"z": ("BF16", [5], bytes(10)), "x": ("F32", [2, 3], bytes(24))})
    assert "x is in two shards, a.safetensors and b.safetensors" in refusal(two_shards)


def test_a_tensor_that_the_index_does_not_list_is_refused(two_shards: Path) -> None:
    write_index(two_shards, {"x": "a.safetensors", "z": "b.safetensors"})
    assert "a.safetensors: holds y, which model.safetensors.index.json does not list" in refusal(two_shards)


def test_a_tensor_that_its_shard_does_not_hold_is_refused(two_shards: Path) -> None:
    write_index(two_shards, dict.fromkeys("xy", "a.safetensors") | dict.fromkeys("zw", "b.safetensors"))
    assert "w is said to be in b.safetensors, which does not hold it" in refusal(two_shards)


def test_a_tensor_listed_with_the_wrong_shard_is_refused_with_the_right_one(two_shards: Path) -> None:
    write_index(two_shards, {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"})
    message = refusal(two_shards)
    assert "y is said to be in b.safetensors, which does not hold it; it is in a.safetensors" in message


def test_an_index_that_lists_a_tensor_twice_is_refused(two_shards: Path) -> None:
    path = two_shards / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}')
    assert "x is listed twice" in refusal(two_shards)


@pytest.mark.parametrize("shard", ["../a.safetensors", "/etc/a.safetensors", "..", "", "sub/a.safetensors", 5, "..\\a"])
def test_a_shard_path_outside_the_directory_is_refused(two_shards: Path, shard: object) -> None:
    text = json.dumps({"weight_map": {"x": shard}})
    (two_shards / "model.safetensors.index.json").write_text(text)
    assert f"x is in {shard!r}: expected a plain file name" in refusal(two_shards)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', "\xff\xfe"])
def test_a_damaged_index_is_named(two_shards: Path, text: str) -> None:
    path = two_shards / "model.safetensors.index.json"
    path.write_bytes(text.encode("latin-1"))
    assert str(path) in refusal(two_shards)


def test_an_index_of_pickle_files_is_refused_unopened(two_shards: Path) -> None:
    write_index(two_shards, {"x": "pytorch_model.bin"})
    (two_shards / "pytorch_model.bin").write_bytes(b"never read")
    assert "'pytorch_model.bin': only .safetensors files are opened" in refusal(two_shards)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt", "model.pth"])
def test_a_directory_with_only_pickle_files_says_that_they_are_never_opened(two_shards: Path, name: str) -> None:
    for path in two_shards.glob("*safetensors*"):
        path.unlink()
    (two_shards / name).write_bytes(b"")
    message = refusal(two_shards)
    assert f"holds pickle files ({name}), which are never opened" in message


def test_an_empty_or_absent_directory_is_named(two_shards: Path) -> None:
    for path in two_shards.glob("*safetensors*"):
        path.unlink()
    assert f"{two_shards}: holds no checkpoint" in refusal(two_shards)
    assert f"{two_shards / 'nowhere'}: no such directory" in refusal(two_shards / "nowhere")


def test_a_checkpoint_without_config_is_refused(two_shards: Path) -> None:
    (two_shards / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        Checkpoint.open(two_shards)


def test_links_to_shards_elsewhere_are_followed(two_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    # The Hugging Face cache keeps its files that way.
    elsewhere = tmp_path_factory.mktemp("blobs") / "blob"
    (two_shards / "a.safetensors").rename(elsewhere)
    (two_shards / "a.safetensors").symlink_to(elsewhere)
    assert Checkpoint.open(two_shards).read("x").shape == (2, 3)


@pytest.fixture(autouse=True)
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was opened")

    for target in ("pickle.load", "pickle.loads", "torch.load"):
        monkeypatch.setattr(target, refuse)

"""Writing checkpoints: streamed, atomic, the same bytes each time, and refusing what would lose or damage data."""

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quickseek.checkpoint.inventory import TensorSpec, inventory, payload_bytes
from quickseek.checkpoint.miniature import miniature_config
from quickseek.checkpoint.reader import TORCH_DTYPES, Checkpoint
from quickseek.checkpoint.writer import plan_shards, write_checkpoint
from quickseek.config import ModelConfig
from quickseek.errors import CheckpointError

SHARD_BYTES = 2 << 20
Named = tuple[str, Tensor]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return miniature_config("tiny")


def tensor_of(spec: TensorSpec, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(spec.name.encode()))
    data = torch.randint(0, 127, (spec.nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


def tensors_of(config: ModelConfig, seed: int = 0) -> Iterator[Named]:
    for spec in inventory(config).values():
        yield spec.name, tensor_of(spec, seed)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_what_is_written_is_read_back_bit_for_bit_from_several_shards(tmp_path: Path, config: ModelConfig) -> None:
    write_checkpoint(
        tmp_path / "out", config, tensors_of(config), files={"tokenizer.json": "{}"}, shard_bytes=SHARD_BYTES
    )
    checkpoint = Checkpoint.open(tmp_path / "out")
    checkpoint.check()
    assert checkpoint.config == config
    for name, tensor in tensors_of(config):
        assert torch.equal(checkpoint.read(name).view(torch.uint8), tensor.view(torch.uint8))
    other = next(tensor for name, tensor in tensors_of(config, seed=1) if name == "embed.weight")
    assert not torch.equal(checkpoint.read("embed.weight").view(torch.uint8), other.view(torch.uint8))
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == payload_bytes(inventory(config).values())


def test_the_order_of_the_stream_does_not_change_a_byte(tmp_path: Path, config: ModelConfig) -> None:
    write_checkpoint(tmp_path / "a", config, tensors_of(config), shard_bytes=SHARD_BYTES)
    write_checkpoint(tmp_path / "b", config, reversed(list(tensors_of(config))), shard_bytes=SHARD_BYTES)
    write_checkpoint(tmp_path / "c", config, tensors_of(config, seed=1), shard_bytes=SHARD_BYTES)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") != contents(tmp_path / "c")


def test_tensors_are_dropped_as_they_are_written(tmp_path: Path, config: ModelConfig) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def stream() -> Iterator[Named]:
        nonlocal most
        for name, tensor in tensors_of(config):
            alive.append(weakref.ref(tensor))
            if len(alive) % 100 == 0:
                gc.collect()
                most = max(most, sum(reference() is not None for reference in alive))
            yield name, tensor

    write_checkpoint(tmp_path / "out", config, stream())
    assert len(alive) > 500 and 1 <= most <= 3


def test_sparse_tensors_read_as_zeros_and_take_no_room(tmp_path: Path, config: ModelConfig) -> None:
    tables = {name for name in inventory(config) if ".ffn.experts." in name}
    kept = ((name, tensor) for name, tensor in tensors_of(config) if name not in tables)
    write_checkpoint(tmp_path / "out", config, kept, sparse=tables)
    checkpoint = Checkpoint.open(tmp_path / "out")
    checkpoint.check()
    assert not checkpoint.read("layers.7.ffn.experts.15.w1.weight").any()
    assert checkpoint.read("layers.7.ffn.shared_experts.w1.weight").view(torch.uint8).any()
    (shard,) = (tmp_path / "out").glob("*.safetensors")
    sparse_bytes = payload_bytes(spec for name, spec in inventory(config).items() if name in tables)
    assert shard.stat().st_blocks * 512 < shard.stat().st_size - sparse_bytes // 2


def test_every_tensor_starts_at_a_multiple_of_its_element_size(config: ModelConfig) -> None:
    for members in plan_shards(inventory(config).values(), SHARD_BYTES).values():
        offset = 0
        for spec in members:
            assert offset % {"F32": 4, "BF16": 2}.get(spec.dtype, 1) == 0
            offset += spec.nbytes


def test_a_shard_is_larger_than_its_limit_only_for_a_single_tensor() -> None:
    specs = [TensorSpec(f"t{i}", "I8", (size,), "text") for i, size in enumerate([3, 5, 20, 4, 4, 2])]
    shards = plan_shards(specs, 10)
    assert [[spec.nbytes for spec in members] for members in shards.values()] == [[3, 5], [20], [4, 4, 2]]


# ------------------------------------------------------------------------------------------ nothing half-written


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("No space left on device"), MemoryError])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interruption_leaves_no_part_and_no_temporary_directory(tmp_path, config, error, existing) -> None:
    def stream() -> Iterator[Named]:
        for count, item in enumerate(tensors_of(config)):
            if count == 200:
                assert len(list(tmp_path.iterdir())) == 1 + existing
                raise error
            yield item

    if existing:
        write_checkpoint(tmp_path / "out", config, tensors_of(config))
    before = contents(tmp_path / "out") if existing else None
    with pytest.raises(error if isinstance(error, type) else type(error)):
        write_checkpoint(tmp_path / "out", config, stream(), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if existing else [])
    assert not existing or contents(tmp_path / "out") == before


def without(config: ModelConfig, name: str) -> list[Named]:
    return [(key, tensor) for key, tensor in tensors_of(config) if key != name]


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (None, r"norm\.weight was not given"),
        (("norm.weight", torch.zeros(255, dtype=torch.bfloat16)), r"norm\.weight is .*\[255\], expected BF16 \[256\]"),
        (("norm.weight", torch.zeros(256)), r"norm\.weight is torch\.float32 .*expected BF16"),
        (("embed.weight", torch.zeros(512, 256, dtype=torch.bfloat16)), r"embed\.weight was given twice"),
        (("layers.0.unknown", torch.zeros(1)), r"layers\.0\.unknown is not part of this model"),
    ],
)
def test_a_stream_that_does_not_match_the_inventory_is_refused(tmp_path, config, last, message) -> None:
    stream = without(config, "norm.weight") + ([last] if last else [])
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "out", config, stream)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ nothing lost


def test_a_directory_that_holds_anything_is_refused_and_left_alone(tmp_path: Path, config: ModelConfig) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            write_checkpoint(tmp_path, config, tensors_of(config), overwrite=overwrite)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_an_empty_directory_is_filled(tmp_path: Path, config: ModelConfig) -> None:
    (tmp_path / "out").mkdir()
    write_checkpoint(tmp_path / "out", config, tensors_of(config))
    Checkpoint.open(tmp_path / "out").check()


def test_an_own_checkpoint_is_replaced_only_when_asked(tmp_path: Path, config: ModelConfig) -> None:
    out = tmp_path / "out"
    write_checkpoint(out, config, tensors_of(config), shard_bytes=SHARD_BYTES)
    with pytest.raises(CheckpointError, match="is not empty"):
        write_checkpoint(out, config, tensors_of(config))
    write_checkpoint(out, config, tensors_of(config, seed=1), overwrite=True)
    assert len(list(out.glob("*.safetensors"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_was_added_to_an_own_checkpoint_protects_it(tmp_path: Path, config: ModelConfig) -> None:
    out = tmp_path / "out"
    write_checkpoint(out, config, tensors_of(config))
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    with pytest.raises(CheckpointError, match=r"holds notes\.txt, which was not written with it"):
        write_checkpoint(out, config, tensors_of(config, seed=1), overwrite=True)
    assert contents(out) == before


def test_a_checkpoint_from_elsewhere_is_never_replaced(two_shards: Path, config: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match="was not written with it"):
        write_checkpoint(two_shards, config, tensors_of(config), overwrite=True)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path, config: ModelConfig) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        write_checkpoint(tmp_path / "out", config, tensors_of(config), overwrite=True)

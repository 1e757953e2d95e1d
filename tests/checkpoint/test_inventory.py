"""The inventory derived from a configuration against the published counts and against a real-format checkpoint."""

import dataclasses
import json
import struct
from pathlib import Path

import pytest

from quickseek.checkpoint.inventory import TensorSpec, count_by_dtype, group_of, inventory, payload_bytes
from quickseek.config import ModelConfig

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return ModelConfig.from_file(GOLDEN / "released_config.json")


@pytest.fixture(scope="module")
def specs(released: ModelConfig) -> dict[str, TensorSpec]:
    """The released inventory."""
    return inventory(released)


def stored_headers(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name to (dtype, shape) of every shard, read without the code under test."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found |= {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    return found


def test_the_released_inventory_has_the_published_names_bytes_and_dtypes(specs: dict[str, TensorSpec]) -> None:
    assert len(specs) == 96_085
    assert payload_bytes(specs.values()) == 510_286_023_000
    assert count_by_dtype(specs.values()) == {
        "BF16": (520, 3_952_883_712),
        "F32": (387, 169_229_128),
        "F8_E4M3": (357, 204_015_223_296),
        "F8_E8M0": (47_589, 23_563_015_184),
        "I8": (47_232, 278_585_671_680),
    }


def test_the_published_counts_notice_one_wrong_number_of_the_configuration(released: ModelConfig) -> None:
    for change in ({"q_lora_rank": 1312}, {"dspark_markov_rank": 128}, {"index_source_layer_ids": (2, 8, 14, 20)}):
        specs = inventory(dataclasses.replace(released, **change))
        assert (len(specs), payload_bytes(specs.values())) != (96_085, 510_286_023_000)


@pytest.mark.parametrize(
    ("part", "size"),
    [
        (lambda n: n.startswith("layers.") and ".ffn.experts." in n, 288_777_830_400),
        (lambda n: ".engram.embed." in n, 202_758_032_400),
        (lambda n: ".engram." in n and ".engram.embed." not in n, 315_043_840),
        (lambda n: ".compressor." in n, 36_704_256),
        (lambda n: ".indexer." in n, 45_130_752),
        (lambda n: n.startswith("layers.") and ".shared_experts." in n, 1_416_960_000),
        (lambda n: n.startswith("layers.") and ".ffn.gate." in n, 157_409_280),
        (lambda n: n.startswith("layers.") and ".hc_" in n, 157_295_040),
        (lambda n: n == "embed.weight", 1_323_827_200),
        (lambda n: group_of(n) == "draft", 7_932_874_632),
        (lambda n: group_of(n) == "vision", 970_536_960),
    ],
)
def test_each_group_of_the_released_checkpoint_has_its_published_size(specs, part, size) -> None:
    assert payload_bytes(spec for name, spec in specs.items() if part(name)) == size


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.attn.wq_b.weight", "F8_E4M3", (32768, 1280)),
        ("layers.39.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.5.ffn.experts.383.w1.weight", "I8", (2304, 2560)),
        ("layers.5.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384_016_682, 8)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.36.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("layers.7.hc_ffn_fn", "F32", (24, 20480)),
    ],
)
def test_a_released_tensor_has_its_published_dtype_and_shape(specs, name, dtype, shape) -> None:
    spec = specs[name]
    assert (spec.dtype, spec.shape) == (dtype, shape)


def test_a_ratio_1_source_has_no_compressor_gate(specs: dict[str, TensorSpec]) -> None:
    assert "layers.14.attn.compressor.wgate.weight" in specs
    assert "layers.20.attn.compressor.wgate.weight" not in specs


def test_the_golden_checkpoint_holds_exactly_its_inventory() -> None:
    config = ModelConfig.from_file(GOLDEN / "base/checkpoint")
    expected = {name: (spec.dtype, spec.shape) for name, spec in inventory(config).items()}
    assert stored_headers(GOLDEN / "base/checkpoint") == expected


def test_without_a_vision_tower_or_draft_stages_their_tensors_are_absent(
    released: ModelConfig, specs: dict[str, TensorSpec]
) -> None:
    text = dataclasses.replace(
        released, vision=None, num_nextn_predict_layers=0, compress_ratios=released.compress_ratios[:40]
    )
    assert {spec.group for spec in specs.values()} == {"text", "draft", "vision"}
    assert {spec.group for spec in inventory(text).values()} == {"text"}

"""Filling models from memory and from disk: equal models, and errors that name the tensor (spec/model.md 3.7)."""

import logging
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compare import assert_bits, assert_float64
from model_helpers import FLOAT64, config_of, differs, forward, logical_weights, prompt, token_map
from quickseek import formats
from quickseek.checkpoint.inventory import inventory, is_engram_table
from quickseek.checkpoint.miniature import miniature_tensors, write_miniature
from quickseek.checkpoint.reader import TORCH_DTYPES, Checkpoint
from quickseek.checkpoint.writer import write_checkpoint
from quickseek.config import ModelConfig, VisionConfig
from quickseek.errors import CheckpointError, ConfigError
from quickseek.model.causal_lm import CausalLM, load_model
from quickseek.model.loader import TensorSource
from quickseek.model.state import ContiguousState
from quickseek.numerics import Numerics
from quickseek.parallel.world import SoloWorld

TRAINED = Numerics.trained()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_miniature(path, "tiny")
    return path


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    return dict(miniature_tensors(config_of()))


def loaded(source: TensorSource | Checkpoint, numerics: Numerics, config: ModelConfig | None = None) -> CausalLM:
    model = CausalLM(config or config_of(), numerics, draft=True)
    model.load(source)
    return model


def logits_of(model: CausalLM, count: int = 30) -> Tensor:
    model.set_token_map(token_map(model.config))
    state = ContiguousState(model.config, model.numerics, max_requests=1, max_length=count, draft=True)
    return model.logits(forward(model, prompt(count), state.context([state.acquire()], [count]))[0])


def assert_same_parameters(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = dict(found.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert_bits(ours[name], parameter, name)


@pytest.mark.parametrize("numerics", [FLOAT64, TRAINED], ids=["exact", "trained"])
def test_a_checkpoint_and_the_same_tensors_in_memory_give_equal_models(
    numerics: Numerics, directory: Path, stored: dict[str, Tensor]
) -> None:
    from_disk, _ = load_model(directory, numerics, draft=True)
    from_memory = loaded(TensorSource(stored), numerics)
    assert_same_parameters(from_disk, from_memory)
    assert_bits(logits_of(from_disk), logits_of(from_memory))


def dequantised(stored: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor as float64 values without scales, by the formulas of the formats alone."""
    values = {}
    for name, spec in inventory(config).items():
        if spec.dtype == "F8_E8M0":
            continue
        tensor, scale = stored[name], stored.get(name.removesuffix("weight") + "scale")
        if spec.dtype == "I8":
            values[name] = formats.dequantize_fp4_rows(tensor, scale, torch.float64)
        elif is_engram_table(name):
            values[name] = formats.dequantize_a8(tensor, scale, torch.float64)
        elif spec.dtype == "F8_E4M3":
            values[name] = formats.dequantize_fp8_blocks(tensor, scale, torch.float64)
        else:
            values[name] = tensor.to(torch.float64)
    return values


def test_exact_mode_equals_the_dequantised_weights(directory: Path, stored: dict[str, Tensor]) -> None:
    packed, _ = load_model(directory, FLOAT64, draft=True)
    plain = loaded(TensorSource(dequantised(stored, config_of())), FLOAT64)
    assert_same_parameters(packed, plain)
    assert_float64(logits_of(packed), logits_of(plain))
    # Negative control: the unquantised weights are other weights.
    assert differs(logits_of(packed), logits_of(loaded(TensorSource(logical_weights(config_of())), FLOAT64)))


@pytest.mark.parametrize("numerics", [Numerics.exact(), FLOAT64, TRAINED], ids=["float32", "float64", "trained"])
@pytest.mark.parametrize("draft", [False, True])
def test_load_model_reads_every_tensor_and_runs(directory: Path, numerics: Numerics, draft: bool) -> None:
    model, checkpoint = load_model(directory, numerics, draft=draft)
    assert not checkpoint.unread(("text", "draft") if draft else ("text",))
    assert bool(checkpoint.unread(("draft",))) != draft
    assert not model.training and not any(parameter.is_meta for parameter in model.parameters())
    logits = logits_of(model)
    assert logits.dtype == numerics.wide and bool(logits.isfinite().all())


def test_load_weights_returns_the_names_that_it_used(stored: dict[str, Tensor]) -> None:
    model = CausalLM(config_of(), TRAINED).backbone
    names = model.load_weights(stored.items())
    assert names == {name for name in stored if not name.startswith("mtp.") and name != "head.weight"}


# ---------------------------------------------------------------------------------------------- damaged


def kind(name: str) -> str:
    return re.sub(r"\d+", "N", name)


KINDS = {kind(spec.name): spec for spec in inventory(config_of()).values()}
"""One tensor of every kind: the last of its name, so that a loader that looks at the first only is caught."""


@pytest.fixture(scope="module")
def packed_model() -> CausalLM:
    return CausalLM(config_of(), TRAINED, draft=True)


def refuse(model: CausalLM, stored: dict[str, Tensor], name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    changed = dict(stored)
    value = change(changed.pop(name))
    if value is not None:
        changed[name] = value
    with pytest.raises(CheckpointError, match=re.escape(name.removesuffix(".weight").removesuffix(".scale"))):
        model.load(TensorSource(changed))


@pytest.mark.parametrize("name", [spec.name for spec in KINDS.values()], ids=list(KINDS))
def test_a_missing_or_misshapen_tensor_in_memory_is_named(
    name: str, stored: dict[str, Tensor], packed_model: CausalLM
) -> None:
    refuse(packed_model, stored, name, lambda _: None)
    if not is_engram_table(name):
        refuse(packed_model, stored, name, lambda tensor: tensor[:-1])
        refuse(packed_model, stored, name, lambda tensor: tensor.unsqueeze(0))


@pytest.mark.parametrize("name", [spec.name for spec in KINDS.values()], ids=list(KINDS))
def test_a_tensor_in_memory_of_another_kind_of_dtype_is_named(
    name: str, stored: dict[str, Tensor], packed_model: CausalLM
) -> None:
    whole_bytes = stored[name].dtype in (torch.uint8, torch.float8_e4m3fn)
    wrong = [torch.int64, torch.bfloat16] if whole_bytes else [torch.int64, torch.uint8, torch.float8_e4m3fn]
    for dtype in wrong:
        refuse(packed_model, stored, name, lambda tensor, dtype=dtype: torch.zeros(tensor.shape, dtype=dtype))


@pytest.mark.parametrize("suffix", [".weight", ".scale"])
def test_damaged_tensors_on_disk_are_named_before_any_weight_is_read(
    suffix: str, tmp_path: Path, stored: dict[str, Tensor]
) -> None:
    name = f"layers.6.attn.indexer.wq_b{suffix}"
    config = config_of()
    write_checkpoint(tmp_path / "good", config, stored.items())
    for damage, message in (("missing", "is missing"), ("shape", "expected F8_"), ("dtype", "expected F8_")):
        path = tmp_path / damage
        rewrite_header(tmp_path / "good", path, name, damage)
        with pytest.raises(CheckpointError, match=f"{re.escape(name)}.*{message}"):
            load_model(path, TRAINED)


def rewrite_header(source: Path, target: Path, name: str, damage: str) -> None:
    """A copy of a checkpoint of one shard in which the header lies about one tensor."""
    import json

    target.mkdir()
    for path in source.iterdir():
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", data[:8])
            header = json.loads(data[8 : 8 + length])
            entry = header[name]
            if damage == "missing":
                header["layers.6.attn.renamed"] = header.pop(name)
            elif damage == "shape":
                entry["shape"] = entry["shape"][::-1]
            else:
                entry["dtype"] = "I8"
            text = json.dumps(header).encode()
            data = struct.pack("<Q", len(text)) + text + data[8 + length :]
        elif damage == "missing" and path.name.endswith("index.json"):
            data = data.replace(f'"{name}"'.encode(), b'"layers.6.attn.renamed"')
        (target / path.name).write_bytes(data)


# ---------------------------------------------------------------------------------------------- vision, ranks, memory


def test_vision_tensors_are_skipped_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vision = VisionConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=32, patch_size=2, downsample_ratio=3)
    config = replace(config_of(), vision=vision, image_token_id=300)
    specs = inventory(config)
    tensors = dict(miniature_tensors(config_of()))
    count = sum(spec.group == "vision" for spec in specs.values())
    for name in specs.keys() - tensors.keys():
        tensors[name] = torch.zeros(specs[name].shape, dtype=TORCH_DTYPES[specs[name].dtype])
    write_checkpoint(tmp_path / "with-vision", config, tensors.items())
    with caplog.at_level(logging.INFO):
        model, checkpoint = load_model(tmp_path / "with-vision", TRAINED, draft=True)
    lines = [record.message for record in caplog.records if "vision" in record.message]
    assert lines == [f"skipping {count} vision tensors: this model reads text only"]
    assert len(checkpoint.unread(("vision",))) == count
    assert_bits(logits_of(model), logits_of(loaded(TensorSource(tensors), TRAINED, config)))


class Pretended(SoloWorld):
    """One of several ranks, for construction only."""

    def __init__(self, size: int, rank: int = 0) -> None:
        super().__init__()
        self.size, self.rank = size, rank


@pytest.mark.parametrize(
    ("size", "name"), [(3, "o_groups"), (4, "o_groups"), (8, "o_groups"), (16, "vocab_size|o_groups")]
)
def test_a_tensor_parallel_degree_that_does_not_divide_is_named(size: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size = {size}: expected a degree that divides") as caught:
        CausalLM(config_of(), TRAINED, world=Pretended(size))
    assert caught.value.key == "tensor_parallel_size"


def test_experts_that_cannot_be_cut_into_scale_blocks_are_named() -> None:
    config = config_of("tiny-tp", moe_intermediate_size=128)
    with pytest.raises(ConfigError, match=r"moe_intermediate_size = 128 into multiples of 32"):
        CausalLM(config, TRAINED, world=Pretended(8))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_ranks_hold_every_byte_of_the_split_weights_exactly_once(size: int) -> None:
    with torch.device("meta"):
        parts = [CausalLM(config_of("tiny-tp"), TRAINED, world=Pretended(size, rank)) for rank in range(size)]
        whole = CausalLM(config_of("tiny-tp"), TRAINED)
    for name, parameter in whole.named_parameters():
        sizes = {dict(part.named_parameters())[name].numel() for part in parts}
        assert len(sizes) == 1
        assert sizes.pop() in (parameter.numel(), parameter.numel() // size), name


def test_packed_parameters_take_the_bytes_of_the_checkpoint_and_tables_stay_mapped(directory: Path) -> None:
    model, checkpoint = load_model(directory, TRAINED, draft=True)
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    stored = sum(spec.nbytes for name, spec in inventory(config_of()).items() if not is_engram_table(name))
    assert kept == stored
    for layer in (1, 3):
        table = model.backbone.layers[layer].engram.table
        assert table.codes.data_ptr() == checkpoint.mapped(f"layers.{layer}.engram.embed.weight").data_ptr()


def test_the_token_map_goes_where_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = CausalLM(config_of(), FLOAT64), []
    monkeypatch.setattr(model.backbone.hashes, "set_token_map", given.append)
    model.set_token_map(token_map(model.config))
    model.head.weight = nn.Parameter(model.head.weight.to("meta"))
    model.set_token_map(token_map(model.config))
    assert [there.device.type for there in given] == ["cpu", "meta"]


LOAD_AND_RUN = """
import sys, torch
from quickseek.model.causal_lm import load_model
from quickseek.model.state import ContiguousState
from quickseek.numerics import Numerics

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

before = anonymous()
model, _ = load_model(sys.argv[1], Numerics.trained())
model.set_token_map(torch.arange(512))
state = ContiguousState(model.config, model.numerics, max_requests=1, max_length=8)
context = state.context([state.acquire()], [8])
assert model.backbone(torch.arange(8, 16), context.rows.positions, context=context).isfinite().all()
print(anonymous() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon, which only Linux has")
def test_tables_larger_than_the_memory_of_the_machine_load_and_run(tmp_path: Path) -> None:
    # Four primes from 800 million on, 3.2 billion rows of 33 bytes: 106 GB, all of it holes.
    config = config_of(
        engram_layer_ids=(1,),
        engram_num_embeddings=(3_200_000_108,),
        engram_vocab_size=800_000_000,
        engram_n_heads=2,
        engram_max_ngram_size=3,
    )
    tables = [f"layers.1.engram.embed.{part}" for part in ("weight", "scale")]
    tensors = dict(miniature_tensors(config_of()))
    specs = inventory(config)
    for name in specs.keys() - set(tables):
        if name not in tensors or tuple(tensors[name].shape) != specs[name].shape:
            tensors[name] = torch.zeros(specs[name].shape, dtype=TORCH_DTYPES[specs[name].dtype])
    given = [(name, tensor) for name, tensor in tensors.items() if name in specs and name not in tables]
    write_checkpoint(tmp_path / "large", config, given, sparse=tables)
    run = [sys.executable, "-c", LOAD_AND_RUN, str(tmp_path / "large")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150 << 20, "the model is 9 MB; the rest is torch's own"

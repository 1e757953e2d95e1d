"""Reading slices as views, with raw dtypes, and accounting for every tensor."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_shards import GOLDEN, Raw, read_raw

from quickseek.checkpoint.inventory import is_engram_table
from quickseek.checkpoint.reader import TORCH_DTYPES, Checkpoint
from quickseek.errors import CheckpointError

Alter = Callable[[Callable[[Raw], None]], Path]


@pytest.fixture(scope="module")
def golden() -> Checkpoint:
    return Checkpoint.open(GOLDEN)


@pytest.fixture(scope="module")
def raw() -> Raw:
    tensors: Raw = {}
    for path in GOLDEN.glob("*.safetensors"):
        tensors |= read_raw(path)
    return tensors


def test_every_tensor_is_read_with_its_stored_bytes_shape_and_raw_dtype(raw: Raw) -> None:
    checkpoint = Checkpoint.open(GOLDEN)
    assert set(checkpoint.names) == set(raw)
    for name, (dtype, shape, payload) in raw.items():
        tensor = checkpoint.read(name)
        assert tensor.dtype == TORCH_DTYPES[dtype]
        assert list(tensor.shape) == shape
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == payload
    assert checkpoint.unread(("text", "draft", "vision")) == []


def test_scales_and_packed_codes_are_bytes_and_not_numbers(golden: Checkpoint, raw: Raw) -> None:
    name = "layers.0.ffn.experts.0.w1.weight"
    numbers = torch.frombuffer(bytearray(raw[name][2]), dtype=torch.int8)
    assert bool((numbers < 0).any())
    assert golden.read(name).flatten().tolist() == [value % 256 for value in numbers.tolist()]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_slice_equals_the_slice_of_the_whole_tensor(golden: Checkpoint, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(golden.names)))
    whole = golden.read(name).view(torch.uint8) if golden.spec(name).dtype == "F8_E4M3" else golden.read(name)
    slices = []
    for size in whole.shape[: data.draw(st.integers(0, whole.ndim))]:
        start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
        shapes = [slice(start, stop), slice(None), slice(start, None), slice(None, stop)]
        slices.append(data.draw(st.sampled_from(shapes)))
    part = golden.read(name, *slices)
    part = part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part
    assert torch.equal(part, whole[tuple(slices)])
    if part.numel():
        shifted = part.clone()
        shifted.view(torch.uint8).flatten()[0] ^= 1
        assert not torch.equal(shifted, whole[tuple(slices)])


@pytest.mark.parametrize(
    ("slices", "what"),
    [
        ((slice(0, 129),), "leaves dimension 0"),
        ((slice(None), slice(-1, None)), "leaves dimension 1"),
        ((slice(None),) * 3, "3 slices for shape"),
    ],
)
def test_a_slice_that_leaves_the_tensor_is_refused_instead_of_clamped(golden, slices, what) -> None:
    with pytest.raises(ValueError, match=rf"layers\.0\.attn\.wo_b\.weight: .*{what}"):
        golden.read("layers.0.attn.wo_b.weight", *slices)


def test_writing_to_a_tensor_does_not_change_the_file(tmp_path: Path, altered_golden: Alter) -> None:
    directory = altered_golden(lambda tensors: None)
    before = (directory / "model.safetensors").read_bytes()
    Checkpoint.open(directory).read("norm.weight").fill_(7.0)
    assert (directory / "model.safetensors").read_bytes() == before


def test_a_tensor_outlives_its_checkpoint(raw: Raw) -> None:
    tensor = Checkpoint.open(GOLDEN).read("norm.weight")
    assert tensor.view(torch.uint8).numpy().tobytes() == raw["norm.weight"][2]


# ------------------------------------------------------------------------------------------ accounting


def test_the_golden_checkpoint_passes_for_every_choice_of_groups(golden: Checkpoint) -> None:
    for groups in (("text",), ("text", "draft"), ("text", "draft", "vision")):
        golden.check(groups)


def test_only_what_was_read_or_mapped_counts_as_read() -> None:
    checkpoint = Checkpoint.open(GOLDEN)
    expected = len(checkpoint.unread())
    assert {name for name in checkpoint.unread() if name.startswith(("vision.", "aligner.", "image_"))} == set()
    assert expected > len(checkpoint.unread(("text",))) > 0
    checkpoint.spec("norm.weight")
    checkpoint.read("embed.weight", slice(0, 1))
    checkpoint.mapped("layers.1.engram.embed.weight")
    assert checkpoint.read_names == {"embed.weight", "layers.1.engram.embed.weight"}
    assert len(checkpoint.unread()) == expected - 2
    assert "norm.weight" in checkpoint.unread()


def test_a_name_that_is_not_stored_is_refused(golden: Checkpoint) -> None:
    for call in (golden.read, golden.mapped, golden.spec):
        with pytest.raises(CheckpointError, match=r"layers\.99\.attn_norm\.weight is missing"):
            call("layers.99.attn_norm.weight")


def refusal(directory: Path, *groups: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory).check(groups or ("text", "draft"))
    return str(caught.value)


def test_a_missing_tensor_is_named(altered_golden: Alter) -> None:
    directory = altered_golden(lambda tensors: tensors.pop("layers.3.attn.wkv.scale") and None)
    assert f"{directory}: layers.3.attn.wkv.scale is missing" in refusal(directory)


def test_many_missing_tensors_are_counted(altered_golden: Alter) -> None:
    def drop(tensors: Raw) -> None:
        for name in [name for name in tensors if name.startswith("layers.8.")]:
            del tensors[name]

    message = refusal(altered_golden(drop))
    assert "more are missing" in message and message.count("layers.8.") == 5


def test_an_extra_tensor_is_named_with_its_file(altered_golden: Alter) -> None:
    directory = altered_golden(lambda tensors: tensors.update({"layers.0.attn.wq_c": ("F32", [1], bytes(4))}))
    assert f"{directory / 'model.safetensors'}: layers.0.attn.wq_c is not part of this model" in refusal(directory)


def test_an_extra_optional_tensor_matters_only_where_its_group_is_asked_for(altered_golden: Alter) -> None:
    extra: Raw = {"mtp.9.norm.weight": ("F32", [1], bytes(4)), "vision.new": ("F32", [1], bytes(4))}
    directory = altered_golden(lambda tensors: tensors.update(extra))
    Checkpoint.open(directory).check(("text",))
    assert "mtp.9.norm.weight is not part" in refusal(directory)
    assert "vision.new is not part" in refusal(directory, "text", "vision")


def test_without_speculation_the_draft_tensors_may_be_absent(altered_golden: Alter) -> None:
    def drop(tensors: Raw) -> None:
        for name in [name for name in tensors if name.startswith(("mtp.", "vision.", "aligner.", "image_"))]:
            del tensors[name]

    directory = altered_golden(drop)
    Checkpoint.open(directory).check(("text",))
    assert "mtp." in refusal(directory)


def reshape(name: str, dtype: str, shape: list[int]) -> Callable[[Raw], None]:
    def change(tensors: Raw) -> None:
        tensors[name] = (dtype, shape, tensors[name][2])

    return change


def test_a_misshapen_tensor_is_named_with_both_shapes(altered_golden: Alter) -> None:
    directory = altered_golden(reshape("layers.2.attn.wq_a.weight", "F8_E4M3", [128, 64]))
    message = refusal(directory)
    assert "model.safetensors: layers.2.attn.wq_a.weight is F8_E4M3 [128, 64], expected F8_E4M3 [64, 128]" in message


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E8M0"])
def test_a_tensor_of_another_dtype_is_named_with_both_dtypes(altered_golden: Alter, dtype: str) -> None:
    directory = altered_golden(reshape("layers.2.attn.wq_a.weight", dtype, [64, 128]))
    assert f"layers.2.attn.wq_a.weight is {dtype} [64, 128], expected F8_E4M3 [64, 128]" in refusal(directory)


def test_a_dtype_that_no_weight_has_cannot_be_read(altered_golden: Alter) -> None:
    directory = altered_golden(lambda tensors: tensors.update({"vision.odd": ("F64", [1], bytes(8))}))
    with pytest.raises(CheckpointError, match=r"vision\.odd has dtype F64: expected BF16"):
        Checkpoint.open(directory).read("vision.odd")


# ------------------------------------------------------------------------------------------ NaN scales


def poison(name: str, byte: int = 255) -> Callable[[Raw], None]:
    def change(tensors: Raw) -> None:
        dtype, shape, payload = tensors[name]
        tensors[name] = (dtype, shape, payload[:-1] + bytes([byte]))

    return change


@pytest.mark.parametrize("name", ["layers.0.attn.wkv.scale", "layers.1.ffn.experts.3.w2.scale"])
def test_a_nan_scale_byte_is_refused_where_it_is_read(altered_golden: Alter, name: str) -> None:
    checkpoint = Checkpoint.open(altered_golden(poison(name)))
    checkpoint.read(name, slice(0, 1), slice(0, 1))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name} holds a NaN scale"):
        checkpoint.read(name)


def test_the_largest_finite_scale_byte_is_read(altered_golden: Alter) -> None:
    name = "layers.0.attn.wkv.scale"
    assert int(Checkpoint.open(altered_golden(poison(name, 254))).read(name).max()) == 254


def test_the_scales_of_an_n_gram_table_are_not_scanned(altered_golden: Alter) -> None:
    name = "layers.1.engram.embed.scale"
    assert is_engram_table(name)
    assert int(Checkpoint.open(altered_golden(poison(name))).mapped(name).max()) == 255


# ------------------------------------------------------------------------------------------ memory

RESIDENT = """
import sys
from pathlib import Path
from quickseek.checkpoint.reader import Checkpoint

def resident():
    status = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(("RssAnon", "RssFile")))

checkpoint = Checkpoint.open(sys.argv[1])
before = resident()
rows = checkpoint.read("table", slice(500_000, 500_512), slice(0, 64)).clone()
table = checkpoint.mapped("table")
part = resident()
if sys.argv[2] == "all":
    table.flatten()[::4096].sum()
print(part - before, resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(("touched", "low", "high"), [("part", 0, 16), ("all", 120, 150)])
def test_reading_a_slice_of_a_large_file_leaves_the_rest_on_disk(tmp_path, touched, low, high) -> None:
    rows, width = 1 << 19, 256
    size = rows * width
    header = {"table": {"dtype": "I8", "shape": [rows, width], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)
    (tmp_path / "config.json").write_text((GOLDEN / "config.json").read_text())
    output = subprocess.check_output([sys.executable, "-c", RESIDENT, str(tmp_path), touched], text=True)
    part, total = (int(value) / 1024 for value in output.split())
    assert part < 16
    assert low <= total <= high


@pytest.mark.skipif(sys.platform != "linux", reason="sparse files of any size and the overcommit rule are Linux's")
def test_a_table_larger_than_the_machine_s_memory_can_be_mapped(tmp_path: Path) -> None:
    pages = sum(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()[:1]) // 4
    rows = 2 * pages * 4096 // 256
    header = {"table": {"dtype": "F8_E4M3", "shape": [rows, 256], "data_offsets": [0, rows * 256]}}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + rows * 256)
        file.seek(-1, 2)
        file.write(b"\x38")
    (tmp_path / "config.json").write_text((GOLDEN / "config.json").read_text())
    table = Checkpoint.open(tmp_path).mapped("table")
    assert table[rows - 1, 255].float().item() == 1.0 and table[rows - 1, 254].float().item() == 0.0

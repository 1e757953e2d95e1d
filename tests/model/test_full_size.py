"""The released sizes: the model's parameters against the published figures, and single layers from disk."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quickseek.config import ModelConfig
from quickseek.model.causal_lm import CausalLM
from quickseek.model.state import cache_specs
from quickseek.numerics import Numerics

ROOT = Path(__file__).parent.parent.parent
RELEASED = ROOT / "tests/golden/released_config.json"

# spec/model.md 2.5, parameters: two for each byte of FP4, scales excluded.
TOTAL, ENGRAM_TABLES, VISION = 763_205_315_794, 196_613_849_600, 485_268_480
GROUPS = {
    r"layers\.\d+\.ffn\.experts\.": 543_581_798_400,
    r"layers\.\d+\.engram\.": 314_654_720,
    r"layers\.\d+\.attn\.compressor\.(wkv|norm)": 18_352_128,
    r"layers\.\d+\.attn\.(indexer\.|compressor\.(wk|k_norm)\.)": 43_516_416,
    r"layers\.\d+\.ffn\.shared_": 1_415_577_600,
    r"layers\.\d+\.ffn\.gate\.": 78_673_920,
    r"layers\.\d+\.hc_": 39_323_760,
    r"layers\.\d+\.(attn|ffn)_norm\.": 409_600,
    r"layers\.\d+\.attn\.(wq|wo_|q_norm|kv_norm|sinks)": 5_064_696_320,
    r"embed\.": 661_913_600,
    r"head\.": 661_913_600,
    r"norm\.": 5_120,
    r"draft\.stages\.\d+\.ffn\.experts\.": 13_589_544_960,
    r"draft\.": 14_225_362_530 - 13_589_544_960,
}


@pytest.fixture(scope="module")
def model() -> CausalLM:
    with torch.device("meta"):
        return CausalLM(ModelConfig.from_file(RELEASED), Numerics.trained(), draft=True)


def weights(model: CausalLM) -> dict[str, int]:
    """Parameter name to its weights; scales hold none, a byte of packed FP4 holds two."""
    counts = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("scale", "_scale")) or re.search(r"hc_\w+\.scale$", name):
            counts[name.removeprefix("backbone.")] = parameter.numel() * (2 if ".experts." in name else 1)
    return counts


def test_the_released_model_has_the_published_number_of_parameters(model: CausalLM) -> None:
    assert sum(weights(model).values()) == TOTAL - ENGRAM_TABLES - VISION


def test_every_group_of_the_released_model_has_its_published_size(model: CausalLM) -> None:
    found = dict.fromkeys(GROUPS, 0)
    for name, count in weights(model).items():
        pattern = next((pattern for pattern in GROUPS if re.match(pattern, name)), None)
        assert pattern is not None, f"{name} belongs to no group"
        found[pattern] += count
    assert found == GROUPS


def test_one_layer_more_or_a_missing_gate_would_be_noticed(model: CausalLM) -> None:
    counts = weights(model)
    assert counts["layers.2.attn.compressor.wkv.weight"] == 2 * 512 * 5120, "values and gate"
    assert counts["layers.20.attn.compressor.wkv.weight"] == 512 * 5120
    assert sum(counts.values()) - 512 * 5120 != TOTAL - ENGRAM_TABLES - VISION


def test_packed_caches_of_the_released_model_take_890_bytes_a_token() -> None:
    config = ModelConfig.from_file(RELEASED)
    specs = cache_specs(config, Numerics.trained(), draft=True)
    paged = [spec for spec in specs.values() if spec.ring == 0]
    assert sum(spec.codec.record / spec.ratio for spec in paged) == 890
    assert {spec.codec.record for name, spec in specs.items() if name.endswith("window")} == {528}
    assert sum(name.endswith("window") for name in specs) == 43


# Bytes of one layer (spec/model.md 2.5): its routed experts, and the rest by kind; the draft's three stages together.
ROUTED_BYTES = 7_219_445_760
UNROUTED_BYTES = {
    "window": 170_055_128,
    "engram": 170_055_128 + 157_521_920,
    "full-2": 170_055_128 + 16_193_792,
    "reuse-2": 170_055_128,
    "full-1": 170_055_128 + 10_950_912,
    "reindex": 170_055_128 + 5_575_680,
    "reuse-1": 170_055_128,
    "draft": 7_932_874_632 - ROUTED_BYTES,
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_full_size_layer_of_each_kind_loads_from_disk_and_runs_one_row(tmp_path: Path) -> None:
    out = tmp_path / "layers.jsonl"
    command = [sys.executable, ROOT / "benchmarks/full_size_layers.py", "--directory", tmp_path, "--out", out]
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in lines] == list(UNROUTED_BYTES)
    for line in lines:
        assert line["finite"] and line["changed"], line
        # The weights, and three FP32 copies of one matrix while it is dequantised: no second copy of the experts,
        # nothing of an n-gram table.
        allowed = line["kept_bytes"] + 12 * line["largest_matrix"] + (512 << 20)
        assert line["peak_rss_anon_bytes"] < allowed, line
    by_kind = {line["kind"]: line["bytes_loaded"] for line in lines}
    assert {kind: size - ROUTED_BYTES for kind, size in by_kind.items()} == UNROUTED_BYTES

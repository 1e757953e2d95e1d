"""Both dialects of config.json, and one clear error for every value that cannot run (spec/model.md 2)."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from golden_data import CHECKPOINT, RELEASED_CONFIG
from quickseek.checkpoint.miniature import miniature_config
from quickseek.config import FLAT_NAMES, DecodeConfig, EngineConfig, ModelConfig
from quickseek.errors import ConfigError

Data = dict[str, Any]


@pytest.fixture
def released() -> Data:
    """The released config.json, to change."""
    data: Data = json.loads(RELEASED_CONFIG.read_text())
    return data


@pytest.fixture
def tiny() -> Data:
    """A miniature's config.json, to change."""
    return copy.deepcopy(miniature_config("tiny").to_dict())


def flattened(nested: Data) -> Data:
    """The flat dialect of a nested configuration."""
    names = {name: key for key, name in FLAT_NAMES.items()}
    text = {k: v for k, v in nested["text_config"].items() if k not in ("model_type", "rope_scaling")}
    scaling = nested["text_config"]["rope_scaling"]
    text |= {"rope_factor": scaling["factor"], "beta_fast": scaling["beta_fast"], "beta_slow": scaling["beta_slow"]}
    text["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    text |= {key: nested[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in nested}
    text |= {"image_token_id": nested["image_token_id"]} if "image_token_id" in nested else {}
    return {names.get(key, key): value for key, value in text.items()}


# ---------------------------------------------------------------------------------------------- reading


def test_the_released_configuration_has_its_published_values() -> None:
    config = ModelConfig.from_file(RELEASED_CONFIG)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (5120, 40, 129280)
    assert config.rms_norm_eps == 1e-20
    assert (config.rope_offset, config.mix_width, config.qkv_latent_width) == (448, 24, 1792)
    assert config.decoder_start == 20
    assert config.vision is not None and config.image_token_id == 129264


def test_the_layer_map_of_the_release_follows_from_its_sources() -> None:
    config = ModelConfig.from_file(RELEASED_CONFIG)
    layers = range(config.num_hidden_layers)
    kv = {layer: config.kv_source(layer) for layer in layers}
    index = {layer: config.index_source(layer) for layer in layers}
    assert kv[0] is kv[1] is index[1] is None
    assert {kv[layer] for layer in range(2, 8)} == {2} and {kv[layer] for layer in range(8, 14)} == {8}
    assert {kv[layer] for layer in range(14, 20)} == {14} and {kv[layer] for layer in range(20, 40)} == {20}
    assert [index[layer] for layer in range(20, 40)] == [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [config.ratio(layer) for layer in (0, 1, 2, 19, 20, 39, 40, 42)] == [0, 0, 2, 2, 1, 1, 0, 0]
    assert config.kv_source(41) is None, "draft stages read no global KV"
    assert [layer for layer in layers if config.reads_candidates(layer)] == list(range(21, 40))


@pytest.mark.parametrize("path", [RELEASED_CONFIG, CHECKPOINT / "config.json"], ids=["released", "golden"])
def test_a_round_trip_through_json_gives_an_equal_configuration(path: Path) -> None:
    config = ModelConfig.from_file(path)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", ["tiny", "tiny-tp", "mid"])
def test_nested_and_flat_dialects_give_equal_configurations(name: str) -> None:
    config = miniature_config(name)
    flat = flattened(config.to_dict())
    assert "hidden_size" not in flat and flat["dim"] == config.hidden_size
    assert ModelConfig.from_dict(flat) == config
    flat["window_size"] += 1
    assert ModelConfig.from_dict(flat) != config


def test_the_flat_dialect_knows_a_divisor_of_the_router_logits(tiny: Data) -> None:
    config = ModelConfig.from_dict(flattened(tiny) | {"gate_temp": 2})
    assert config.gate_temp == 2.0
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_a_directory_stands_for_its_config_json(tmp_path: Path, tiny: Data) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    assert ModelConfig.from_file(tmp_path) == miniature_config("tiny")


def test_integers_stand_for_numbers_and_unknown_keys_are_let_be(tiny: Data) -> None:
    tiny["text_config"] |= {"swiglu_limit": 10, "use_cache": True, "initializer_range": 0.02}
    config = ModelConfig.from_dict(tiny)
    assert config == miniature_config("tiny") and isinstance(config.swiglu_limit, float)


# ---------------------------------------------------------------------------------------------- cross-checks

TEXT_ERRORS: list[tuple[str, Any, str]] = [
    *[(key, 0, "a positive integer") for key in (
        "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "max_position_embeddings", "n_routed_experts",
        "num_experts_per_tok", "sliding_window", "index_n_heads", "index_head_dim", "index_topk",
        "candidate_topk_blocks", "candidate_block_size", "hc_mult", "hc_sinkhorn_iters", "engram_vocab_size",
        "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size", "dspark_block_size", "dspark_markov_rank",
    )],
    *[(key, 10**9, "at most ") for key in (
        "num_hidden_layers", "n_routed_experts", "dspark_n_routed_experts", "hc_mult", "hc_sinkhorn_iters",
        "engram_max_ngram_size", "engram_n_heads", "candidate_block_size", "dspark_block_size",
    )],
    *[(key, 0.0, "a positive number") for key in (
        "swiglu_limit", "rope_theta", "compress_rope_theta", "routed_scaling_factor",
    )],
    *[(key, -1e-6, "0 or a positive number") for key in ("rms_norm_eps", "hc_eps")],
    *[(key, 48, "a multiple of 32") for key in (
        "hidden_size", "moe_intermediate_size", "head_dim", "q_lora_rank", "o_lora_rank", "index_head_dim",
        "engram_head_dim",
    )],
    ("n_shared_experts", 2, "1"),
    ("num_key_value_heads", 8, "1"),
    ("scoring_func", "sigmoid", "'sqrtsoftplus'"),
    ("hidden_act", "gelu", "'silu'"),
    ("topk_method", "greedy", "'noaux_tc'"),
    ("norm_topk_prob", False, "True"),
    ("tie_word_embeddings", True, "False"),
    ("attention_bias", True, "False"),
    ("qk_rope_head_dim", 15, "an even number up to head_dim = 64"),
    ("qk_rope_head_dim", 66, "an even number up to head_dim = 64"),
    ("qk_rope_head_dim", 34, "an even number up to index_head_dim = 32"),
    ("o_groups", 3, "a divisor of num_attention_heads = 8"),
    ("compress_ratios", [0, 0, 2, 2, 1, 1, 1, 1], "11 entries (layers + draft stages)"),
    ("compress_ratios", [0, 0, 4, 4, 1, 1, 1, 1, 0, 0, 0], "entries 0, 1 or 2"),
    ("compress_ratios", [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 1], "0 for the draft stages"),
    ("compress_ratios", [0, 0, 2, 2, 1, 1, 1, 2, 0, 0, 0], "ratio 1 at layer 7, that of its KV source 4"),
    ("kv_source_layer_ids", [4, 2], "increasing layer ids"),
    ("kv_source_layer_ids", [2, 2, 4], "increasing layer ids"),
    ("kv_source_layer_ids", [2, 4, 8], "layer ids below num_hidden_layers = 8"),
    ("kv_source_layer_ids", [2, 3, 4], "a subset of index_source_layer_ids"),
    ("kv_source_layer_ids", [4], "a source at or before layer 2 (ratio 2)"),
    ("index_source_layer_ids", [1, 2, 4, 6], "layers with a ratio above 0; compress_ratios is 0 at [1]"),
    ("index_source_layer_ids", [2, 4, 9], "layer ids below num_hidden_layers = 8"),
    ("engram_layer_ids", [3, 1], "increasing layer ids"),
    ("engram_layer_ids", [1, 8], "layer ids below num_hidden_layers = 8"),
    ("candidate_source_layer_id", 5, "negative, or one of index_source_layer_ids"),
    ("candidate_source_layer_id", 2, "a source whose global KV all later index sources read; [4, 6] read another"),
    ("engram_num_embeddings", [434], "2 entries, one per engram_layer_ids"),
    ("engram_num_embeddings", [434, 605], "the sums of the derived primes, [434, 606]"),
    ("engram_max_ngram_size", 1, "2 or more"),
    ("engram_pad_token_id", 512, "an id below vocab_size 512"),
    ("engram_compressed_vocab_size", 513, "at most vocab_size = 512"),
    ("num_experts_per_tok", 17, "1 to n_routed_experts = 16"),
    ("dspark_num_experts_per_tok", 9, "1 to dspark_n_routed_experts = 8"),
    ("num_nextn_predict_layers", -1, "0 or more draft stages"),
    ("dspark_noise_token_id", 512, "an id below vocab_size 512"),
    ("dspark_target_layer_ids", [], "at least one layer id below num_hidden_layers = 8"),
    ("dspark_target_layer_ids", [6, 8], "at least one layer id below num_hidden_layers = 8"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "expected"), TEXT_ERRORS, ids=lambda part: str(part)[:48])
def test_a_value_that_cannot_run_is_named_with_what_was_expected(
    tiny: Data, key: str, value: Any, expected: str
) -> None:
    tiny["text_config"][key] = value
    if key == "num_nextn_predict_layers":
        tiny["text_config"]["compress_ratios"] = tiny["text_config"]["compress_ratios"][:7]
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(tiny, source="somewhere/config.json")
    error = caught.value
    assert error.key.removeprefix("text_config.") == key
    assert expected in error.expected
    if isinstance(value, list):
        assert list(error.value) == value  # type: ignore[call-overload]
    else:
        assert error.value == value
    assert str(error).startswith("somewhere/config.json: ") and repr(error.value) in str(error)


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"])
@pytest.mark.parametrize("value", [-1, 512])
def test_a_special_token_outside_the_vocabulary_is_named(tiny: Data, key: str, value: int) -> None:
    tiny[key] = value
    with pytest.raises(ConfigError, match=rf"{key} = {value}: expected an id below vocab_size 512"):
        ModelConfig.from_dict(tiny)


def test_no_draft_stages_need_no_draft_sizes(tiny: Data) -> None:
    text = tiny["text_config"]
    text |= {"num_nextn_predict_layers": 0, "compress_ratios": text["compress_ratios"][:8], "dspark_block_size": 0}
    assert ModelConfig.from_dict(tiny).num_nextn_predict_layers == 0


def test_a_negative_candidate_source_switches_the_filter_off(tiny: Data) -> None:
    tiny["text_config"]["candidate_source_layer_id"] = -1
    config = ModelConfig.from_dict(tiny)
    assert not any(config.reads_candidates(layer) for layer in range(8))


# ---------------------------------------------------------------------------------------------- form of the file


def required_keys() -> list[str]:
    text = miniature_config("tiny").to_dict()["text_config"]
    optional = {
        "model_type", "rope_scaling", "max_position_embeddings", "n_shared_experts", "num_key_value_heads",
        "scoring_func", "hidden_act", "topk_method", "norm_topk_prob", "tie_word_embeddings", "attention_bias",
    }  # fmt: skip
    return sorted(set(text) - optional)


@pytest.mark.parametrize("key", required_keys())
def test_a_missing_key_is_named(tiny: Data, key: str) -> None:
    del tiny["text_config"][key]
    with pytest.raises(ConfigError, match=rf"text_config\.{key} = None: .*the key is missing"):
        ModelConfig.from_dict(tiny)


@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"])
def test_a_missing_key_of_the_rotary_scaling_is_named(tiny: Data, key: str) -> None:
    del tiny["text_config"]["rope_scaling"][key]
    with pytest.raises(ConfigError, match=rf"text_config\.rope_scaling\.{key}"):
        ModelConfig.from_dict(tiny)


def test_a_missing_key_of_the_flat_dialect_is_named(tiny: Data) -> None:
    flat = flattened(tiny)
    del flat["n_layers"]
    with pytest.raises(ConfigError, match=r"num_hidden_layers = None: .*missing"):
        ModelConfig.from_dict(flat)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        *[("hidden_size", value, "an integer below 2^53") for value in ("256", 256.0, True, None, 10**30)],
        *[("swiglu_limit", value, "a finite number") for value in ("10", False, float("inf"), 10**400)],
        ("compress_ratios", [10**30], "a list of integers"),
        ("scoring_func", 3, "a string"),
        ("norm_topk_prob", 1, "true or false"),
        ("compress_ratios", 2, "a list of integers"),
        ("compress_ratios", [0, "0"], "a list of integers"),
        ("engram_layer_ids", [1, True], "a list of integers"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_the_right_one(tiny: Data, key: str, value: Any, kind: str) -> None:
    tiny["text_config"][key] = value
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(tiny)
    assert (caught.value.key, caught.value.value, caught.value.expected) == (f"text_config.{key}", value, kind)


Change = Callable[[Data], None]


def with_text(**values: Any) -> Change:
    return lambda data: data["text_config"].update(values)


def with_outer(**values: Any) -> Change:
    return lambda data: data.update(values)


def with_scaling(**values: Any) -> Change:
    return lambda data: data["text_config"]["rope_scaling"].update(values)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (with_outer(model_type="deepseek_v4"), "model_type"),
        (with_outer(model_type="llama"), "model_type"),
        (with_text(model_type="deepseek_v4_text"), "text_config.model_type"),
        (with_text(num_hash_layers=3), "text_config.num_hash_layers"),
        (with_text(n_group=8), "text_config.n_group"),
        (with_text(kv_lora_rank=512), "text_config.kv_lora_rank"),
        (with_outer(text_config=None), "text_config"),
        (with_text(rope_scaling=None), "text_config.rope_scaling"),
        (with_scaling(rope_type="linear"), "text_config.rope_scaling.rope_type"),
        (with_outer(quantization_config="fp8"), "quantization_config"),
        (with_outer(vision_config=[1]), "vision_config"),
        (with_outer(vision_config={"num_hidden_layers": 1}), "vision_config.hidden_size"),
    ],
)
def test_a_configuration_of_another_model_or_form_is_refused(tiny: Data, change: Change, key: str) -> None:
    change(tiny)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(tiny)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "awq"),
        ("weight_block_size", [128, 128]),
        ("scale_fmt", "float"),
        ("expert_dtype", "fp8"),
        ("activation_scheme", "static"),
    ],
)
def test_weights_stored_another_way_are_refused(released: Data, key: str, value: Any) -> None:
    released["quantization_config"][key] = value
    with pytest.raises(ConfigError, match=rf"quantization_config\.{key} = "):
        ModelConfig.from_dict(released)


@pytest.mark.parametrize("data", [{"a": 1}, {}, [], "text", None])
def test_what_is_no_configuration_at_all_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="config = "):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize("text", ["{", "", '{"a": 1', "\udcff"])
def test_a_file_that_is_not_json_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json = .*config\.json'"):
        ModelConfig.from_file(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file that exists"):
        ModelConfig.from_file(tmp_path / "nothing.json")


def test_an_error_of_a_file_names_the_file_once(tmp_path: Path, tiny: Data) -> None:
    tiny["text_config"]["hidden_size"] = 100
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(tmp_path)
    assert str(caught.value).count("config.json") == 1


# ---------------------------------------------------------------------------------------------- running


def test_engine_options_have_defaults_that_run_on_a_cpu() -> None:
    engine = EngineConfig()
    assert (engine.device, engine.tensor_parallel_size, engine.decode_backend) == ("cpu", 1, "auto")
    assert EngineConfig(device="cuda:1", draft_confidence_threshold=0, max_model_len=100).max_model_len == 100
    assert [EngineConfig(device=device).warms_up for device in ("cpu", "cuda:1")] == [False, True]
    assert EngineConfig(jit_warmup=True).warms_up and not EngineConfig(device="cuda", jit_warmup=False).warms_up


def test_tuning_at_start_is_refused_by_name() -> None:
    assert not DecodeConfig().autotune
    with pytest.raises(NotImplementedError, match="autotune"):
        DecodeConfig(autotune=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode = 'fast': expected one of auto, exact, trained"),
        ({"mode": "exact", "dtype": "bfloat16"}, "dtype = 'bfloat16': expected float32 or float64 in exact mode"),
        ({"mode": "trained", "dtype": "float32"}, "dtype = 'float32': expected bfloat16 in trained mode"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size = 3: expected 1, 2, 4 or 8"),
        ({"max_model_len": 0}, "max_model_len = 0: expected a positive number of tokens"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens = -1: expected 0 or more"),
        ({"decode_backend": "turbo"}, "decode_backend = 'turbo': expected one of auto, stock, latency_specialized"),
        (
            {"approximate_prefix_caching": True, "num_prefix_snapshots": 0},
            "num_prefix_snapshots = 0: expected 1 or more beside approximate_prefix_caching",
        ),
        ({"device": "abacus"}, "device = 'abacus': expected 'cpu', 'cuda' or 'cuda:N'"),
        ({"max_num_seqs": "16"}, "max_num_seqs = '16': expected an integer"),
        ({"max_num_seqs": 16.0}, "max_num_seqs = 16.0: expected an integer"),
        ({"block_size": True}, "block_size = True: expected an integer"),
        ({"guard_pools": 1}, "guard_pools = 1: expected True or False"),
        ({"max_model_len": "100"}, "max_model_len = '100': expected an integer or None"),
        ({"dtype": 64}, "dtype = 64: expected a string or None"),
        ({"draft_confidence_threshold": "high"}, "draft_confidence_threshold = 'high': expected a number"),
    ],
)
def test_an_engine_option_out_of_range_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)

"""Cross-checks of a ``ModelConfig`` (spec/model.md 2): every combination that the model cannot run is refused."""

from typing import TYPE_CHECKING, Any

from quickseek.errors import ConfigError

if TYPE_CHECKING:
    from quickseek.config import ModelConfig

BLOCK = 32
"""Every quantised dimension is a multiple of this (spec 3.3)."""

_POSITIVE = [
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "n_routed_experts",
    "num_experts_per_tok",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_compressed_vocab_size",
]

_POSITIVE_NUMBERS = [
    "swiglu_limit",
    "rope_theta",
    "compress_rope_theta",
    "rope_factor",
    "beta_fast",
    "beta_slow",
    "routed_scaling_factor",
    "gate_temp",
]

_MOST = {
    "num_hidden_layers": 1024,
    "n_routed_experts": 16384,
    "dspark_n_routed_experts": 16384,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 1000,
    "engram_max_ngram_size": 16,
    "engram_n_heads": 256,
    "candidate_block_size": 65536,
    "dspark_block_size": 64,
}
"""What is looped over or padded to: far beyond it a configuration is a mistake, which must not look like a hang."""

_FIXED: dict[str, Any] = {
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "hidden_act": "silu",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
}

_BLOCKED = [
    "hidden_size",
    "moe_intermediate_size",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "index_head_dim",
    "engram_head_dim",
]


def check_model_config(config: "ModelConfig") -> None:
    """Raise ConfigError for the first key whose value the model cannot run with."""
    for key in _POSITIVE:
        value = getattr(config, key)
        _require(config, key, value >= 1, "a positive integer")
    for key, most in _MOST.items():
        _require(config, key, getattr(config, key) <= most, f"at most {most}")
    for key in _POSITIVE_NUMBERS:
        _require(config, key, getattr(config, key) > 0, "a positive number")
    for key in ("rms_norm_eps", "hc_eps"):
        _require(config, key, getattr(config, key) >= 0, "0 or a positive number")
    for key, expected in _FIXED.items():
        _require(config, key, getattr(config, key) == expected, repr(expected))
    for key in _BLOCKED:
        _require(config, key, getattr(config, key) % BLOCK == 0, f"a multiple of {BLOCK}")
    _check_attention(config)
    _check_layers(config)
    _check_engram(config)
    _check_experts(config)
    _check_draft(config)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        value = getattr(config, key)
        _require(
            config, key, value is None or 0 <= value < config.vocab_size, f"an id below vocab_size {config.vocab_size}"
        )


def _require(config: "ModelConfig", key: str, valid: bool, expected: str) -> None:
    if not valid:
        raise ConfigError(key, getattr(config, key), expected)


def _check_attention(config: "ModelConfig") -> None:
    rotary, heads, groups = config.qk_rope_head_dim, config.num_attention_heads, config.o_groups
    for key, width in (("head_dim", config.head_dim), ("index_head_dim", config.index_head_dim)):
        _require(
            config, "qk_rope_head_dim", rotary % 2 == 0 and rotary <= width, f"an even number up to {key} = {width}"
        )
    _require(config, "o_groups", heads % groups == 0, f"a divisor of num_attention_heads = {heads}")
    _require(config, "num_attention_heads", heads % groups == 0, f"a multiple of o_groups = {groups}")
    _require(config, "beta_fast", config.beta_fast > config.beta_slow, f"above beta_slow = {config.beta_slow}")


def _check_layers(config: "ModelConfig") -> None:
    _require(config, "num_nextn_predict_layers", config.num_nextn_predict_layers >= 0, "0 or more draft stages")
    layers = config.num_hidden_layers
    expected = layers + config.num_nextn_predict_layers
    ratios = config.compress_ratios
    _require(config, "compress_ratios", len(ratios) == expected, f"{expected} entries (layers + draft stages)")
    _require(config, "compress_ratios", all(r in (0, 1, 2) for r in ratios), "entries 0, 1 or 2")
    _require(config, "compress_ratios", not any(ratios[layers:]), "0 for the draft stages")
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(config, key)
        _require(config, key, list(ids) == sorted(set(ids)), "increasing layer ids")
        _require(config, key, all(0 <= i < layers for i in ids), f"layer ids below num_hidden_layers = {layers}")
    sources, index_sources = config.kv_source_layer_ids, config.index_source_layer_ids
    _require(config, "kv_source_layer_ids", set(sources) <= set(index_sources), "a subset of index_source_layer_ids")
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        bad = [i for i in getattr(config, key) if ratios[i] == 0]
        _require(config, key, not bad, f"layers with a ratio above 0; compress_ratios is 0 at {bad}")
    for layer in range(layers):
        if ratios[layer] == 0:
            continue
        source = max((s for s in sources if s <= layer), default=None)
        if source is None:
            raise ConfigError(
                "kv_source_layer_ids", list(sources), f"a source at or before layer {layer} (ratio {ratios[layer]})"
            )
        if ratios[source] != ratios[layer]:
            raise ConfigError(
                "compress_ratios",
                list(ratios),
                f"ratio {ratios[source]} at layer {layer}, that of its KV source {source}",
            )
    candidate = config.candidate_source_layer_id
    if candidate >= 0:
        _require(
            config,
            "candidate_source_layer_id",
            candidate in index_sources,
            "negative, or one of index_source_layer_ids",
        )
        later = [i for i in index_sources if i > candidate]
        bad = [i for i in later if config.kv_source(i) != config.kv_source(candidate)]
        _require(
            config, "candidate_source_layer_id", not bad,
            f"a source whose global KV all later index sources read; {bad} read another",
        )  # fmt: skip


def _check_engram(config: "ModelConfig") -> None:
    count = len(config.engram_layer_ids)
    _require(
        config,
        "engram_num_embeddings",
        len(config.engram_num_embeddings) == count,
        f"{count} entries, one per engram_layer_ids",
    )
    _require(config, "engram_max_ngram_size", config.engram_max_ngram_size >= 2, "2 or more")
    _require(
        config, "engram_pad_token_id", 0 <= config.engram_pad_token_id < config.vocab_size,
        f"an id below vocab_size {config.vocab_size}",
    )  # fmt: skip
    _require(
        config, "engram_compressed_vocab_size", config.engram_compressed_vocab_size <= config.vocab_size,
        f"at most vocab_size = {config.vocab_size}",
    )  # fmt: skip
    if count:
        _ = config.engram_layout  # derives the primes and compares their sums


def _check_experts(config: "ModelConfig") -> None:
    pairs = [("num_experts_per_tok", "n_routed_experts")]
    if config.num_nextn_predict_layers:
        pairs.append(("dspark_num_experts_per_tok", "dspark_n_routed_experts"))
    for key, total in pairs:
        experts = getattr(config, total)
        _require(config, key, 1 <= getattr(config, key) <= experts, f"1 to {total} = {experts}")


def _check_draft(config: "ModelConfig") -> None:
    if not config.num_nextn_predict_layers:
        return
    _require(config, "dspark_block_size", config.dspark_block_size >= 1, "a positive integer")
    _require(
        config, "dspark_noise_token_id", 0 <= config.dspark_noise_token_id < config.vocab_size,
        f"an id below vocab_size {config.vocab_size}",
    )  # fmt: skip
    _require(config, "dspark_markov_rank", config.dspark_markov_rank >= 1, "a positive integer")
    ids = config.dspark_target_layer_ids
    _require(
        config, "dspark_target_layer_ids", bool(ids) and all(0 <= i < config.num_hidden_layers for i in ids),
        f"at least one layer id below num_hidden_layers = {config.num_hidden_layers}",
    )  # fmt: skip

"""Configurations: what the model is (``ModelConfig``), how it is run (``EngineConfig``), how decode is specialized.

``ModelConfig`` reads both dialects of config.json (spec/model.md 2): the nested Hugging Face form and the flat
form of the reference program. Every value is checked on construction and a wrong one raises ``ConfigError``
with its key, its value and what was expected.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from quickseek.config_checks import check_model_config
from quickseek.engram_layout import EngramLayout
from quickseek.errors import ConfigError

MODEL_TYPE = "deepseek_v41"
TEXT_MODEL_TYPE = "deepseek_v41_text"
ARCHITECTURE = "DeepseekV41ForCausalLM"

# Flat key of the reference dialect -> our (Hugging Face) name; keys that are not listed keep their name.
FLAT_NAMES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_layers": "engram_layer_ids",
    "engram_pad_id": "engram_pad_token_id",
    "n_mtp_layers": "num_nextn_predict_layers",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
    "rope_factor": "rope_factor",
    "original_seq_len": "original_max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
}

LARGEST = 2**53
"""Integers of a configuration are below it: JSON of other hands keeps no larger ones exactly."""

# Keys of earlier models of the family: their presence means that the layers are built another way.
FOREIGN_KEYS = ("num_hash_layers", "n_group", "topk_group", "hc_head", "kv_lora_rank", "first_k_dense_replace")


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower (spec 2.4); read for the tensor inventory only, the tower is not built."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that fixes what the model computes (spec 2.2); names are the Hugging Face keys."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int = 1048576
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    n_shared_experts: int = 1
    num_key_value_heads: int = 1
    scoring_func: str = "sqrtsoftplus"
    hidden_act: str = "silu"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    gate_temp: float = 1.0
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        check_model_config(self)

    # ------------------------------------------------------------------------------------------ derived

    @property
    def rope_offset(self) -> int:
        """First rotated channel of an attention head; the rotation covers the tail."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def decoder_start(self) -> int:
        """First decoder layer: the last KV source (spec 9, "cut")."""
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else self.num_hidden_layers

    @property
    def mix_width(self) -> int:
        """Coefficients of one sublayer: pre, post and comb of hc_mult streams."""
        return self.hc_mult * (self.hc_mult + 2)

    @property
    def qkv_latent_width(self) -> int:
        """Rows of the stacked projection of the query latent and the window KV."""
        return self.q_lora_rank + self.head_dim

    def ratio(self, layer: int) -> int:
        """Compression ratio of the global KV that ``layer`` reads; 0: window only. DSpark stages follow the layers."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose global KV ``layer`` reads, or None for a window-only layer (spec 1)."""
        return self._source(layer, self.kv_source_layer_ids)

    def index_source(self, layer: int) -> int | None:
        """The layer whose top-k lists ``layer`` reads, or None for a window-only layer (spec 1)."""
        return self._source(layer, self.index_source_layer_ids)

    def _source(self, layer: int, sources: tuple[int, ...]) -> int | None:
        if layer >= self.num_hidden_layers or self.ratio(layer) == 0:
            return None
        return max(source for source in sources if source <= layer)

    def reads_candidates(self, layer: int) -> bool:
        """Whether the top-k of ``layer`` is restricted to the published candidate blocks (spec 6.5)."""
        return self.candidate_source_layer_id >= 0 and layer > self.candidate_source_layer_id

    @cached_property
    def engram_layout(self) -> EngramLayout:
        """Primes, offsets and multipliers of the n-gram memory."""
        return EngramLayout.from_config(self)

    # ------------------------------------------------------------------------------------------ reading

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Read config.json, or the one inside a directory; errors name the file."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError("config.json", str(path), "a file that exists") from None
        except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, a number too long
            raise ConfigError("config.json", str(path), f"a readable JSON file ({error})") from None
        return cls.from_dict(data, source=str(path))

    @classmethod
    def from_dict(cls, data: Any, *, source: str = "") -> "ModelConfig":
        """Read either dialect; ``source`` names the file in errors."""
        if not isinstance(data, Mapping):
            raise ConfigError("config", type(data).__name__, "a JSON object", source=source)
        try:
            return cls(**_read_nested(data) if _is_nested(data) else _read_flat(data))
        except ConfigError as error:
            if source and not str(error).startswith(source):
                raise ConfigError(error.key, error.value, error.expected, source=source) from None
            raise

    def to_dict(self) -> dict[str, Any]:
        """The nested Hugging Face form; ``from_dict`` of it gives an equal configuration."""
        text: dict[str, Any] = {"model_type": TEXT_MODEL_TYPE}
        outer = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "vision")
        scaling = ("rope_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in outer or field.name in scaling or (field.name == "gate_temp" and value == 1.0):
                continue
            text[field.name] = list(value) if isinstance(value, tuple) else value
        text["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": self.rope_factor,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "original_max_position_embeddings": self.original_max_position_embeddings,
        }
        nested: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "dtype": "bfloat16",
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "quantization_config": QUANTIZATION_CONFIG,
            "text_config": text,
        }
        if self.image_token_id is not None:
            nested["image_token_id"] = self.image_token_id
        if self.vision is not None:
            nested["vision_config"] = {f.name: getattr(self.vision, f.name) for f in fields(self.vision)}
        return nested


QUANTIZATION_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
"""The only storage that the loader reads (spec 2.3)."""


def _is_nested(data: Mapping[str, Any]) -> bool:
    return "text_config" in data or "model_type" in data or "architectures" in data


def _read_nested(data: Mapping[str, Any]) -> dict[str, Any]:
    model_type = data.get("model_type")
    if model_type not in (MODEL_TYPE, TEXT_MODEL_TYPE):
        raise ConfigError("model_type", model_type, f"'{MODEL_TYPE}'")
    text = data.get("text_config", data if model_type == TEXT_MODEL_TYPE else None)
    if not isinstance(text, Mapping):
        raise ConfigError("text_config", text, "an object")
    if text.get("model_type", TEXT_MODEL_TYPE) != TEXT_MODEL_TYPE:
        raise ConfigError("text_config.model_type", text["model_type"], f"'{TEXT_MODEL_TYPE}'")
    quantization = data.get("quantization_config")
    if quantization is not None:
        if not isinstance(quantization, Mapping):
            raise ConfigError("quantization_config", quantization, "an object")
        for key, expected in QUANTIZATION_CONFIG.items():
            if quantization.get(key, expected) != expected:
                raise ConfigError(f"quantization_config.{key}", quantization[key], repr(expected))
    scaling = text.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        raise ConfigError("text_config.rope_scaling", scaling, "an object with rope_type 'yarn'")
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        raise ConfigError("text_config.rope_scaling.rope_type", scaling.get("rope_type"), "'yarn'")
    values = {key: text[key] for key in text if key not in ("rope_scaling", "model_type")}
    for key, name in (("factor", "rope_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
        if key not in scaling:
            raise ConfigError(f"text_config.rope_scaling.{key}", None, "a number")
        values[name] = scaling[key]
    key = "original_max_position_embeddings"
    if key not in scaling:
        raise ConfigError(f"text_config.rope_scaling.{key}", None, "a positive integer")
    values[key] = scaling[key]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        if key in data:
            values[key] = data[key]
    vision = data.get("vision_config")
    if vision is not None:
        values["vision"] = _read_vision(vision)
    return _typed(values, prefix="text_config.")


def _read_flat(data: Mapping[str, Any]) -> dict[str, Any]:
    if "dim" not in data:
        raise ConfigError(
            "config", f"keys {sorted(data)[:8]}", f"model_type '{MODEL_TYPE}' with text_config, or the flat dialect"
        )
    values: dict[str, Any] = {}
    for key, value in data.items():
        values[FLAT_NAMES.get(key, key)] = value
    values["vision"] = None
    return _typed(values, prefix="")


def _read_vision(data: Any) -> VisionConfig:
    if not isinstance(data, Mapping):
        raise ConfigError("vision_config", data, "an object")
    values = {}
    for field in fields(VisionConfig):
        if field.name not in data:
            raise ConfigError(f"vision_config.{field.name}", None, "a positive integer")
        value = data[field.name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"vision_config.{field.name}", value, "a positive integer")
        values[field.name] = value
    return VisionConfig(**values)


def _typed(values: Mapping[str, Any], *, prefix: str) -> dict[str, Any]:
    """Keep the known keys with their types checked; refuse keys of other models and name missing ones."""
    for key in FOREIGN_KEYS:
        if values.get(key):
            raise ConfigError(f"{prefix}{key}", values[key], "absent: this is a configuration of another model")
    typed: dict[str, Any] = {}
    for field in fields(ModelConfig):
        if field.name not in values:
            if field.default is field.default_factory:  # both MISSING: the key has no default
                raise ConfigError(f"{prefix}{field.name}", None, f"a value ({_kind(field.type)}); the key is missing")
            continue
        value = values[field.name]
        if not _fits(value, field.type):
            raise ConfigError(f"{prefix}{field.name}", value, _kind(field.type))
        if field.type is float:
            value = float(value)
        typed[field.name] = tuple(value) if isinstance(value, list) else value
    return typed


def _kind(annotation: Any) -> str:
    names = {int: "an integer below 2^53", float: "a finite number", str: "a string", bool: "true or false"}
    return names.get(annotation, "a list of integers" if "tuple" in str(annotation) else "an integer or null")


def _fits(value: Any, annotation: Any) -> bool:
    if annotation is bool:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if annotation is int:
        return _is_count(value)
    if annotation is float:
        return _is_count(value) or (isinstance(value, float) and math.isfinite(value))
    if annotation is str:
        return isinstance(value, str)
    if "tuple" in str(annotation):
        return isinstance(value, list | tuple) and all(_is_count(v) and not isinstance(v, bool) for v in value)
    return value is None or isinstance(value, VisionConfig) or _is_count(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < LARGEST


# ---------------------------------------------------------------------------------------------- running


def _is_option(value: Any, annotation: Any) -> bool:
    """Whether a value has the type of its field; an integer stands for a number, a truth value for neither."""
    if isinstance(value, bool) or annotation is bool:
        return isinstance(value, bool) and bool in (annotation, *get_args(annotation))
    return isinstance(value, int | float) if annotation is float else isinstance(value, annotation)


def _option_kind(annotation: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string", bool: "True or False"}
    return names.get(annotation) or " or ".join(names.get(kind, "None") for kind in get_args(annotation))


DECODE_BACKENDS = ("auto", "stock", "latency_specialized")
MODES = ("auto", "exact", "trained")
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Settings of the specialized decode (spec/api.md).

    ``jit_warmup``: run every kind of step before serving (``EngineConfig.jit_warmup`` decides it in an ``LLM``).
    ``off``: names of paths that are not to be taken (decode/gates.py).
    ``autotune``, a name of the published settings, is off: no kernel is tuned at start. Their shapes are functions of
    rows and sizes, measured beforehand (decode/gates.py, the launches in ops/), so that all ranks launch alike.
    NotImplementedError for True.
    """

    autotune: bool = False
    jit_warmup: bool = True
    off: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.autotune:
            raise NotImplementedError("DecodeConfig.autotune: kernels have shapes that were measured beforehand")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a model is run. Options follow vLLM's spelling; ``max_model_len`` None means what the model allows.

    ``mode``: "exact" (no fake quantisation, one dtype; CPU), "trained" (BF16 with the trained fake quantisation) or
    "auto" (exact on a CPU, trained on a GPU). ``dtype`` None: float32 in exact mode, bfloat16 in trained mode.
    ``max_num_seqs`` requests decode together; ``max_num_batched_tokens`` prompt tokens are read in one step.
    ``decoder_replay`` runs the decoder layers of a prompt on its last window only (spec/model.md 9), an approximation.
    ``decode_backend``: "stock", "latency_specialized", or "auto" for the specialized decode where nothing is missing.
    ``decode_paths_off``: paths of the specialized decode to switch off, separated by commas (decode/gates.py).

    ``block_size`` tokens make a block of the paged caches; ``kv_cache_memory_bytes`` bounds all caches together.
    ``enable_prefix_caching`` reuses prompts exactly from ``num_prefix_snapshots`` snapshots, taken at the ends of
    prompts and answers and every ``prefix_snapshot_interval`` prompt tokens (0: never); ``approximate_prefix_caching``
    also reuses blocks without one by replaying a window (spec/model.md 9), which changes results slightly.
    ``draft_sample_method``: "greedy", or "probabilistic" for drafts drawn at the request's temperature.
    ``draft_confidence_threshold``: verify only drafts whose cumulative confidence reaches it (0: all); its batches are
    paced by the host. ``guard_pools`` puts canaries around the caches and checks them after each step.
    ``rank_check_interval``: engine ticks after which ranks compare a hash of what they decided (0: never; a check is a
    round of messages between the hosts). ``jit_warmup``: run every kind of step once at start, so that nothing is
    compiled while serving; None: on a GPU.
    """

    device: str = "cpu"
    mode: str = "auto"
    dtype: str | None = None
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    num_speculative_tokens: int = 0
    decode_backend: str = "auto"
    decode_paths_off: str = ""
    decoder_replay: bool = False
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory_bytes: int = 4 << 30
    enable_prefix_caching: bool = True
    approximate_prefix_caching: bool = False
    num_prefix_snapshots: int = 8
    prefix_snapshot_interval: int = 0
    draft_sample_method: str = "greedy"
    draft_confidence_threshold: float = 0.0
    guard_pools: bool = False
    rank_check_interval: int = 0
    jit_warmup: bool | None = None

    @property
    def warms_up(self) -> bool:
        """``jit_warmup`` with None decided: a CPU compiles nothing."""
        return self.device.startswith("cuda") if self.jit_warmup is None else self.jit_warmup

    @property
    def resolved_mode(self) -> str:
        """The mode with "auto" decided."""
        if self.mode != "auto":
            return self.mode
        return "exact" if self.device.startswith("cpu") else "trained"

    def __post_init__(self) -> None:
        def check(key: str, valid: bool, expected: str) -> None:
            if not valid:
                raise ConfigError(key, getattr(self, key), expected)

        for field in fields(self):
            check(field.name, _is_option(getattr(self, field.name), field.type), _option_kind(field.type))
        check("device", re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None, "'cpu', 'cuda' or 'cuda:N'")
        check("mode", self.mode in MODES, f"one of {', '.join(MODES)}")
        dtypes = ("bfloat16",) if self.resolved_mode == "trained" else ("float32", "float64")
        expected = f"{' or '.join(dtypes)} in {self.resolved_mode} mode"
        check("dtype", self.dtype is None or self.dtype in dtypes, expected)
        check("max_num_seqs", self.max_num_seqs >= 1, "1 or more")
        check("max_num_batched_tokens", self.max_num_batched_tokens >= 1, "1 or more")
        check("block_size", self.block_size >= 8 and self.block_size % 8 == 0, "a positive multiple of 8")
        check("kv_cache_memory_bytes", self.kv_cache_memory_bytes > 0, "a positive number of bytes")
        check("num_prefix_snapshots", self.num_prefix_snapshots >= 0, "0 or more")
        check("prefix_snapshot_interval", self.prefix_snapshot_interval >= 0, "0 or more")
        check("rank_check_interval", self.rank_check_interval >= 0, "0 or more")
        methods = DRAFT_SAMPLE_METHODS
        check("draft_sample_method", self.draft_sample_method in methods, f"one of {', '.join(methods)}")
        check("draft_confidence_threshold", 0.0 <= self.draft_confidence_threshold <= 1.0, "a number in [0, 1]")
        if self.approximate_prefix_caching:
            check("enable_prefix_caching", self.enable_prefix_caching, "True beside approximate_prefix_caching")
            check("num_prefix_snapshots", self.num_prefix_snapshots > 0, "1 or more beside approximate_prefix_caching")
        if self.draft_confidence_threshold:
            check(
                "num_speculative_tokens", self.num_speculative_tokens > 0, "1 or more beside draft_confidence_threshold"
            )
        check("tensor_parallel_size", self.tensor_parallel_size in (1, 2, 4, 8), "1, 2, 4 or 8")
        check("max_model_len", self.max_model_len is None or self.max_model_len > 0, "a positive number of tokens")
        check("num_speculative_tokens", self.num_speculative_tokens >= 0, "0 or more")
        check("decode_backend", self.decode_backend in DECODE_BACKENDS, f"one of {', '.join(DECODE_BACKENDS)}")

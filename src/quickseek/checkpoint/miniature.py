"""Small checkpoints in the released formats, from deterministic weights (spec/model.md 15): for tests and demos."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quickseek.checkpoint.inventory import TensorSpec, inventory, is_engram_table
from quickseek.checkpoint.miniature_tokenizer import tokenizer_files
from quickseek.checkpoint.recipe import logical_shape, logical_weight
from quickseek.checkpoint.writer import write_checkpoint
from quickseek.config import ModelConfig
from quickseek.errors import ConfigError
from quickseek.formats import quantize_a8, quantize_fp4_rows, quantize_fp8_blocks

_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "sliding_window": 8,
    "compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0),
    "kv_source_layer_ids": (2, 4),
    "index_source_layer_ids": (2, 4, 6),
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "max_position_embeddings": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": (1, 3),
    "engram_num_embeddings": (434, 606),
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 61,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 258,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 7,
    "dspark_target_layer_ids": (5, 6, 7),
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}

_TINY_TP: dict[str, Any] = {"num_attention_heads": 16, "o_groups": 8, "moe_intermediate_size": 256}

_MID: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 256,
    "o_lora_rank": 128,
    "o_groups": 8,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "index_head_dim": 128,
    "index_topk": 64,
    "candidate_topk_blocks": 16,
    "candidate_block_size": 8,
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 16384,
    "engram_num_embeddings": (99228, 100586),
    "engram_vocab_size": 8230,
    "engram_n_heads": 4,
    "engram_head_dim": 64,
    "engram_compressed_vocab_size": 839,
    "dspark_markov_rank": 128,
    "dspark_n_routed_experts": 16,
}

CHANGES: dict[str, dict[str, Any]] = {"tiny": {}, "tiny-tp": _TINY_TP, "mid": _MID}
"""Miniature name to its differences from ``tiny`` (spec 15): more heads to shard, or sizes for a GPU."""


def miniature_config(name: str) -> ModelConfig:
    """The configuration of ``tiny``, ``tiny-tp`` or ``mid``; ConfigError for another name."""
    if name not in CHANGES:
        raise ConfigError("config", name, f"one of {', '.join(CHANGES)}")
    return ModelConfig(**(_TINY | CHANGES[name]))


def write_miniature(directory: str | Path, name: str = "tiny", *, overwrite: bool = False) -> ModelConfig:
    """Write a miniature with its tokenizer into ``directory``, the same bytes each time; errors of the writer."""
    config = miniature_config(name)
    write_checkpoint(
        directory,
        config,
        miniature_tensors(config),
        files=tokenizer_files(config.vocab_size),
        overwrite=overwrite,
    )
    return config


def miniature_tensors(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(name, stored tensor) of the whole inventory: the deterministic weights, quantised as the release is."""
    for spec in inventory(config).values():
        if spec.dtype == "F8_E8M0":
            continue
        weight = logical_weight(spec.name, logical_shape(spec)).to(torch.float32)
        codes, scales = _stored(spec, weight)
        yield spec.name, codes
        if scales is not None:
            yield spec.name.removesuffix(".weight") + ".scale", scales


def _stored(spec: TensorSpec, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    if spec.dtype == "F32":
        return weight, None
    if spec.dtype == "BF16":
        return weight.to(torch.bfloat16), None
    if spec.dtype == "I8":
        return quantize_fp4_rows(weight)
    return quantize_a8(weight) if is_engram_table(spec.name) else quantize_fp8_blocks(weight)

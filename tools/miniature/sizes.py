"""Configuration of the shipped miniature: every mechanism of the model in 8.5 million parameters."""

from pathlib import Path

from quickseek.config import ModelConfig
from quickseek.tokenizer.compressed_ids import compressed_id_table
from quickseek.tokenizer.tokenizer import Tokenizer

VOCAB_SIZE = 1024
CONTEXT = 512
"""Tokens of a training sequence."""
ENGRAM_VOCAB_SIZE = 1000
ENGRAM_ROWS = (6126, 6332)
"""Table rows: the sums of the primes that follow from ``ENGRAM_VOCAB_SIZE``."""


def miniature_config(compressed_vocab_size: int) -> ModelConfig:
    """The miniature over a tokenizer with so many compressed ids (spec/model.md 8.1).

    The layers are those of the tiny test configuration (spec/model.md 15) with heads, groups and inner widths that up
    to eight ranks can share. Windows, lists and candidate blocks are short beside the training context of 512: a row
    sees 32 neighbours, 32 of up to 512 groups, and the Reindex layer chooses among 64.
    """
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        moe_intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=16,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        rms_norm_eps=1e-20,
        sliding_window=32,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 6),
        index_n_heads=16,
        index_head_dim=32,
        index_topk=32,
        candidate_source_layer_id=4,
        candidate_topk_blocks=8,
        candidate_block_size=8,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_factor=4.0,
        original_max_position_embeddings=256,
        beta_fast=32.0,
        beta_slow=1.0,
        max_position_embeddings=2 * CONTEXT,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        engram_layer_ids=(1, 3),
        engram_num_embeddings=ENGRAM_ROWS,
        engram_max_ngram_size=4,
        engram_vocab_size=ENGRAM_VOCAB_SIZE,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_pad_token_id=2,
        engram_compressed_vocab_size=compressed_vocab_size,
        num_nextn_predict_layers=3,
        dspark_block_size=5,
        dspark_noise_token_id=7,
        dspark_target_layer_ids=(5, 6, 7),
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
    )


def config_for(directory: Path) -> ModelConfig:
    """The miniature for the tokenizer in ``directory``."""
    tokenizer = Tokenizer.from_directory(directory, vocab_size=VOCAB_SIZE)
    return miniature_config(int(compressed_id_table(tokenizer, VOCAB_SIZE).max()) + 1)

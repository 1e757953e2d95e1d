"""Every tensor that a checkpoint of a configuration holds: name, stored dtype and shape (spec/model.md 3.1)."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from quickseek.config import ModelConfig
from quickseek.formats import BLOCK

DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
"""Bytes of one element, by safetensors dtype name. I8 holds two E2M1 codes."""

GROUPS = ("text", "draft", "vision")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor: its safetensors dtype name, its stored (packed) shape, and the group that needs it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    group: str

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def inventory(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors of a complete checkpoint, by name, from the configuration alone.

    Draft tensors appear if the configuration has draft stages, vision tensors if it has a vision tower.
    """
    specs: dict[str, TensorSpec] = {}
    for name, dtype, shape in _tensors(config):
        specs[name] = TensorSpec(name, dtype, shape, group_of(name))
    return specs


def group_of(name: str) -> str:
    """One of ``GROUPS`` by the name alone: draft is for speculation only, vision is never loaded."""
    if name.startswith("mtp."):
        return "draft"
    return "vision" if name.startswith(("vision.", "aligner.", "image_")) else "text"


def is_engram_table(name: str) -> bool:
    """Whether a tensor is part of an n-gram table, which stays on disk or in host memory."""
    return name.endswith((".engram.embed.weight", ".engram.embed.scale"))


def payload_bytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes of the tensors themselves, shard headers excluded."""
    return sum(spec.nbytes for spec in specs)


def count_by_dtype(specs: Iterable[TensorSpec]) -> dict[str, tuple[int, int]]:
    """(tensors, bytes) of each dtype (the last lines of spec 2.5)."""
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for spec in specs:
        tensors[spec.dtype] += 1
        sizes[spec.dtype] += spec.nbytes
    return {dtype: (tensors[dtype], sizes[dtype]) for dtype in sorted(tensors)}


# ---------------------------------------------------------------------------------------------- the tables of spec 3.1

Entry = tuple[str, str, tuple[int, ...]]


def _fp8(prefix: str, rows: int, columns: int) -> Iterator[Entry]:
    yield f"{prefix}.weight", "F8_E4M3", (rows, columns)
    yield f"{prefix}.scale", "F8_E8M0", (-(-rows // BLOCK), -(-columns // BLOCK))


def _fp4(prefix: str, rows: int, columns: int) -> Iterator[Entry]:
    yield f"{prefix}.weight", "I8", (rows, columns // 2)
    yield f"{prefix}.scale", "F8_E8M0", (rows, columns // BLOCK)


def _tensors(config: ModelConfig) -> Iterator[Entry]:
    hidden = config.hidden_size
    yield "embed.weight", "BF16", (config.vocab_size, hidden)
    yield "head.weight", "BF16", (config.vocab_size, hidden)
    yield "norm.weight", "BF16", (hidden,)
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        yield from _block(config, prefix, config.n_routed_experts)
        if layer in config.kv_source_layer_ids:
            yield from _kv_source(config, prefix, config.ratio(layer))
        if layer in config.index_source_layer_ids:
            yield from _index_source(config, prefix)
        if layer in config.engram_layer_ids:
            yield from _engram(config, prefix, config.engram_layer_ids.index(layer))
    for stage in range(config.num_nextn_predict_layers):
        yield from _block(config, f"mtp.{stage}.", config.dspark_n_routed_experts)
    if config.num_nextn_predict_layers:
        yield from _draft_extras(config)
    if config.vision is not None:
        yield from _vision(config)


def _block(config: ModelConfig, prefix: str, experts: int) -> Iterator[Entry]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    heads, head_dim, groups = config.num_attention_heads, config.head_dim, config.o_groups
    attn, ffn = prefix + "attn.", prefix + "ffn."
    yield from _fp8(attn + "wq_a", config.q_lora_rank, hidden)
    yield attn + "q_norm.weight", "BF16", (config.q_lora_rank,)
    yield from _fp8(attn + "wq_b", heads * head_dim, config.q_lora_rank)
    yield from _fp8(attn + "wkv", head_dim, hidden)
    yield attn + "kv_norm.weight", "BF16", (head_dim,)
    yield from _fp8(attn + "wo_a", groups * config.o_lora_rank, heads // groups * head_dim)
    yield from _fp8(attn + "wo_b", hidden, groups * config.o_lora_rank)
    yield attn + "attn_sink", "F32", (heads,)
    yield prefix + "attn_norm.weight", "BF16", (hidden,)
    yield prefix + "ffn_norm.weight", "BF16", (hidden,)
    for sublayer in ("attn", "ffn"):
        yield f"{prefix}hc_{sublayer}_fn", "F32", (config.mix_width, config.hc_mult * hidden)
        yield f"{prefix}hc_{sublayer}_base", "F32", (config.mix_width,)
        yield f"{prefix}hc_{sublayer}_scale", "F32", (3,)
    yield ffn + "gate.weight", "BF16", (experts, hidden)
    yield ffn + "gate.bias", "F32", (experts,)
    yield ffn + "gate.bias_vl", "F32", (experts,)
    yield from _fp8(ffn + "shared_experts.w1", inner, hidden)
    yield from _fp8(ffn + "shared_experts.w3", inner, hidden)
    yield from _fp8(ffn + "shared_experts.w2", hidden, inner)
    for expert in range(experts):
        yield from _fp4(f"{ffn}experts.{expert}.w1", inner, hidden)
        yield from _fp4(f"{ffn}experts.{expert}.w3", inner, hidden)
        yield from _fp4(f"{ffn}experts.{expert}.w2", hidden, inner)


def _kv_source(config: ModelConfig, prefix: str, ratio: int) -> Iterator[Entry]:
    compressor, indexer = prefix + "attn.compressor.", prefix + "attn.indexer."
    yield compressor + "wkv.weight", "BF16", (config.head_dim, config.hidden_size)
    if ratio > 1:
        yield compressor + "wgate.weight", "BF16", (config.head_dim, config.hidden_size)
    yield compressor + "norm.weight", "BF16", (config.head_dim,)
    yield indexer + "wk.weight", "BF16", (config.index_head_dim, config.head_dim)
    yield indexer + "k_norm.weight", "BF16", (config.index_head_dim,)


def _index_source(config: ModelConfig, prefix: str) -> Iterator[Entry]:
    indexer = prefix + "attn.indexer."
    yield from _fp8(indexer + "wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
    yield indexer + "weights_proj.weight", "BF16", (config.index_n_heads, config.hidden_size)


def _engram(config: ModelConfig, prefix: str, index: int) -> Iterator[Entry]:
    engram, rows, width = prefix + "engram.", config.engram_num_embeddings[index], config.engram_head_dim
    yield engram + "embed.weight", "F8_E4M3", (rows, width)
    yield engram + "embed.scale", "F8_E8M0", (rows, width // BLOCK)
    yield from _fp8(engram + "wkv", (config.hc_mult + 1) * config.hidden_size, config.engram_layout.width)
    yield engram + "q_weight", "BF16", (config.hc_mult, config.hidden_size)
    yield engram + "k_weight", "BF16", (config.hc_mult, config.hidden_size)


def _draft_extras(config: ModelConfig) -> Iterator[Entry]:
    hidden, rank, last = config.hidden_size, config.dspark_markov_rank, config.num_nextn_predict_layers - 1
    yield from _fp8("mtp.0.main_proj", hidden, hidden * len(config.dspark_target_layer_ids))
    yield "mtp.0.main_norm.weight", "BF16", (hidden,)
    yield f"mtp.{last}.norm.weight", "BF16", (hidden,)
    yield f"mtp.{last}.markov_head.embed.weight", "BF16", (config.vocab_size, rank)
    yield f"mtp.{last}.markov_head.head.weight", "BF16", (config.vocab_size, rank)
    yield f"mtp.{last}.confidence_head.proj.weight", "BF16", (1, hidden + rank)


def _vision(config: ModelConfig) -> Iterator[Entry]:
    vision, hidden = config.vision, config.hidden_size
    assert vision is not None
    width, inner = vision.hidden_size, vision.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (width, 3 * vision.patch_size**2),
        "vision.patch_embed.proj.bias": (width,),
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (hidden, width * vision.downsample_ratio**2),
        "aligner.w1.bias": (hidden,),
        "aligner.w2.weight": (hidden, hidden),
        "aligner.w2.bias": (hidden,),
        "image_start": (hidden,),
        "image_newline": (hidden,),
        "image_end": (hidden,),
    }
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        shapes |= {
            prefix + "norm1.weight": (width,),
            prefix + "norm2.weight": (width,),
            prefix + "attn.wqkv.weight": (3 * width, width),
            prefix + "attn.wqkv.bias": (3 * width,),
            prefix + "attn.wo.weight": (width, width),
            prefix + "attn.wo.bias": (width,),
            prefix + "mlp.w1.weight": (2 * inner, width),
            prefix + "mlp.w2.weight": (width, inner),
        }
    for name, shape in shapes.items():
        yield name, "BF16", shape

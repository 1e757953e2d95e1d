"""CSA2 attention of one layer, and the block attention of a draft stage (spec/model.md 6, 10.3)."""

from dataclasses import dataclass

from torch import Tensor, nn

from quickseek.config import ModelConfig
from quickseek.model.compressor import Compressor
from quickseek.model.context import ForwardContext, StepShared
from quickseek.model.indexer import Indexer
from quickseek.model.loader import WeightLoader
from quickseek.model.modules import Linear, RMSNorm, parameter, shard
from quickseek.numerics import Numerics
from quickseek.ops import attention as attention_op
from quickseek.ops import linear as linear_op
from quickseek.ops import norm_rope, rings
from quickseek.ops.norm_rope import Rotation
from quickseek.parallel.world import World


class Attention(nn.Module):
    """Multi-query attention whose one KV vector per position is both key and value.

    A rank holds the heads of its output groups; everything before the heads is replicated. ``prefix`` is also the
    name of the caches: "layers.3" or "mtp.0".
    """

    def __init__(self, config: ModelConfig, layer: int, prefix: str, numerics: Numerics, world: World) -> None:
        super().__init__()
        self.config, self.prefix, self.numerics = config, prefix, numerics
        self.groups = shard("o_groups", config.o_groups, world)
        heads_per_group = config.num_attention_heads // config.o_groups
        self.heads = slice(self.groups.start * heads_per_group, self.groups.stop * heads_per_group)
        self.local_groups, self.local_heads = _size(self.groups), _size(self.heads)
        self.reads_global = config.ratio(layer) > 0
        self.kv_source = config.kv_source(layer)
        width, hidden = config.head_dim, config.hidden_size
        self.wqa_wkv = Linear(config.qkv_latent_width, hidden, numerics)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps, numerics)
        self.kv_norm = RMSNorm(width, config.rms_norm_eps, numerics)
        self.wq_b = Linear(self.local_heads * width, config.q_lora_rank, numerics)
        self.sinks = parameter(self.local_heads, dtype=numerics.wide)
        self.wo_a = Linear(self.local_groups * config.o_lora_rank, heads_per_group * width, numerics)
        self.wo_b = Linear(hidden, self.local_groups * config.o_lora_rank, numerics)
        is_layer = prefix.startswith("layers.")
        self.compressor = (
            Compressor(config, layer, numerics) if is_layer and layer in config.kv_source_layer_ids else None
        )
        self.indexer = Indexer(config, layer, numerics) if is_layer and layer in config.index_source_layer_ids else None

    # ------------------------------------------------------------------------------------------ parts

    def latents(self, x: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
        """Query latent [T, q_lora_rank], normalised, and window KV [T, D], rotated and quantised (spec 6.1)."""
        return norm_rope.normalised_latents(
            self.wqa_wkv(x),
            self.q_norm.weight,
            self.kv_norm.weight,
            self.config.rms_norm_eps,
            turn,
            quantise=self.numerics.quantize_caches,
        )

    def finish_kv(self, kv: Tensor, turn: Rotation) -> Tensor:
        """Window KV [T, D] of its projection [T, D]."""
        return norm_rope.normalised_kv(
            kv, self.kv_norm.weight, self.config.rms_norm_eps, turn, quantise=self.numerics.quantize_caches
        )

    def queries(self, latent: Tensor) -> Tensor:
        """Queries [T, local heads, D] of query latents, before their rotation."""
        return self.wq_b(latent).unflatten(-1, (self.local_heads, self.config.head_dim))

    def output(self, attended: Tensor) -> Tensor:
        """This rank's share of the output [T, H] of attended values [T, local heads, D], rotated back (spec 6.7)."""
        grouped = attended.flatten(1).unflatten(1, (self.local_groups, -1))
        return self.wo_b(linear_op.grouped_linear(grouped, self.wo_a.value))

    def keep_window(self, kv: Tensor, shared: StepShared, context: ForwardContext) -> None:
        """Write window KV of a step into the ring, after it has been read."""
        rings.keep(context.view(f"{self.prefix}.window"), shared.rows, kv)

    # ------------------------------------------------------------------------------------------ one call

    def write_global(self, x: Tensor, shared: StepShared, context: ForwardContext) -> None:
        """On a KV source: global KV and index keys of rows x [T, H]."""
        if self.compressor is not None:
            self.compressor(x, shared, context)

    def select(self, x: Tensor, latent: Tensor, shared: StepShared, context: ForwardContext) -> None:
        """On an index source: publish what rows x [T, H] with query latents [T, q_lora_rank] attend to."""
        if self.indexer is not None:
            shared.publish(self.indexer(x, latent, shared, context))

    def attended(self, latent: Tensor, kv: Tensor, shared: StepShared, context: ForwardContext) -> Tensor:
        """Attended values [T, local heads, D], the window ring still as it was before the step."""
        return attention_op.sparse_attention(
            self.queries(latent),
            kv,
            context.view(f"{self.prefix}.window"),
            shared.rows,
            self.sinks,
            window_size=self.config.sliding_window,
            oldest=shared.oldest,
            global_kv=context.view(f"layers.{self.kv_source}.global_kv") if self.reads_global else None,
            lists=shared.lists if self.reads_global else None,
            turn=shared.turns[self.reads_global],
            queries_last=True,
        )

    def forward(self, x: Tensor, shared: StepShared, context: ForwardContext) -> Tensor:
        """This rank's share of the sublayer's output [T, H] of its normalised input [T, H]."""
        latent, kv = self.latents(x, shared.turns[self.reads_global])
        self.write_global(x, shared, context)
        self.select(x, latent, shared, context)
        attended = self.attended(latent, kv, shared, context)
        self.keep_window(kv, shared, context)
        return self.output(attended)

    def load(self, loader: WeightLoader, prefix: str) -> None:
        """``prefix``: "layers.3.attn."."""
        config = self.config
        loader.linear(self.wqa_wkv, f"{prefix}wq_a", size=config.q_lora_rank)
        loader.linear(self.wqa_wkv, f"{prefix}wkv", at=config.q_lora_rank)
        loader.tensor(self.q_norm.weight, f"{prefix}q_norm.weight")
        loader.tensor(self.kv_norm.weight, f"{prefix}kv_norm.weight")
        loader.linear(self.wq_b, f"{prefix}wq_b", rows=_scaled(self.heads, config.head_dim))
        loader.tensor(self.sinks, f"{prefix}attn_sink", self.heads)
        group_rows = _scaled(self.groups, config.o_lora_rank)
        loader.linear(self.wo_a, f"{prefix}wo_a", rows=group_rows)
        loader.linear(self.wo_b, f"{prefix}wo_b", columns=group_rows)
        if self.compressor is not None:
            self.compressor.load(loader, prefix)
        if self.indexer is not None:
            self.indexer.load(loader, f"{prefix}indexer.")


@dataclass
class BlockShared:
    """What the stages of one draft pass share: the rotation of the rows, blocks and the last committed position.

    ``requests`` int64 [B]: batch index of each block; ``last`` int64 [B]; ``size``: rows of a block.
    """

    turns: dict[bool, Rotation]
    requests: Tensor
    last: Tensor
    size: int
    image_rows: Tensor | None = None


class DraftAttention(Attention):
    """Attention of a draft stage: bidirectional in its block, context from the target's states (spec 10.2, 10.3)."""

    def write_context(self, main: Tensor, shared: StepShared, context: ForwardContext) -> None:
        """Keep context KV of committed states main [T, H] in this stage's ring."""
        rank = self.config.q_lora_rank
        kv = linear_op.linear(main, self.wqa_wkv.rows(slice(rank, rank + self.config.head_dim)))
        self.keep_window(self.finish_kv(kv, shared.turns[False]), shared, context)

    def forward(self, x: Tensor, shared: BlockShared, context: ForwardContext) -> Tensor:  # type: ignore[override]
        """This rank's share of the output [B * size, H] of block rows x [B * size, H]."""
        turn = shared.turns[False]
        latent, kv = self.latents(x, turn)
        queries = self.queries(latent)
        attended = attention_op.block_attention(
            queries.unflatten(0, (-1, shared.size)),
            kv.unflatten(0, (-1, shared.size)),
            context.view(f"{self.prefix}.window"),
            shared.requests,
            shared.last,
            self.sinks,
            window_size=self.config.sliding_window,
            turn=turn,
            queries_last=True,
        )
        return self.output(attended.flatten(0, 1))


def _size(part: slice) -> int:
    return int(part.stop - part.start)


def _scaled(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)

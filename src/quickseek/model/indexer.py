"""The indexer of an index source: which global rows each query row attends to (spec/model.md 6.4, 6.5)."""

from torch import Tensor, nn

from quickseek.config import ModelConfig
from quickseek.model.context import ForwardContext, StepShared
from quickseek.model.loader import WeightLoader
from quickseek.model.modules import Linear
from quickseek.numerics import Numerics
from quickseek.ops import indexer as indexer_op
from quickseek.ops import norm_rope, quantize
from quickseek.ops.indexer import Selection


class Indexer(nn.Module):
    """Scores every visible group of the layer's own KV source and keeps the best; replicated on every rank."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics) -> None:
        super().__init__()
        self.config, self.layer, self.numerics = config, layer, numerics
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(heads * width, config.q_lora_rank, numerics)
        self.weights_proj = Linear(heads, config.hidden_size, numerics, packed=False)
        self.weight_scale = width**-0.5 * heads**-0.5

    def forward(self, x: Tensor, query_latent: Tensor, shared: StepShared, context: ForwardContext) -> Selection:
        """Lists for rows x [T, H] with query latents [T, q_lora_rank]; at the candidate source also its blocks."""
        config, layer = self.config, self.layer
        queries = self.wq_b(query_latent).unflatten(-1, (config.index_n_heads, config.index_head_dim))
        queries = norm_rope.apply_rope(queries, shared.turns[True], overwrite=True)
        if self.numerics.quantize_caches:
            queries = quantize.fake_quantize_q4i(queries)
        is_source = layer == config.candidate_source_layer_id
        return indexer_op.select(
            queries,
            self.weights_proj(x),
            context.view(f"layers.{config.kv_source(layer)}.index_k"),
            shared.rows,
            ratio=config.ratio(layer),
            top_k=config.index_topk,
            block_size=config.candidate_block_size,
            publish_blocks=config.candidate_topk_blocks if is_source else 0,
            candidates=shared.candidates if config.reads_candidates(layer) else None,
            weight_scale=self.weight_scale,
        )

    def load(self, loader: WeightLoader, prefix: str) -> None:
        """``prefix``: "layers.2.attn.indexer."."""
        loader.linear(self.wq_b, f"{prefix}wq_b")
        loader.tensor(self.weights_proj.weight, f"{prefix}weights_proj.weight")

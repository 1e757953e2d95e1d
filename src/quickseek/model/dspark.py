"""DSpark, the block drafter: context from the target's states, five drafts in one pass (spec/model.md 10)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quickseek.config import ModelConfig
from quickseek.errors import ConfigError
from quickseek.model.attention import BlockShared, DraftAttention
from quickseek.model.backbone import rotary_frequencies
from quickseek.model.context import DraftExecutor, ForwardContext, StepShared
from quickseek.model.layer import Layer
from quickseek.model.loader import WeightLoader
from quickseek.model.modules import Linear, RMSNorm, parameter
from quickseek.model.vocabulary import VocabParallelEmbedding, VocabParallelHead
from quickseek.numerics import Numerics
from quickseek.ops import head as head_op
from quickseek.ops import mhc, norm_rope, sampling
from quickseek.ops.rows import StepRows
from quickseek.parallel.world import World

Choose = Callable[[Tensor, int], Tensor]
"""Chooses a draft int64 [B] from its corrected logits [B, V] and its number in the block."""


@dataclass(frozen=True)
class Drafts:
    """``tokens`` int64 [B, k]; ``logits`` [B, k, V], Markov-corrected; ``confidence`` [B, k] in (0, 1)."""

    tokens: Tensor
    logits: Tensor
    confidence: Tensor


class DraftHead(nn.Module):
    """The stages and heads of DSpark; embedding and vocabulary head are the backbone's."""

    def __init__(self, config: ModelConfig, numerics: Numerics, world: World) -> None:
        super().__init__()
        if not config.num_nextn_predict_layers:
            raise ConfigError("num_nextn_predict_layers", 0, "at least one draft stage")
        self.config, self.numerics = config, numerics
        self.executor: DraftExecutor | None = None
        hidden, rank = config.hidden_size, config.dspark_markov_rank
        self.main_proj = Linear(hidden, hidden * len(config.dspark_target_layer_ids), numerics)
        self.main_norm = RMSNorm(hidden, config.rms_norm_eps, numerics)
        self.stages = nn.ModuleList(
            Layer(config, config.num_hidden_layers + stage, f"mtp.{stage}", numerics, world)
            for stage in range(config.num_nextn_predict_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, numerics)
        self.markov_embed = parameter(config.vocab_size, rank, dtype=numerics.dtype)
        self.markov_head = VocabParallelHead(config, rank, numerics, world)
        self.confidence_proj = parameter(1, hidden + rank, dtype=numerics.dtype)

    def write_context(self, aux: list[Tensor], rows: StepRows, context: ForwardContext) -> None:
        """Keep context KV of the step's rows from the stream means [T, H] of the target layers (spec 10.2).

        Rows beyond what is committed later do no harm: they are overwritten before they are read.
        """
        main = self.main_norm(self.main_proj(torch.cat(aux, -1)))
        turn = norm_rope.rotation(rows.positions, self._frequencies(rows.positions.device))
        shared = StepShared(rows=rows, turns={False: turn}, group_turns={}, oldest=rows.starts)
        for stage in self.stages:
            assert isinstance(stage, Layer) and isinstance(stage.attn, DraftAttention)
            stage.attn.write_context(main, shared, context)

    def propose(
        self,
        anchors: Tensor,
        last: Tensor,
        embed: VocabParallelEmbedding,
        head: VocabParallelHead,
        context: ForwardContext,
        *,
        count: int | None = None,
        choose: Choose | None = None,
    ) -> Drafts:
        """Drafts after ``anchors`` int64 [B], each at position ``last`` + 1 of its request (spec 10.3).

        ``last`` int64 [B]: last committed position of each request of ``context``. ``count`` drafts are returned
        (at most the trained block size). ``choose`` None is greedy.
        """
        block = self.config.dspark_block_size
        count = block if count is None else count
        if not 1 <= count <= block:
            raise ConfigError("num_speculative_tokens", count, f"1 to the trained block size, {block}")
        collapsed = self._block_states(anchors, last, embed, context)
        base = head(self.norm(collapsed)).unflatten(0, (-1, block))
        states = collapsed.unflatten(0, (-1, block))
        previous, tokens, logits, confidence = anchors, [], [], []
        for i in range(count):
            markov = self.markov_embed[previous]
            corrected = base[:, i] + self.markov_head(markov)
            previous = sampling.greedy(corrected) if choose is None else choose(corrected, i)
            tokens.append(previous)
            logits.append(corrected)
            confidence.append(head_op.confidence(states[:, i], markov, self.confidence_proj))
        return Drafts(torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidence, 1))

    def _block_states(
        self, anchors: Tensor, last: Tensor, embed: VocabParallelEmbedding, context: ForwardContext
    ) -> Tensor:
        """Collapsed states [B * block, H] of the anchor and its noise rows."""
        config, block, device = self.config, self.config.dspark_block_size, anchors.device
        ids = torch.full((anchors.shape[0], block), config.dspark_noise_token_id, device=device)
        ids[:, 0] = anchors
        positions = (last.unsqueeze(1) + 1 + torch.arange(block, device=device)).flatten()
        shared = BlockShared(
            turns={False: norm_rope.rotation(positions, self._frequencies(device))},
            requests=torch.arange(anchors.shape[0], device=device),
            last=last,
            size=block,
        )
        x = embed(ids.flatten())
        step = self.executor.plan(x.shape[0], context=context) if self.executor else None
        if step is not None:
            return step.run(x, shared)
        streams, pre = mhc.first_streams(x, config.hc_mult)
        for stage in self.stages:
            streams, pre = stage(streams, pre, shared, context)
        return mhc.collapse(streams, pre)

    def _frequencies(self, device: torch.device) -> Tensor:
        return rotary_frequencies(self.config, self.numerics.wide, device)[0]

    def load(self, loader: WeightLoader) -> None:
        """Fill every parameter from the ``mtp.*`` tensors."""
        loader.linear(self.main_proj, "mtp.0.main_proj")
        loader.tensor(self.main_norm.weight, "mtp.0.main_norm.weight")
        for stage in self.stages:
            assert isinstance(stage, Layer)
            stage.load(loader)
        last = f"mtp.{len(self.stages) - 1}."
        loader.tensor(self.norm.weight, f"{last}norm.weight")
        loader.tensor(self.markov_embed, f"{last}markov_head.embed.weight")
        self.markov_head.load(loader, f"{last}markov_head.head.weight")
        loader.tensor(self.confidence_proj, f"{last}confidence_head.proj.weight")

"""The vocabulary ends of the model: sharded embedding and output head (spec/model.md 5.1, 5.5)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quickseek.config import ModelConfig
from quickseek.model.loader import WeightLoader
from quickseek.model.modules import parameter, shard
from quickseek.numerics import Numerics
from quickseek.ops import head as head_op
from quickseek.parallel.world import World


class VocabParallelEmbedding(nn.Module):
    """Rows of the embedding, a range of ids on each rank."""

    def __init__(self, config: ModelConfig, numerics: Numerics, world: World) -> None:
        super().__init__()
        self.world = world
        self.ids = shard("vocab_size", config.vocab_size, world)
        self.weight = parameter(self.ids.stop - self.ids.start, config.hidden_size, dtype=numerics.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """[T, H] of ids [T]: rows of other ranks arrive by the sum over ranks."""
        local = ids.to(torch.int64) - self.ids.start
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = self.weight[torch.where(mine, local, 0)]
        return self.world.all_reduce(rows.masked_fill(~mine.unsqueeze(-1), 0.0))

    def load(self, loader: WeightLoader, name: str) -> None:
        """``name``: "embed.weight"."""
        loader.tensor(self.weight, name, self.ids)


class VocabParallelHead(nn.Module):
    """Logits from a weight [V, width], a range of ids on each rank.

    ``gather``: another way from a rank's columns [T, V / ranks] to all [T, V]; None: the gather of the world.
    """

    def __init__(self, config: ModelConfig, width: int, numerics: Numerics, world: World) -> None:
        super().__init__()
        self.world = world
        self.ids = shard("vocab_size", config.vocab_size, world)
        self.weight = parameter(self.ids.stop - self.ids.start, width, dtype=numerics.dtype)
        self.gather: Callable[[Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, V] in the wide dtype of hidden [T, width]."""
        local = head_op.logits(hidden, self.weight)
        return self.world.all_gather(local, dim=-1) if self.gather is None else self.gather(local)

    def load(self, loader: WeightLoader, name: str) -> None:
        """``name``: "head.weight" and the like."""
        loader.tensor(self.weight, name, self.ids)

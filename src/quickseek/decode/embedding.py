"""The embedding of a step: a full copy of the table on every rank where that applies (spec/decode.md D)."""

from dataclasses import dataclass

from torch import Tensor

from quickseek.model.vocabulary import VocabParallelEmbedding
from quickseek.ops.embedding import ReplicatedEmbedding
from quickseek.parallel.world import World


@dataclass(frozen=True)
class Shard:
    """A ``VocabParallelEmbedding`` as the replica reads it: rows [start, end) of the vocabulary in ``weight``."""

    weight: Tensor
    start: int
    end: int
    vocab_size: int
    world: World
    reduce_results: bool = True


def replicate(embed: VocabParallelEmbedding, vocab_size: int, hc_mult: int) -> ReplicatedEmbedding | None:
    """The replica of a table, or None where the look-up of the backbone is as good or the only one. Collective."""
    shard = Shard(embed.weight, embed.ids.start, embed.ids.stop, vocab_size, embed.world)
    return ReplicatedEmbedding.create(shard, hc_mult, embed.world)

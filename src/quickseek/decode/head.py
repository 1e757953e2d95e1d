"""Logits of a step: the ranks' shards in one Lamport all-gather (spec/decode.md C, I)."""

import torch
from torch import Tensor

from quickseek.ops.collectives import LamportAllGather
from quickseek.parallel.fabric import Fabric
from quickseek.parallel.world import World

WORD_DTYPES = (torch.float32, torch.bfloat16)
"""In these a 32-bit word of 0x80000000 holds zeros, so that it may arrive as 0; in float64 it may be half a number."""


class LogitsGather:
    """Gathers shards [m, V / ranks] of ``width`` columns to [m, V]; up to ``max_rows`` rows by ``LamportAllGather``.

    Others take the gather of the world. The choice reads shape and dtype alone, so that ranks agree. Construction and
    calls are collective; ranks fail as one (``World.as_one``).
    """

    def __init__(self, width: int, max_rows: int, world: World, fabric: Fabric | None = None) -> None:
        self.world, self.fused = world, 0
        capacity = -(-max_rows * width * 4 // 16) * 16
        self.gather = LamportAllGather(rank_capacity_bytes=capacity, device=world.device, world=world, fabric=fabric)

    def __call__(self, local: Tensor) -> Tensor:
        """[m, V] of this rank's local [m, V / ranks], ranks ascending."""
        with self.world.as_one("the gather of logits"):
            if local.dtype not in WORD_DTYPES or not self.gather.accepts(local):
                return self.world.all_gather(local, dim=-1)
            self.fused += 1
            gathered = self.gather(local).unflatten(0, (self.gather.world_size, local.shape[0]))
            return gathered.movedim(0, -2).flatten(-2)

"""The all-gather and the replicated embedding between two GPUs."""

import os
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quickseek.ops.collectives import LamportAllGather
from quickseek.ops.embedding import ReplicatedEmbedding
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import World

pytestmark = [pytest.mark.gpu2, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

CALLS = int(os.environ.get("QUICKSEEK_CALLS", "1000"))
HIDDEN, STREAMS, VOCABULARY = 5120, 4, 1000
EMPTY = -(2**31)


def gathers(world: World) -> tuple[int, int]:
    """Wrong words of calls of changing size, and of one whose expectation is off by one word."""
    gather = LamportAllGather(rank_capacity_bytes=1 << 20, device=world.device, world=world)
    wrong = torch.zeros((), dtype=torch.int64, device=world.device)
    chooser = random.Random(3)
    for _ in range(CALLS):
        packs = chooser.choice((1, 2, 64, 2048, 20000))
        parts = [torch.arange(packs * 4, dtype=torch.int32, device="cuda") * (rank + 3) + EMPTY for rank in range(2)]
        expected = torch.cat(parts).masked_fill(torch.cat(parts) == EMPTY, 0)
        found = gather(parts[world.rank])
        wrong += (found != expected).sum()
    expected[5] ^= 1
    torch.cuda.synchronize()
    return int(wrong), int((found != expected).sum())


def test_gathers_of_changing_size_are_right() -> None:
    assert spawn(gathers, 2, device="cuda", timeout_s=90) == [(0, 1), (0, 1)]


@dataclass
class Shard:
    """Rows [start, end) of an embedding layer."""

    weight: Tensor
    start: int
    end: int
    world: World
    vocab_size: int = VOCABULARY
    reduce_results: bool = True


def same(found: tuple[Tensor, Tensor], table: Tensor, ids: Tensor) -> bool:
    rows = table[ids.long()]
    return torch.equal(found[0], rows) and torch.equal(found[1], rows[:, None].expand(-1, STREAMS, -1))


def replicate(world: World) -> dict[str, object]:
    generator = torch.Generator("cuda").manual_seed(3)
    whole = torch.randn(VOCABULARY, HIDDEN, generator=generator, device=world.device).bfloat16()
    start, end = ((0, 600), (600, VOCABULARY))[world.rank]
    shard = Shard(whole[start:end].clone(), start, end, world)
    replica = ReplicatedEmbedding.create(shard, STREAMS, world)
    assert replica is not None
    report: dict[str, object] = {}
    ids = torch.tensor([0, 599, 600, 999, 7], dtype=torch.int32, device=world.device)
    report["eager"] = same(replica(ids), whole, ids)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = replica(ids)
    ids.copy_(ids.flip(0))
    graph.replay()
    report["replayed"] = same(captured, whole, ids)
    # The negative control of both comparisons: a shard that has changed shows only after a refresh.
    shard.weight.mul_(-2)
    report["stale"] = same(replica(ids), whole * -2, ids)
    replica.refresh()
    graph.replay()
    report["refreshed"] = same(captured, whole * -2, ids)
    shard.end -= world.rank
    try:
        replica.refresh()
    except RuntimeError as error:
        report["hole"] = str(error)
    return report


def test_each_gpu_looks_up_in_a_whole_copy_of_the_sharded_table() -> None:
    first, second = spawn(replicate, 2, device="cuda", timeout_s=90)
    assert first == second
    assert first["eager"] and first["replayed"] and first["refreshed"] and not first["stale"]
    assert "do not tile a vocabulary of 1000" in str(first["hole"])

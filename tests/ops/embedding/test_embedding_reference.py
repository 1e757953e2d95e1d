"""The replicated embedding on a CPU: equal to the sharded sum, from shards that tile the vocabulary."""

from types import SimpleNamespace

import pytest
import torch

from quickseek.errors import RankDisagreement
from quickseek.ops.embedding import ReplicatedEmbedding, embed_streams
from quickseek.parallel.launch import spawn
from quickseek.parallel.virtual import run_virtual
from quickseek.parallel.world import SoloWorld, World

VOCABULARY, HIDDEN, STREAMS = 10, 16, 4
IDS = torch.tensor([0, 9, 4, 4, -1, 10], dtype=torch.int32)


def table(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def shard(world: World, ends: tuple[int, ...], seed: int = 0) -> SimpleNamespace:
    """Rank r holds the rows up to ends[r], padded by one row of rubbish."""
    start, end = (0, *ends)[world.rank], ends[world.rank]
    weight = torch.cat((table(seed)[start:end], torch.full((1, HIDDEN), 7.0).bfloat16()))
    return SimpleNamespace(weight=weight, start=start, end=end, vocab_size=VOCABULARY, reduce_results=True, world=world)


def replicate(world: World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    embed = shard(world, (4, 4, 10))
    replica = ReplicatedEmbedding.create(embed, STREAMS, world)
    assert replica is not None and replica.accepts(IDS)
    before, streams = replica(IDS)
    local = IDS - embed.start
    known = (local >= 0) & (local < embed.end - embed.start)
    sharded = torch.where(known[:, None], embed.weight[local.clamp(0, len(embed.weight) - 1).long()], 0)
    embed.weight[: embed.end - embed.start] = table(1)[embed.start : embed.end]
    replica.refresh()
    return before, streams, world.all_reduce(sharded), replica(IDS)[0]


def hole(world: World) -> str:
    try:
        ReplicatedEmbedding.create(shard(world, (4, 9)), STREAMS, world)
    except RuntimeError as error:
        return str(error)
    return "not noticed"


def test_a_lookup_equals_the_summed_shards_and_follows_a_weight_update():
    for before, streams, summed, after in spawn(replicate, 3):
        assert torch.equal(before, summed)
        assert torch.equal(before[:3], table()[[0, 9, 4]]) and before[4:].count_nonzero() == 0
        assert torch.equal(streams, before[:, None].expand(-1, STREAMS, -1))
        assert torch.equal(after[:3], table(1)[[0, 9, 4]]) and not torch.equal(after, before)


def test_shards_that_leave_a_hole_are_the_same_error_on_all_ranks():
    told = spawn(hole, 2)
    assert told[0] == told[1] == "embedding shards [(0, 4), (4, 9)] do not tile a vocabulary of 10"


def short(world: World) -> str:
    """Rank 1 holds a single row of the six that it claims."""
    embed = shard(world, (4, 10))
    embed.weight = embed.weight[: 1 if world.rank else None]
    try:
        ReplicatedEmbedding.create(embed, STREAMS, world)
    except RuntimeError as error:
        return str(error)
    return "not noticed"


def test_a_shard_with_fewer_rows_than_it_claims_is_the_same_error_on_all_ranks() -> None:
    told = spawn(short, 2)
    assert told[0] == told[1] == "embedding shards [(0, 4), (4, 5)] do not tile a vocabulary of 10"


def other_opinion(world: World) -> list[str]:
    """What ranks make of tables of which rank 1's is not plain, is wider, or has another vocabulary."""
    told = []
    for change in (
        {"weight": torch.zeros(7, HIDDEN)},
        {"num_added_embeddings": 1},
        {"weight": torch.zeros(7, 2 * HIDDEN).bfloat16()},
        {"vocab_size": 11},
        {},
    ):
        embed = SimpleNamespace(**{**vars(shard(world, (4, 10))), **(change if world.rank else {})})
        try:
            told.append(type(ReplicatedEmbedding.create(embed, STREAMS, world)).__name__)
        except RankDisagreement as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("run", [spawn, run_virtual])
def test_a_table_that_one_rank_cannot_replicate_has_no_replica_and_widths_that_differ_are_an_error(run) -> None:
    first, second = run(other_opinion, 2)
    assert first == second
    assert first[:2] == ["NoneType"] * 2 and first[4] == "ReplicatedEmbedding"
    assert "width (rank 0: 16; rank 1: 32)" in first[2] and "vocabulary (rank 0: 10; rank 1: 11)" in first[3]


@pytest.mark.parametrize(
    "change",
    [
        {"reduce_results": False},
        {"weight": table().float()},
        {"weight": table()[:, :12].contiguous()},
        {"weight": table().T},
        {"num_added_embeddings": 1},
    ],
)
def test_anything_but_the_plain_sharded_lookup_gets_no_replica(change):
    class TwoRanks(SoloWorld):
        size = 2

        def __init__(self) -> None:
            self.rank, self.device = 0, torch.device("cpu")

    world = TwoRanks()
    embed = SimpleNamespace(**{**vars(shard(world, (10, 10))), **change})
    assert ReplicatedEmbedding.create(embed, STREAMS, world) is None
    assert ReplicatedEmbedding.create(shard(SoloWorld(), (10,)), STREAMS, SoloWorld()) is None


def test_no_ids_is_a_no_op_and_a_wrong_buffer_is_named():
    full, none = table(), IDS[:0]
    embed_streams(none, full, torch.empty(0, HIDDEN).bfloat16(), torch.empty(0, STREAMS, HIDDEN).bfloat16())
    with pytest.raises(ValueError, match=r"streams .*\[6, hc, 16\]"):
        embed_streams(IDS, full, torch.empty(6, HIDDEN).bfloat16(), torch.empty(5, STREAMS, HIDDEN).bfloat16())

"""The all-gather and the embedding on a GPU, ranks on one GPU."""

import pytest
import torch

from quickseek.errors import CollectiveTimeout
from quickseek.ops.collectives import LamportAllGather
from quickseek.ops.embedding import embed_streams
from quickseek.parallel.fabric import VirtualFabric

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EMPTY = -(2**31)


def make_gathers(ranks: int, capacity: int, *, replay: bool = False, timeout_s: float = 5.0) -> list[LamportAllGather]:
    fabrics = VirtualFabric.ranks(ranks, torch.device("cuda", 0), replay_multicast=replay)
    return [
        LamportAllGather(rank_capacity_bytes=capacity, device=fabric.device, fabric=fabric, timeout_s=timeout_s)
        for fabric in fabrics
    ]


def gather_all(gathers: list[LamportAllGather], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    side = [torch.cuda.Stream() for _ in gathers]
    torch.cuda.synchronize()
    results = []
    for gather, part, stream in zip(gathers, parts, side, strict=True):
        with torch.cuda.stream(stream):
            results.append(gather(part))
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("replay", [False, True], ids=["unicast", "multicast addressing"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_gets_everything_in_rank_order(ranks: int, replay: bool) -> None:
    gathers = make_gathers(ranks, 1 << 20, replay=replay)
    for turn, words in enumerate((4, 8, 1024, 8192, 40000, 8192, 4)):
        parts = [
            torch.randint(-(2**31), 2**31 - 1, (words // 4, 4), dtype=torch.int32, device="cuda") for _ in range(ranks)
        ]
        for part in parts:
            part.view(-1)[turn % 4 :: 5] = EMPTY
        expected = torch.cat(parts).masked_fill(torch.cat(parts) == EMPTY, 0)
        results = gather_all(gathers, parts)
        gathers[0]._gather.watchdog.check()
        assert all(torch.equal(result, expected) for result in results)
        wrong = expected.clone()
        wrong[0, 0] += 1
        assert not torch.equal(results[0], wrong)


def test_a_missing_rank_is_named_and_reset_restores_the_gather() -> None:
    gathers = make_gathers(2, 64, timeout_s=0.2)
    part = torch.arange(16, dtype=torch.int32, device="cuda")
    gathers[0](part)
    torch.cuda.synchronize()
    with pytest.raises(CollectiveTimeout) as caught:
        gathers[0](part)
    assert caught.value.kind == "all_gather" and caught.value.missing == (1,)
    for gather in gathers:
        gather.reset()
    results = gather_all(gathers, [part, part + 16])
    assert torch.equal(results[1], torch.arange(32, dtype=torch.int32, device="cuda"))


def test_inputs_of_any_layout_and_dtype_are_taken_but_sizes_are_checked() -> None:
    gathers = make_gathers(2, 4096)
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    views = [x[:, ::2], x.view(-1)[1:257].view(8, 32)]
    results = gather_all(gathers, views)
    assert torch.equal(results[0], torch.cat(views))
    for size in (0, 12, 4112):
        bad = torch.zeros(size, dtype=torch.uint8, device="cuda")
        assert not gathers[0].accepts(bad)
        with pytest.raises(ValueError, match="multiple of 16"):
            gathers[0](bad)


@pytest.mark.parametrize(("hidden", "streams"), [(5120, 4), (1024, 1), (72, 3)])
def test_lookup_writes_the_embedding_and_every_stream(hidden: int, streams: int) -> None:
    table = torch.randn(1000, hidden, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 7, 48, 3000):
        ids = torch.randint(-3, 1004, (rows,), dtype=torch.int32, device="cuda")
        ids[-1], ids[0] = -1, 5
        embedding = torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16, device="cuda")
        copies = torch.full((rows, streams, hidden), torch.nan, dtype=torch.bfloat16, device="cuda")
        embed_streams(ids, table, embedding, copies)
        known = (ids >= 0) & (ids < 1000)
        expected = torch.where(known[:, None], table[ids.clamp(0, 999).long()], 0.0)
        assert torch.equal(embedding, expected.to(torch.bfloat16))
        assert torch.equal(copies, expected.to(torch.bfloat16)[:, None].expand_as(copies))
        assert not torch.equal(copies, copies.roll(1, -1))


def test_no_ids_is_no_launch() -> None:
    table = torch.randn(10, 64, device="cuda", dtype=torch.bfloat16)
    embed_streams(
        torch.empty(0, dtype=torch.int32, device="cuda"), table, table.new_empty(0, 64), table.new_empty(0, 4, 64)
    )

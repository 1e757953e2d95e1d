"""Side streams, the gather of logits, the replicated embedding, the prefetch of the n-gram memory, refresh."""

from typing import Any

import pytest
import torch
from decode_runs import build
from torch import Tensor

from compare import assert_bits, assert_float64
from model_helpers import FLOAT64, Driver, config_of, differs, forward, prompt
from quickseek.config import DecodeConfig
from quickseek.decode.embedding import replicate
from quickseek.decode.executor import SpecializedDecode
from quickseek.decode.head import LogitsGather
from quickseek.decode.streams import SideStream, SideStreams
from quickseek.engine.graphs import EagerGraphs
from quickseek.model.vocabulary import VocabParallelEmbedding, VocabParallelHead
from quickseek.numerics import Numerics
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import World

CPU = torch.device("cpu")


def test_a_fork_is_open_until_it_is_joined_however_it_ends():
    stream = SideStream("side", CPU)
    with pytest.raises(KeyError), stream.fork():
        raise KeyError
    assert stream.open
    stream.join()
    stream.join()
    assert (stream.open, stream.forks, stream.joins) == (False, 1, 1)


def test_an_inactive_fork_leaves_nothing_to_join():
    stream = SideStream("side", CPU)
    with stream.fork(False):
        pass
    assert (stream.open, stream.forks) == (False, 0)


def test_streams_name_what_is_open_and_join_all_of_it():
    streams = SideStreams(CPU)
    with streams.engram.fork(), streams.inputs.fork():
        pass
    assert streams.open == ["inputs", "engram"]
    streams.join()
    assert streams.open == []


# ---------------------------------------------------------------------------------------------- several ranks


def ends(world: World) -> dict[str, Any]:
    """Embedding and logits of one rank, in the stock way and in that of the executor."""
    torch.set_num_threads(1)
    config = config_of("tiny-tp")
    seen: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    for name, numerics in (("bf16", Numerics.trained()), ("float64", FLOAT64), ("float32", Numerics.exact())):
        embed = VocabParallelEmbedding(config, numerics, world)
        embed.weight.copy_(table[embed.ids])
        replica = replicate(embed, config.vocab_size, config.hc_mult)
        ids = torch.tensor([0, 511, 256, 255, 9])
        seen[f"replica {name}"] = None if replica is None else replica(ids.to(torch.int32))
        seen[f"rows {name}"] = embed(ids)
        if replica is not None:
            embed.weight.mul_(2)
            seen["stale"] = replica(ids.to(torch.int32))[0]
            replica.refresh()
            seen["fresh"] = replica(ids.to(torch.int32))[0]
            embed.weight.div_(2)
        head = VocabParallelHead(config, config.hidden_size, numerics, world)
        head.weight.copy_(table[head.ids])
        for rows in (1, 16, 17):
            hidden = torch.randn(rows, config.hidden_size, generator=generator, dtype=numerics.dtype)
            wanted = head(hidden)
            gather = LogitsGather(head.weight.shape[0], 16, world)
            head.gather = gather
            seen[f"logits {name} {rows}"] = (head(hidden), wanted, gather.fused)
            head.gather = None
    return seen


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return spawn(ends, 2)


def test_the_replica_gives_the_rows_of_the_sharded_table_and_their_copies(seen):
    for one in seen:
        rows, streams = one["replica bf16"]
        assert torch.equal(rows, one["rows bf16"])
        assert torch.equal(streams, rows.unsqueeze(1).expand(-1, 4, -1))
        # Only the plain BF16 table has a replica.
        assert one["replica float64"] is None and one["replica float32"] is None


def test_a_replica_is_stale_until_it_is_refreshed(seen):
    for one in seen:
        assert torch.equal(one["stale"], one["rows bf16"])
        assert torch.equal(one["fresh"], one["rows bf16"] * 2)


@pytest.mark.parametrize("rows", [1, 16, 17])
@pytest.mark.parametrize("name", ["bf16", "float32", "float64"])
def test_gathered_logits_are_those_of_the_stock_gather_and_float64_never_goes_through_words(seen, name, rows):
    for one in seen:
        found, wanted, fused = one[f"logits {name} {rows}"]
        assert_bits(found, wanted)
        assert fused == (name != "float64" and rows <= 16)
    # Negative control: the ranks' halves in the other order are not these logits.
    assert not torch.equal(found.roll(found.shape[1] // 2, 1), wanted)


# ---------------------------------------------------------------------------------------------- n-gram memory, weights


def step_of(driver: Driver, slot: int, recorded: bool) -> Tensor:
    context = driver.state.context([slot], [5])
    return forward(driver.model, prompt(5, 3), EagerGraphs().record(context) if recorded else context)[0]


def test_table_rows_are_read_and_projected_once_before_the_layers_up_to_the_limit_and_inline_beyond(monkeypatch):
    model = build(config_of("tiny"))
    order: list[str] = []
    for layer in (1, 3):
        engram = model.backbone.layers[layer].engram
        original = engram.gather
        monkeypatch.setattr(engram, "gather", lambda rows, o=original, n=layer: (order.append(f"read {n}"), o(rows))[1])
        engram.wkv.register_forward_hook(lambda *_, n=layer: order.append(f"project {n}"))
    model.backbone.layers[0].attn.wqa_wkv.register_forward_hook(lambda *_: order.append("layer 0"))
    driver = Driver(model, max_requests=4)
    slots = [driver.state.acquire() for _ in range(4)]
    driver.feed({slot: prompt(10) for slot in slots}, num_prefills=4)
    SpecializedDecode.for_target(model, DecodeConfig())
    for rows, wanted in (
        (4, ["read 1", "read 3", "project 1", "project 3", "layer 0"]),
        (5, ["read 1", "read 3", "layer 0", "project 1", "project 3"]),
    ):
        order.clear()
        context = EagerGraphs().record(driver.state.context(slots, [rows] * 4))
        forward(model, prompt(4 * rows), context)
        assert order == wanted, f"{4 * rows} rows"


def test_refresh_takes_over_weights_that_have_changed():
    model = build(config_of("tiny", engram_layer_ids=(), engram_num_embeddings=()))
    driver = Driver(model)
    slot = driver.state.acquire()
    driver.feed({slot: prompt(12)}, num_prefills=1)
    executor = SpecializedDecode.for_target(model, DecodeConfig())
    before = step_of(driver, slot, recorded=True)
    with torch.no_grad():
        model.backbone.layers[0].hc_attn.fn.mul_(1.5)
    stale = step_of(driver, slot, recorded=True)
    assert_float64(stale, before)
    summed = model.backbone.layers[0].hc_attn.broadcast_fn
    executor.refresh()
    # Graphs hold its address.
    assert model.backbone.layers[0].hc_attn.broadcast_fn is summed
    fresh = step_of(driver, slot, recorded=True)
    assert differs(fresh, before)
    assert_float64(fresh, step_of(driver, slot, recorded=False))


def test_refresh_refuses_weights_that_have_moved_and_names_them():
    model = build(config_of("tiny"))
    executor = SpecializedDecode.for_target(model, DecodeConfig())
    executor.refresh()
    engram, norm = model.backbone.layers[1].engram, model.draft.norm
    for owner, name, told in (
        (engram, "table", "backbone.layers.1.engram.table moved"),
        (norm, "weight", "draft.norm.weight moved"),
        (model.head, "weight", "head.weight moved"),
    ):
        kept = getattr(owner, name)
        moved = kept.clone()
        setattr(owner, name, torch.nn.Parameter(moved, requires_grad=False) if name == "weight" else moved)
        summed = model.backbone.layers[0].hc_attn.broadcast_fn.clone()
        model.backbone.layers[0].hc_attn.fn.data.mul_(1.5)
        with pytest.raises(RuntimeError, match=f"changed in place, .*: {told}"):
            executor.refresh()
        assert torch.equal(model.backbone.layers[0].hc_attn.broadcast_fn, summed), "refused, and yet half done"
        setattr(owner, name, kept)
    executor.refresh()

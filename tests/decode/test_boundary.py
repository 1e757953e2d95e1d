"""Boundaries against the stock operations, quantised copies, publish marks, side streams and auxiliary means."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_runs import build
from torch import Tensor

from compare import assert_bits, assert_float64
from model_helpers import Driver, config_of, differs, forward, prompt
from quickseek.config import DecodeConfig
from quickseek.decode.boundary import Boundaries, BoundaryAllReduce, BoundaryState, MoEOutput
from quickseek.decode.executor import SpecializedDecode
from quickseek.decode.gates import GATES, gates_of
from quickseek.decode.streams import SideStream
from quickseek.engine.graphs import EagerGraphs
from quickseek.model.layer import Layer
from quickseek.ops import mhc
from quickseek.ops import moe as moe_op
from quickseek.ops.collectives import AllReduceMHC
from quickseek.ops.mhc import Mixes
from quickseek.ops.quantize import quantize_a8, swizzle_scales
from quickseek.parallel.world import SoloWorld

ROWS = 5
RATIOS = (0, 0, 2, 2, 1, 1, 1, 1)
STEP = gates_of(ROWS, GATES["cpu"])


@pytest.fixture(scope="module")
def layer() -> Layer:
    found = build(config_of("tiny")).backbone.layers[2]
    assert isinstance(found, Layer)
    return found


def boundaries(config: Any, quantize: bool = False) -> Boundaries:
    collective = AllReduceMHC(
        hidden_size=config.hidden_size,
        hc_mult=config.hc_mult,
        max_num_tokens=16,
        top_k=config.num_experts_per_tok,
        device="cpu",
        residual_only=True,
        quantize_layer_input=quantize,
        world=SoloWorld(),
    )
    return Boundaries(BoundaryAllReduce(collective), SideStream("mhc", torch.device("cpu")))


def state_of(config: Any, pending: Any = None) -> BoundaryState:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.25

    n, hidden = config.hc_mult, config.hidden_size
    state = BoundaryState(random(ROWS, n, hidden), random(ROWS, n), random(ROWS, n, n), random(ROWS, n))
    return state.after(random(ROWS, hidden) if pending is None else pending)


def stock(layer: Layer, state: BoundaryState, partial: Tensor, ffn: bool) -> tuple[Tensor, Tensor, Mixes]:
    """Streams, next input and next mixes as the stock layer computes them."""
    streams = mhc.post(state.residual, partial, Mixes(state.pre, state.post, state.comb))
    norm, hyper = (layer.ffn_norm, layer.hc_ffn) if ffn else (layer.attn_norm, layer.hc_attn)
    return streams, norm(mhc.collapse(streams, state.pre)), hyper(streams)


@pytest.mark.parametrize("ffn", [True, False])
def test_a_boundary_gives_the_streams_input_and_mixes_of_the_stock_layer(layer, ffn):
    bound, state = boundaries(layer.hc_attn.config), state_of(layer.hc_attn.config)
    new, layer_input, copy, mean = bound.sublayer(layer, ffn, state, STEP, capture_aux=True)
    streams, wanted, mixes = stock(layer, state, state.pending, ffn)
    assert copy is None and mean is not None
    for ours, theirs in (
        (new.residual, streams),
        (layer_input, wanted),
        (new.pre, mixes.pre),
        (new.post, mixes.post),
        (new.comb, mixes.comb),
        (mean, mhc.stream_mean(streams)),
        (bound.post_only(state), streams),
    ):
        assert_float64(ours, theirs)
    # Negative control: the coefficients of the other sublayer are others.
    assert differs(new.post, (layer.hc_attn if ffn else layer.hc_ffn)(streams).post)


def test_an_unsummed_moe_output_gives_what_its_sum_gives(layer):
    config = layer.hc_attn.config
    x = state_of(config).pending
    routed, shared = layer.ffn.parts(x, None)
    bound, state = boundaries(config), state_of(config)
    deferred = bound.sublayer(layer, False, state.after(MoEOutput(routed, shared)), STEP)
    summed = bound.sublayer(layer, False, state.after(moe_op.finalize(routed, shared)), STEP)
    assert_float64(deferred[1], summed[1])
    assert_float64(bound.post_only(state.after(MoEOutput(routed, shared))), summed[0].residual)
    swapped = replace(routed, weights=routed.weights.flip(1))
    assert differs(bound.sublayer(layer, False, state.after(MoEOutput(swapped, shared)), STEP)[1], summed[1])


def test_the_quantised_copy_is_the_layer_input_by_a8(layer):
    bound, state = boundaries(layer.hc_attn.config, quantize=True), state_of(layer.hc_attn.config)
    _, layer_input, copy, _ = bound.sublayer(layer, True, state, STEP, quantize=True)
    assert copy is not None
    codes, scales = quantize_a8(layer_input)
    assert_bits(copy[0].view(torch.uint8), codes.view(torch.uint8))
    assert_bits(copy[1], swizzle_scales(scales))
    other, _ = quantize_a8(layer_input * 1.3)
    assert not torch.equal(copy[0].view(torch.uint8), other.view(torch.uint8))


def test_forked_coefficients_are_open_until_the_join(layer):
    config = layer.hc_attn.config
    bound = boundaries(config)
    bound.sublayer(layer, True, state_of(config), STEP)
    assert bound.side.open and (bound.side.forks, bound.side.joins) == (1, 0)
    bound.join(STEP)
    assert not bound.side.open and bound.side.joins == 1
    bound.sublayer(layer, True, state_of(config), replace(STEP, side_stream=False))
    assert not bound.side.open and bound.side.forks == 1


class MarkedCollective:
    """An AllReduceMHC as far as marks go: records what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def mark_published(self, rows: int) -> None:
        self.calls.append(f"mark {rows}")

    def drop_mark(self) -> None:
        self.calls.append("drop")

    def collect(self, *carried: Any) -> tuple[Tensor, None]:
        self.calls.append("collect")
        return carried[0], None


def test_a_published_contribution_is_collected_once_and_nothing_else_may_come_between(layer):
    state = state_of(layer.hc_attn.config)
    collective = MarkedCollective()
    reduce = BoundaryAllReduce(collective)  # type: ignore[arg-type]
    reduce.mark_published(state.pending)
    with pytest.raises(RuntimeError, match="a published contribution is still unreduced"):
        reduce.mark_published(state.pending)
    with pytest.raises(RuntimeError, match="still unreduced: this is another one"):
        reduce(state.pending.clone(), state)
    reduce(state.pending, state)
    assert collective.calls == [f"mark {ROWS}", "collect"]


def test_a_mark_that_an_aborted_step_left_is_dropped_at_the_next(layer):
    state = state_of(layer.hc_attn.config)
    collective = MarkedCollective()
    reduce = BoundaryAllReduce(collective)  # type: ignore[arg-type]
    reduce.reset()
    assert collective.calls == []
    reduce.mark_published(state.pending)
    reduce.reset()
    reduce.mark_published(state.pending)
    assert collective.calls == [f"mark {ROWS}", "drop", f"mark {ROWS}"]


def test_publishing_on_a_cpu_is_refused_by_name(layer):
    reduce = boundaries(layer.hc_attn.config).all_reduce
    with pytest.raises(NotImplementedError, match=r"AllReduceMHC.* on a CPU"):
        reduce.publish_target(4)


# ---------------------------------------------------------------------------------------------- auxiliary states


@pytest.mark.parametrize("layers", [(0, 1, 2, 3, 7, 8), (8, 3), (1,)])
@pytest.mark.parametrize("engram_layers", [(1, 3), (0, 3)])
def test_auxiliary_states_of_any_layer_and_of_the_end_are_those_of_the_stock_model(layers, engram_layers):
    drafter_off = {"num_nextn_predict_layers": 0, "dspark_target_layer_ids": (), "compress_ratios": RATIOS}
    model = build(config_of("tiny", engram_layer_ids=engram_layers, **drafter_off))
    model.backbone.aux_hidden_state_layers = layers
    driver = Driver(model)
    slot = driver.state.acquire()
    driver.feed({slot: prompt(12)}, num_prefills=1)
    context = driver.state.context([slot], [5])
    wanted = forward(model, prompt(5, 3), context)
    executor = SpecializedDecode.for_target(model, DecodeConfig())
    found = forward(model, prompt(5, 3), EagerGraphs().record(context))
    assert executor.runs == 1 and len(found[1]) == len(layers)
    assert_float64(found[0], wanted[0])
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        assert_float64(ours, theirs)
    # Negative control: an Engram layer's state is that after its injection, so the order of states matters.
    if len(layers) > 1:
        assert differs(found[1][0], wanted[1][1])


# ---------------------------------------------------------------------------------------------- a whole step


def reductions(monkeypatch: pytest.MonkeyPatch, off: tuple[str, ...] = ()) -> dict[str, int]:
    """What one decode step of tiny (8 layers, Engram at 1 and 3) reduces, by kind, and sums outside the boundaries."""
    model = build(config_of("tiny"))
    driver = Driver(model)
    slot = driver.state.acquire()
    driver.feed({slot: prompt(12)}, num_prefills=1)
    SpecializedDecode.for_target(model, DecodeConfig(off=off))
    counts = dict.fromkeys(("plain", "plain only", "finalize", "finalize only", "elsewhere"), 0)

    def counting(name: str, kind: str) -> None:
        original = getattr(AllReduceMHC, name)

        def call(self: Any, *args: Any) -> Any:
            # The pre-mix follows x or the four of a MoE output, and residual, post and comb.
            counts[f"{kind} only" if args[7 if kind == "finalize" else 4] is None else kind] += 1
            return original(self, *args)

        monkeypatch.setattr(AllReduceMHC, name, call)

    counting("__call__", "plain")
    counting("finalize", "finalize")
    embedded = type(model.world).all_reduce

    def all_reduce(self: Any, x: Tensor) -> Tensor:
        counts["elsewhere"] += 1
        return embedded(self, x)

    monkeypatch.setattr(type(model.world), "all_reduce", all_reduce)
    forward(model, prompt(5, 3), EagerGraphs().record(driver.state.context([slot], [5])))
    return counts


def test_a_step_reduces_twice_a_layer_inside_boundaries_and_sums_experts_there_at_every_layer(monkeypatch):
    # Without a layer input: before the Engram layers 1 and 3, and after the last. The one sum elsewhere embeds.
    wanted = {"plain": 8, "plain only": 0, "finalize": 5, "finalize only": 3, "elsewhere": 1}
    assert reductions(monkeypatch) == wanted


def test_with_the_deferred_sum_off_the_same_boundaries_take_sums(monkeypatch):
    wanted = {"plain": 13, "plain only": 3, "finalize": 0, "finalize only": 0, "elsewhere": 1}
    assert reductions(monkeypatch, off=("deferred_finalize",)) == wanted

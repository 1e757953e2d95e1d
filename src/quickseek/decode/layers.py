"""The layers of a step, one after the other: what the target and the drafter's stages have in common (A.5)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quickseek.decode.attention import AttentionStep, DraftAttentionStep
from quickseek.decode.boundary import Boundaries, BoundaryState, Quantised
from quickseek.decode.engram import EngramPrefetch
from quickseek.decode.gates import DecodeStep
from quickseek.decode.moe import MoEStep
from quickseek.model.engram import Engram
from quickseek.model.layer import Layer


@dataclass(frozen=True)
class LayerPlan:
    """What one layer's step needs."""

    layer_id: int
    layer: Layer
    attention: AttentionStep | DraftAttentionStep
    moe: MoEStep
    engram: Engram | None


@dataclass(frozen=True)
class Memory:
    """The n-gram memory of a step: what was looked up, and the mask bool [m] of rows that take none of it."""

    prefetch: EngramPrefetch
    mask: Tensor


def run_layers(
    plans: Sequence[LayerPlan],
    boundaries: Boundaries,
    step: DecodeStep,
    x: Tensor,
    shared: Any,
    *,
    streams: Tensor | None = None,
    memory: Memory | None = None,
    aux_layers: Collection[int] = (),
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Streams [m, hc, H] after the last layer, the pre-mix [m, hc] that collapses them, auxiliary means by layer.

    ``x`` [m, H] is the embedding, ``streams`` its copies where they exist already. A layer's mean is that of the
    streams that enter it, after its Engram injection, as in the stock model. Collective.
    """
    state: BoundaryState | None = None
    aux: dict[int, Tensor] = {}
    for plan in plans:
        wanted = plan.layer_id in aux_layers
        state, layer_input, quant, mean = _enter(plan, boundaries, state, step, x, streams, memory, wanted)
        if mean is not None:
            aux[plan.layer_id] = mean
        state = state.after(plan.attention.run(layer_input, quant, shared, step))
        boundaries.join(step)
        state, layer_input, _, _ = boundaries.sublayer(plan.layer, True, state, step)
        state = state.after(plan.moe.run(layer_input, shared.image_rows, step))
        boundaries.join(step)
    assert state is not None
    return boundaries.post_only(state), state.pre, aux


def _enter(
    plan: LayerPlan,
    boundaries: Boundaries,
    state: BoundaryState | None,
    step: DecodeStep,
    x: Tensor,
    streams: Tensor | None,
    memory: Memory | None,
    wanted: bool,
) -> tuple[BoundaryState, Tensor, Quantised | None, Tensor | None]:
    """How a layer's attention input comes to be: the first, after an injection, or over an ordinary boundary."""
    layer = plan.layer
    if plan.engram is None:
        if state is not None:
            return boundaries.sublayer(layer, False, state, step, capture_aux=wanted)
        state, layer_input = boundaries.first(layer, x, step, streams)
        return state, layer_input, None, boundaries.mean(state.residual, step) if wanted else None
    assert memory is not None
    if state is None:
        state = BoundaryState.initial(x, layer.hc_attn, streams)
    entering = state.residual if state.pending is None else boundaries.post_only(state)
    injected = memory.prefetch.forward(plan.engram, entering, memory.mask)
    state, layer_input = boundaries.pre(layer, injected, state, step)
    return state, layer_input, None, boundaries.mean(injected, step) if wanted else None

"""What happens between two sublayers, with the sum over ranks inside it (spec/decode.md 0.1, B.7.1, E)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quickseek.decode.gates import DecodeStep
from quickseek.decode.streams import SideStream
from quickseek.model.hyper_connections import HyperConnections
from quickseek.model.layer import Layer
from quickseek.ops import mhc
from quickseek.ops.collectives import AllReduceMHC, PublishTarget
from quickseek.ops.mhc import Mixes
from quickseek.ops.moe import UnfinalizedMoE
from quickseek.ops.quantize import mxfp8_scale_bytes

Quantised = tuple[Tensor, Tensor]
"""Values E4M3 [m, H] and swizzled scale bytes uint8 of a layer input."""


@dataclass(frozen=True)
class MoEOutput:
    """A rank's MoE output before its top-k reduction: the routed rows and the shared expert's share [m, H]."""

    routed: UnfinalizedMoE
    shared_output: Tensor


Pending = Tensor | MoEOutput


@dataclass(frozen=True)
class BoundaryState:
    """What crosses a sublayer: ``residual`` [m, hc, H]; ``post`` [m, hc] and ``comb`` [m, hc, hc] of the sublayer that
    makes ``pending`` (its output, partial over ranks); ``pre`` [m, hc] for the next collapse. Mixes are in the wide
    dtype, and may still be under way on the side stream until ``Boundaries.join``.
    """

    residual: Tensor
    post: Tensor
    comb: Tensor
    pre: Tensor
    pending: Pending | None = None

    @classmethod
    def initial(cls, x: Tensor, hyper: HyperConnections, streams: Tensor | None = None) -> "BoundaryState":
        """Before any boundary: copies of the embedding x [m, H], passed on as they are, the first one picked."""
        rows, copies = x.shape[0], hyper.config.hc_mult
        comb = torch.eye(copies, dtype=hyper.base.dtype, device=x.device).expand(rows, -1, -1)
        streams = x.unsqueeze(1).repeat(1, copies, 1) if streams is None else streams
        return cls(streams, torch.zeros_like(comb[:, 0]), comb, comb[:, 0])

    def after(self, pending: Pending) -> "BoundaryState":
        """The state once the sublayer has given its output."""
        return replace(self, pending=pending)


class BoundaryAllReduce:
    """An ``AllReduceMHC`` whose contribution a kernel before it may already have published (spec/decode.md B.7.1)."""

    def __init__(self, collective: AllReduceMHC) -> None:
        self.collective = collective
        self._published: Tensor | None = None

    def publish_target(self, rows: int) -> PublishTarget:
        """Where a kernel stores its partial output of ``rows`` rows itself; NotImplementedError on a CPU."""
        return self.collective.publish_target(rows)

    def mark_published(self, x: Tensor) -> None:
        """The kernel that publishes x [m, H] has been launched; the next call must reduce x."""
        if self._published is not None:
            raise RuntimeError("a published contribution is still unreduced")
        self.collective.mark_published(x.shape[0])
        self._published = x

    def reset(self) -> None:
        """Drop the mark that an aborted step left."""
        if self._published is not None:
            self._published = None
            self.collective.drop_mark()

    def __call__(
        self,
        pending: Pending,
        state: BoundaryState,
        pre: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        mxfp8_out: Quantised | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Reduce ``pending`` and carry it over the boundary of ``state``; see ``AllReduceMHC``. Collective."""
        carried = (state.residual, state.post, state.comb, pre, norm_weight, norm_eps, mxfp8_out)
        if self._published is not None:
            if pending is not self._published:
                raise RuntimeError("a published contribution is still unreduced: this is another one")
            self._published = None
            return self.collective.collect(*carried)
        if isinstance(pending, Tensor):
            return self.collective(pending, *carried)
        routed = pending.routed
        return self.collective.finalize(routed.rows, routed.weights, routed.index, pending.shared_output, *carried)


class Boundaries:
    """The boundaries of one stack of layers (the target's, or the draft's stages).

    A boundary reduces what is pending, spreads it over the streams and gives the next sublayer's input; the
    coefficients of the new streams are wanted one boundary later, so they may run beside the sublayer.
    """

    def __init__(self, all_reduce: BoundaryAllReduce, side: SideStream) -> None:
        self.all_reduce, self.side = all_reduce, side

    def first(
        self, layer: Layer, x: Tensor, step: DecodeStep, streams: Tensor | None = None
    ) -> tuple[BoundaryState, Tensor]:
        """The attention input of the first layer, x [m, H] the embedding: no reduction.

        ``streams`` [m, hc, H]: copies of x that exist already. All copies are equal, so the identity pre-mix picks x.
        """
        hyper = layer.hc_attn
        streams = BoundaryState.initial(x, hyper, streams).residual
        mixes = self._mixes(hyper, streams if hyper.broadcast_fn is None else x, step)
        layer_input: Tensor = layer.attn_norm(x)
        return BoundaryState(streams, mixes.post, mixes.comb, mixes.pre), layer_input

    def pre(
        self, layer: Layer, injected: Tensor, state: BoundaryState, step: DecodeStep
    ) -> tuple[BoundaryState, Tensor]:
        """The attention input of a layer whose streams [m, hc, H] took an Engram injection: no reduction.

        ``state``: that of the boundary before, whose pre-mix collapses the streams.
        """
        layer_input: Tensor = layer.attn_norm(mhc.collapse(injected, state.pre))
        mixes = self._mixes(layer.hc_attn, injected, step)
        return BoundaryState(injected, mixes.post, mixes.comb, mixes.pre), layer_input

    def sublayer(
        self,
        layer: Layer,
        is_ffn: bool,
        state: BoundaryState,
        step: DecodeStep,
        *,
        quantize: bool = False,
        capture_aux: bool = False,
    ) -> tuple[BoundaryState, Tensor, Quantised | None, Tensor | None]:
        """Reduce ``state.pending``: (state, input of the next sublayer [m, H], its MXFP8 copy, the streams' mean).

        ``quantize``: also make the MXFP8 copy. ``capture_aux``: also the mean over the new streams [m, H], which may
        be read after ``join`` only.
        """
        assert state.pending is not None
        hyper, norm = (layer.hc_ffn, layer.ffn_norm) if is_ffn else (layer.hc_attn, layer.attn_norm)
        copy = _quantised_like(state.residual) if quantize else None
        streams, layer_input = self.all_reduce(state.pending, state, state.pre, norm.weight, norm.eps, copy)
        assert layer_input is not None
        mixes = self._mixes(hyper, streams, step)
        mean = self.mean(streams, step) if capture_aux else None
        return BoundaryState(streams, mixes.post, mixes.comb, mixes.pre), layer_input, copy, mean

    def post_only(self, state: BoundaryState) -> Tensor:
        """Reduce ``state.pending`` into streams [m, hc, H] and stop there: before an Engram, after the last layer."""
        assert state.pending is not None
        return self.all_reduce(state.pending, state)[0]

    def mean(self, streams: Tensor, step: DecodeStep) -> Tensor:
        """The mean over streams [m, hc, H], to be read after ``join`` only."""
        with self.side.fork(step.side_stream):
            self.side.share(streams)
            return mhc.stream_mean(streams)

    def join(self, step: DecodeStep) -> None:
        """Wait for coefficients and means that run beside the sublayer."""
        if step.side_stream:
            self.side.join()

    def _mixes(self, hyper: HyperConnections, streams: Tensor, step: DecodeStep) -> Mixes:
        with self.side.fork(step.side_stream):
            self.side.share(streams)
            mixes: Mixes = hyper(streams)
        return mixes


def _quantised_like(residual: Tensor) -> Quantised:
    rows, _, hidden = residual.shape
    values = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=residual.device)
    scales = torch.empty(mxfp8_scale_bytes(rows, hidden), dtype=torch.uint8, device=residual.device)
    return values, scales

"""The attention sublayer of a step: the layer's own parts, side projections beside the rest (spec/decode.md F)."""

from typing import Any

from torch import Tensor

from quickseek.decode.boundary import Quantised
from quickseek.decode.gates import DecodeStep
from quickseek.decode.row_shard import RowShard
from quickseek.decode.streams import SideStream
from quickseek.model.attention import Attention, DraftAttention
from quickseek.model.context import StepShared


class AttentionStep:
    """Attention of one target layer.

    ``inputs``: where global rows are made beside the latents. ``late``: where the window is kept beside the output, to
    be joined by whoever joins the coefficients made there. ``row_shard``: how ranks divide its selections; None: they
    do not.
    """

    def __init__(
        self, attention: Attention, inputs: SideStream, late: SideStream, row_shard: RowShard | None = None
    ) -> None:
        self.attention, self.inputs, self.late, self.row_shard = attention, inputs, late, row_shard

    def run(self, x: Tensor, quant: Quantised | None, shared: StepShared, step: DecodeStep) -> Tensor:
        """This rank's share of the output [m, H] of the normalised input x [m, H].

        ``quant``: x as MXFP8, for projections that take it; those here read x.
        """
        attention, context = self.attention, step.context
        assert context is not None
        if quant is not None:
            raise NotImplementedError("AttentionStep: projections that read an MXFP8 copy of the input")
        with self.inputs.fork(step.overlap_inputs and attention.compressor is not None):
            self.inputs.share(x)
            attention.write_global(x, shared, context)
        latent, kv = attention.latents(x, shared.turns[attention.reads_global])
        # Index keys and global rows of this step are read by the scores and by attention itself.
        self.inputs.join()
        if step.row_shard and attention.indexer is not None:
            assert self.row_shard is not None
            shared.publish(self.row_shard.select(attention.indexer, x, latent, shared, context))
        else:
            attention.select(x, latent, shared, context)
        attended = attention.attended(latent, kv, shared, context)
        with self.late.fork(step.side_stream):
            self.late.share(kv)
            attention.keep_window(kv, shared, context)
        return attention.output(attended)


class DraftAttentionStep:
    """Attention of one draft stage: nothing runs beside it."""

    def __init__(self, attention: DraftAttention) -> None:
        self.attention = attention

    def run(self, x: Tensor, quant: Quantised | None, shared: Any, step: DecodeStep) -> Tensor:
        """This rank's share of the output [m, H] of block rows x [m, H]; ``shared``: the pass's ``BlockShared``."""
        if quant is not None:
            raise NotImplementedError("DraftAttentionStep: projections that read an MXFP8 copy of the input")
        out: Tensor = self.attention(x, shared, step.context)
        return out

"""The drafter's stages through boundaries of their own: other experts a token, so another collective."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from quickseek.decode.attention import DraftAttentionStep
from quickseek.decode.boundary import Boundaries
from quickseek.decode.gates import FUSED_MHC_MAX_ROWS, DecodeStep, captures_pure_decode, step_gates
from quickseek.decode.layers import LayerPlan, run_layers
from quickseek.decode.moe import MoEStep
from quickseek.model.attention import BlockShared, DraftAttention
from quickseek.model.context import ForwardContext
from quickseek.model.dspark import DraftHead
from quickseek.model.layer import Layer
from quickseek.ops import mhc

if TYPE_CHECKING:
    from quickseek.decode.executor import SpecializedDecode


@dataclass(frozen=True)
class DraftStep:
    """One pass over the stages; see ``DraftDecode.run``."""

    gates: DecodeStep
    draft: "DraftDecode"

    def run(self, x: Tensor, shared: BlockShared) -> Tensor:
        """Collapsed states [n, H] of the embeddings x [n, H] of anchors and noise rows."""
        return self.draft.run(self.gates, x, shared)


class DraftDecode:
    """What the executor is to the backbone, for the stages of a ``DraftHead``. ``runs`` counts its passes."""

    def __init__(self, executor: "SpecializedDecode", head: DraftHead) -> None:
        self.executor, self.runs = executor, 0
        self.stages = [stage for stage in head.stages if isinstance(stage, Layer)]
        streams = executor.streams
        self.boundaries = Boundaries(executor.boundary(head.config.dspark_num_experts_per_tok), streams.mhc)
        self.plans = []
        for stage in self.stages:
            assert isinstance(stage.attn, DraftAttention)
            attention, moe = DraftAttentionStep(stage.attn), MoEStep(stage.ffn, streams.shared_expert)
            self.plans.append(LayerPlan(stage.layer, stage, attention, moe, None))

    def plan(self, rows: int, *, context: ForwardContext) -> DraftStep | None:
        """The pass that runs ``rows`` block rows, or None for the stock stages; the rules of ``SpecializedDecode``."""
        if not 0 < rows <= min(FUSED_MHC_MAX_ROWS, self.executor.gates.draft):
            return None
        if not captures_pure_decode([stage.attn.prefix for stage in self.stages], context=context):
            return None
        return DraftStep(replace(step_gates(rows, self.executor), context=context), self)

    def run(self, step: DecodeStep, x: Tensor, shared: BlockShared) -> Tensor:
        """Collapsed states [n, H] after the last stage; side work is joined on every path, and ranks fail as one."""
        with self.executor.world.as_one("a draft pass of the specialized decode"):
            self.boundaries.all_reduce.reset()
            try:
                streams, pre, _ = run_layers(self.plans, self.boundaries, step, x, shared)
            finally:
                self.executor.streams.join()
            self.runs += 1
            return mhc.collapse(streams, pre)

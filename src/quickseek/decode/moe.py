"""The mixture-of-experts sublayer of a step: rows are handed to the boundary unsummed (spec/decode.md E.4, G)."""

from torch import Tensor

from quickseek.decode.boundary import MoEOutput, Pending
from quickseek.decode.gates import DecodeStep
from quickseek.decode.streams import SideStream
from quickseek.model.moe import MixtureOfExperts
from quickseek.ops import moe as moe_op


class MoEStep:
    """Experts of one layer or draft stage, the shared one beside the routed ones."""

    def __init__(self, ffn: MixtureOfExperts, side: SideStream) -> None:
        self.ffn, self.side = ffn, side

    def run(self, x: Tensor, image_rows: Tensor | None, step: DecodeStep) -> Pending:
        """The pending output of the normalised input x [m, H]; ``image_rows`` bool [m]: rows of image spans."""
        with self.side.fork(step.shared_expert):
            self.side.share(x)
            shared_output = self.ffn.shared_part(x)
        routed = self.ffn.routed_part(x, image_rows)
        self.side.join()
        if step.deferred_finalize:
            return MoEOutput(routed, shared_output)
        return moe_op.finalize(routed, shared_output)

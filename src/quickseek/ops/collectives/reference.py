"""The fused collectives in plain PyTorch over a ``World``: the definition of right (spec/decode.md 0.1, B, C).

Rounding points are those of spec/decode.md B.12: every tensor between steps has the activations' dtype, everything
within a step is in its wide dtype (FP32, or float64 for float64). In trained mode that is BF16 and FP32; in exact
mode the two are one and nothing rounds. The arithmetic is differentiable, the exchange between ranks is not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quickseek.errors import RankDisagreement
from quickseek.numerics import wide_dtype
from quickseek.ops.collectives.spec import AllReduceShape, Boundary, Result, Routed, require
from quickseek.ops.quantize import quantize_a8, swizzle_scales
from quickseek.parallel.fabric import Fabric
from quickseek.parallel.world import World

EMPTY_WORD = -(2**31)
"""The resting value of a 32-bit mailbox word, which no payload may hold (spec/decode.md C)."""


def sanitise(x: Tensor) -> Tensor:
    """x with every -0 made +0: -0 is the resting value of a mailbox (spec/decode.md B.3)."""
    return torch.where(x == 0, torch.zeros_like(x), x)


def sum_ranks(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """The sum of every rank's partial [M, H] as mailboxes deliver it: wide, ranks ascending from 0, one rounding."""
    wide = wide_dtype(parts[0].dtype)
    total = torch.zeros_like(parts[0], dtype=wide)
    for part in parts:
        total = total + sanitise(part).to(wide)
    return total.to(parts[0].dtype)


def finalize_routed(routed: Routed) -> Tensor:
    """This rank's MoE output [M, H]: wide, k ascending, the shared expert last, one rounding (spec/decode.md B.5)."""
    shared = routed.shared_output
    wide, rows = wide_dtype(shared.dtype), shared.shape[0]
    index = routed.expanded_idx_to_permuted_idx.reshape(rows, -1).long()
    weights = routed.expert_weights.reshape(rows, -1).to(wide)
    total = torch.zeros_like(shared, dtype=wide)
    # Without rows no expert of any token lives on this rank.
    for k in range(index.shape[1] if routed.gemm2_permuted.shape[0] else 0):
        here = (index[:, k] >= 0)[:, None]
        piece = routed.gemm2_permuted[index[:, k].clamp_min(0)].to(wide)
        # Chosen, not multiplied by zero: what stands in the row of an absent expert may be NaN.
        total = torch.where(here, total + piece * weights[:, k, None], total)
    return sanitise((total + shared.to(wide)).to(shared.dtype))


def mhc_boundary(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Result:
    """What follows the rank sum x [M, H]: mHC post, and with ``pre`` and ``norm_weight`` collapse and RMSNorm.

    residual [M, hc, H]; post and pre [M, hc], comb [M, hc, hc] (source, target), in the wide dtype; norm_weight [H].
    Returns (streams [M, hc, H], layer input [M, H] or None), in x's dtype. Sums run in the order of B.12.
    """
    rows, streams, hidden = residual.shape
    wide = wide_dtype(x.dtype)
    post, comb = post.reshape(rows, streams, 1).to(wide), comb.reshape(rows, streams, streams, 1).to(wide)
    spread = x.to(wide)[:, None] * post
    for source in range(streams):
        spread = spread + residual[:, source, None].to(wide) * comb[:, source]
    new = spread.to(x.dtype)
    if pre is None or norm_weight is None:
        return new, None
    pre = pre.reshape(rows, streams, 1).to(wide)
    collapsed = torch.zeros(rows, hidden, dtype=wide, device=x.device)
    for stream in range(streams):
        collapsed = collapsed + new[:, stream].to(wide) * pre[:, stream]
    rounded = collapsed.to(x.dtype).to(wide)
    inverse = torch.rsqrt(rounded.square().mean(-1, keepdim=True) + norm_eps)
    return new, (rounded * inverse * norm_weight.to(wide)).to(x.dtype)


def write_mxfp8(layer_input: Tensor, values: Tensor, scales: Tensor) -> None:
    """Fill values E4M3 [M, H] and the swizzled scale bytes from the rounded layer input, by A8 (equality.md 1.2).

    Scale bytes of rows that pad M to a multiple of 128 become 0.
    """
    codes, bytes_ = quantize_a8(layer_input)
    values.copy_(codes)
    scales.view(torch.uint8).view(-1).copy_(swizzle_scales(bytes_))


CALL_BYTES = 128


def check_call(world: World, kind: str, x: Tensor) -> None:
    """RankDisagreement, one text on all ranks, unless all are in a collective ``kind`` with x of one dtype and shape.

    Collective. Without it a backend aborts, or takes the bytes of one dtype for another.
    """
    if world.size == 1:
        return
    told = f"{kind} {x.dtype} {list(x.shape)}".encode()[:CALL_BYTES].ljust(CALL_BYTES)
    calls = world.all_gather(torch.frombuffer(bytearray(told), dtype=torch.uint8)[None])
    if not torch.equal(calls, calls[:1].expand_as(calls)):
        names = [bytes(call.tolist()).decode().rstrip() for call in calls]
        what = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise RankDisagreement(f"ranks make different calls: {what}")


def gather_words(x: Tensor, world: World) -> Tensor:
    """Every rank's x concatenated along dimension 0; 32-bit words equal to 0x80000000 become 0 (spec/decode.md C)."""
    flat = x.contiguous().view(-1).view(torch.uint8)
    # Bytes can be read as words only where they start at one.
    words = (flat.clone() if flat.storage_offset() % 4 else flat).view(torch.int32)
    words = torch.where(words == EMPTY_WORD, torch.zeros_like(words), words)
    gathered = world.all_gather(words).view(torch.uint8).view(x.dtype)
    return gathered.view(world.size * x.shape[0], *x.shape[1:])


class ReferenceAllReduceMHC:
    """``AllReduceMHC`` over a world: one all-gather of the partial sums, then the ordered sum and the boundary.

    Holds no mailbox, so nothing depends on earlier calls and there is no two-shot form.
    """

    def __init__(self, shape: AllReduceShape, world: World, fabric: Fabric | None) -> None:
        require(fabric is None, "on a CPU the ranks are those of world; fabric must be None")
        self.world = world
        self.bt_min_rows = self.bt_min_finalize_rows = shape.max_num_tokens + 1

    def all_reduce(self, x: Tensor, boundary: Boundary) -> Result:
        """The boundary after x [M, H] (TP-partial), summed over ranks. Collective."""
        return self._reduce("all-reduce", x, boundary)

    def _reduce(self, kind: str, x: Tensor, boundary: Boundary) -> Result:
        check_call(self.world, kind, x)
        total = sum_ranks(self.world.all_gather(x[None]))
        streams, layer_input = mhc_boundary(
            total,
            boundary.residual,
            boundary.post,
            boundary.comb,
            boundary.pre,
            boundary.norm_weight,
            boundary.norm_eps,
        )
        if boundary.mxfp8_out is not None and layer_input is not None:
            write_mxfp8(layer_input, *boundary.mxfp8_out)
        return streams, layer_input

    def finalize(self, routed: Routed, boundary: Boundary) -> Result:
        """The boundary after a MoE output, reduced over k here and then over ranks. Collective."""
        return self._reduce("finalize", finalize_routed(routed), boundary)

    def reset(self) -> None:
        """Wait for all ranks; there are no mailboxes to empty. Collective."""
        self.world.barrier()

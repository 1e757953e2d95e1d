"""Collectives of a decode step, fused with what follows them (spec/api.md "Fused collectives", spec/decode.md B, C).

On CUDA the kernels of this folder run over a ``Fabric``; on a CPU ``reference.py`` computes the same over a ``World``.
``reference.py`` provides ``ReferenceAllReduceMHC(shape, world, fabric)``, an ``Implementation`` of ``spec.py``, and
``gather_words(x, world)``.
"""

import torch
from torch import Tensor

from quickseek.ops.collectives.spec import (
    AllReduceShape,
    Boundary,
    Implementation,
    Phases,
    PublishTarget,
    Result,
    Routed,
    agree,
    check_boundary,
    check_gather,
    check_partial,
    check_routed,
    check_shape,
    require,
)
from quickseek.parallel.fabric import Fabric
from quickseek.parallel.world import World, default_world, together

__all__ = ["AllReduceMHC", "LamportAllGather", "PublishTarget"]

DEFAULT_TIMEOUT_S = 30.0
"""How long a collective waits for its peers; must exceed the worst skew between ranks (spec/decode.md L.6)."""


class AllReduceMHC:
    """All-reduce + mHC post + collapse + RMSNorm at a sublayer boundary (spec/decode.md 0.1 and B).

    Construction and calls are collective: every rank of ``fabric`` (CUDA; None: symmetric memory over ``world``) or
    ``world`` (CPU; None: the process default) makes them in the same order with equal shapes. All ranks get the same
    bits. ``hc_mult`` 1 with mixes of 1 is residual add + RMSNorm. ``quantize_layer_input`` (for ``mxfp8_out``) needs
    ``hidden_size`` a multiple of 256, else 8 is enough. ``two_shot_rows`` overrides the thresholds on
    CUDA: rows from which two-shot runs, above ``max_num_tokens`` for never.

    Raises ValueError before any launch for arguments that do not fit, RuntimeError at construction when peers cannot
    be mapped, ``CollectiveTimeout`` when a wait of an earlier call gave up after ``timeout_s``. ``timeout_s`` is that
    of GPUs: on a CPU the backend of ``world`` has its own limit. Ranks that build different collectives all raise
    ValueError; those whose calls differ in kind, dtype or shape raise RankDisagreement on a CPU (undefined on CUDA).
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        hc_mult: int,
        max_num_tokens: int,
        top_k: int,
        device: torch.device | str,
        quantize_layer_input: bool = False,
        residual_only: bool = False,
        world: World | None = None,
        fabric: Fabric | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        two_shot_rows: int | None = None,
    ) -> None:
        chosen = default_world() if world is None else world
        peers = chosen if fabric is None else fabric
        sizes = (hidden_size, hc_mult, max_num_tokens, top_k)
        options = (quantize_layer_input, residual_only, timeout_s, two_shot_rows)
        # Compared before they are checked: a rank that refused its own would leave the others waiting.
        described = (
            f"AllReduceMHC({hidden_size=}, {hc_mult=}, {max_num_tokens=}, {top_k=}, {quantize_layer_input=}, "
            f"{residual_only=}, {timeout_s=}, {two_shot_rows=}) on {_kind(device)}"
        )
        agree(peers, described)

        def checked() -> AllReduceShape:
            shape = AllReduceShape(*sizes, _device(device, fabric), *options)
            check_shape(shape, chosen, fabric)
            return shape

        self.shape = together(peers, "AllReduceMHC", checked)
        self.hidden_size, self.hc_mult, self.top_k = hidden_size, hc_mult, top_k
        self.capacity, self.quantize_layer_input, self.residual_only = (
            max_num_tokens,
            quantize_layer_input,
            residual_only,
        )
        self.implementation = _implementation(self.shape, chosen, fabric)

    @property
    def bt_min_rows(self) -> int:
        """Rows from which a plain call takes the two-shot protocol; capacity + 1 where it was not built."""
        return self.implementation.bt_min_rows

    @property
    def bt_min_finalize_rows(self) -> int:
        """Rows from which ``finalize`` takes the two-shot protocol; capacity + 1 where it was not built."""
        return self.implementation.bt_min_finalize_rows

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        pre: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        mxfp8_out: tuple[Tensor, Tensor] | None = None,
    ) -> Result:
        """Reduce x [M, H] (TP-partial) and carry it over the boundary.

        residual [M, hc, H]; post [M, hc(, 1)], comb [M, hc, hc] (source, target) and pre [M, hc] FP32; norm_weight [H].
        Returns (post-mixed streams [M, hc, H], normalised layer input [M, H]); without pre and norm_weight the second
        is None. ``mxfp8_out`` = (values [M, H] E4M3, ``mxfp8_scale_bytes(M, H)`` scale bytes) is filled by the A8 rule.
        """
        boundary = Boundary(residual, post, comb, pre, norm_weight, norm_eps, mxfp8_out)
        check_boundary(self.shape, check_partial(self.shape, x), x.dtype, boundary)
        return self.implementation.all_reduce(x, boundary)

    def finalize(
        self,
        gemm2_permuted: Tensor,
        expert_weights: Tensor,
        expanded_idx_to_permuted_idx: Tensor,
        shared_output: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        pre: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        mxfp8_out: tuple[Tensor, Tensor] | None = None,
    ) -> Result:
        """As ``__call__`` for x = sum_k weight_k * gemm2_permuted[idx_k] + shared_output, in FP32, rounded once.

        gemm2_permuted [rows, H] unweighted; expert_weights [M, top_k] FP32; expanded_idx_to_permuted_idx [M, top_k]
        int32, -1 for an expert of another rank; shared_output [M, H] TP-partial.
        """
        routed = Routed(gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx, shared_output)
        boundary = Boundary(residual, post, comb, pre, norm_weight, norm_eps, mxfp8_out)
        check_boundary(self.shape, check_routed(self.shape, routed), shared_output.dtype, boundary)
        return self.implementation.finalize(routed, boundary)

    # The phases of a call, for a process that plays several ranks of one GPU: every rank's ``publish`` (or
    # ``publish_finalize``), then every rank's ``sum_owned``, then every rank's ``collect``. A CPU has none of them.

    def publish(self, x: Tensor) -> None:
        """Send x [M, H] (TP-partial) to the peers; ``sum_owned`` and ``collect`` must follow on this rank.

        NotImplementedError on a CPU, as from every phase.
        """
        check_partial(self.shape, x)
        self._phases().publish(x)

    def publish_finalize(
        self,
        gemm2_permuted: Tensor,
        expert_weights: Tensor,
        expanded_idx_to_permuted_idx: Tensor,
        shared_output: Tensor,
    ) -> None:
        """Send the finalized MoE output (as in ``finalize``) to the peers; ``sum_owned`` and ``collect`` follow."""
        routed = Routed(gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx, shared_output)
        check_routed(self.shape, routed)
        self._phases().publish(shared_output, routed)

    def sum_owned(self) -> None:
        """In the two-shot form, sum the tokens that this rank owns, once a publish; nothing otherwise."""
        self._phases().sum_owned()

    def collect(
        self,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        pre: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        mxfp8_out: tuple[Tensor, Tensor] | None = None,
    ) -> Result:
        """Wait for every rank's published contribution and carry the sum over the boundary, as ``__call__``."""
        boundary = Boundary(residual, post, comb, pre, norm_weight, norm_eps, mxfp8_out)
        phases = self._phases()
        check_boundary(self.shape, phases.published_rows(), residual.dtype, boundary)
        return phases.collect(boundary)

    def publish_target(self, rows: int) -> PublishTarget:
        """Where a kernel stores x of ``rows`` rows itself, in place of ``publish``; one-shot row counts only.

        The kernel must have been launched on this rank before ``mark_published``; ``collect`` must follow.
        ValueError, from both, for row counts that are two-shot or none.
        """
        return self._phases().publish_target(rows)

    def mark_published(self, rows: int) -> None:
        """A kernel that publishes ``rows`` rows to ``publish_target`` has been launched."""
        self._phases().mark_published(rows)

    def drop_mark(self) -> None:
        """Forget a publish whose capture was aborted: nothing was executed, so the device is clean."""
        self._phases().drop_mark()

    def _phases(self) -> Phases:
        if not isinstance(self.implementation, Phases):
            raise NotImplementedError("AllReduceMHC has no mailboxes on a CPU: call it, or finalize")
        return self.implementation

    def reset(self) -> None:
        """Empty the mailboxes after a ``CollectiveTimeout`` or an aborted eager step; on a CPU, which has none, wait
        for all ranks. Collective."""
        self.implementation.reset()


class LamportAllGather:
    """Small all-gathers of a decode step in one kernel (spec/decode.md C). Construction and calls are collective.

    ``rank_capacity_bytes``: the largest x of a rank, a positive multiple of 16. One instance serves one stream order.
    At most 8 ranks. ``timeout_s``, and what ranks that differ raise, as of ``AllReduceMHC``.
    """

    def __init__(
        self,
        *,
        rank_capacity_bytes: int,
        device: torch.device | str,
        world: World | None = None,
        fabric: Fabric | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.world = default_world() if world is None else world
        peers = self.world if fabric is None else fabric
        # Compared before they are checked: a rank that refused its own would leave the others waiting.
        agree(peers, f"LamportAllGather({rank_capacity_bytes=}, {timeout_s=}) on {_kind(device)}")

        def checked() -> torch.device:
            check_gather(rank_capacity_bytes, timeout_s, peers.size)
            found = _device(device, fabric)
            require(
                found.type == "cuda" or fabric is None, "on a CPU the ranks are those of world; fabric must be None"
            )
            return found

        self.device = together(peers, "LamportAllGather", checked)
        self.world_size, self.rank_capacity_bytes = peers.size, rank_capacity_bytes
        self._gather = None
        if self.device.type == "cuda":
            from quickseek.ops.collectives.gather import FusedAllGather

            self._gather = FusedAllGather(
                rank_capacity_bytes, self.device, _fabric(self.world, fabric, self.device), timeout_s
            )

    def accepts(self, x: Tensor) -> bool:
        """Whether x has 1 to ``rank_capacity_bytes`` bytes, a multiple of 16: read from the size alone."""
        size = x.numel() * x.element_size()
        return 0 < size <= self.rank_capacity_bytes and size % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        """Every rank's x (equal shapes) concatenated along dimension 0 in rank order.

        32-bit words equal to 0x80000000 arrive as 0. Raises ValueError when x is not accepted or is elsewhere.
        """
        size = x.numel() * x.element_size()
        require(self.accepts(x), f"x of {size} bytes: 16 to {self.rank_capacity_bytes}, a multiple of 16")
        require(x.ndim > 0, "x has no dimension 0 to concatenate along")
        require(x.device == self.device, f"x is on {x.device}: {self.device}")
        if self._gather is not None:
            return self._gather(x)
        from quickseek.ops.collectives.reference import check_call, gather_words

        check_call(self.world, "all-gather", x)
        return gather_words(x, self.world)

    def reset(self) -> None:
        """Empty the mailboxes after a ``CollectiveTimeout``; a CPU has none and waits for all ranks. Collective."""
        if self._gather is not None:
            self._gather.reset()
        else:
            self.world.barrier()


def _kind(device: torch.device | str) -> str:
    """What ranks have in common of their devices: all but the index."""
    return str(device).partition(":")[0]


def _device(device: torch.device | str, fabric: Fabric | None) -> torch.device:
    """The device with its index, which must be the fabric's; a CPU has none."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu":
        device = torch.device("cpu")
    require(fabric is None or fabric.device == device, f"device {device} is not the fabric's")
    return device


def _implementation(shape: AllReduceShape, world: World, fabric: Fabric | None) -> Implementation:
    if shape.device.type == "cuda":
        from quickseek.ops.collectives.all_reduce import FusedAllReduceMHC

        return FusedAllReduceMHC(shape, _fabric(world, fabric, shape.device))
    from quickseek.ops.collectives.reference import ReferenceAllReduceMHC

    return ReferenceAllReduceMHC(shape, world, fabric)


def _fabric(world: World, fabric: Fabric | None, device: torch.device) -> Fabric:
    if fabric is not None:
        return fabric
    from quickseek.parallel.fabric import SymmetricFabric, VirtualFabric

    if world.size == 1:
        return VirtualFabric.ranks(1, device)[0]
    fabric = SymmetricFabric.of(world)
    require(fabric.device == device, f"device {device} is not the world's: {fabric.device}")
    return fabric

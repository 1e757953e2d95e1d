"""What a fused collective is asked to do, and the checks that come before any launch (spec/decode.md B.7)."""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quickseek.ops.quantize import mxfp8_scale_bytes
from quickseek.parallel.fabric import Fabric
from quickseek.parallel.watchdog import MAX_RANKS
from quickseek.parallel.world import Peers, World, same


@dataclass(frozen=True)
class AllReduceShape:
    """What is fixed when an ``AllReduceMHC`` is built; the arguments of its constructor."""

    hidden_size: int
    hc_mult: int
    max_num_tokens: int
    top_k: int
    device: torch.device
    quantize_layer_input: bool
    residual_only: bool
    timeout_s: float
    two_shot_rows: int | None = None


@dataclass(frozen=True)
class Boundary:
    """What happens to the reduced rows (spec/decode.md 0.1).

    ``residual`` [M, hc, H], ``post`` [M, hc] and ``comb`` [M, hc, hc] (source, target), ``pre`` [M, hc] and
    ``norm_weight`` [H] or both None (residual-only), ``mxfp8_out`` (values E4M3 [M, H], swizzled scale bytes) or None.
    """

    residual: Tensor
    post: Tensor
    comb: Tensor
    pre: Tensor | None
    norm_weight: Tensor | None
    norm_eps: float
    mxfp8_out: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Routed:
    """A MoE output before its top-k reduction (spec/decode.md B.5): rows [*, H], weights and indices [M, top_k]."""

    gemm2_permuted: Tensor
    expert_weights: Tensor
    expanded_idx_to_permuted_idx: Tensor
    shared_output: Tensor


MAX_TIMEOUT_S = 1e9
"""Seconds whose nanoseconds, added to a clock of the device, still fit 63 bits."""

QUANTIZED_MULTIPLE = 256
"""Values of a row that a warp holds: its lanes share the scales of the MXFP8 copy by shuffles that all must reach."""

Result = tuple[Tensor, Tensor | None]
"""Post-mixed streams [M, hc, H], and the normalised layer input [M, H] or None when residual-only."""


class Implementation(Protocol):
    """What the door needs of a device: built with (shape, world, fabric), arguments already validated."""

    bt_min_rows: int
    bt_min_finalize_rows: int

    def all_reduce(self, x: Tensor, boundary: Boundary) -> Result: ...

    def finalize(self, routed: Routed, boundary: Boundary) -> Result: ...

    def reset(self) -> None: ...


@dataclass(frozen=True)
class PublishTarget:
    """Addresses for a kernel that publishes its own result (spec/decode.md B.7.1), constant for an instance.

    It reads the generation g = state[0] after its grid wait, stores each 16-byte fragment f of row t, with halves of
    0x8000 made 0, at byte ``(((g * ranks + rank) * capacity + t) * hidden_size + 8 * f) * 2`` of every mailbox in
    ``table`` (int64 [ranks]; or once at ``multicast`` where that is not 0), and one thread sets state[1] = g.
    """

    table: int
    multicast: int
    state: int
    capacity: int
    rank: int
    ranks: int


@runtime_checkable
class Phases(Protocol):
    """An implementation whose calls can be taken apart, so that one process can play several ranks."""

    def publish_target(self, rows: int) -> PublishTarget: ...

    def mark_published(self, rows: int) -> None: ...

    def drop_mark(self) -> None: ...

    def publish(self, x: Tensor, routed: Routed | None = None) -> None: ...

    def sum_owned(self) -> None: ...

    def published_rows(self) -> int: ...

    def collect(self, boundary: Boundary) -> Result: ...


def require(condition: bool, message: str) -> None:
    """ValueError with ``message`` unless ``condition``."""
    if not condition:
        raise ValueError(message)


def agree(peers: Peers, value: object) -> None:
    """ValueError, on every rank alike, unless all ranks build a collective from equal values. Collective."""
    values = peers.gather_object(value)
    different = {rank: other for rank, other in enumerate(values) if not same(other, values[0])}
    require(not different, f"ranks build different collectives: rank 0 {values[0]}, others {different}")


def check_shape(shape: AllReduceShape, world: World, fabric: Fabric | None) -> None:
    """ValueError naming the constructor argument that no build of the collective can serve."""
    for name in ("hidden_size", "hc_mult", "max_num_tokens", "top_k", "two_shot_rows"):
        value = getattr(shape, name)
        require(is_size(value) or (value is None and name == "two_shot_rows"), f"{name} {value!r}: an integer")
    require(shape.hidden_size > 0 and shape.hidden_size % 8 == 0, f"hidden_size {shape.hidden_size}: a multiple of 8")
    require(1 <= shape.hc_mult <= 8, f"hc_mult {shape.hc_mult}: 1 to 8 residual streams")
    require(shape.max_num_tokens >= 1, f"max_num_tokens {shape.max_num_tokens}: at least 1")
    require(shape.top_k >= 1, f"top_k {shape.top_k}: at least 1")
    check_timeout(shape.timeout_s)
    if shape.two_shot_rows is not None:
        require(shape.two_shot_rows >= 1, f"two_shot_rows {shape.two_shot_rows}: at least 1")
    if shape.quantize_layer_input:
        fits = shape.hidden_size % QUANTIZED_MULTIPLE == 0
        require(fits, f"hidden_size {shape.hidden_size}: quantize_layer_input needs a multiple of {QUANTIZED_MULTIPLE}")
    size = world.size if fabric is None else fabric.size
    require(size in (1, 2, 4, 8), f"{size} ranks: 1, 2, 4 or 8")


def is_size(value: object) -> bool:
    """Whether ``value`` is an integer and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_gather(rank_capacity_bytes: int, timeout_s: float, ranks: int) -> None:
    """ValueError naming the constructor argument that no all-gather can serve."""
    fits = is_size(rank_capacity_bytes) and rank_capacity_bytes > 0 and rank_capacity_bytes % 16 == 0
    require(fits, f"rank_capacity_bytes {rank_capacity_bytes!r}: a positive multiple of 16")
    check_timeout(timeout_s)
    require(ranks <= MAX_RANKS, f"{ranks} ranks: at most {MAX_RANKS}")


def check_timeout(timeout_s: float) -> None:
    """ValueError unless a kernel can count down ``timeout_s`` in nanoseconds (63 bits)."""
    require(0 < timeout_s <= MAX_TIMEOUT_S, f"timeout_s {timeout_s}: above 0, at most {MAX_TIMEOUT_S:.0f} seconds")


def check_partial(shape: AllReduceShape, x: Tensor, name: str = "x") -> int:
    """The rows of a TP-partial [M, H], checked."""
    require(x.ndim == 2 and x.shape[1] == shape.hidden_size, f"{name} {list(x.shape)}: [M, {shape.hidden_size}]")
    rows = x.shape[0]
    require(1 <= rows <= shape.max_num_tokens, f"M = {rows} is outside [1, {shape.max_num_tokens}]")
    _check_tensor(shape, name, x, _activation(shape, x))
    return rows


def check_routed(shape: AllReduceShape, routed: Routed) -> int:
    """The rows of a MoE output, checked."""
    rows = check_partial(shape, routed.shared_output, "shared_output")
    dtype, gemm2 = routed.shared_output.dtype, routed.gemm2_permuted
    fits = gemm2.ndim == 2 and gemm2.shape[1] == shape.hidden_size
    require(fits, f"gemm2_permuted {list(gemm2.shape)}: [rows, {shape.hidden_size}]")
    _check_tensor(shape, "gemm2_permuted", gemm2, dtype)
    for name, tensor, kind in (
        ("expert_weights", routed.expert_weights, _mix(shape, dtype)),
        ("expanded_idx_to_permuted_idx", routed.expanded_idx_to_permuted_idx, torch.int32),
    ):
        require(list(tensor.shape) == [rows, shape.top_k], f"{name} {list(tensor.shape)}: [{rows}, {shape.top_k}]")
        _check_tensor(shape, name, tensor, kind)
    return rows


def check_boundary(shape: AllReduceShape, rows: int, dtype: torch.dtype, boundary: Boundary) -> None:
    """ValueError naming the first argument of a boundary that does not fit ``rows`` rows of ``dtype``."""
    hc, hidden = shape.hc_mult, shape.hidden_size
    wanted, found = [rows, hc, hidden], list(boundary.residual.shape)
    require(found == wanted, f"residual {found}: {wanted}")
    _check_tensor(shape, "residual", boundary.residual, dtype)
    _check_mix(shape, "post", boundary.post, [rows, hc], dtype)
    _check_mix(shape, "comb", boundary.comb, [rows, hc, hc], dtype)
    pre, norm = boundary.pre, boundary.norm_weight
    require((pre is None) == (norm is None), "pre and norm_weight come together: give both or neither")
    if pre is None or norm is None:
        require(shape.residual_only, "a residual-only boundary needs residual_only=True at construction")
        require(boundary.mxfp8_out is None, "a residual-only boundary has no layer input to quantise to mxfp8_out")
        return
    _check_mix(shape, "pre", pre, [rows, hc], dtype)
    require(list(norm.shape) == [hidden], f"norm_weight {list(norm.shape)}: [{hidden}]")
    _check_tensor(shape, "norm_weight", norm, dtype)
    require(0 <= boundary.norm_eps < math.inf, f"norm_eps {boundary.norm_eps}: a finite number, not negative")
    if boundary.mxfp8_out is not None:
        _check_mxfp8(shape, rows, *boundary.mxfp8_out)


def _check_mxfp8(shape: AllReduceShape, rows: int, values: Tensor, scales: Tensor) -> None:
    require(shape.quantize_layer_input, "mxfp8_out needs quantize_layer_input=True at construction")
    wanted = [rows, shape.hidden_size]
    require(list(values.shape) == wanted, f"mxfp8_out values {list(values.shape)}: {wanted}")
    _check_tensor(shape, "mxfp8_out values", values, torch.float8_e4m3fn)
    count = mxfp8_scale_bytes(rows, shape.hidden_size)
    found = scales.numel() * scales.element_size()
    require(found == count, f"mxfp8_out scales hold {found} bytes: {count} for {rows} rows")
    require(scales.element_size() == 1, f"mxfp8_out scales are {scales.dtype}: one byte each")
    _check_tensor(shape, "mxfp8_out scales", scales, scales.dtype)


def _check_mix(shape: AllReduceShape, name: str, mix: Tensor, wanted: list[int], dtype: torch.dtype) -> None:
    """A mix may have a trailing dimension of 1."""
    require(list(mix.shape) in (wanted, [*wanted, 1]), f"{name} {list(mix.shape)}: {wanted}")
    # Kernels load a row's mixes 16 bytes at a time where their number allows (ptx.load_words).
    _check_tensor(shape, name, mix, _mix(shape, dtype), 4 if math.prod(wanted[1:]) % 4 else 16)


def _check_tensor(
    shape: AllReduceShape, name: str, tensor: Tensor, dtype: torch.dtype, alignment: int | None = None
) -> None:
    """``alignment`` in bytes; None: that of a word for FP32 and int32, 16 for all else."""
    require(tensor.dtype == dtype, f"{name} is {tensor.dtype}: {dtype}")
    require(tensor.device == shape.device, f"{name} is on {tensor.device}: {shape.device}")
    require(tensor.is_contiguous(), f"{name} with strides {tensor.stride()}: contiguous")
    if tensor.is_cuda and tensor.numel():
        alignment = alignment or (4 if dtype in (torch.float32, torch.int32) else 16)
        require(
            tensor.data_ptr() % alignment == 0, f"{name} starts at {tensor.data_ptr():#x}: {alignment}-byte alignment"
        )


def _activation(shape: AllReduceShape, x: Tensor) -> torch.dtype:
    if shape.device.type == "cuda" or not x.dtype.is_floating_point:
        return torch.bfloat16
    return x.dtype


def _mix(shape: AllReduceShape, dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32

"""Inputs, references and schedules of the collectives' GPU tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quickseek.ops.collectives import AllReduceMHC
from quickseek.ops.collectives.reference import finalize_routed, mhc_boundary, sum_ranks
from quickseek.ops.collectives.spec import Routed
from quickseek.ops.quantize import mxfp8_scale_bytes, quantize_a8, swizzle_scales
from quickseek.parallel.fabric import VirtualFabric

EPSILON = 1e-6
TOP_K = 6
KINDS = ("plain", "quantize", "residual")


@dataclass
class Case:
    """One call: what each rank contributes and the boundary that all share."""

    partials: list[Tensor]
    routed: list[Routed] | None
    boundary: dict[str, Any]
    kind: str
    outputs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.partials[0].shape[0]

    def sums(self) -> list[Tensor]:
        """What each rank sends, BF16."""
        return self.partials if self.routed is None else [finalize_routed(routed) for routed in self.routed]

    def arguments(self, rank: int) -> dict[str, Any]:
        """The boundary's arguments for a rank; MXFP8 buffers are poisoned and the rank's own."""
        if self.kind != "quantize":
            return self.boundary
        device, (rows, hidden) = self.partials[0].device, self.partials[0].shape
        values = torch.full((rows, hidden), 0x55, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        scales = torch.full((mxfp8_scale_bytes(rows, hidden),), 0xAA, dtype=torch.uint8, device=device)
        while len(self.outputs) <= rank:
            self.outputs.append((values, scales))
        self.outputs[rank] = (values, scales)
        return self.boundary | {"mxfp8_out": (values, scales)}


def make_case(
    ranks: int, rows: int, hidden: int, streams: int, seed: int, *, kind: str = "plain", finalize: bool = False
) -> Case:
    """Random inputs of a boundary; about one expert in ``ranks`` of each token is on a given rank."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    partials = [normal(rows, hidden) for _ in range(ranks)]
    routed = None
    if finalize:
        holder = torch.randint(0, ranks, (rows, TOP_K), generator=generator, device="cuda")
        places = torch.randperm(rows * TOP_K, generator=generator, device="cuda").view(rows, TOP_K).int()
        weights = normal(rows, TOP_K, dtype=torch.float32).abs()
        absent = torch.full_like(places, -1)
        routed = [
            Routed(normal(rows * TOP_K, hidden), weights, torch.where(holder == rank, places, absent), partials[rank])
            for rank in range(ranks)
        ]
    boundary: dict[str, Any] = {
        "residual": normal(rows, streams, hidden),
        "post": normal(rows, streams, dtype=torch.float32),
        "comb": normal(rows, streams, streams, dtype=torch.float32).softmax(-1),
    }
    if kind != "residual":
        pre = normal(rows, streams, dtype=torch.float32).sigmoid()
        boundary |= {"pre": pre, "norm_weight": normal(hidden), "norm_eps": EPSILON}
    return Case(partials, routed, boundary, kind)


ADVERSARIAL = {
    "only negative zeros": [0x8000],
    "negative zeros in odd or even halves": [0x8000, 0x3F80],
    "subnormals of both signs": [0x8001, 0x0001, 0x807F, 0x007F, 0x8000],
    "NaN payloads and infinities": [0x7FC1, 0xFFC1, 0x7F81, 0x7F80, 0xFF80, 0x8000, 0x3F80],
    "any bit pattern": list(range(0, 0x10000, 7)),
}
"""BF16 bit patterns of contributions that could be taken for an empty slot, or spoil a sum."""


def special(ranks: int, rows: int, hidden: int, pick: Sequence[int]) -> list[Tensor]:
    """Contributions whose BF16 halves are drawn from given bit patterns."""
    generator = torch.Generator("cuda").manual_seed(7)
    patterns = torch.tensor(pick, dtype=torch.int32, device="cuda").to(torch.int16)
    index = torch.randint(0, len(pick), (ranks, rows, hidden), generator=generator, device="cuda")
    return [part.view(torch.bfloat16) for part in patterns[index]]


def make_ranks(ranks: int, hidden: int, streams: int, capacity: int, **options: Any) -> list[AllReduceMHC]:
    """One instance a virtual rank on the current GPU."""
    replay = options.pop("replay_multicast", False)
    fabrics = VirtualFabric.ranks(ranks, torch.device("cuda", torch.cuda.current_device()), replay_multicast=replay)
    return [
        AllReduceMHC(
            hidden_size=hidden, hc_mult=streams, max_num_tokens=capacity, top_k=TOP_K, device=fabric.device,
            quantize_layer_input=hidden % 128 == 0, residual_only=True, fabric=fabric, **options,
        )
        for fabric in fabrics
    ]  # fmt: skip


def routed_arguments(routed: Routed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return routed.gemm2_permuted, routed.expert_weights, routed.expanded_idx_to_permuted_idx, routed.shared_output


def phased(
    instances: Sequence[AllReduceMHC], case: Case, order: Callable[[], Sequence[int]] | None = None
) -> list[Any]:
    """Every rank's result by the phased schedule; ``order`` gives the ranks' order in a phase."""
    ranks = order or (lambda: range(len(instances)))
    for rank in ranks():
        if case.routed is None:
            instances[rank].publish(case.partials[rank])
        else:
            instances[rank].publish_finalize(*routed_arguments(case.routed[rank]))
    for rank in ranks():
        instances[rank].sum_owned()
    results: list[Any] = [None] * len(instances)
    for rank in ranks():
        results[rank] = instances[rank].collect(**case.arguments(rank))
    return results


def one_call(instance: AllReduceMHC, case: Case, rank: int) -> Any:
    """A rank's whole call, which waits for the others."""
    if case.routed is None:
        return instance(case.partials[rank], **case.arguments(rank))
    return instance.finalize(*routed_arguments(case.routed[rank]), **case.arguments(rank))


def concurrent(
    instances: Sequence[AllReduceMHC], case: Case, streams: Sequence[torch.cuda.Stream]
) -> list[tuple[Tensor, Tensor | None]]:
    """Every rank's result with each rank on a CUDA stream of its own, really waiting for the others."""
    arguments = [case.arguments(rank) for rank in range(len(instances))]
    torch.cuda.synchronize()
    results = []
    for rank, instance in enumerate(instances):
        with torch.cuda.stream(streams[rank]):
            if case.routed is None:
                results.append(instance(case.partials[rank], **arguments[rank]))
            else:
                results.append(instance.finalize(*routed_arguments(case.routed[rank]), **arguments[rank]))
    torch.cuda.synchronize()
    return results


def ordered(x: Tensor) -> Tensor:
    """BF16 as integers in which neighbours differ by 1 and both zeros are 0."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def check(case: Case, rank: int, result: tuple[Tensor, Tensor | None]) -> None:
    """A finite rank's result against float64 (streams) and against the reference fed its own streams (the rest)."""
    streams, layer_input = result
    boundary = case.boundary
    x = sum_ranks(case.sums()).double()
    residual, post, comb = (boundary[name].double() for name in ("residual", "post", "comb"))
    expected, _ = mhc_boundary(x, residual, post, comb)
    terms, _ = mhc_boundary(x.abs(), residual.abs(), post.abs(), comb.abs())
    error = (streams.double() - expected).abs()
    excess = error - (2.0**-8 * expected.abs() + 2.0**-21 * terms)
    assert not (excess > 0).any() and not error.isnan().any(), f"rank {rank}: streams off by {excess.max().item():.3e}"
    if case.kind == "residual":
        assert layer_input is None
        return
    assert layer_input is not None
    count = streams.shape[1]
    same = torch.eye(count, device=x.device).expand(case.rows, -1, -1)
    nothing = torch.zeros(case.rows, count, device=x.device)
    zeros = torch.zeros_like(layer_input)
    _, wanted = mhc_boundary(
        zeros, streams, nothing, same, boundary["pre"], boundary["norm_weight"], boundary["norm_eps"]
    )
    # Where the collapse cancels, its FP32 rounding (fused or not) outweighs BF16 steps: equality.md's rule for sums.
    weights, gain = boundary["pre"].double()[..., None], boundary["norm_weight"].double()
    collapsed = (streams.double() * weights).sum(1)
    inverse = (collapsed.square().mean(-1, keepdim=True) + boundary["norm_eps"]).rsqrt()
    slack = 2.0**-21 * (streams.double().abs() * weights.abs()).sum(1) * inverse * gain.abs()
    distance = (ordered(layer_input) - ordered(wanted)).abs()
    far = (distance > 2) & ((layer_input.double() - wanted.double()).abs() > slack)
    assert not far.any(), f"rank {rank}: layer input {int(distance[far].max())} BF16 ulp from the reference"
    if case.kind == "quantize":
        check_copy(layer_input, *case.outputs[rank])


def check_copy(layer_input: Tensor, values: Tensor, scales: Tensor) -> None:
    """The MXFP8 copy equals the stand-alone quantiser's in bits, padding included."""
    codes, bytes_ = quantize_a8(layer_input)
    assert torch.equal(values.view(torch.uint8), codes.view(torch.uint8)), "MXFP8 values differ from A8"
    assert torch.equal(scales, swizzle_scales(bytes_)), "MXFP8 scales differ from A8"


def same_bits(one: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]) -> Tensor:
    """A device Boolean: both results have the same bytes."""
    same = (one[0].view(torch.int16) == other[0].view(torch.int16)).all()
    if one[1] is not None and other[1] is not None:
        same = same & (one[1].view(torch.int16) == other[1].view(torch.int16)).all()
    return same

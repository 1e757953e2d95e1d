"""Cases of ``moe``: router, routed experts, shared expert and finalisation of a rank of TP 4 in the released model.

Each row chooses its experts at random. Copies of a call share the weights of 384 experts and choose others among them.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from op_case import ROWS, Build, Calls, Case
from quickseek.ops import moe
from quickseek.ops.linear import Fp4Weight, Fp8Weight
from quickseek.ops.moe import ExpertWeights, Routing, UnfinalizedMoE

HIDDEN, INNER, EXPERTS, TOP, LIMIT, SCALE = 5120, 576, 384, 6, 10.0, 1.5
EXPERT_BYTES = 3 * HIDDEN * INNER * 17 // 32
SHARED_BYTES = 3 * HIDDEN * INNER * 1025 // 1024


def bf16(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).to(torch.bfloat16)


def chosen(rows: int, copy: int) -> Tensor:
    """int64 [rows, 6]; copies choose equally many different experts."""
    keys = torch.rand(rows, EXPERTS, generator=torch.Generator().manual_seed(rows))
    return (keys.argsort(1)[:, :TOP] + 53 * copy) % EXPERTS


def routings(rows: int, device: torch.device, copies: int) -> list[Routing]:
    weights = torch.rand(rows, TOP, device=device)
    return [Routing(chosen(rows, copy).to(device), weights) for copy in range(copies)]


def fp4(outputs: int, inputs: int, device: torch.device) -> Fp4Weight:
    codes = torch.randint(0, 256, (EXPERTS, outputs, inputs // 2), dtype=torch.uint8, device=device)
    return Fp4Weight(codes, torch.full((EXPERTS, outputs, inputs // 32), 120, dtype=torch.uint8, device=device))


def fp8(outputs: int, inputs: int, device: torch.device) -> Fp8Weight:
    codes = bf16(outputs, inputs, device=device).to(torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.full((outputs // 32, inputs // 32), 121, dtype=torch.uint8, device=device))


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.clamp_max(LIMIT)) * up.clamp(-LIMIT, LIMIT)


# ---------------------------------------------------------------------------------------------- routed experts


def experts(rows: int) -> Build:
    def build(device: torch.device, copies: int) -> Calls:
        weights = ExpertWeights(fp4(2 * INNER, HIDDEN, device), fp4(HIDDEN, INNER, device))
        x = bf16(rows, HIDDEN, device=device)
        return [
            functools.partial(moe.routed_experts, x, routing, weights, limit=LIMIT)
            for routing in routings(rows, device, copies)
        ]

    return build


def experts_torch(rows: int) -> Build:
    """BF16 weights, rows sorted by expert, ``torch._grouped_mm``."""

    def build(device: torch.device, copies: int) -> Calls:
        w13 = torch.zeros(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16, device=device).transpose(1, 2)
        w2 = torch.zeros(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16, device=device).transpose(1, 2)
        x, numbers = bf16(rows, HIDDEN, device=device), torch.arange(EXPERTS, device=device)

        def call(routing: Routing) -> Tensor:
            slots = routing.experts.flatten()
            order = slots.argsort(stable=True)
            ends = torch.searchsorted(slots[order], numbers, right=True).to(torch.int32)
            hidden = clamped_swiglu(torch._grouped_mm(x[order // TOP], w13, offs=ends))
            return torch._grouped_mm(hidden, w2, offs=ends)

        return [functools.partial(call, routing) for routing in routings(rows, device, copies)]

    return build


# ---------------------------------------------------------------------------------------------- the other parts


def router(rows: int) -> Build:
    def build(device: torch.device, copies: int) -> Calls:
        x, bias = bf16(rows, HIDDEN, device=device), torch.randn(EXPERTS, device=device)
        weights = [bf16(EXPERTS, HIDDEN, device=device) / 64 for _ in range(copies)]
        return [functools.partial(moe.route, x, weight, bias, top_k=TOP, scale=SCALE) for weight in weights]

    return build


def router_torch(rows: int) -> Build:
    def build(device: torch.device, copies: int) -> Calls:
        x, bias = bf16(rows, HIDDEN, device=device), torch.randn(EXPERTS, device=device)
        weights = [bf16(EXPERTS, HIDDEN, device=device) / 64 for _ in range(copies)]

        def call(weight: Tensor) -> tuple[Tensor, Tensor]:
            scores = F.softplus(torch.mm(x, weight.T, out_dtype=torch.float32)).sqrt()
            experts = (scores + bias).topk(TOP).indices
            found = scores.gather(1, experts)
            return experts, found / (found.sum(1, keepdim=True) + 1e-20) * SCALE

        return [functools.partial(call, weight) for weight in weights]

    return build


def shared(rows: int) -> Build:
    def build(device: torch.device, copies: int) -> Calls:
        x = bf16(rows, HIDDEN, device=device)
        pairs = [(fp8(2 * INNER, HIDDEN, device), fp8(HIDDEN, INNER, device)) for _ in range(copies)]
        return [functools.partial(moe.shared_expert, x, w13, w2, limit=LIMIT) for w13, w2 in pairs]

    return build


def shared_torch(rows: int) -> Build:
    def build(device: torch.device, copies: int) -> Calls:
        x = bf16(rows, HIDDEN, device=device)
        pairs = [(bf16(2 * INNER, HIDDEN, device=device), bf16(HIDDEN, INNER, device=device)) for _ in range(copies)]

        def call(w13: Tensor, w2: Tensor) -> Tensor:
            return F.linear(clamped_swiglu(F.linear(x, w13)), w2)

        return [functools.partial(call, w13, w2) for w13, w2 in pairs]

    return build


def unfinalized(rows: int, device: torch.device, copies: int) -> list[UnfinalizedMoE]:
    index = torch.randperm(rows * TOP, device=device).view(rows, TOP).int()
    weights = torch.rand(rows, TOP, device=device)
    return [UnfinalizedMoE(bf16(rows * TOP, HIDDEN, device=device), weights, index) for _ in range(copies)]


def finalisation(call: Callable[[UnfinalizedMoE, Tensor], Tensor], rows: int) -> Build:
    def build(device: torch.device, copies: int) -> Calls:
        x = bf16(rows, HIDDEN, device=device)
        return [functools.partial(call, routed, x) for routed in unfinalized(rows, device, copies)]

    return build


def finalize_torch(routed: UnfinalizedMoE, shared: Tensor) -> Tensor:
    return (torch.einsum("tkh,tk->th", routed.rows[routed.index].float(), routed.weights) + shared).to(torch.bfloat16)


def cases(counts: Sequence[int] = ROWS) -> list[Case]:
    found = []
    for rows in counts:
        active = chosen(rows, 0).unique().numel()
        row = HIDDEN * 2
        found += [
            Case(
                name="route",
                rows=rows,
                bytes=EXPERTS * HIDDEN * 2 + rows * (row + 12 * TOP),
                build=router(rows),
                alternative=router_torch(rows),
                alternative_name="torch.mm with FP32 out, softplus, topk",
            ),
            Case(
                name="routed_experts",
                rows=rows,
                bytes=active * EXPERT_BYTES + rows * (1 + TOP) * row,
                build=experts(rows),
                alternative=experts_torch(rows),
                alternative_name="torch._grouped_mm on BF16 weights",
            ),
            Case(
                name="shared_expert",
                rows=rows,
                bytes=SHARED_BYTES + 2 * rows * row,
                build=shared(rows),
                alternative=shared_torch(rows),
                alternative_name="F.linear on BF16 weights",
            ),
            Case(
                name="finalize",
                rows=rows,
                bytes=rows * (2 + TOP) * row,
                build=finalisation(moe.finalize, rows),
                alternative=finalisation(finalize_torch, rows),
                alternative_name="gather, einsum in FP32, add",
            ),
        ]
    return found

"""Router, experts and finalisation in the released shapes of a TP 4 rank."""

from collections.abc import Callable

import torch

from quickseek.ops.linear import Fp4Weight
from quickseek.ops.moe import ExpertWeights, Routing, UnfinalizedMoE
from quickseek.ops.moe import triton as kernels

HIDDEN, INNER, EXPERTS, TOP = 5120, 576, 384, 6


def packed(outputs: int, inputs: int) -> Fp4Weight:
    # Nothing is read: one expert's memory stands for all.
    codes = torch.empty(1, outputs, inputs // 2, dtype=torch.uint8).expand(EXPERTS, -1, -1)
    return Fp4Weight(codes, torch.empty(EXPERTS, outputs, inputs // 32, dtype=torch.uint8))


def launches() -> dict[str, Callable[[], object]]:
    weights = ExpertWeights(packed(2 * INNER, HIDDEN), packed(HIDDEN, INNER))
    router, bias = torch.empty(EXPERTS, HIDDEN, dtype=torch.bfloat16), torch.empty(EXPERTS)
    calls: dict[str, Callable[[], object]] = {}
    for rows in (1, 48, 384, 2048):
        x = torch.empty(rows, HIDDEN, dtype=torch.bfloat16)
        routing = Routing(torch.empty(rows, TOP, dtype=torch.int64), torch.empty(rows, TOP))
        routed = UnfinalizedMoE(torch.empty(rows * TOP, HIDDEN, dtype=torch.bfloat16), routing.weights, routing.experts)
        image = torch.empty(rows, dtype=torch.bool)
        calls |= {
            f"route {rows}": lambda x=x, image=image: kernels.route(x, router, bias, TOP, 1.5, 1.0, bias, image),  # type: ignore[misc]
            f"experts {rows}": lambda x=x, routing=routing: kernels.routed_experts(x, routing, weights, 10.0, "after"),  # type: ignore[misc]
            f"finalize {rows}": lambda routed=routed, x=x: kernels.finalize(routed, x),  # type: ignore[misc]
        }
    gate_up = torch.empty(8, 2 * INNER, dtype=torch.bfloat16)
    codes = torch.empty(8, INNER, dtype=torch.uint8)
    calls["swiglu"] = lambda: kernels.swiglu[(8, 1)](gate_up, codes, codes, INNER, 10.0, QUANTIZE=True, num_warps=4)
    return calls

"""Router, experts and finalisation in the released shapes of a TP 4 rank."""

from collections.abc import Callable
from functools import partial

import torch

from quickseek.ops.linear import Fp4Weight
from quickseek.ops.moe import ExpertWeights, Routing, UnfinalizedMoE
from quickseek.ops.moe import triton as kernels

HIDDEN, INNER, EXPERTS, TOP = 5120, 576, 384, 6


def packed(outputs: int, inputs: int) -> Fp4Weight:
    codes = torch.empty(EXPERTS, outputs, inputs // 2, dtype=torch.uint8)
    return Fp4Weight(codes, torch.empty(EXPERTS, outputs, inputs // 32, dtype=torch.uint8))


def launches() -> dict[str, Callable[[], object]]:
    weights = ExpertWeights(packed(2 * INNER, HIDDEN), packed(HIDDEN, INNER))
    router, bias = torch.empty(EXPERTS, HIDDEN, dtype=torch.bfloat16), torch.empty(EXPERTS)
    calls: dict[str, Callable[[], object]] = {}
    for rows in (1, 48, 384, 2048):
        x = torch.empty(rows, HIDDEN, dtype=torch.bfloat16)
        routing = Routing(torch.empty(rows, TOP, dtype=torch.int64), torch.empty(rows, TOP))
        routed = UnfinalizedMoE(
            torch.empty(rows * TOP, HIDDEN, dtype=torch.bfloat16), routing.weights, routing.experts.int()
        )
        image = torch.empty(rows, dtype=torch.bool)
        calls |= {
            f"route {rows}": partial(kernels.route, x, router, bias, TOP, 1.5, 1.0, bias, image),
            f"experts {rows}": partial(kernels.routed_experts, x, routing, weights, 10.0, "after"),
            f"finalize {rows}": partial(kernels.finalize, routed, x),
        }
    gate_up = torch.empty(8, 2 * INNER, dtype=torch.bfloat16)
    codes = torch.empty(8, INNER, dtype=torch.uint8)
    calls["swiglu"] = lambda: kernels.swiglu[(8, 1)](gate_up, codes, codes, INNER, 10.0, QUANTIZE=True, num_warps=4)
    return calls

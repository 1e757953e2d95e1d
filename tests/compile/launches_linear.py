"""The linear and head kernels in released shapes: rank shapes of TP 4, decode rows and prefill."""

from collections.abc import Callable

import torch

from quickseek.ops.head import triton as head
from quickseek.ops.linear import Fp4Weight, Fp8Weight, QuantizedRows
from quickseek.ops.linear import triton as kernels


def fp8(outputs: int, inner: int) -> Fp8Weight:
    codes = torch.empty(outputs, inner, dtype=torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.empty(-(-outputs // 32), -(-inner // 32), dtype=torch.uint8))


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def launches() -> dict[str, Callable[[], object]]:
    fp4 = Fp4Weight(torch.empty(1152, 2560, dtype=torch.uint8), torch.empty(1152, 160, dtype=torch.uint8))
    calls: dict[str, Callable[[], object]] = {}
    for rows in (1, 6, 12, 48, 384):
        x, latent = bf16(rows, 5120), bf16(rows, 1280)
        codes = QuantizedRows(torch.empty(rows, 5120, dtype=torch.float8_e4m3fn), torch.empty(rows, 160).byte())
        calls |= {
            f"latents, {rows}": lambda x=x: kernels.linear(x, fp8(1792, 5120)),
            f"latents of codes, {rows}": lambda codes=codes: kernels.linear(codes, fp8(1792, 5120)),
            f"queries, {rows}": lambda latent=latent: kernels.linear(latent, fp8(8192, 1280)),
            f"output groups, {rows}": lambda rows=rows: kernels.grouped_linear(bf16(rows, 2, 4096), fp8(2048, 4096)),
            f"FP4, {rows}": lambda x=x: kernels.linear(x, fp4),
            f"shared down, {rows}": lambda rows=rows: kernels.linear(bf16(rows, 576), fp8(5120, 576)),
        }
    for rows in (1, 6, 12):
        x = bf16(rows, 5120)
        calls |= {
            f"router, {rows}": lambda x=x: kernels.linear_wide(x, bf16(384, 5120)),
            f"head, {rows}": lambda x=x: kernels.linear_wide(x, bf16(32320, 5120)),
            f"Markov bias, {rows}": lambda rows=rows: kernels.linear_wide(bf16(rows, 256), bf16(32320, 256)),
            f"index keys, {rows}": lambda rows=rows: kernels.linear(bf16(rows, 512), bf16(128, 512)),
        }
    return calls | {
        "FP32, 6": lambda: kernels.linear_wide(torch.empty(6, 5120), bf16(384, 5120)),
        "one output": lambda: kernels.linear(bf16(6, 32), fp8(1, 32)),
        "one output, many rows": lambda: kernels.linear(bf16(48, 32), fp8(1, 32)),
        "one FP32 output": lambda: kernels.linear_wide(torch.empty(6, 5120), bf16(1, 5120)),
        "confidence, 6": lambda: head.confidence(bf16(6, 5120), bf16(6, 256), bf16(1, 5376)),
    }

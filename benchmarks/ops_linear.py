"""Cases of ``linear`` and ``head``: shapes of a rank of TP 4 in the released model."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from op_case import ROWS, Build, Calls, Case
from quickseek import formats
from quickseek.ops import head, linear
from quickseek.ops.linear import Fp8Weight, QuantizedRows

FP8 = {
    "latents": (1792, 5120),
    "queries": (8192, 1280),
    "output": (5120, 2048),
    "index queries": (4096, 1280),
    "shared up": (1152, 5120),
    "shared down": (5120, 576),
    "engram": (25600, 6144),
    "draft context": (5120, 15360),
}
"""Packed projections: outputs and inputs."""
BF16 = {"index weights": (32, 5120), "index keys": (128, 512), "decoder compressor": (512, 5120)}
WIDE = {"router": (384, 5120), "compressor": (512, 5120), "logits": (32320, 5120), "Markov": (32320, 256)}
WIDE_TILES = ((32, 4, 64, 3), (32, 4, 64, 4))
"""Tiles beside the usual ``WIDE_BF16``, for the choice between them."""

Product = Callable[[Tensor, Tensor], object]


def bf16(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).to(torch.bfloat16)


def fp8(outputs: int, inner: int, device: torch.device) -> Fp8Weight:
    codes = torch.randn(outputs, inner, device=device).to(torch.float8_e4m3fn)
    scales = torch.randint(118, 124, (-(-outputs // 32), inner // 32), device=device, dtype=torch.uint8)
    return Fp8Weight(codes, scales)


def packed(rows: int, outputs: int, inner: int, *, quantized: bool = False) -> Build:
    def build(device: torch.device, copies: int) -> Calls:
        x: Tensor | QuantizedRows = bf16(rows, inner, device=device)
        if quantized:
            assert isinstance(x, Tensor)
            x = QuantizedRows(*formats.quantize_a8(x))
        weights = [fp8(outputs, inner, device) for _ in range(copies)]
        return [lambda weight=weight: linear.linear(x, weight) for weight in weights]  # type: ignore[misc]

    return build


def grouped(rows: int) -> Build:
    def build(device: torch.device, copies: int) -> Calls:
        x, weights = bf16(rows, 2, 4096, device=device), [fp8(2048, 4096, device) for _ in range(copies)]
        return [lambda weight=weight: linear.grouped_linear(x, weight) for weight in weights]  # type: ignore[misc]

    return build


def plain(product: Product, rows: int, outputs: int, inner: int) -> Build:
    """``product(x, weight)`` on BF16 values."""

    def build(device: torch.device, copies: int) -> Calls:
        x, weights = bf16(rows, inner, device=device), [bf16(outputs, inner, device=device) for _ in range(copies)]
        return [lambda weight=weight: product(x, weight) for weight in weights]  # type: ignore[misc]

    return build


def grouped_bf16(rows: int) -> Build:
    def build(device: torch.device, copies: int) -> Calls:
        x, weights = bf16(2, rows, 4096, device=device), [bf16(2, 4096, 1024, device=device) for _ in range(copies)]
        return [lambda weight=weight: torch.bmm(x, weight) for weight in weights]  # type: ignore[misc]

    return build


def mm_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.T, out_dtype=torch.float32)


def with_tile(tile: tuple[int, int, int, int]) -> Product:
    """``linear_wide`` with another ``WIDE_BF16``: outputs, warps, columns of a warp, stages."""
    from quickseek.ops.linear import triton as kernels

    def product(x: Tensor, weight: Tensor) -> Tensor:
        usual, kernels.WIDE_BF16 = kernels.WIDE_BF16, tile
        try:
            return linear.linear_wide(x, weight)
        finally:
            kernels.WIDE_BF16 = usual

    return product


def confidence(rows: int) -> Build:
    def build(device: torch.device, copies: int) -> Calls:
        states, markov = bf16(rows, 5120, device=device), bf16(rows, 256, device=device)
        weights = [bf16(1, 5376, device=device) for _ in range(copies)]
        return [lambda weight=weight: head.confidence(states, markov, weight) for weight in weights]  # type: ignore[misc]

    return build


def confidence_torch(rows: int) -> Build:
    def build(device: torch.device, copies: int) -> Calls:
        states, markov = bf16(rows, 5120, device=device), bf16(rows, 256, device=device)
        weights = [bf16(1, 5376, device=device) for _ in range(copies)]
        return [
            lambda weight=weight: torch.sigmoid(mm_fp32(torch.cat((states, markov), 1), weight))  # type: ignore[misc]
            for weight in weights
        ]

    return build


def cases(counts: Sequence[int] = ROWS) -> list[Case]:
    found = []
    for rows in counts:
        for name, (outputs, inner) in FP8.items():
            size = outputs * inner + outputs * inner // 1024 + rows * (inner + outputs) * 2
            other = plain(F.linear, rows, outputs, inner)
            words = {"alternative": other, "alternative_name": "F.linear on BF16 weights"}
            build = packed(rows, outputs, inner)
            found.append(Case(name=f"linear {name}", rows=rows, bytes=size, build=build, **words))  # type: ignore[arg-type]
            if name in ("latents", "output"):
                build = packed(rows, outputs, inner, quantized=True)
                size -= rows * (inner - inner // 32)
                found.append(
                    Case(name=f"linear {name}, codes", rows=rows, bytes=size, build=build, **words)  # type: ignore[arg-type]
                )
        found.append(
            Case(
                name="grouped_linear",
                rows=rows,
                bytes=2048 * 4096 + 2048 * 4 + rows * (8192 + 2048) * 2,
                build=grouped(rows),
                alternative=grouped_bf16(rows),
                alternative_name="torch.bmm on BF16 weights",
            )
        )
        for shapes, ours, theirs, width in ((BF16, linear.linear, F.linear, 2), (WIDE, linear.linear_wide, mm_fp32, 4)):
            for name, (outputs, inner) in shapes.items():
                found.append(
                    Case(
                        name=f"{ours.__name__} {name}",
                        rows=rows,
                        bytes=outputs * inner * 2 + rows * (inner * 2 + outputs * width),
                        build=plain(ours, rows, outputs, inner),
                        alternative=plain(theirs, rows, outputs, inner),
                        alternative_name="F.linear" if width == 2 else "torch.mm with FP32 out",
                    )
                )
        if rows <= 8:
            for tile in WIDE_TILES:
                outputs, inner = WIDE["logits"]
                size = outputs * inner * 2 + rows * (inner * 2 + outputs * 4)
                build = plain(with_tile(tile), rows, outputs, inner)
                found.append(Case(name=f"linear_wide logits, tile {tile}", rows=rows, bytes=size, build=build))
        found.append(
            Case(
                name="confidence",
                rows=rows,
                bytes=(rows + 1) * 5376 * 2,
                build=confidence(rows),
                alternative=confidence_torch(rows),
                alternative_name="cat, torch.mm, sigmoid",
            )
        )
    return found

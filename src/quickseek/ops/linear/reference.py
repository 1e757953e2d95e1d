"""Linear layers in plain PyTorch: dequantise one matrix, then multiply in the wide dtype."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from quickseek import formats
from quickseek.numerics import wide_dtype

if TYPE_CHECKING:
    from quickseek.ops.linear import QuantizedRows, Weight


def dequantize(weight: "Weight", dtype: torch.dtype) -> Tensor:
    """The weight's values [..., O, I] in ``dtype``."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if weight.codes.dtype == torch.float8_e4m3fn:
        return formats.dequantize_fp8_blocks(weight.codes, weight.scales, dtype)
    return formats.dequantize_fp4_rows(weight.codes, weight.scales, dtype)


def linear(x: "Tensor | QuantizedRows", weight: "Weight", quantize_input: bool = True) -> Tensor:
    if not isinstance(x, Tensor):
        x = formats.dequantize_a8(x.codes, x.scales, torch.bfloat16)
    elif isinstance(weight, Tensor):
        if weight.dtype == x.dtype and x.dtype != torch.bfloat16:
            return F.linear(x, weight)
    elif quantize_input:
        x = formats.fake_quantize_a8(x)
    wide = wide_dtype(x.dtype)
    return F.linear(x.to(wide), dequantize(weight, wide)).to(x.dtype)


def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    wide = wide_dtype(x.dtype)
    return F.linear(x.to(wide), weight.to(wide))


def grouped_linear(x: Tensor, weight: "Weight") -> Tensor:
    wide = wide_dtype(x.dtype)
    groups = x.shape[1]
    blocks = dequantize(weight, wide).unflatten(0, (groups, -1))
    return torch.einsum("tgi,gri->tgr", x.to(wide), blocks).flatten(1).to(x.dtype)

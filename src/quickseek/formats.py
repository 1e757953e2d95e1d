"""Number formats of the checkpoint and of the caches, in plain PyTorch (spec/model.md 3.2 to 3.4 and 4).

E8M0 scales are raw ``uint8`` bytes everywhere: a numeric cast of a float8_e8m0fnu tensor destroys them.
E4M3 is the "fn" variant (bias 7, maximum 448, no infinity). E2M1 codes are packed two a byte, the even
element in the low nibble.

Two kinds of functions: ``quantize_*`` give codes and scales, ``fake_quantize_*`` give the values that those
codes stand for, in the dtype of the input.
"""

import torch
from torch import Tensor

E8M0_NAN = 255
E8M0_BIAS = 127
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32
"""Elements along K that share one E8M0 scale, and rows of an FP8 weight block."""
GLOBAL_KV_GROUP = 16
"""Elements that share one E4M3 scale in the global KV (Q4k)."""


# ---------------------------------------------------------------------------------------------- scalars


def e8m0_to_float32(scale: Tensor) -> Tensor:
    """fp32 2^(byte - 127) of raw E8M0 bytes (uint8, any shape); byte 255 gives NaN."""
    bits = scale.to(torch.int32)
    value = (bits << 23).view(torch.float32)
    value = torch.where(bits == 0, torch.full_like(value, 2.0**-127), value)
    return torch.where(bits == E8M0_NAN, torch.full_like(value, torch.nan), value)


def pow2ceil_exponent(value: Tensor) -> Tensor:
    """int32 biased exponent of 2^ceil(log2 value), exactly, from the bits of positive fp32 values."""
    bits = value.to(torch.float32).contiguous().view(torch.int32)
    return (bits >> 23) + (bits & 0x7FFFFF).ne(0).to(torch.int32)


def e4m3_to_float32(codes: Tensor) -> Tensor:
    """fp32 values of E4M3 codes given as float8_e4m3fn or as raw uint8."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def float32_to_e4m3(value: Tensor) -> Tensor:
    """Round to nearest even into float8_e4m3fn, saturating at 448; NaN stays NaN."""
    return value.to(torch.float32).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def float32_to_e2m1(value: Tensor) -> Tensor:
    """uint8 codes 0..15 of values in [-6, 6]: nearest, ties to the even code, the sign of zero kept.

    The format has no NaN: a NaN becomes code 0; callers carry it in the scale or refuse it.
    """
    magnitude = value.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    # A tie goes to the even code: down at 0.25, 1.25, 2.5, 5.0 (strictly above), up at the others.
    for threshold, up_on_tie in (
        (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False),
    ):  # fmt: skip
        above = magnitude >= threshold if up_on_tie else magnitude > threshold
        code += above.to(torch.uint8)
    return code | (torch.signbit(value).to(torch.uint8) << 3)


def e2m1_to_float32(codes: Tensor) -> Tensor:
    """fp32 values of unpacked E2M1 codes (uint8, 0..15)."""
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float32, device=codes.device)
    return table[codes.to(torch.int64)]


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., K/2] from codes [..., K]: the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 codes [..., K] from packed bytes [..., K/2] (any one-byte dtype)."""
    byte = packed.view(torch.uint8)
    return torch.stack((byte & 0xF, byte >> 4), dim=-1).flatten(-2)


# ---------------------------------------------------------------------------------------------- quantisers


def _groups(x: Tensor, group: int) -> Tensor:
    if x.shape[-1] % group:
        raise ValueError(f"last dimension {x.shape[-1]} is not a multiple of {group}")
    return x.to(torch.float32).unflatten(-1, (-1, group))


def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    """A8: activations of quantised GEMMs, and window KV (spec 4).

    x [..., K], K a multiple of 32. Returns float8_e4m3fn [..., K] and E8M0 bytes uint8 [..., K/32]. A group
    that holds a NaN gives NaN codes in that group only.
    """
    groups = _groups(x, BLOCK)
    amax = groups.abs().nan_to_num(0.0, posinf=torch.finfo(torch.float32).max).amax(-1).clamp_min(1e-4)
    exponent = pow2ceil_exponent(amax * torch.tensor(1.0 / 448.0, dtype=torch.float32)).clamp_max(254)
    inverse = e8m0_to_float32((254 - exponent).clamp_min(0).to(torch.uint8))
    codes = float32_to_e4m3(groups * inverse.unsqueeze(-1))
    return codes.flatten(-2), exponent.to(torch.uint8)


def dequantize_a8(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values [..., K] of E4M3 codes [..., K] with E8M0 bytes [..., K/32]; exact in BF16 for A8's scales."""
    values = e4m3_to_float32(codes).unflatten(-1, (-1, BLOCK)) * e8m0_to_float32(scales).unsqueeze(-1)
    return values.flatten(-2).to(dtype)


def quantize_q4i(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q4i: indexer queries and keys, MXFP4 (spec 4).

    x [..., K], K a multiple of 32. Returns packed uint8 [..., K/2] and E8M0 bytes uint8 [..., K/32]; a group
    that holds a NaN gets the NaN scale.
    """
    groups = _groups(x, BLOCK)
    nan = groups.isnan().any(-1)
    amax = groups.abs().nan_to_num(0.0, posinf=torch.finfo(torch.float32).max).amax(-1).clamp_min(E2M1_MAX * 2.0**-126)
    exponent = pow2ceil_exponent(amax * torch.tensor(1.0 / 6.0, dtype=torch.float32)).clamp(1, 254)
    scaled = groups / e8m0_to_float32(exponent.to(torch.uint8)).unsqueeze(-1)
    codes = float32_to_e2m1(scaled.clamp(-E2M1_MAX, E2M1_MAX)).flatten(-2)
    return pack_nibbles(codes), torch.where(nan, E8M0_NAN, exponent).to(torch.uint8)


def dequantize_q4i(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values [..., K] of packed E2M1 [..., K/2] with E8M0 bytes [..., K/32]."""
    values = e2m1_to_float32(unpack_nibbles(packed)).unflatten(-1, (-1, BLOCK))
    return (values * e8m0_to_float32(scales).unsqueeze(-1)).flatten(-2).to(dtype)


def quantize_q4k(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q4k: global KV, groups of 16 with an E4M3 scale that is not a power of two (spec 4).

    x [..., K], K a multiple of 16. Returns packed uint8 [..., K/2] and E4M3 scale bytes uint8 [..., K/16]; a
    group that holds a NaN gets the NaN scale.
    """
    groups = _groups(x, GLOBAL_KV_GROUP)
    nan = groups.isnan().any(-1)
    amax = groups.abs().nan_to_num(0.0, posinf=torch.finfo(torch.float32).max).amax(-1).clamp_min(E2M1_MAX * 2.0**-9)
    scale = float32_to_e4m3(amax / E2M1_MAX)
    scaled = groups / scale.to(torch.float32).unsqueeze(-1)
    codes = float32_to_e2m1(scaled.clamp(-E2M1_MAX, E2M1_MAX)).flatten(-2)
    return pack_nibbles(codes), torch.where(nan, 0x7F, scale.view(torch.uint8)).to(torch.uint8)


def dequantize_q4k(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values [..., K] of packed E2M1 [..., K/2] with E4M3 scale bytes [..., K/16]."""
    values = e2m1_to_float32(unpack_nibbles(packed)).unflatten(-1, (-1, GLOBAL_KV_GROUP))
    return (values * e4m3_to_float32(scales).unsqueeze(-1)).flatten(-2).to(dtype)


# ---------------------------------------------------------------------------------------------- weights


def dequantize_fp8_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Weight [O, I] of E4M3 codes [O, I] with E8M0 bytes [ceil(O/32), ceil(I/32)] (spec 3.3)."""
    rows, columns = codes.shape[-2:]
    scale = e8m0_to_float32(scales).repeat_interleave(BLOCK, -2)[..., :rows, :]
    scale = scale.repeat_interleave(BLOCK, -1)[..., :columns]
    return (e4m3_to_float32(codes) * scale).to(dtype)


def quantize_fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [O, I] and E8M0 bytes [ceil(O/32), ceil(I/32)] of a weight [O, I], one scale per 32x32 block."""
    rows, columns = weight.shape
    pad = (0, -columns % BLOCK, 0, -rows % BLOCK)
    blocks = torch.nn.functional.pad(weight.to(torch.float32), pad).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    amax = blocks.abs().amax((1, 3)).clamp_min(1e-30)
    exponent = pow2ceil_exponent(amax / E4M3_MAX).clamp(1, 254)
    scales = exponent.to(torch.uint8)
    codes = float32_to_e4m3(blocks / e8m0_to_float32(scales)[:, None, :, None])
    return codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales


def dequantize_fp4_rows(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Weight [..., O, I] of packed E2M1 [..., O, I/2] with E8M0 bytes [..., O, I/32] (spec 3.4)."""
    return dequantize_q4i(packed, scales, dtype)


def quantize_fp4_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed E2M1 uint8 [..., O, I/2] and E8M0 bytes [..., O, I/32] of a weight [..., O, I]."""
    return quantize_q4i(weight)


# ---------------------------------------------------------------------------------------------- fake quantisation


def fake_quantize_a8(x: Tensor) -> Tensor:
    """x [..., K] after A8 and back, in x's dtype; straight-through gradient."""
    return _straight_through(x, dequantize_a8(*quantize_a8(x.detach()), dtype=x.dtype))


def fake_quantize_q4i(x: Tensor) -> Tensor:
    """x [..., K] after Q4i and back, in x's dtype; straight-through gradient."""
    return _straight_through(x, dequantize_q4i(*quantize_q4i(x.detach()), dtype=x.dtype))


def fake_quantize_q4k(x: Tensor) -> Tensor:
    """x [..., K] after Q4k and back, in x's dtype; straight-through gradient."""
    return _straight_through(x, dequantize_q4k(*quantize_q4k(x.detach()), dtype=x.dtype))


def _straight_through(x: Tensor, value: Tensor) -> Tensor:
    return x + (value - x).detach() if x.requires_grad else value

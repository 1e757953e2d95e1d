"""Number formats and exact roundings inside Triton kernels: the device functions that kernels share.

Each computes what its namesake of ``quickseek.formats`` does, on blocks of FP32 values or integer codes.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def e8m0_value(byte):
    """FP32 2^(byte - 127) of E8M0 bytes in any integer dtype; 255 gives NaN."""
    bits = byte.to(tl.int32)
    bits = tl.where(bits == 0, 0x00400000, bits << 23)
    bits = tl.where(bits == 0x7F800000, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(byte):
    """FP32 values of E4M3 bytes (uint8)."""
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e4m3_byte(value):
    """E4M3 bytes (uint8) of FP32 values: nearest even, saturating at 448; NaN stays NaN."""
    bounded = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return bounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e2m1_value(code):
    """FP32 values of E2M1 codes 0..15 in any integer dtype."""
    bits = code.to(tl.int32)
    return (((bits & 7) << 22) | ((bits & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


def _e2m1_ptx(unit: bool) -> str:
    """PTX for ``e2m1_pairs``, on four bytes of pairs and their BF16 scales in two words.

    Two of the bytes are spread over the halves of a word. A product copies a code to where the lowest exponent bits,
    the highest mantissa bit and the sign of BF16 are: 2^-126 of its value, which ``unit`` makes up for.
    """
    corrected = "mul.rn.bf16x2 ${0}, ${0}, unit;" if unit else ""
    part = (
        "and.b32 ${0}, {1}, {2}; mul.lo.u32 ${0}, ${0}, {3}; and.b32 ${0}, ${0}, 0x81C081C0;"
        f" {corrected} mul.rn.bf16x2 ${{0}}, ${{0}}, ${{4}};"
    )
    even = [part.format(n, half, "0x000F000F", "0x1040", 5 + n) for n, half in enumerate(("low", "high"))]
    odd = [part.format(2 + n, half, "0x00F000F0", "0x104", 5 + n) for n, half in enumerate(("low", "high"))]
    spread = "prmt.b32 low, $4, 0, 0x4140; prmt.b32 high, $4, 0, 0x4342;"
    return "\n".join(["{ .reg .b32 low, high, unit; mov.b32 unit, 0x7E807E80;", spread, *even, *odd, "}"])


_E2M1_PTX = tl.constexpr(_e2m1_ptx(True))
_SMALL_E2M1_PTX = tl.constexpr(_e2m1_ptx(False))


@triton.jit
def e2m1_pairs(pairs, scale, SMALL: tl.constexpr):
    """BF16 of the even and of the odd elements of E2M1 pairs (bytes) times BF16 scales of the same shape: exact.

    SMALL: 2^-126 of these, which saves a product for each pair.
    """
    if INTERPRETED:
        # The interpreter's BF16 is bits: products are FP32.
        wide = scale.to(tl.float32) * (1.1754943508222875e-38 if SMALL else 1.0)
        code = pairs.to(tl.int32)
        return (e2m1_value(code & 15) * wide).to(tl.bfloat16), (e2m1_value(code >> 4) * wide).to(tl.bfloat16)
    ASM: tl.constexpr = _SMALL_E2M1_PTX if SMALL else _E2M1_PTX
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r,r,r", [pairs, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit
def e2m1_code(value):
    """E2M1 codes (int32) of FP32 values in [-6, 6]: nearest, ties to the even code, sign of zero kept; NaN gives 0."""
    m = tl.abs(value)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32) + (m >= 1.75).to(tl.int32)
    code += (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
    return code | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def pow2ceil_exponent(value):
    """Biased exponent (int32) of 2^ceil(log2 value) of positive FP32 values."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def largest_magnitude(groups):
    """Largest magnitude along the last dimension of FP32 [..., group]; NaN counts as 0, infinity as FP32's largest."""
    magnitude = tl.where(groups != groups, 0.0, tl.abs(groups))
    return tl.max(tl.minimum(magnitude, 3.4028234663852886e38), -1)


@triton.jit
def a8_exponent(groups):
    """A8's biased scale exponent (int32, an E8M0 byte) [...] of FP32 groups [..., 32]."""
    amax = tl.maximum(largest_magnitude(groups), 1e-4)
    return tl.minimum(pow2ceil_exponent(amax * 0.002232142857142857), 254)  # 1 / 448


@triton.jit
def a8_bytes(groups, exponent):
    """E4M3 bytes (uint8) [..., 32] of FP32 groups with A8's exponent [...]."""
    inverse = e8m0_value(tl.maximum(254 - exponent, 0))
    return e4m3_byte(groups * tl.expand_dims(inverse, -1))


@triton.jit
def fake_quantize_a8(groups):
    """FP32 groups [..., 32] after A8 and back; the results are exact in BF16."""
    exponent = a8_exponent(groups)
    return e4m3_value(a8_bytes(groups, exponent)) * tl.expand_dims(e8m0_value(exponent), -1)


@triton.jit
def has_nan(groups):
    """Whether there is a NaN along the last dimension."""
    return tl.max((groups != groups).to(tl.int32), -1) != 0


@triton.jit
def q4i_exponent(groups):
    """Q4i's biased scale exponent (int32, 1..254) [...] of FP32 groups [..., 32]; ``has_nan`` groups get byte 255."""
    amax = tl.maximum(largest_magnitude(groups), 7.052966104933725e-38)  # 6 * 2^-126
    exponent = pow2ceil_exponent(amax * 0.16666666666666666)
    return tl.minimum(tl.maximum(exponent, 1), 254)


@triton.jit
def q4i_codes(groups, exponent):
    """E2M1 codes (int32) [..., 32] of FP32 groups with Q4i's exponent [...]."""
    scaled = tl.div_rn(groups, tl.broadcast_to(tl.expand_dims(e8m0_value(exponent), -1), groups.shape))
    return e2m1_code(tl.clamp(scaled, -6.0, 6.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def fake_quantize_q4i(groups):
    """FP32 groups [..., 32] after Q4i and back."""
    exponent = q4i_exponent(groups)
    scale = e8m0_value(tl.where(has_nan(groups), 255, exponent))
    return e2m1_value(q4i_codes(groups, exponent)) * tl.expand_dims(scale, -1)


@triton.jit
def q4k_scale(groups):
    """Q4k's scale as an E4M3 byte (uint8) [...] of FP32 groups [..., 16]; ``has_nan`` groups get byte 0x7F."""
    amax = tl.maximum(largest_magnitude(groups), 0.01171875)  # 6 * 2^-9
    return e4m3_byte(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)))


@triton.jit
def q4k_codes(groups, scale):
    """E2M1 codes (int32) [..., 16] of FP32 groups with Q4k's scale bytes [...]."""
    divisor = tl.broadcast_to(tl.expand_dims(e4m3_value(scale), -1), groups.shape)
    return e2m1_code(tl.clamp(tl.div_rn(groups, divisor), -6.0, 6.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def fake_quantize_q4k(groups):
    """FP32 groups [..., 16] after Q4k and back."""
    scale = q4k_scale(groups)
    value = tl.where(has_nan(groups), float("nan"), e4m3_value(scale))
    return e2m1_value(q4k_codes(groups, scale)) * tl.expand_dims(value, -1)


# ---------------------------------------------------------------------------------------------- norm and rotation


@triton.jit
def rms_norm(x, weight, eps, WIDTH: tl.constexpr):
    """RMSNorm of a row x [padded] of FP32 values, zero beyond WIDTH, with weights [padded] in FP32."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight


@triton.jit
def rotate_pairs(even, odd, cos, sin):
    """Even and odd channels of rotated pairs."""
    return even * cos - odd * sin, even * sin + odd * cos


@triton.jit
def rotate_tail(x, cos, sin, WIDTH: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr):
    """A row x [PADDED] of FP32 values, the last PAIRS pairs of its WIDTH channels rotated by what cos and sin point to.

    ``cos``, ``sin``: pointers to [PAIRS] FP32. The other channels keep their bits, NaN and infinity included.
    """
    even, odd = tl.split(tl.reshape(x, [PADDED // 2, 2]))
    pair = tl.arange(0, PADDED // 2) - (WIDTH // 2 - PAIRS)
    turned = (pair >= 0) & (pair < PAIRS)
    c = tl.load(cos + pair, mask=turned, other=1.0)
    s = tl.load(sin + pair, mask=turned, other=0.0)
    first, second = rotate_pairs(even, odd, c, s)
    return tl.reshape(tl.join(tl.where(turned, first, even), tl.where(turned, second, odd)), [PADDED])


@triton.jit
def rounded(x):
    """FP32 values after a rounding to BF16."""
    return x.to(tl.bfloat16).to(tl.float32)

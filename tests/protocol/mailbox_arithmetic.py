"""What rides on the mailbox protocol, on BF16 bits in numpy and independent of torch (spec/decode.md B.5, B.6, B.12).

``fault`` plants one error, by the names of FAULTS.
"""

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
SENTINEL = np.uint16(0x8000)
FAULTS = ("sanitise before rounding", "index -1 as row -1", "padding not zeroed")


def widen(bits: Bits) -> NDArray[np.float32]:
    """FP32 values of BF16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_bf16(values: NDArray[np.float32]) -> Bits:
    """BF16 bits, nearest even, by integer arithmetic; any NaN becomes 0x7FC0."""
    words = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((words + np.uint32(0x7FFF) + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def sanitise(bits: Bits) -> Bits:
    """-0 becomes +0."""
    return np.where(bits == SENTINEL, np.uint16(0), bits)


def finalize(rows: Bits, weights: NDArray[np.float32], index: NDArray[np.int32], shared: Bits, fault: str = "") -> Bits:
    """Top-k reduction and shared expert, not yet sanitised: FP32, k ascending, shared last, one rounding (B.5)."""
    total = np.zeros(shared.shape, np.float32)
    for k in range(index.shape[1]):
        piece = widen(rows[index[:, k]]) * weights[:, k, None]
        here = np.ones((len(index), 1), bool) if fault == "index -1 as row -1" else index[:, k, None] >= 0
        total = np.where(here, total + piece, total)
    total = total + widen(shared)
    if fault == "sanitise before rounding":
        total = np.where(total == 0, np.float32(0), total)
    return round_bf16(total)


def boundary(
    total: Bits,
    residual: Bits,
    post: NDArray[np.float32],
    comb: NDArray[np.float32],
    pre: NDArray[np.float32],
    gamma: Bits,
    eps: float,
) -> tuple[Bits, Bits]:
    """Streams [m, hc, H] and layer input [m, H] of the rank sum [m, H], in the order of B.12."""
    spread = widen(total)[:, None] * post[:, :, None]
    for source in range(residual.shape[1]):
        spread = spread + widen(residual[:, source])[:, None] * comb[:, source, :, None]
    streams = round_bf16(spread)
    collapsed = np.zeros(total.shape, np.float32)
    for stream in range(residual.shape[1]):
        collapsed = collapsed + widen(streams[:, stream]) * pre[:, stream, None]
    rounded = widen(round_bf16(collapsed))
    mean = np.square(rounded).mean(-1, keepdims=True, dtype=np.float32)
    inverse = np.float32(1) / np.sqrt(mean + np.float32(eps))
    return streams, round_bf16(rounded * inverse * widen(gamma))


def mxfp8(bits: Bits, scales: NDArray[np.uint8], fault: str = "") -> NDArray[np.uint8]:
    """E4M3 codes [m, H] by A8; fills the swizzled scale bytes, those of padding rows with 0 (B.6.1)."""
    rows, hidden = bits.shape
    blocks = widen(bits).reshape(rows, hidden // 32, 32)
    largest = np.maximum(np.abs(blocks).max(-1), np.float32(1e-4))
    words = (largest * np.float32(1 / 448)).view(np.uint32)
    factor = (words >> 23) + ((words & 0x7FFFFF) != 0)
    inverse = ((254 - factor).astype(np.uint32) << 23).view(np.float32)
    columns = hidden // 32
    for row in range(rows if fault == "padding not zeroed" else -(-rows // 128) * 128):
        for column in range(-(-columns // 4) * 4):
            place = (row // 128 * -(-columns // 4) + column // 4) * 512
            place += row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            scales[place] = factor[row, column] if row < rows and column < columns else 0
    return e4m3(np.clip(blocks * inverse[..., None], -448, 448)).reshape(rows, hidden)


def e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """E4M3 codes of finite values up to 448, nearest even."""
    magnitude = np.abs(values).astype(np.float64)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, -6)
    eighths = np.rint(magnitude / np.exp2(exponent - 3.0)).astype(np.int64)
    exponent, eighths = np.where(eighths == 16, exponent + 1, exponent), np.where(eighths == 16, 8, eighths)
    code = np.where(eighths < 8, eighths, ((exponent + 7) << 3) | (eighths & 7))
    return (code | (np.signbit(values).astype(np.int64) << 7)).astype(np.uint8)

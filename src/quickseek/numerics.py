"""``Numerics``: which roundings a model run makes (spec/equality.md 1).

*exact*: one float dtype throughout, weights dequantised once, no fake quantisation. *trained*: BF16 between
operations, packed weights, and the fake quantisation that the model was trained with.
"""

from dataclasses import dataclass

import torch

ROUTED_WEIGHT = ("after", "before")


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Dtype of activations and the switches of the two modes.

    ``packed_weights``: FP8 and FP4 weights stay packed and their inputs go through A8. ``quantize_caches``:
    window KV, global KV and indexer queries and keys go through A8, Q4k and Q4i. ``packed_caches``: the pools hold
    the packed records instead of values. ``routed_weight``: whether the routing weight multiplies an expert's row
    "after" the down projection (settled) or "before" it (the released reference, for comparisons only).
    """

    dtype: torch.dtype
    packed_weights: bool = False
    quantize_caches: bool = False
    packed_caches: bool = False
    routed_weight: str = "after"

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ValueError(f"dtype = {self.dtype}: expected float32, float64 or bfloat16")
        if self.packed_caches and not self.quantize_caches:
            raise ValueError("packed_caches needs quantize_caches: packed records hold quantised values only")
        if self.routed_weight not in ROUTED_WEIGHT:
            raise ValueError(f"routed_weight = {self.routed_weight!r}: expected one of {ROUTED_WEIGHT}")

    @classmethod
    def exact(cls, dtype: torch.dtype = torch.float32) -> "Numerics":
        """No fake quantisation; every tensor in ``dtype``."""
        return cls(dtype=dtype)

    @classmethod
    def trained(cls) -> "Numerics":
        """BF16 with packed weights and caches."""
        return cls(dtype=torch.bfloat16, packed_weights=True, quantize_caches=True, packed_caches=True)

    @property
    def wide(self) -> torch.dtype:
        """Dtype of sums, mixing coefficients, routing weights and logits: at least float32."""
        return wide_dtype(self.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: where operations accumulate."""
    return torch.float64 if dtype == torch.float64 else torch.float32

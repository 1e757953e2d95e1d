"""``Numerics``: the two modes of spec/equality.md 1 and what cannot be combined."""

import pytest
import torch

from quickseek.numerics import Numerics, wide_dtype


def test_exact_mode_rounds_nothing() -> None:
    for dtype in (torch.float32, torch.float64):
        exact = Numerics.exact(dtype)
        assert exact.dtype == exact.wide == dtype
        assert not (exact.packed_weights or exact.quantize_caches or exact.packed_caches)


def test_trained_mode_is_bf16_packed_and_weighs_after_the_down_projection() -> None:
    trained = Numerics.trained()
    assert trained.dtype == torch.bfloat16 and trained.wide == torch.float32
    assert trained.packed_weights and trained.quantize_caches and trained.packed_caches
    assert trained.routed_weight == "after"


def test_sums_are_at_least_float32() -> None:
    assert [wide_dtype(d) for d in (torch.bfloat16, torch.float32, torch.float64)] == [
        torch.float32,
        torch.float32,
        torch.float64,
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, r"dtype = torch.float16: expected float32, float64 or bfloat16"),
        ({"dtype": torch.bfloat16, "packed_caches": True}, "packed_caches needs quantize_caches"),
        ({"dtype": torch.float32, "routed_weight": "between"}, r"routed_weight = 'between': expected one of"),
    ],
)
def test_numerics_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Numerics(**options)  # type: ignore[arg-type]

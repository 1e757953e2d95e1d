"""Checks that doors make before they launch anything: a ValueError names the argument and what it should have been."""

from collections.abc import Sequence

import torch
from torch import Tensor


def expect_shape(name: str, x: Tensor, shape: Sequence[int | None]) -> None:
    """``shape`` entries of None match any size."""
    if len(x.shape) != len(shape) or any(
        want is not None and have != want for have, want in zip(x.shape, shape, strict=True)
    ):
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected [{wanted}]")


def expect_dtype(name: str, x: Tensor, *dtypes: torch.dtype) -> None:
    """x must have one of ``dtypes``."""
    if x.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {x.dtype}: expected {' or '.join(str(d) for d in dtypes)}")

"""mHC of the released model: 4 streams of 5120, few and many rows."""

from collections.abc import Callable

import torch

from quickseek.ops.mhc import Mixes, triton


def launches() -> dict[str, Callable[[], object]]:
    hidden, fn = 5120, torch.zeros(24, 4 * 5120)
    scale, base = torch.zeros(3), torch.zeros(24)
    calls: dict[str, Callable[[], object]] = {}
    for rows in (8, 384):
        streams = torch.zeros(rows, 4, hidden, dtype=torch.bfloat16)
        mixes = Mixes(torch.zeros(rows, 4), torch.zeros(rows, 4), torch.zeros(rows, 4, 4))
        calls |= {
            f"coefficients of {rows}": lambda x=streams: triton.coefficients(x, fn, scale, base, 1e-20, 1e-6, 20, 4),  # type: ignore[misc]
            f"post of {rows}": lambda x=streams, mixes=mixes: triton.post(x, x[:, 0], mixes),  # type: ignore[misc]
            f"collapse of {rows}": lambda x=streams, mixes=mixes: triton.collapse(x, mixes.pre),  # type: ignore[misc]
        }
    row = torch.zeros(8, hidden, dtype=torch.bfloat16)
    calls["coefficients of equal copies"] = lambda: triton.coefficients(
        row, fn[:, :hidden].contiguous(), scale, base, 1e-20, 1e-6, 20, 4
    )
    calls["mean"] = lambda: triton.stream_mean(torch.zeros(8, 4, hidden, dtype=torch.bfloat16))
    return calls

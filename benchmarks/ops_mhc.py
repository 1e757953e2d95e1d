"""mHC in the released shape: coefficients, spreading and collapsing of 4 streams of 5120."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from op_case import ROWS, Calls, Case
from quickseek.ops import mhc
from quickseek.ops.mhc import Mixes, reference

N, HIDDEN = 4, 5120
OPTIONS = {"norm_eps": 1e-20, "hc_eps": 1e-6, "iterations": 20, "hc_mult": N}
ROW_BYTES = 2 * HIDDEN
MIX_BYTES = 4 * 24


def _streams(rows: int, device: torch.device) -> Tensor:
    return torch.randn(rows, N, HIDDEN, device=device).to(torch.bfloat16)


def _coefficients(rows: int, call: Callable[..., object]) -> Callable[[torch.device, int], Calls]:
    def build(device: torch.device, copies: int) -> Calls:
        streams, scale, base = _streams(rows, device), torch.ones(3, device=device), torch.zeros(24, device=device)
        fns = [torch.randn(24, N * HIDDEN, device=device) * 0.01 for _ in range(copies)]
        return [lambda fn=fn: call(streams, fn, scale, base) for fn in fns]  # type: ignore[misc]

    return build


def _torch_coefficients(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> Mixes:
    z = streams.flatten(1).float()
    projected = F.linear(z, fn) * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-20)
    return reference.mixes_of(projected, scale, base, 1e-6, 20, N)


def _mixed(rows: int, call: Callable[[Tensor, Tensor, Mixes], object]) -> Callable[[torch.device, int], Calls]:
    def build(device: torch.device, copies: int) -> Calls:
        mixes = Mixes(*(torch.rand(rows, *shape, device=device) for shape in ((N,), (N,), (N, N))))
        output = torch.randn(rows, HIDDEN, device=device).to(torch.bfloat16)
        return [lambda x=_streams(rows, device): call(x, output, mixes) for _ in range(copies)]  # type: ignore[misc]

    return build


def cases(counts: Sequence[int] = ROWS) -> list[Case]:
    found = []
    for rows in counts:
        found += [
            Case(
                name="mhc coefficients",
                rows=rows,
                bytes=24 * N * HIDDEN * 4 + rows * (N * ROW_BYTES + MIX_BYTES),
                build=_coefficients(rows, lambda *x: mhc.coefficients(*x, **OPTIONS)),  # type: ignore[arg-type]
                alternative=_coefficients(rows, _torch_coefficients),
                alternative_name="F.linear in FP32 and elementwise kernels",
            ),
            Case(
                name="mhc post",
                rows=rows,
                bytes=rows * ((2 * N + 1) * ROW_BYTES + MIX_BYTES),
                build=_mixed(rows, mhc.post),
                alternative=_mixed(rows, reference.post),
                alternative_name="matmul and addcmul in FP32",
            ),
            Case(
                name="mhc collapse",
                rows=rows,
                bytes=rows * ((N + 1) * ROW_BYTES + MIX_BYTES),
                build=_mixed(rows, lambda x, _, mixes: mhc.collapse(x, mixes.pre)),
                alternative=_mixed(rows, lambda x, _, mixes: reference.collapse(x, mixes.pre)),
                alternative_name="matmul in FP32",
            ),
        ]
    return found

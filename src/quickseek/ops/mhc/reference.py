"""mHC in plain PyTorch; differentiable."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quickseek.numerics import wide_dtype


@dataclass(frozen=True)
class Mixes:
    """Coefficients of one sublayer: ``pre`` [T, n], ``post`` [T, n], ``comb`` [T, n, n] (source, target)."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def coefficients(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float, iterations: int, n: int
) -> Mixes:
    z = streams.flatten(1).to(wide_dtype(streams.dtype))
    projected = F.linear(z, fn.to(z.dtype)) * torch.rsqrt(z.square().mean(-1, keepdim=True) + norm_eps)
    return mixes_of(projected, scale, base, hc_eps, iterations, n)


def mixes_of(projected: Tensor, scale: Tensor, base: Tensor, hc_eps: float, iterations: int, n: int) -> Mixes:
    """Coefficients of RMS-scaled projections [T, n(n+2)]: two gates, and Sinkhorn ending on columns (spec 5.2)."""
    scale, base = scale.to(projected.dtype), base.to(projected.dtype)
    scales = torch.cat((scale[0].expand(n), scale[1].expand(n), scale[2].expand(n * n)))
    logits = torch.addcmul(base, projected, scales)
    gates = torch.sigmoid(logits[:, : 2 * n])
    comb = torch.softmax(logits[:, 2 * n :].unflatten(1, (n, n)), -1) + hc_eps
    comb = comb / comb.sum(1, keepdim=True).add_(hc_eps)
    for _ in range(iterations - 1):
        comb = comb / comb.sum(2, keepdim=True).add_(hc_eps)
        comb = comb / comb.sum(1, keepdim=True).add_(hc_eps)
    return Mixes(pre=gates[:, :n] + hc_eps, post=2 * gates[:, n:], comb=comb)


def first_streams(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    pre = torch.zeros(x.shape[0], n, dtype=wide_dtype(x.dtype), device=x.device)
    pre[:, 0] = 1.0
    return x.unsqueeze(1).expand(-1, n, -1), pre


def post(streams: Tensor, output: Tensor, mixes: Mixes) -> Tensor:
    wide = mixes.post.dtype
    carried = torch.matmul(mixes.comb.transpose(1, 2), streams.to(wide))
    return torch.addcmul(carried, mixes.post.unsqueeze(-1), output.to(wide).unsqueeze(1)).to(streams.dtype)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return torch.matmul(pre.unsqueeze(1), streams.to(pre.dtype)).squeeze(1).to(streams.dtype)


def stream_mean(streams: Tensor) -> Tensor:
    return streams.to(wide_dtype(streams.dtype)).mean(1).to(streams.dtype)

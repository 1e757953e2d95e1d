"""Sinkhorn normalisation of the training forward: the Triton kernels give PyTorch's values and gradients."""

import pytest
import torch
from torch import Tensor

from miniature.sinkhorn import Fused, alternate, sinkhorn

pytest.importorskip("triton")
EPS, ITERATIONS = 1e-6, 20


def matrices(rows: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return (torch.softmax(3 * torch.randn(rows, 4, 4, generator=generator), -1) + EPS).to(device)


@pytest.mark.parametrize("rows", [1, 70])
def test_the_kernels_give_the_values_and_gradients_of_the_plain_form(rows: int, device: torch.device) -> None:
    slope = torch.randn(rows, 4, 4, generator=torch.Generator().manual_seed(1)).to(device)
    results = []
    for rule in (Fused.apply, alternate):
        x = matrices(rows, device).requires_grad_()
        y = rule(x, EPS, ITERATIONS)
        (y * slope).sum().backward()
        assert x.grad is not None
        results.append((y.detach(), x.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    fewer = alternate(matrices(rows, device), EPS, 2)
    assert not torch.allclose(results[0][0], fewer, rtol=1e-4, atol=1e-5)


def test_other_matrices_take_the_plain_form() -> None:
    wide = matrices(3, torch.device("cpu")).double()
    assert torch.equal(sinkhorn(wide, EPS, ITERATIONS), alternate(wide, EPS, ITERATIONS))
    assert float((sinkhorn(wide, EPS, ITERATIONS).sum(1) - 1).abs().max()) < 1e-5

"""Kernels of the heads against their reference (spec/model.md 5.5, 10.3)."""

import pytest
import torch
from torch import Tensor

from compare import assert_bits
from op_cases import assert_nan_stays, normal, poisoned_outputs
from quickseek.ops.head import reference

kernels = pytest.importorskip("quickseek.ops.head.triton")


def run(device: torch.device, collapsed: Tensor, markov: Tensor, weight: Tensor) -> Tensor:
    with poisoned_outputs():
        out: Tensor = kernels.confidence(collapsed.to(device), markov.to(device), weight.to(device))
    return out.cpu()


def cases(rows: int, hidden: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.bfloat16
    weight = normal(1, hidden + rank, seed=2) * hidden**-0.5
    return normal(rows, hidden, dtype=dtype), normal(rows, rank, seed=1, dtype=dtype), weight.to(dtype)


@pytest.mark.parametrize(("rows", "hidden", "rank"), [(1, 256, 32), (5, 1100, 72), (3, 40, 24)])
def test_a_confidence_is_that_of_the_reference(device: torch.device, rows: int, hidden: int, rank: int) -> None:
    collapsed, markov, weight = cases(rows, hidden, rank)
    out = run(device, collapsed, markov, weight)
    expected = reference.confidence(collapsed.double(), markov.double(), weight.double())
    assert out.dtype == torch.float32
    assert (out.double() - expected).abs().max() < 1e-6
    assert (run(device, collapsed, -markov, weight).double() - expected).abs().max() > 1e-3
    assert_bits(run(device, collapsed, markov, weight), out, "a second run")


def test_rows_of_a_block_are_read_where_they_are(device: torch.device) -> None:
    states, markov, weight = cases(6, 64, 32)
    blocks = states.view(2, 3, 64)
    out = run(device, blocks[:, 1], markov[:2], weight)
    assert_bits(out, run(device, blocks[:, 1].contiguous(), markov[:2], weight))
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(out, run(device, blocks[:, 0], markov[:2], weight))


def test_extreme_sums_saturate_and_a_nan_row_stays_in_its_row(device: torch.device) -> None:
    collapsed, markov, weight = cases(4, 64, 32)
    collapsed[0], collapsed[1] = weight[0, :64] * 1e4, weight[0, :64] * -1e4
    out = run(device, collapsed, markov, weight)
    assert out[0] == 1.0 and out[1] == 0.0 and not out.isnan().any()
    assert_nan_stays(lambda x: run(device, x, markov, weight), collapsed, 2)


def test_other_dtypes_are_refused_before_a_launch(device: torch.device) -> None:
    collapsed, markov, weight = (x.to(device) for x in cases(2, 64, 32))
    with pytest.raises(ValueError, match="collapsed has dtype"):
        kernels.confidence(collapsed.float(), markov, weight)
    with pytest.raises(ValueError, match="weight has dtype"):
        kernels.confidence(collapsed, markov, weight.float())

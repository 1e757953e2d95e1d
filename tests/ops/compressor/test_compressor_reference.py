"""The compressor's pooling, open groups and ring bookkeeping (spec/model.md 6.3)."""

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64
from op_cases import assert_nan_stays, filled_ring, normal, poisoned_cache, step
from quickseek.ops import compressor as door
from quickseek.ops.quantize.reference import kept_rows
from quickseek.ops.rows import StepRows

WIDTH = 6
LENGTHS = (11, 8)
RAW = [normal(length, 2, WIDTH, seed=i) for i, length in enumerate(LENGTHS)]
FLAT = [raw.flatten(1) for raw in RAW]


def pooled(raw: Tensor, group: int, ratio: int) -> Tensor:
    """The definition: softmax over the members of a group, for each channel by itself."""
    values, gates = raw[group * ratio : (group + 1) * ratio].unbind(1)
    weights = gates.exp() / gates.exp().sum(0)
    return (weights * values).sum(0)


@pytest.mark.parametrize("ratio", [2, 3])
@pytest.mark.parametrize("starts", [(0, 0), (1, 3), (4, 5), (10, 7), (9, 2)])
def test_every_closed_group_is_pooled_whatever_the_border_of_the_step(starts: tuple[int, ...], ratio: int) -> None:
    rows = StepRows.build(list(starts), [length - start for length, start in zip(LENGTHS, starts, strict=True)])
    ring = filled_ring(FLAT, starts, rows=ratio - 1 + 8)
    out = door.pool(step(RAW, rows), ring, rows, ratio)
    groups = door.closed_groups(rows, ratio)
    assert int((groups >= 0).sum()) == sum(n // ratio - s // ratio for n, s in zip(LENGTHS, starts, strict=True))
    for row, group in enumerate(groups.tolist()):
        if group >= 0:
            assert_float64(out[row], pooled(RAW[int(rows.requests[row])], group, ratio))


def test_a_mean_in_place_of_the_gates_is_noticed() -> None:
    rows = StepRows.build([0], [2])
    out = door.pool(RAW[0][:2], poisoned_cache(1, 9, 2 * WIDTH), rows, 2)
    with pytest.raises(AssertionError):
        assert_float64(out[1], RAW[0][:2, 0].mean(0))


def test_large_gates_do_not_overflow() -> None:
    raw = torch.stack((RAW[0][:2, 0], torch.tensor([[3e4], [-3e4]]).expand(2, WIDTH).double()), 1)
    out = door.pool(raw, poisoned_cache(1, 9, 2 * WIDTH), StepRows.build([0], [2]), 2)
    assert_float64(out[1], raw[0, 0])


def test_records_that_were_never_written_are_never_read() -> None:
    for start in (0, 1, 2):
        rows = StepRows.build([start], [5])
        ring = filled_ring(FLAT[:1], [start], rows=9)
        out = door.pool(RAW[0][start : start + 5], ring, rows, 2)
        assert out[door.closed_groups(rows, 2) >= 0].isfinite().all()


def test_closed_groups_are_numbered_by_their_last_token() -> None:
    rows = StepRows.build([0, 3], [5, 3])
    assert door.closed_groups(rows, 1).tolist() == [0, 1, 2, 3, 4, 3, 4, 5]
    assert door.closed_groups(rows, 2).tolist() == [-1, 0, -1, 1, -1, 1, -1, 2]


def test_a_ring_keeps_the_last_rows_of_a_long_step() -> None:
    ring = poisoned_cache(2, 4, 2 * WIDTH)
    rows = StepRows.build([0, 5], [11, 2])
    assert kept_rows(4, rows.requests, rows.positions, rows.ends).tolist() == [-1] * 7 + [3, 0, 1, 2] + [1, 2]
    raw = torch.cat((RAW[0], RAW[1][5:7]))
    door.keep_open_rows(raw, ring, rows)
    for position in range(7, 11):
        assert_bits(ring.storage[1, position % 4], FLAT[0][position])
    assert ring.storage[2, [0, 3]].isnan().all(), "rows that no step wrote"


def test_pieces_of_any_size_pool_like_the_whole() -> None:
    rows = StepRows.build([0], [11])
    whole = door.pool(RAW[0], poisoned_cache(1, 9, 2 * WIDTH), rows, 2)[1::2]
    ring, parts, start = poisoned_cache(1, 9, 2 * WIDTH), [], 0
    for count in (3, 1, 1, 4, 2):
        piece = StepRows.build([start], [count])
        raw = RAW[0][start : start + count]
        out = door.pool(raw, ring, piece, 2)
        door.keep_open_rows(raw, ring, piece)
        parts.append(out[door.closed_groups(piece, 2) >= 0])
        start += count
    assert_float64(torch.cat(parts), whole)


def test_a_nan_row_reaches_its_own_group_only() -> None:
    rows = StepRows.build([0, 0], [6, 4])
    raw = torch.cat((RAW[0][:6], RAW[1][:4]))
    ring = poisoned_cache(2, 9, 2 * WIDTH)
    closed = [row for row, group in enumerate(door.closed_groups(rows, 2).tolist()) if group >= 0 and row != 3]
    assert_nan_stays(lambda raw: door.pool(raw, ring, rows, 2), raw, 3, closed)


def test_pooling_is_differentiable() -> None:
    rows = StepRows.build([1], [4])
    ring = filled_ring(FLAT[:1], [1], rows=9)
    closed = door.closed_groups(rows, 2) >= 0
    raw = RAW[0][1:5].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda raw: door.pool(raw, ring, rows, 2)[closed], (raw,))


def test_a_shape_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"raw has shape \(3, 2, 6\): expected \[2, 2, \*\]"):
        door.pool(RAW[0][:3], poisoned_cache(1, 9, 2 * WIDTH), StepRows.build([0], [2]), 2)

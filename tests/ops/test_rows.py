"""``StepRows``: which request and position each row of a step belongs to."""

from dataclasses import replace

import pytest
import torch

from quickseek.ops.rows import StepRows


def test_rows_of_requests_follow_each_other_at_consecutive_positions() -> None:
    rows = StepRows.build([0, 7, 3], [2, 3, 1])
    assert rows.positions.tolist() == [0, 1, 7, 8, 9, 3]
    assert rows.requests.tolist() == [0, 0, 1, 1, 1, 2]
    assert rows.first_rows.tolist() == [0, 2, 5]
    assert (rows.starts.tolist(), rows.ends.tolist()) == ([0, 7, 3], [2, 10, 4])
    assert (rows.max_rows, rows.max_length) == (3, 10)
    assert rows.positions.dtype == rows.requests.dtype == rows.starts.dtype == torch.int64


@pytest.mark.parametrize("counts", [[], [0], [2, 0, 1], [1, -1]])
def test_a_request_without_rows_is_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="expected at least one row for each request"):
        StepRows.build([0] * len(counts), counts)


@pytest.mark.parametrize(("starts", "count"), [([5], 6), ([5, 0, 9], 1), ([5, 0, 9], 4)])
def test_uniform_rows_are_those_of_a_built_step_and_lie_in_memory_one_after_another(
    starts: list[int], count: int
) -> None:
    rows, expected = StepRows.uniform(torch.tensor(starts), count, 99), StepRows.build(starts, [count] * len(starts))
    for name in ("positions", "requests", "first_rows", "starts", "ends"):
        assert torch.equal(getattr(rows, name), getattr(expected, name)), name
        # Kernels read them by the row's number.
        assert getattr(rows, name).stride() == (1,), name
    assert (rows.max_rows, rows.max_length) == (count, 99)
    assert not torch.equal(StepRows.uniform(torch.tensor(starts), count + 1, 99).positions, expected.positions)


def test_selected_rows_are_a_step_that_begins_later() -> None:
    rows = StepRows.build([0, 7, 3], [4, 3, 1])
    starts = torch.tensor([2, 8, 3])
    kept = torch.nonzero(rows.positions >= starts[rows.requests]).squeeze(1)
    part = rows.select(kept, starts)
    expected = StepRows.build([2, 8, 3], [2, 2, 1])
    for name in ("positions", "requests", "first_rows", "starts", "ends"):
        assert torch.equal(getattr(part, name), getattr(expected, name)), name


def test_selecting_everything_changes_nothing() -> None:
    rows = StepRows.build([1, 5], [3, 2])
    part = rows.select(torch.arange(5), rows.starts)
    assert torch.equal(part.first_rows, rows.first_rows) and torch.equal(part.positions, rows.positions)
    fewer = rows.select(torch.arange(1, 5), torch.tensor([2, 5]))
    assert not torch.equal(fewer.first_rows, rows.first_rows)


def test_tensors_with_gaps_are_made_whole_or_refused_by_name() -> None:
    wide = torch.tensor([[5, -1], [0, -1]])
    rows = StepRows.uniform(wide[:, 0], 2, 99)
    assert rows.starts.is_contiguous() and rows.starts.tolist() == [5, 0] and rows.ends.tolist() == [7, 2]
    for name in ("positions", "requests", "first_rows", "starts", "ends"):
        with pytest.raises(ValueError, match=f"{name} has strides"):
            replace(rows, **{name: wide[:, 0]})
    assert replace(rows, starts=wide[:, 0].contiguous()).starts.tolist() == [5, 0]

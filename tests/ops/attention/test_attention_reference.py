"""Sparse attention and draft-block attention against a loop over keys (spec/model.md 6.6, 10.3)."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64, assert_op
from op_cases import assert_nan_stays, filled_pages, filled_ring, normal, step
from quickseek.ops import attention as door
from quickseek.ops.attention.reference import ROWS_AT_ONCE
from quickseek.ops.cache import CacheView
from quickseek.ops.rows import StepRows

HEADS, WIDTH, WINDOW, SLACK = 3, 8, 5, 8


def attend(query: Tensor, keys: Sequence[Tensor], sink: float) -> Tensor:
    """One head by the definition: a softmax with one more term in the denominator."""
    weights = [math.exp(float(query @ key) * WIDTH**-0.5) for key in keys]
    total = sum(weights) + math.exp(sink)
    return sum((w / total * key for w, key in zip(weights, keys, strict=True)), torch.zeros(WIDTH).double())


class Case:
    """Requests with window KV at every position, global rows, and lists of them for the rows of a step."""

    def __init__(self, starts: list[int], counts: list[int], seed: int = 0) -> None:
        self.rows = StepRows.build(starts, counts)
        total = sum(counts)
        self.queries, self.sinks = normal(total, HEADS, WIDTH, seed=seed), normal(HEADS, seed=seed + 1)
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self.kv = [normal(length, WIDTH, seed=seed + 2 + i) for i, length in enumerate(lengths)]
        self.ring = filled_ring(self.kv, starts, WINDOW + SLACK)
        self.global_rows = [normal(9, WIDTH, seed=seed + 20 + i) for i in range(len(starts))]
        self.pages = filled_pages(self.global_rows, 12)
        self.lists = torch.randint(-1, 9, (total, 4), generator=torch.Generator().manual_seed(seed))
        self.oldest = torch.zeros(len(starts), dtype=torch.int64)

    def run(self, *, reads_global: bool = True, window: int = WINDOW) -> Tensor:
        options: dict[str, CacheView | Tensor] = {"global_kv": self.pages, "lists": self.lists} if reads_global else {}
        return door.sparse_attention(
            self.queries, step(self.kv, self.rows), self.ring, self.rows, self.sinks,
            window_size=window, oldest=self.oldest, **options,
        )  # fmt: skip

    def expected(self, *, reads_global: bool = True) -> Tensor:
        out = torch.empty_like(self.queries)
        for row in range(self.queries.shape[0]):
            request, position = int(self.rows.requests[row]), int(self.rows.positions[row])
            first = max(int(self.oldest[request]), position - WINDOW + 1, 0)
            keys = list(self.kv[request][first : position + 1])
            if reads_global:
                keys += [self.global_rows[request][number] for number in self.lists[row].tolist() if number >= 0]
            for head in range(HEADS):
                out[row, head] = attend(self.queries[row, head], keys, float(self.sinks[head]))
        return out


BORDERS = [
    ([0], [1]), ([0], [WINDOW]), ([0], [WINDOW + 1]), ([WINDOW - 1], [2]), ([WINDOW], [1]), ([12], [1]), ([13], [1]),
    ([14], [6]), ([0, 20, 3], [7, 1, 4]), ([30], [20]),
]  # fmt: skip


@pytest.mark.parametrize(("starts", "counts"), BORDERS, ids=str)
def test_outputs_are_the_definition_at_every_border_of_window_and_ring(starts: list[int], counts: list[int]) -> None:
    case = Case(starts, counts)
    assert_float64(case.run(), case.expected())
    assert_float64(case.run(reads_global=False), case.expected(reads_global=False))


def test_a_window_of_another_size_is_noticed() -> None:
    case = Case([0, 20], [7, 3])
    for window in (WINDOW - 1, WINDOW + 1):
        with pytest.raises(AssertionError, match="relative error"):
            assert_float64(case.run(window=window), case.expected())


def test_more_rows_than_are_held_at_once_change_nothing() -> None:
    case = Case([3, 0], [ROWS_AT_ONCE + 7, 5])
    assert_float64(case.run(), case.expected())


def test_an_empty_list_leaves_the_window_and_the_sink() -> None:
    case = Case([4], [3])
    case.lists = torch.full_like(case.lists, -1)
    assert_float64(case.run(), case.expected(reads_global=False))


def test_a_row_may_name_a_global_row_twice_and_nothing_is_removed() -> None:
    case = Case([4], [3])
    case.lists[:] = torch.tensor([2, 2, -1, 5])
    assert_float64(case.run(), case.expected())


def test_window_keys_before_the_oldest_position_do_not_exist() -> None:
    case = Case([0, 20], [9, 3])
    everything = case.run()
    case.oldest = torch.tensor([6, 20])
    assert_float64(case.run(), case.expected())
    with pytest.raises(AssertionError):
        assert_float64(case.run(), everything)


def test_a_sink_far_below_or_above_gives_all_or_none_of_the_value() -> None:
    case = Case([0], [1])
    case.sinks = torch.tensor([-1e4, 1e4, 0.0], dtype=torch.float64)
    out = case.run(reads_global=False)
    assert_float64(out[0, 0], case.kv[0][0])
    assert (out[0, 1] == 0).all()


def test_large_scores_do_not_overflow() -> None:
    case = Case([4], [3])
    case.queries = case.queries * 1e4
    assert case.run().isfinite().all()


@pytest.mark.parametrize(("starts", "counts"), BORDERS, ids=str)
def test_records_that_were_never_written_never_matter(starts: list[int], counts: list[int]) -> None:
    case = Case(starts, counts)
    assert case.run().isfinite().all(), "all unwritten records are NaN"
    before = case.run()
    case.ring.storage[torch.isnan(case.ring.storage)] = 1e30
    case.pages.storage[torch.isnan(case.pages.storage)] = -1e30
    assert_bits(case.run(), before)


def test_a_written_record_does_matter() -> None:
    case = Case([14], [2])
    before = case.run()
    # Position 12 of a ring of 13 lies in record 12 and is inside the window of position 14.
    case.ring.storage[1, 12] = 3.0
    with pytest.raises(AssertionError):
        assert_bits(case.run(), before)


def test_a_nan_row_reaches_no_other_request_and_no_earlier_row() -> None:
    case = Case([0, 20, 3], [7, 2, 4])

    def run(queries: Tensor) -> Tensor:
        return door.sparse_attention(
            queries, step(case.kv, case.rows), case.ring, case.rows, case.sinks, window_size=WINDOW, oldest=case.oldest
        )

    assert_nan_stays(run, case.queries, 5)

    def run_kv(kv: Tensor) -> Tensor:
        return door.sparse_attention(
            case.queries, kv, case.ring, case.rows, case.sinks, window_size=WINDOW, oldest=case.oldest
        )

    assert_nan_stays(run_kv, step(case.kv, case.rows), 4, rows=[0, 1, 2, 3, 7, 8, 9, 10, 11, 12])


def test_a_nan_record_reaches_the_rows_that_name_it_only() -> None:
    case = Case([9], [4])
    case.lists[:] = torch.tensor([[0, 1, 2, -1], [1, 2, 3, -1], [3, 4, 5, 6], [0, 3, -1, -1]])
    clean = case.run()
    case.pages.storage[1, 0] = torch.nan
    out = case.run()
    assert out[[0, 3]].isnan().all()
    assert_bits(out[1:3], clean[1:3])


def test_bf16_inputs_are_attended_in_float32() -> None:
    case = Case([9, 0], [4, 6])
    expected = case.expected()
    case.queries, case.kv = case.queries.to(torch.bfloat16), [kv.to(torch.bfloat16) for kv in case.kv]
    case.ring = replace(case.ring, storage=case.ring.storage)
    out = case.run()
    assert out.dtype == torch.bfloat16
    assert_op(out, expected)


def test_attention_is_differentiable() -> None:
    case = Case([6], [3])
    inputs = tuple(x.clone().requires_grad_() for x in (case.queries, step(case.kv, case.rows), case.sinks))

    def run(queries: Tensor, kv: Tensor, sinks: Tensor) -> Tensor:
        return door.sparse_attention(
            queries, kv, case.ring, case.rows, sinks, window_size=WINDOW, oldest=case.oldest, global_kv=case.pages,
            lists=case.lists,
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, inputs)


# ---------------------------------------------------------------------------------------------- draft blocks


def block_case(last: list[int], rows: int = 3) -> tuple[Tensor, Tensor, CacheView, Tensor, Tensor, list[Tensor]]:
    kv = [normal(p + 1, WIDTH, seed=7 + i) for i, p in enumerate(last)]
    ring = filled_ring(kv, [p + 1 for p in last], WINDOW + SLACK)
    queries, block = normal(len(last), rows, HEADS, WIDTH), normal(len(last), rows, WIDTH, seed=1)
    return queries, block, ring, torch.tensor(last), normal(HEADS, seed=2), kv


@pytest.mark.parametrize("last", [[0], [3], [4], [5], [12], [13], [40, 0, 11]], ids=str)
def test_every_row_of_a_block_sees_the_whole_block_and_the_last_window(last: list[int]) -> None:
    queries, block, ring, positions, sinks, kv = block_case(last)
    requests = torch.arange(len(last))
    out = door.block_attention(queries, block, ring, requests, positions, sinks, window_size=WINDOW)
    for i, p in enumerate(last):
        keys = [*kv[i][max(0, p - WINDOW + 1) : p + 1], *block[i]]
        for row in range(3):
            for head in range(HEADS):
                assert_float64(out[i, row, head], attend(queries[i, row, head], keys, float(sinks[head])))
    shifted = door.block_attention(queries, block, ring, requests, positions - 1, sinks, window_size=WINDOW)
    with pytest.raises(AssertionError, match="relative error"):
        assert_float64(shifted, out)


def test_blocks_may_belong_to_any_requests() -> None:
    queries, block, ring, positions, sinks, _ = block_case([40, 0, 11])
    order = torch.tensor([2, 0, 1])
    whole = door.block_attention(queries, block, ring, torch.arange(3), positions, sinks, window_size=WINDOW)
    turned = door.block_attention(
        queries[order], block[order], ring, order, positions[order], sinks, window_size=WINDOW
    )
    assert_bits(turned, whole[order])


def test_a_nan_block_reaches_no_other_block() -> None:
    queries, block, ring, positions, sinks, _ = block_case([40, 0, 11])
    requests = torch.arange(3)
    run = {"window_size": WINDOW}
    assert_nan_stays(lambda x: door.block_attention(x, block, ring, requests, positions, sinks, **run), queries, 1)
    assert_nan_stays(lambda x: door.block_attention(queries, x, ring, requests, positions, sinks, **run), block, 1)


def test_arguments_that_do_not_fit_are_named() -> None:
    case = Case([0], [2])
    with pytest.raises(ValueError, match="global_kv and lists come together"):
        door.sparse_attention(
            case.queries, step(case.kv, case.rows), case.ring, case.rows, case.sinks, window_size=WINDOW,
            oldest=case.oldest, lists=case.lists,
        )  # fmt: skip
    case.sinks = case.sinks[1:]
    with pytest.raises(ValueError, match=r"sinks has shape \(2,\): expected \[3\]"):
        case.run()
    queries, block, ring, positions, sinks, _ = block_case([4])
    with pytest.raises(ValueError, match="block_kv has shape"):
        door.block_attention(queries, block[:, 1:], ring, torch.arange(1), positions, sinks, window_size=WINDOW)

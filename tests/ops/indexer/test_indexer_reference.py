"""Scores, candidate blocks and exact lists of the indexer (spec/model.md 6.4, 6.5)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compare import assert_selections, member_sets
from op_cases import filled_pages, normal
from quickseek.ops import indexer as door
from quickseek.ops.indexer import Selection, reference
from quickseek.ops.rows import StepRows

HEADS, WIDTH = 8, 4
BLOCK = 4


class Case:
    """Requests whose last rows run now, and the keys of every group that exists for them."""

    def __init__(self, starts: list[int], counts: list[int], ratio: int = 1, seed: int = 0) -> None:
        self.rows, self.ratio = StepRows.build(starts, counts), ratio
        self.queries = normal(sum(counts), HEADS, WIDTH, seed=seed)
        self.weights = normal(sum(counts), HEADS, seed=seed + 1)
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self.keys = [normal(length // ratio, WIDTH, seed=seed + 2 + i) for i, length in enumerate(lengths)]

    def select(self, top_k: int, **options: Any) -> Selection:
        capacity = self.rows.max_length // self.ratio + 3
        options = {"block_size": BLOCK, **options}
        return door.select(
            self.queries, self.weights, filled_pages(self.keys, capacity), self.rows,
            ratio=self.ratio, top_k=top_k, **options,
        )  # fmt: skip

    def scores(self, row: int) -> list[float]:
        """Scores of the groups that a row can see, by the definition."""
        keys, position = self.keys[int(self.rows.requests[row])], int(self.rows.positions[row])
        return [
            sum(float(self.weights[row, h]) * max(0.0, float(self.queries[row, h] @ key)) for h in range(HEADS))
            for key in keys[: (position + 1) // self.ratio]
        ]

    def blocks(self, row: int, count: int) -> set[int]:
        """Candidate blocks of a row, by the definition."""
        scores = self.scores(row)
        if not scores:
            return set()
        best = [max(scores[i : i + BLOCK]) for i in range(0, len(scores), BLOCK)]
        best[(len(scores) - 1) // BLOCK] = float("inf")
        return set(sorted(range(len(best)), key=lambda block: (-best[block], block))[:count])

    def members(self, row: int, top_k: int, blocks: set[int] | None = None) -> set[int]:
        scores = self.scores(row)
        allowed = [g for g in range(len(scores)) if blocks is None or g // BLOCK in blocks]
        return set(sorted(allowed, key=lambda group: (-scores[group], group))[:top_k])


CASES = [
    Case([0], [40]), Case([0, 25], [7, 15]), Case([30, 31, 3], [1, 6, 2], seed=5), Case([0], [41], ratio=2, seed=9),
    Case([18, 0], [3, 1], ratio=2, seed=11),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("top_k", [1, 8, 64])
def test_lists_are_the_best_visible_groups(case: int, top_k: int) -> None:
    found = member_sets(CASES[case].select(top_k).lists)
    assert found == [CASES[case].members(row, top_k) for row in range(len(found))]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("count", [1, 2, 5, 64])
def test_candidates_are_the_best_blocks_with_the_newest_among_them(case: int, count: int) -> None:
    selection = CASES[case].select(8, publish_blocks=count)
    assert selection.candidates is not None
    found = member_sets(selection.candidates)
    assert found == [CASES[case].blocks(row, count) for row in range(len(found))]
    assert_selections(selection.lists, CASES[case].select(8).lists, "the source itself is not restricted")


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("count", [1, 3])
def test_a_later_layer_chooses_inside_the_candidates(case: int, count: int) -> None:
    published = CASES[case].select(8, publish_blocks=count).candidates
    found = member_sets(CASES[case].select(6, candidates=published).lists)
    expected = [CASES[case].members(row, 6, CASES[case].blocks(row, count)) for row in range(len(found))]
    assert found == expected
    free = member_sets(CASES[case].select(6).lists)
    assert count == 3 or found != free, "one block restricts some row"


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1])
def test_candidates_are_right_around_the_borders_of_blocks(length: int) -> None:
    case = Case([length - 1], [1], seed=length)
    published = case.select(4, publish_blocks=2).candidates
    assert published is not None
    assert member_sets(published) == [case.blocks(0, 2)]
    assert (length - 1) // BLOCK in member_sets(published)[0]
    assert member_sets(case.select(4, candidates=published).lists) == [case.members(0, 4, case.blocks(0, 2))]


@pytest.mark.parametrize("top_k", [15, 16, 17])
def test_lists_around_the_number_of_visible_groups(top_k: int) -> None:
    case = Case([12], [6])
    found = member_sets(case.select(top_k).lists)
    assert [len(members) for members in found] == [min(top_k, n) for n in range(13, 19)]
    assert found == [case.members(row, top_k) for row in range(6)]


def test_a_row_that_sees_no_group_selects_none() -> None:
    case = Case([0], [3], ratio=2)
    selection = case.select(4, publish_blocks=2)
    assert member_sets(selection.lists) == [set(), {0}, {0}]
    assert selection.candidates is not None and member_sets(selection.candidates) == [set(), {0}, {0}]


def test_no_group_at_all_gives_empty_lists() -> None:
    case = Case([0], [1], ratio=2)
    assert member_sets(case.select(4).lists) == [set()]


def test_equal_scores_go_to_the_lowest_groups() -> None:
    case = Case([19], [1])
    case.weights = torch.zeros_like(case.weights)
    assert member_sets(case.select(5).lists) == [{0, 1, 2, 3, 4}]
    published = case.select(5, publish_blocks=3).candidates
    assert published is not None and member_sets(published) == [{0, 1, 4}], "the newest block is pinned"
    negative = Case([19], [1])
    negative.weights = -negative.weights.abs()
    negative.keys = [torch.cat((keys[:10], 100 * keys[10:])) for keys in negative.keys]
    assert member_sets(negative.select(5).lists) == [negative.members(0, 5)]


def test_heads_that_are_rectified_away_add_nothing() -> None:
    case = Case([3], [1])
    case.queries, case.keys = torch.ones_like(case.queries), [-torch.ones(4, WIDTH, dtype=torch.float64)]
    case.weights = -torch.ones_like(case.weights)
    case.keys[0][2] = 1.0
    assert member_sets(case.select(3).lists) == [{0, 1, 3}], "a positive product under a negative weight ranks last"


@pytest.mark.parametrize("top_k", [4, 16])
def test_keys_that_were_never_written_or_are_not_visible_cannot_be_chosen(top_k: int) -> None:
    case = Case([5, 19], [3, 1])
    clean = case.select(top_k, publish_blocks=2)
    case.keys[0] = torch.cat((case.keys[0], torch.full((2, WIDTH), torch.nan)))
    spoilt = case.select(top_k, publish_blocks=2)
    assert_selections(spoilt.lists, clean.lists)
    assert spoilt.candidates is not None and clean.candidates is not None
    assert_selections(spoilt.candidates, clean.candidates)
    case.keys[0][0] = -1e9 * torch.sign(case.queries[0, 0])
    with pytest.raises(AssertionError):
        assert_selections(Case([5, 19], [3, 1], seed=1).select(4).lists, clean.lists)


def test_a_row_sees_no_group_that_a_later_row_of_the_step_closes() -> None:
    case = Case([10], [6], ratio=2)
    for row, members in enumerate(member_sets(case.select(64).lists)):
        assert members == set(range((10 + row + 1) // 2))


def test_a_nan_row_stays_in_its_row() -> None:
    case = Case([0, 25], [20, 15])
    clean = case.select(6, publish_blocks=2)
    case.queries[4] = torch.nan
    spoilt = case.select(6, publish_blocks=2)
    others = [row for row in range(35) if row != 4]
    assert torch.equal(spoilt.lists[others], clean.lists[others])
    assert spoilt.candidates is not None and clean.candidates is not None
    assert torch.equal(spoilt.candidates[others], clean.candidates[others])
    assert all(group <= 4 for group in member_sets(spoilt.lists)[4]), "a spoilt row still sees visible groups only"


def test_scores_are_skipped_only_where_they_cannot_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([12], [6])
    expected = [case.members(row, 18) for row in range(6)]

    def never(*_: Tensor) -> Tensor:
        raise AssertionError("scored")

    monkeypatch.setattr(reference, "scores", never)
    assert member_sets(case.select(18).lists) == expected
    for options in ({"top_k": 17}, {"top_k": 18, "publish_blocks": 4}):
        with pytest.raises(AssertionError, match="scored"):
            case.select(**options)


def test_shapes_that_do_not_fit_are_named() -> None:
    case = Case([3], [2])
    with pytest.raises(ValueError, match=r"weights has shape \(2, 7\): expected \[2, 8\]"):
        case.weights = case.weights[:, 1:]
        case.select(2)
    other = Case([3], [2])
    other.rows = replace(other.rows, positions=other.rows.positions[:1])
    with pytest.raises(ValueError, match="queries has shape"):
        other.select(2)

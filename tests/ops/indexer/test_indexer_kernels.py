"""Selection by kernels against its reference (spec/model.md 6.4, 6.5), with trees of several levels."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op_selections, assert_selections, member_sets
from indexer_cases import BF16, IndexerCase, eps_of
from op_cases import normal, poisoned_outputs
from quickseek.ops import indexer as door
from quickseek.ops.indexer import reference

kernels = pytest.importorskip("quickseek.ops.indexer.triton")

SIZE = 4
"""Groups of a candidate block."""


@pytest.fixture(autouse=True)
def small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves of 64 scores, so that few groups make trees of several levels."""
    monkeypatch.setattr(kernels, "CHUNK", 64)


def choose(scores: Tensor, visible: list[int], k: int, device: torch.device, chunk: range | None = None) -> Tensor:
    """Lists [T, k] of given scores [T, groups]."""
    rows, groups = scores.shape
    chunk = range(rows) if chunk is None else chunk
    with poisoned_outputs():
        out = torch.empty(rows, k, dtype=torch.int64, device=device)
        choice = kernels.Choice(out, groups, kernels.EVERY)
        arrivals = torch.zeros(choice.counters(len(chunk)), dtype=torch.int32, device=device)
        step = door.StepRows.build([0] * rows, [1] * rows, device)
        step = replace(step, positions=torch.tensor(visible, device=device) - 1)
        kernels._choose(
            choice, arrivals, scores[chunk.start : chunk.stop].to(device), chunk, step, 1, groups, SIZE, None
        )
    return out.cpu()


def adversarial_scores() -> Tensor:
    """Rows of 200 scores: of every size and sign, equal ones, zeros of both signs, infinities, NaN, subnormal."""
    spread = normal(200, seed=3) * 10.0 ** torch.arange(-20, 20).repeat(5)
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 1.0000001])
    return torch.stack((
        spread, normal(200, seed=4), torch.zeros(200), special.repeat(20), torch.arange(200.0), -torch.arange(200.0),
        torch.cat((torch.full((150,), 2.0), torch.full((50,), 3.0))), torch.full((200,), torch.nan),
        torch.full((200,), -torch.inf), torch.tensor([0.0, -0.0]).repeat(100), torch.randint(0, 3, (200,)) - 1.0,
    )).float()  # fmt: skip


@pytest.mark.parametrize("k", [3, 16])
def test_lists_are_exactly_those_of_a_stable_descending_sort(device: torch.device, k: int) -> None:
    scores = adversarial_scores()
    visible = [200, 199, 130, 200, 65, 64, 200, 63, 200, 128, 1]
    hidden = torch.arange(200) >= torch.tensor(visible).unsqueeze(1)
    expected = reference.top_lowest_index(scores.masked_fill(hidden, -torch.inf), k)
    found = choose(scores, visible, k, device)
    assert_selections(found, expected)
    members = [row[row >= 0] for row in found]
    assert all(bool((row.diff() > 0).all()) for row in members), "lists ascend"
    with pytest.raises(AssertionError):
        assert_selections(choose(scores[:1].flip(1), visible[:1], k, device), expected[:1])


def test_a_row_that_sees_nothing_and_one_chunk_of_rows_leave_the_others_alone(device: torch.device) -> None:
    scores = normal(4, 100, dtype=torch.float32)
    found = choose(scores, [100, 0, 100, 100], 8, device, range(1, 3))
    assert member_sets(found[1:2]) == [set()] and bool((found[[0, 3]] == -7777).all())
    assert_selections(found[2:3], reference.top_lowest_index(scores[2:3], 8))


CASES = [
    ([30, 0], [5, 3], {}),
    ([150, 3], [3, 2], {"ratio": 2}),
    ([63, 64, 62], [1, 1, 1], {"heads": 5, "block_rows": 4}),
    ([130, 0, 1], [2, 1, 6], {"width": 128, "heads": 32}),
    ([90], [2], {"packed": False}),
    ([70, 20], [2, 3], {"packed": False, "ratio": 2, "heads": 17}),
]


@pytest.mark.parametrize(("starts", "counts", "options"), CASES)
def test_lists_and_candidates_are_the_best_within_rounding(
    device: torch.device, starts: list[int], counts: list[int], options: dict
) -> None:
    case = IndexerCase.build(starts, counts, **options)
    there, scores = case.to(device), case.scores()
    published = there.select(kernels, 8, publish=3, block_size=SIZE)
    expected = case.select(reference, 8, publish=3, block_size=SIZE)
    assert published.lists.shape == expected.lists.shape and published.lists.dtype == torch.int64
    assert published.candidates is not None and expected.candidates is not None
    assert published.candidates.shape == expected.candidates.shape
    assert_op_selections(published.lists, scores, 8, eps_of(scores))
    assert_op_selections(published.candidates, case.block_scores(SIZE), 3, eps_of(scores))
    assert_bits(there.select(kernels, 8).lists, published.lists, "the source itself is not restricted")
    wrong = replace(there, weights=there.weights.flip(1))
    with pytest.raises(AssertionError):
        assert_op_selections(wrong.select(kernels, 8).lists, scores, 8, eps_of(scores))


@pytest.mark.parametrize(("starts", "counts", "options"), CASES)
def test_a_later_layer_reads_only_the_candidates(
    device: torch.device, starts: list[int], counts: list[int], options: dict
) -> None:
    case = IndexerCase.build(starts, counts, **options)
    published = case.select(reference, 8, publish=5, block_size=SIZE).candidates
    assert published is not None
    candidates = published.flip(1)
    candidates[0, 0] = -1
    scores = case.restricted(candidates, SIZE)
    found = case.to(device).select(kernels, 6, candidates=candidates.to(device), block_size=SIZE)
    assert found.candidates is None and found.lists.shape[1] == min(6, case.groups)
    assert_op_selections(found.lists, scores, 6, eps_of(scores))
    with pytest.raises(AssertionError):
        free = case.to(device).select(kernels, 6, candidates=published.to(device)[:, :1], block_size=SIZE)
        assert_op_selections(free.lists, scores, 6, eps_of(scores))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65])
def test_lengths_around_blocks_leaves_and_lists(device: torch.device, length: int) -> None:
    case = IndexerCase.build([length - 1], [1], seed=length)
    found = case.to(device).select(kernels, 16, publish=2, block_size=SIZE)
    expected = case.select(reference, 16, publish=2, block_size=SIZE)
    assert_selections(found.lists, expected.lists)
    assert found.candidates is not None and expected.candidates is not None
    assert_selections(found.candidates, expected.candidates)
    assert (length - 1) // SIZE in member_sets(found.candidates)[0]
    again = case.to(device).select(kernels, 3, candidates=found.candidates, block_size=SIZE)
    assert_selections(again.lists, case.select(reference, 3, candidates=expected.candidates, block_size=SIZE).lists)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_blocks_of_any_size(device: torch.device, size: int) -> None:
    case = IndexerCase.build([40, 9], [2, 1], seed=size)
    found = case.to(device).select(kernels, 6, publish=4, block_size=size).candidates
    assert found is not None
    scores = case.scores()
    assert_op_selections(found, case.block_scores(size), 4, eps_of(scores))
    lists = case.to(device).select(kernels, 6, candidates=found, block_size=size).lists
    assert_op_selections(lists, case.restricted(found.cpu(), size), 6, eps_of(scores))


def test_weights_may_be_bf16_and_come_with_a_scale(device: torch.device) -> None:
    case = IndexerCase.build([60], [2])
    case = replace(case, weights=case.weights.to(BF16))
    scores = replace(case, weights=case.weights.float() * -0.3).scores()
    found = case.to(device).select(kernels, 6, publish=3, block_size=SIZE, scale=-0.3)
    assert_op_selections(found.lists, scores, 6, eps_of(scores))
    inside = case.to(device).select(kernels, 4, candidates=found.candidates, block_size=SIZE, scale=-0.3).lists
    assert found.candidates is not None
    expected = case.select(reference, 4, candidates=found.candidates.cpu(), block_size=SIZE, scale=-0.3)
    assert_selections(inside, expected.lists)
    with pytest.raises(AssertionError):
        assert_op_selections(case.to(device).select(kernels, 6).lists, scores, 6, eps_of(scores))


def test_both_at_once_publish_freely_and_choose_inside(device: torch.device) -> None:
    case = IndexerCase.build([50], [2])
    candidates = torch.tensor([[1, 2, -1], [3, 0, 7]])
    found = case.to(device).select(kernels, 6, publish=3, candidates=candidates.to(device))
    expected = case.select(reference, 6, publish=3, candidates=candidates)
    assert_selections(found.lists, expected.lists)
    assert found.candidates is not None and expected.candidates is not None
    assert_selections(found.candidates, expected.candidates)


def test_with_room_for_every_group_nothing_is_scored(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = IndexerCase.build([9, 0], [4, 3], ratio=2)
    candidates = torch.tensor([[0, -1]] * 3 + [[1, 0]] * 4)
    monkeypatch.setattr(kernels, "_score", None)
    found = case.to(device).select(kernels, 6, publish=2, block_size=SIZE)
    expected = case.select(reference, 6, publish=2, block_size=SIZE)
    assert_bits(found.lists.cpu(), expected.lists)
    assert found.candidates is not None and expected.candidates is not None
    assert_selections(found.candidates, expected.candidates)
    inside = case.to(device).select(kernels, 6, candidates=candidates.to(device), block_size=SIZE).lists
    assert inside.shape == expected.lists.shape
    assert_selections(inside, case.select(reference, 6, candidates=candidates, block_size=SIZE).lists)
    for options in ({"top_k": 5}, {"top_k": 6, "publish": 1}):
        with pytest.raises(TypeError, match="NoneType"):
            case.to(device).select(kernels, **options)


def test_no_group_at_all_gives_empty_lists(device: torch.device) -> None:
    found = IndexerCase.build([0], [1], ratio=2).to(device).select(kernels, 4, publish=2)
    assert found.lists.shape == (1, 0) and found.candidates is not None and found.candidates.shape == (1, 0)


def test_equal_scores_go_to_the_lowest_groups(device: torch.device) -> None:
    case = IndexerCase.build([199], [1])
    case = replace(case, weights=case.weights * torch.tensor([0.0, -0.0]).repeat(8)).to(device)
    found = case.select(kernels, 5, publish=3, block_size=SIZE)
    assert found.lists.tolist() == [[0, 1, 2, 3, 4]]
    assert found.candidates is not None and found.candidates.tolist() == [[0, 1, 49]], "the newest block is pinned"
    inside = case.select(kernels, 5, candidates=torch.tensor([[30, 9, 12]], device=device), block_size=SIZE)
    assert member_sets(inside.lists) == [{36, 37, 38, 39, 48}]


def test_a_nan_row_stays_in_its_row(device: torch.device) -> None:
    case = IndexerCase.build([0, 90], [7, 3])
    clean = case.to(device).select(kernels, 6, publish=2)
    case.queries[4], case.weights[8] = torch.nan, torch.nan
    spoilt = case.to(device).select(kernels, 6, publish=2)
    assert clean.candidates is not None and spoilt.candidates is not None
    others = [row for row in range(10) if row not in (4, 8)]
    for ours, theirs in ((spoilt.lists, clean.lists), (spoilt.candidates, clean.candidates)):
        assert_bits(ours[others], theirs[others])
        assert not torch.equal(ours[[8]], theirs[[8]])
    expected = case.select(reference, 6, publish=2)
    assert expected.candidates is not None
    assert_selections(spoilt.lists[[4, 8]], expected.lists[[4, 8]], "NaN ranks as in a descending sort")
    assert_selections(spoilt.candidates[[4, 8]], expected.candidates[[4, 8]])


def test_a_nan_key_and_infinite_weights_rank_as_in_the_reference(device: torch.device) -> None:
    case = IndexerCase.build([70, 80], [2, 2], heads=5)
    case.keys.write(torch.tensor([0, 1]), torch.tensor([17, 33]), torch.full((2, 32), torch.nan))
    case.weights[1, 2], case.weights[3, 4] = torch.inf, -torch.inf
    scores = case.scores()
    assert bool(scores.isnan().any()) and bool((scores == torch.inf).any())
    found = case.to(device).select(kernels, 12, publish=3)
    expected = case.select(reference, 12, publish=3)
    assert_selections(found.lists, expected.lists)
    assert found.candidates is not None and expected.candidates is not None
    assert_selections(found.candidates, expected.candidates)


def test_rows_in_any_chunks_and_any_company_have_the_same_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = IndexerCase.build([90, 60], [5, 2]).to(device)
    whole = case.select(kernels, 6, publish=3)
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 3000)
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 1)
    parts = case.select(kernels, 6, publish=3)
    assert whole.candidates is not None and parts.candidates is not None
    assert_bits(parts.lists, whole.lists)
    assert_bits(parts.candidates, whole.candidates)
    inside = case.select(kernels, 6, candidates=whole.candidates)
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "CHUNK", 64)
    assert_bits(case.select(kernels, 6, candidates=whole.candidates).lists, inside.lists)
    alone = IndexerCase(case.queries[3:4], case.weights[3:4], case.keys, door.StepRows.build([93], [1], device), 1)
    assert_bits(alone.select(kernels, 6).lists, whole.lists[3:4])
    with pytest.raises(AssertionError):
        assert_bits(alone.select(kernels, 6).lists, whole.lists[2:3])


def test_what_kernels_cannot_read_is_named() -> None:
    case = IndexerCase.build([9], [2])
    for name, value, message in (
        ("queries", case.queries.float(), "queries has dtype torch.float32"),
        ("weights", case.weights.double(), "weights has dtype torch.float64"),
        ("keys", IndexerCase.build([9], [2], width=96).keys, "keys have width 96"),
        ("queries", case.queries.transpose(0, 1).contiguous().transpose(0, 1), "queries has strides"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(case, **{name: value}).select(kernels, 4)

"""Borders of top_k and top_p by windows: what is listed, that flat rows have room, and that it changes no border."""

import math

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64
from op_cases import normal, poisoned_outputs
from quickseek.ops.sampling import reference

kernels = pytest.importorskip("quickseek.ops.sampling.triton")
INF = math.inf
VOCABULARY = 200
"""Ranges of 64, 64, 64 and 8 ids."""
SHARES = (0.95, 1e-6, 0.5, 0.999999, 1.0)
HEATS = (1.0, 0.5, 2.0)
WIDTHS = (3.0, 1.0, 0.1, 1e-3)

Asked = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Temperature, top_p, top_k and min_p of rows."""


class Windows:
    """The outcome of ``bordering`` in the last call of ``probabilities``; -1 for rows that ask for nothing."""

    lists: list[list[int] | None]
    """Listed ids of each row; None without room."""
    ahead: list[int]
    above: Tensor


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Windows:
    found, shipped = Windows(), kernels._Rows.bordering

    def look(self: object, *args: object) -> tuple[Tensor, ...]:
        listing, listed, ahead, above = shipped(self, *args)
        lengths = listed.tolist()
        found.lists = [row[:n] if n >= 0 else None for row, n in zip(listing.tolist(), lengths, strict=True)]
        found.ahead, found.above = ahead.tolist(), above.sum(1).cpu()
        return listing, listed, ahead, above

    monkeypatch.setattr(kernels._Rows, "bordering", look)
    return found


def column(values: tuple[float, ...], rows: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).repeat(rows)[:rows]


def flat_rows() -> tuple[Tensor, Asked]:
    """Rows of every width, which take the shares and temperatures in turn; with min_p, blocks of equal logits, -inf."""
    x, ids = normal(VOCABULARY, seed=21).float(), torch.arange(VOCABULARY)
    rows = [width * x for _ in SHARES[1:] for width in WIDTHS]
    rows += [x[ids // 25], 0 * x, torch.where(ids % 3 == 0, x, -INF), (ids % 2).float(), x.round()]
    logits = torch.stack(rows)
    count = logits.shape[0]
    asked = column(HEATS, count), column(SHARES, count) + 1e-9, None, column((0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.9), count)
    asked[1][asked[1] > 1] = 1.0
    return logits, asked


def both(logits: Tensor, asked: Asked, device: torch.device) -> tuple[Tensor, Tensor]:
    """Distributions by kernels and by the reference."""
    with poisoned_outputs():
        found = kernels.probabilities(logits.to(device), *(x if x is None else x.to(device) for x in asked)).cpu()
    return found, reference.probabilities(logits, *asked)


@pytest.mark.parametrize("room", [16384, 2])
def test_flat_rows_have_the_distributions_of_the_reference(
    room: int, device: torch.device, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_ROOM", room)
    monkeypatch.setattr(kernels, "_SEARCHED", 64)
    logits, asked = flat_rows()
    found, expected = both(logits, asked, device)
    asking = [ids for ids, share in zip(windows.lists, asked[1], strict=True) if share < 1]
    assert any(asking) and (None in asking) == (room < VOCABULARY), "ties do not fit into 2"
    for number in range(logits.shape[0]):
        assert torch.equal(found[number] > 0, expected[number] > 0), f"row {number}"
    assert_float64(found, expected)
    alone, _ = both(logits[2:3], (asked[0][2:3], asked[1][2:3], None, None), device)
    assert_bits(alone[0], found[2], "a row by itself")
    with pytest.raises(AssertionError, match="relative error"):
        assert_float64(found, reference.probabilities(logits, asked[0], 0.9 * asked[1], None, asked[3]))


def test_a_window_holds_the_border_of_a_share_and_little_more(device: torch.device, windows: Windows) -> None:
    logits = torch.stack([width * normal(500, seed=22).float() for width in WIDTHS])
    heat, share = torch.ones(4), torch.tensor([0.95, 0.5, 0.9, 0.7], dtype=torch.float64)
    found, expected = both(logits, (heat, share, None, None), device)
    assert_float64(found, expected)
    weights = torch.exp(logits.double() - logits.amax(1, keepdim=True).double())
    for number, ids in enumerate(windows.lists):
        assert ids is not None and ids == sorted(ids)
        kept, order = int((expected[number] > 0).sum()), logits[number].sort(descending=True).indices.tolist()
        ahead, border = windows.ahead[number], order[kept - 1]
        assert ahead < kept <= ahead + len(ids) and border in ids
        assert set(ids) == set(order[ahead : ahead + len(ids)]), "a run of the sorted row"
        assert len(ids) < (10 if WIDTHS[number] > 0.01 else 60)
        torch.testing.assert_close(windows.above[number], weights[number][order[:ahead]].sum())
        assert not torch.isclose(windows.above[number], weights[number][order[: ahead + 1]].sum(), rtol=1e-9)


def test_a_window_of_two_borders_reaches_from_the_one_to_the_other(device: torch.device, windows: Windows) -> None:
    logits = 2 * normal(1, 500, seed=23).float()
    asked = torch.ones(1), torch.tensor([0.6], dtype=torch.float64), torch.tensor([200]), None
    found, expected = both(logits, asked, device)
    assert torch.equal(found > 0, expected > 0)
    assert_float64(found, expected)
    order, ids = logits[0].sort(descending=True).indices.tolist(), windows.lists[0]
    kept = int((expected[0] > 0).sum())
    assert ids is not None and {order[199], order[kept - 1]} <= set(ids)
    assert 0 < windows.ahead[0] < kept and len(ids) < 200
    alone, _ = both(logits, (asked[0], 0 * asked[1] + 1, asked[2], None), device)
    assert windows.lists[0] is not None and len(windows.lists[0]) < 20 and order[199] in windows.lists[0]
    assert (alone > 0).sum() == 200


def test_a_list_that_just_fits_is_used_and_one_that_does_not_is_not(
    device: torch.device, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = normal(3, 150, seed=24).float()
    logits[1] = logits[1].round()
    asked = torch.ones(3), torch.full((3,), 0.9, dtype=torch.float64), torch.tensor([0, 0, 70]), None
    wide, expected = both(logits, asked, device)
    lengths = [len(ids) for ids in windows.lists if ids is not None]
    assert len(set(lengths)) == 3
    for room in (sorted(lengths)[1], sorted(lengths)[1] - 1):
        monkeypatch.setattr(kernels, "_ROOM", room)
        found, _ = both(logits, asked, device)
        assert [ids is None for ids in windows.lists] == [length > room for length in lengths]
        assert torch.equal(found > 0, wide > 0)
        assert_float64(found, expected)


@pytest.mark.parametrize("wrong", ["too low", "too high"])
def test_a_list_that_misses_the_border_is_not_used(
    wrong: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = normal(2, 100, seed=25).float()
    asked = torch.ones(2), torch.tensor([0.9, 0.5], dtype=torch.float64), None, None

    def misled(of: object, *_: object) -> tuple[Tensor, ...]:
        """The first four ids alone, and nothing above or all there is."""
        listing = torch.arange(4, dtype=torch.int32, device=device).repeat(2, 25)
        above = torch.full((2, 2), 0.0 if wrong == "too high" else 1e3, dtype=torch.float64, device=device)
        return listing, torch.full_like(listing[:, 0], 4).contiguous(), 0 * listing[:, 0], above

    monkeypatch.setattr(kernels._Rows, "bordering", misled)
    found, expected = both(logits, asked, device)
    assert torch.equal(found > 0, expected > 0)
    assert_float64(found, expected)


def test_a_row_of_the_released_vocabulary_lists_few_ids_however_flat(device: torch.device, windows: Windows) -> None:
    logits = normal(1, 129280, seed=26).float() * torch.tensor([[3.0], [1.0]])
    asked = torch.ones(2), torch.full((2,), 0.95, dtype=torch.float64), None, None
    found, expected = both(logits, asked, device)
    assert torch.equal(found > 0, expected > 0) and (expected > 0).sum(1).min() > 10_000
    assert_float64(found, expected)
    assert all(ids is not None and len(ids) < 600 for ids in windows.lists)


def test_rows_that_weigh_nothing_are_left_out(device: torch.device, windows: Windows) -> None:
    logits = normal(4, 100, seed=27).float()
    logits[0, 3], logits[1], logits[2, 80] = math.nan, -INF, INF
    asked = torch.ones(4), torch.full((4,), 0.9, dtype=torch.float64), torch.full((4,), 50), None
    found, expected = both(logits, asked, device)
    assert_float64(found, expected)
    assert (found.sum(1) > 0).tolist() == [False, False, False, True]

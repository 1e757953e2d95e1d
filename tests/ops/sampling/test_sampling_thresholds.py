"""Thresholds by kernels on rows that are hard to cut: ties, neighbours, infinities, NaN, lists without room."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64
from op_cases import normal, poisoned_outputs
from quickseek.ops.sampling import reference

kernels = pytest.importorskip("quickseek.ops.sampling.triton")
INF = math.inf
VOCABULARY = 100
"""Ranges of 64 and 36 ids."""


@pytest.fixture(autouse=True)
def no_gpu(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("these run in Triton's interpreter; tests/gpu has its own rows")


@pytest.fixture(params=[(16384, 2048), (25, 64)], ids=lambda param: f"room {param[0]}")
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of the list, so that some rows fit and some are searched as a whole; and of what is looked at together."""
    monkeypatch.setattr(kernels, "_ROOM", request.param[0])
    monkeypatch.setattr(kernels, "_SEARCHED", request.param[1])
    return int(request.param[0])


def one_finite(x: Tensor) -> Tensor:
    return torch.where(torch.arange(VOCABULARY) == 84, x, -INF)


def few_finite(x: Tensor) -> Tensor:
    return torch.where(torch.arange(VOCABULARY) % 37 == 3, x, -INF)


def with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[1:30:4] = INF
    x[[7, 70, 99]] = math.nan
    return x


def neighbours(x: Tensor) -> Tensor:
    """Two values a bit apart."""
    low = torch.tensor(1.0, dtype=x.dtype)
    return torch.where(torch.arange(VOCABULARY) % 3 == 0, torch.nextafter(low, low + 1), low)


def far_ahead(x: Tensor) -> Tensor:
    x = x.clone()
    x[67] = 1e4
    return x


def many_ties(x: Tensor) -> Tensor:
    """A few above, most at the border, the rest below."""
    ids = torch.arange(VOCABULARY)
    return torch.where(ids % 37 == 0, x.abs() + 1, torch.where(ids % 5 == 0, -x.abs() - 1, 0.5))


def as_it_is(x: Tensor) -> Tensor:
    return x


HARD: dict[str, Callable[[Tensor], Tensor]] = {
    "random": as_it_is,
    "equal": lambda x: torch.full_like(x, -3.0),
    "zeros of both signs": lambda x: 0.0 * x,
    "nothing finite": lambda x: torch.full_like(x, -INF),
    "one finite": one_finite,
    "few finite": few_finite,
    "NaN and infinite": with_nan,
    "infinite": lambda x: torch.where(torch.arange(VOCABULARY) % 40 == 0, INF, x),
    "denormal": lambda x: x * torch.finfo(x.dtype).smallest_normal / 8,
    "of any size": lambda x: torch.sign(x) * torch.exp(30 * x.abs()),
    "neighbours": neighbours,
    "far ahead": far_ahead,
    "many ties": many_ties,
    "rising": lambda x: torch.arange(VOCABULARY, dtype=x.dtype) / 100,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_most_likely_of_hard_rows_are_those_of_the_reference(dtype: torch.dtype, room: int) -> None:
    x = normal(VOCABULARY, seed=11).to(dtype)
    logits = torch.stack([row(x) for row in HARD.values()])
    ones = torch.ones(len(HARD))
    for count in (20, 64) if room > VOCABULARY else (1, VOCABULARY):
        with poisoned_outputs():
            found = kernels.most_likely(logits, ones, count)
        expected = reference.most_likely(logits, ones, count)
        for number, name in enumerate(HARD):
            assert_bits(found.ids[number], expected.ids[number], f"{name}, {count} of them")
        assert_float64(found.probabilities, expected.probabilities)
        assert not torch.equal(found.ids, reference.most_likely(logits.roll(1, 1), ones, count).ids)


def distinct(dtype: torch.dtype) -> list[str]:
    """Rows in which different logits weigh differently: the weight of an id is all that the reference goes by."""
    alike = {"denormal", "of any size", "far ahead"} | ({"neighbours"} if dtype == torch.float64 else set())
    return [name for name in HARD if name not in alike]


LIMITS = [(0, 0.9), (0, 0.3), (20, 0.7), (60, 1.0), (1, 0.5), (VOCABULARY, 0.999), (5, 0.0)]


@pytest.mark.parametrize(
    ("dtype", "temperature", "limits"),
    [(torch.float32, 1.0, LIMITS[:4]), (torch.float32, 0.3, LIMITS[4:]), (torch.float64, 20.0, LIMITS[1:3])],
)
def test_distributions_of_hard_rows_are_those_of_the_reference(
    dtype: torch.dtype, temperature: float, limits: list[tuple[int, float]], room: int
) -> None:
    x = 2 * normal(VOCABULARY, seed=12).to(dtype)
    names = distinct(dtype)
    logits = torch.stack([HARD[name](x) for name in names]).repeat_interleave(len(limits), 0)
    top_k, top_p = (torch.tensor(values).repeat(len(names)) for values in zip(*limits, strict=True))
    # Two sums of equal weights may fall on either side of a share that they meet; none meets these.
    top_p = torch.where((top_p > 0) & (top_p < 1), top_p + 1.7e-4, top_p).double()
    heat = torch.full(top_p.shape, temperature)
    with poisoned_outputs():
        found = kernels.probabilities(logits, heat, top_p, top_k)
    expected = reference.probabilities(logits, heat, top_p, top_k)
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        what = f"{names[number // len(limits)]}, {limits[number % len(limits)]}"
        assert torch.equal(mine > 0, theirs > 0), what
        assert_float64(mine, theirs)
    with pytest.raises(AssertionError, match="relative error"):
        assert_float64(found, reference.probabilities(logits, heat, 0.5 * top_p, top_k))


def listed(logits: Tensor, count: int) -> list[list[int]]:
    """The list of each row."""
    of = kernels._Rows(logits)
    keys, ids = of.largest()
    levels = of.levels()
    kernels.spread[of.grid](of.logits, keys, ids, levels, of.vocabulary, of.ranges, of.block, of.block_r)
    with poisoned_outputs():
        listing, lengths = of.listed(keys, ids, levels, count)
    return [row[:length] for row, length in zip(listing.tolist(), lengths.tolist(), strict=True)]


def test_a_list_holds_what_is_wanted_and_little_more() -> None:
    logits = 3 * normal(3, 500, seed=13).float()
    for row, ids in zip(logits, listed(logits, count=64), strict=True):
        assert ids == sorted(ids) and 64 <= len(ids) < 150
        assert set(row.topk(64).indices.tolist()) <= set(ids)
        assert not set(row.topk(len(ids) + 1).indices.tolist()) <= set(ids)


def test_a_list_without_room_is_cut_between_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_ROOM", 40)
    logits = torch.zeros(5, 500)
    logits[1, 5::50] = 1.0
    logits[2] = 3 * normal(500, seed=14).float()
    logits[3, :41], logits[4, :40] = 1.0, 1.0
    lists = listed(logits, count=64)
    assert lists[3:] == [[], [*range(40)]]
    assert lists[:2] == [[], [*range(5, 500, 50)]]
    assert 0 < len(lists[2]) <= 40 and set(logits[2].topk(len(lists[2])).indices.tolist()) == set(lists[2])


def test_levels_never_rise_with_the_logit() -> None:
    rows = torch.stack([row(normal(VOCABULARY, seed=15).float()) for row in HARD.values()])
    for name, row in zip(HARD, rows, strict=True):
        ordered = row.sort(descending=True).values
        counts = []
        for count in (1, 30, 90):
            ids = listed(row.unsqueeze(0), count=count)[0]
            assert len(ids) >= count and counts <= [len(ids)], name
            # What is listed are the largest, all ties at the end included.
            assert_bits(row[ids].sort(descending=True).values + 0.0, ordered[: len(ids)] + 0.0)
            if len(ids) < VOCABULARY:
                assert not ordered[len(ids)] >= ordered[len(ids) - 1], name
            counts = [len(ids)]

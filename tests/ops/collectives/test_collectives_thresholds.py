"""Thresholds are data with conditions, and the geometry covers every row width."""

import pytest

from quickseek.ops.collectives.thresholds import Thresholds, load, thresholds


def test_every_entry_says_what_it_comes_from() -> None:
    for entry in load():
        assert len(entry.conditions) > 20
        assert entry.ranks in (2, 4, 8)
        for rows in (entry.two_shot_rows, entry.two_shot_finalize_rows):
            assert rows is None or rows > entry.ranks


def test_the_nearest_entry_serves_what_was_not_measured() -> None:
    assert thresholds(9, 4).ranks == 4
    assert thresholds(10, 8).ranks == 8
    assert thresholds(9, 1).ranks == 2


@pytest.mark.parametrize(
    ("hidden", "geometry"),
    [(5120, (128, 5)), (4096, (128, 4)), (6144, (128, 6)), (7168, (128, 7)), (8192, (128, 8)), (2048, (128, 2))],
)
def test_published_widths_get_full_blocks(hidden: int, geometry: tuple[int, int]) -> None:
    assert thresholds(9, 2).geometry(hidden) == geometry


@pytest.mark.parametrize("limit", [1, 8])
def test_a_geometry_covers_its_row_in_whole_trips(limit: int) -> None:
    entry = Thresholds(9, 2, 128, limit, 384, None, None, "made up")
    for hidden in range(8, 20000, 8):
        threads, cluster = entry.geometry(hidden)
        assert threads % 32 == 0 and 32 <= threads <= 1024 and 1 <= cluster <= limit
        trips = -(-(hidden // 8) // (threads * cluster))
        assert trips == 1 or cluster == limit, f"{hidden} takes {trips} trips though more blocks are allowed"

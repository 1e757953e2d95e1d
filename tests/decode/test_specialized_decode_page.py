"""The page tells the truth: its table is the gates, its limits are the constants, its needs are the list's."""

import re
from pathlib import Path

import pytest

from quickseek.config import DECODE_BACKENDS
from quickseek.decode.gates import FUSED_MHC_MAX_ROWS, GATES, PATHS
from quickseek.decode.requirements import CHECKED_FEATURES, LEAST_CAPABILITY, MOST_STREAMS

PAGE = (Path(__file__).parents[2] / "docs" / "specialized_decode.md").read_text(encoding="utf-8")


def table(page: str) -> dict[str, dict[str, int]]:
    """Rows of every path by kind of device, as the page has them."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    header = next(cells for cells in lines if cells[0] == "path")
    kinds = header[1:-1]
    rows = [cells for cells in lines if re.fullmatch(r"`\w+`", cells[0])]
    return {cells[0].strip("`"): dict(zip(kinds, map(int, cells[1:-1]), strict=True)) for cells in rows}


def gates() -> dict[str, dict[str, int]]:
    return {path: {kind: getattr(of_kind, path) for kind, of_kind in GATES.items()} for path in PATHS}


def test_the_table_of_paths_is_that_of_the_gates():
    assert table(PAGE) == gates()
    # Negative control: a figure of the page that is off by one.
    assert table(PAGE.replace("| 48 | 0 | 48 |", "| 47 | 0 | 48 |")) != gates()
    assert table(PAGE.replace("| `draft` | 384", "| `drafts` | 384")) != gates()


@pytest.mark.parametrize(
    "words",
    [
        f"1 to {FUSED_MHC_MAX_ROWS} rows",
        f"compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer",
        f"`hc_mult` at most {MOST_STREAMS}",
        *(f"`{backend}`" for backend in DECODE_BACKENDS),
        *CHECKED_FEATURES,
    ],
)
def test_limits_and_names_of_the_page_are_those_of_the_code(words):
    assert words in PAGE


def test_paths_that_the_page_calls_not_built_never_run():
    unbuilt = re.findall(r"\| `(\w+)` \|.*not built", PAGE)
    assert unbuilt == ["low_batch", "overlap_candidates"]
    for path in unbuilt:
        assert set(table(PAGE)[path].values()) == {0}

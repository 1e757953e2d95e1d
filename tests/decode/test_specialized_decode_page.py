"""The page tells the truth: its table is the gates, its limits are the constants, its needs are the list's."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from quickseek.config import DECODE_BACKENDS
from quickseek.decode.gates import FUSED_MHC_MAX_ROWS, GATES, PATHS, ROW_SHARD_MIN_REQUESTS
from quickseek.decode.requirements import CHECKED_FEATURES, LEAST_CAPABILITY, MOST_STREAMS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "specialized_decode.md").read_text(encoding="utf-8")
SOURCES = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "quickseek" / "decode").glob("*.py"))


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
    assert table(PAGE.replace("| 1024 | 0 |", "| 1023 | 0 |")) != gates()
    assert table(PAGE.replace("| `draft` | 384", "| `drafts` | 384")) != gates()


@pytest.mark.parametrize(
    "words",
    [
        f"1 to {FUSED_MHC_MAX_ROWS} rows",
        f"With {ROW_SHARD_MIN_REQUESTS} requests or more",
        f"compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer",
        f"`hc_mult` at most {MOST_STREAMS}",
        *(f"`{backend}`" for backend in DECODE_BACKENDS),
        *CHECKED_FEATURES,
    ],
)
def test_limits_and_names_of_the_page_are_those_of_the_code(words):
    assert words in PAGE


def unread(paths: Iterable[str]) -> list[str]:
    """Paths whose gate no source of the decode reads."""
    return [path for path in paths if not re.search(rf"\b(step|gates)\.{path}\b", SOURCES)]


def test_every_path_of_the_table_is_built_and_its_gate_is_read():
    assert "not built" not in "".join(line for line in PAGE.splitlines() if line.startswith("|"))
    assert unread(PATHS) == []
    # Negative control: gates that switch nothing.
    assert unread(["overlap_candidates", "draft"]) == ["overlap_candidates"]

"""Where tables lie: whole pages, each locked once."""

import mmap

import pytest
import torch

from quickseek import formats
from quickseek.ops.engram import HostTable
from quickseek.ops.engram.host_table import missing, pages
from quickseek.ops.linear import Fp8Weight

PAGE = mmap.PAGESIZE


def test_a_cpu_reads_the_table_where_it_is() -> None:
    table = Fp8Weight(*formats.quantize_a8(torch.randn(4, 64)))
    placed = HostTable(table, "cpu")
    assert placed.weight is table
    placed.close()


def test_pages_cover_the_tensors_and_meet_in_one_range() -> None:
    whole = torch.zeros(6 * PAGE, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE
    parts = [whole[first + 100 : first + 2 * PAGE + 1], whole[first + 2 * PAGE + 5 : first + 3 * PAGE]]
    found = pages(reversed(parts))
    start = whole.data_ptr() + first
    assert found == [(start, start + 3 * PAGE)]
    apart = pages([parts[0], whole[first + 4 * PAGE : first + 4 * PAGE + 1]])
    assert apart == [(start, start + 3 * PAGE), (start + 4 * PAGE, start + 5 * PAGE)]


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ([], [(10, 20), (20, 30), (30, 34)]),
        ([(0, 12), (33, 40)], [(12, 22), (22, 32), (32, 33)]),
        ([(15, 16)], [(10, 15), (16, 26), (26, 34)]),
        ([(0, 50)], []),
        ([(34, 40), (0, 10)], [(10, 20), (20, 30), (30, 34)]),
    ],
)
def test_what_is_locked_already_is_left_out(taken: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert list(missing([(10, 34)], taken, most=10)) == expected

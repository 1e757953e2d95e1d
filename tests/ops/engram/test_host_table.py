"""Where tables lie: whole pages, each locked once."""

import contextlib
import gc
import mmap

import pytest
import torch

from quickseek import formats
from quickseek.ops.engram import HostTable, host_table
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


class Driver:
    """Stands in for the CUDA runtime: the addresses that are locked, and how often the device was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked: dict[int, int] = {}
        self.waits = 0
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def wait(self, device: torch.device) -> None:
        self.waits += 1

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        assert start not in self.locked, "locked twice"
        self.locked[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.locked[start]
        return 0


def on_gpu(values: torch.Tensor) -> HostTable:
    return HostTable(values, "cuda", copied_bytes=0)


def test_pages_are_unlocked_when_what_holds_the_table_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    layer = torch.nn.Module()
    layer.placed, layer.itself = on_gpu(torch.zeros(4 * PAGE, dtype=torch.uint8)), layer  # type: ignore[assignment]
    assert sum(driver.locked.values()) >= 4 * PAGE and len(HostTable._registered) == len(driver.locked) == 1
    gc.collect()
    assert driver.locked and not driver.waits, "a table in use stays locked"
    del layer
    gc.collect()
    assert not driver.locked and not HostTable._registered
    assert driver.waits == 1, "kernels that read the table are waited for"


def test_pages_of_two_tables_stay_locked_until_both_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    whole = torch.zeros(8 * PAGE, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE
    one, two = on_gpu(whole[first : first + 2 * PAGE + 9]), on_gpu(whole[first + 2 * PAGE + 9 : first + 4 * PAGE])
    start = whole.data_ptr() + first
    assert driver.locked == {start: 3 * PAGE, start + 3 * PAGE: PAGE}, "the page between them is locked once"
    one.close()
    assert driver.locked == {start: 3 * PAGE, start + 3 * PAGE: PAGE}, "the second table reads from both"
    again = on_gpu(whole[first : first + PAGE])
    two.close()
    assert driver.locked == {start: 3 * PAGE}
    again.close()
    assert not driver.locked and not HostTable._registered


def test_pages_that_were_locked_before_a_refusal_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    lock, refused = driver.cudaHostRegister, []

    def second_is_refused(start: int, size: int, flags: int) -> int:
        return lock(start, size, flags) if not driver.locked else refused.append(start) or 2

    monkeypatch.setattr(driver, "cudaHostRegister", second_is_refused)
    monkeypatch.setattr(host_table, "_forget_error", lambda: None)
    monkeypatch.setattr(driver, "cudaError", lambda code: code, raising=False)
    monkeypatch.setattr(driver, "cudaGetErrorString", lambda code: "out of memory", raising=False)
    apart = torch.zeros(8 * PAGE, dtype=torch.uint8)
    table = Fp8Weight(apart[: 2 * PAGE].view(torch.float8_e4m3fn), apart[6 * PAGE :])
    with pytest.raises(RuntimeError, match="does not lock"):
        HostTable(table, "cuda", copied_bytes=0)
    assert refused and not driver.locked and not HostTable._registered

"""Engram kernels against their reference (spec/model.md 8.3, 8.4)."""

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op
from golden_data import RELEASED_CONFIG
from op_cases import assert_nan_stays, filled_ring, normal, poisoned_outputs
from quickseek import formats
from quickseek.config import ModelConfig
from quickseek.ops.cache import CacheView
from quickseek.ops.engram import DEAD, HashConstants, reference
from quickseek.ops.linear import Fp8Weight
from quickseek.ops.rows import StepRows

kernels = pytest.importorskip("quickseek.ops.engram.triton")

BF16 = torch.bfloat16
LOOKBACK = 3


def rows_on(starts: list[int], counts: list[int], device: torch.device) -> StepRows:
    return StepRows.build(starts, counts, device)


def ring_of(starts: list[int], device: torch.device) -> CacheView:
    """Ids of each request before its step, some of them dead."""
    ids = [torch.arange(100 * (i + 1), 100 * (i + 1) + start, dtype=torch.int32) for i, start in enumerate(starts)]
    for one in ids:
        one[1::5] = DEAD
    ring = filled_ring([one.unsqueeze(1) for one in ids], starts, rows=11)
    return CacheView(ring.storage.to(device), ring.table.to(device), ring.codec)


@pytest.mark.parametrize(
    ("starts", "counts"), [([0], [1]), ([10], [1]), ([11], [2]), ([12, 0, 3], [2, 5, 1]), ([0, 25, 2], [3, 30, 9])]
)
def test_windows_are_those_of_the_reference(device: torch.device, starts: list[int], counts: list[int]) -> None:
    ids = torch.arange(7, 7 + sum(counts))
    ids[::4] = DEAD
    rows, history = rows_on(starts, counts, device), ring_of(starts, device)
    expected = reference.token_windows(ids.to(device), history, rows, LOOKBACK, None)
    with poisoned_outputs():
        found = kernels.token_windows(ids.to(device), history, rows, LOOKBACK, None)
    assert_bits(found, expected)
    given = torch.stack([torch.arange(50, 50 + LOOKBACK) + 10 * i for i in range(len(starts))]).to(device)
    with_given = kernels.token_windows(ids.to(device), None, rows, LOOKBACK, given)
    assert_bits(with_given, reference.token_windows(ids.to(device), None, rows, LOOKBACK, given))
    if max(starts):
        assert not torch.equal(with_given, expected)


def test_other_requests_of_the_ring_are_not_read(device: torch.device) -> None:
    rows, history = rows_on([5], [2], device), ring_of([5], device)
    ids = torch.tensor([1, 2], device=device)
    found = kernels.token_windows(ids, history, rows, LOOKBACK, None)
    moved = CacheView(history.storage.flip(0).contiguous(), 1 - history.table, history.codec)
    assert_bits(kernels.token_windows(ids, moved, rows, LOOKBACK, None), found)
    assert -7777 not in found.tolist()[0]
    other = CacheView(history.storage, 1 - history.table, history.codec)
    assert not torch.equal(kernels.token_windows(ids, other, rows, LOOKBACK, None), found)


def released(index: int, device: torch.device) -> HashConstants:
    layout = ModelConfig.from_file(RELEASED_CONFIG).engram_layout
    parts = (torch.tensor(part[index]).to(device) for part in (layout.multipliers, layout.primes, layout.offsets))
    return HashConstants(*parts, pad=2)


@pytest.mark.parametrize("rows", [1, 40])
def test_hashes_are_exact(device: torch.device, rows: int) -> None:
    windows = torch.randint(0, 99092, (rows, LOOKBACK + 1), generator=torch.Generator().manual_seed(rows))
    windows[0] = 99091
    windows[rows // 2, 1] = windows[-1, 0] = DEAD
    for index in range(2):
        constants = released(index, torch.device("cpu"))
        expected = reference.hash_ngrams(windows, constants)
        with poisoned_outputs():
            found = kernels.hash_ngrams(windows.to(device), released(index, device)).cpu()
        assert_bits(found, expected)
        nudged = HashConstants(constants.multipliers + 2, constants.primes, constants.offsets, constants.pad)
        with pytest.raises(AssertionError, match="differ in bits"):
            assert_bits(found, reference.hash_ngrams(windows, nudged))


@pytest.mark.parametrize(("width", "columns"), [(32, 4), (256, 3), (96, 1)])
def test_table_rows_are_those_of_the_reference(device: torch.device, width: int, columns: int) -> None:
    values = normal(20, width, dtype=torch.float32) * torch.logspace(-12, 12, 20).unsqueeze(1)
    values[3], values[4, 5] = -0.0, torch.nan
    rows = torch.tensor([[3, 19, 0, 7], [5, 5, 7, 4]])[:, :columns].contiguous()
    packed = Fp8Weight(*formats.quantize_a8(values))
    on = Fp8Weight(packed.codes.to(device), packed.scales.to(device))
    for dtype in (BF16, torch.float32):
        with poisoned_outputs():
            found = kernels.gather_rows(on, rows.to(device), dtype).cpu()
        expected = reference.gather_rows(packed, rows, dtype)
        number = ~expected.isnan()
        assert_bits(found[number], expected[number])
        assert found[~number].isnan().all()
        plain = kernels.gather_rows(values.to(BF16).to(device), rows.to(device), dtype).cpu()
        assert_bits(plain[0], reference.gather_rows(values.to(BF16), rows, dtype)[0])
        with pytest.raises(AssertionError, match="differ in bits"):
            assert_bits(plain[0], reference.gather_rows(values.to(BF16), rows.flip(0), dtype)[0])


N = 4


def parts(rows: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dead = torch.arange(rows) % 3 == 2
    streams = normal(rows, N, hidden, dtype=BF16)
    return (streams, normal(rows, (N + 1) * hidden, seed=1, dtype=BF16), normal(N, hidden, seed=2, dtype=BF16),
            normal(N, hidden, seed=3, dtype=BF16), dead)  # fmt: skip


def inject(device: torch.device, *arguments: Tensor, eps: float = 1e-20) -> Tensor:
    with poisoned_outputs():
        out: Tensor = kernels.inject(*(x.to(device) for x in arguments), eps)
    return out.cpu()


@pytest.mark.parametrize(("rows", "hidden"), [(1, 32), (5, 40), (4, 2100)])
@pytest.mark.parametrize("size", [1.0, 1e-7, 0.0])
def test_the_injection_is_that_of_the_reference(device: torch.device, rows: int, hidden: int, size: float) -> None:
    streams, key_value, q, k, dead = parts(rows, hidden)
    streams = (streams * size).to(BF16)
    expected = reference.inject(streams, key_value, q, k, dead, 1e-20)
    found = inject(device, streams, key_value, q, k, dead)
    assert_op(found, expected)
    assert_bits(found[dead], streams[dead])
    if size == 1.0:
        with pytest.raises(AssertionError, match="outside"):
            assert_op(found, reference.inject(streams, key_value, q, -k, dead, 1e-20))
        with pytest.raises(AssertionError, match="outside"):
            assert_op(found, reference.inject(streams, key_value, q, k, dead.logical_not(), 1e-20))
    if size == 1e-7:
        with pytest.raises(AssertionError, match="outside"):
            assert_op(inject(device, streams, key_value, q, k, dead, eps=1e-6), expected)


def test_a_dead_row_keeps_its_bits_even_if_its_memory_is_nan(device: torch.device) -> None:
    streams, key_value, q, k, dead = parts(3, 40)
    key_value[2] = torch.nan
    streams[2, 0, 0] = -0.0
    assert_bits(inject(device, streams, key_value, q, k, dead)[2], streams[2])
    assert inject(device, streams, key_value, q, k, ~dead)[2].isnan().all()


def test_a_nan_row_stays_in_its_row(device: torch.device) -> None:
    streams, key_value, q, k, dead = parts(4, 40)
    assert_nan_stays(lambda x: inject(device, x, key_value, q, k, dead), streams, 3)
    assert_nan_stays(lambda x: inject(device, streams, x, q, k, dead), key_value, 3)


def test_another_dtype_is_named(device: torch.device) -> None:
    streams, key_value, q, k, dead = parts(2, 40)
    with pytest.raises(ValueError, match="key_value has dtype"):
        inject(device, streams, key_value.float(), q, k, dead)
    with pytest.raises(ValueError, match="rows has dtype"):
        kernels.gather_rows(q, torch.zeros(1, 1, dtype=torch.int32), BF16)
    with pytest.raises(ValueError, match="expected a multiple of 32"):
        codes = torch.zeros(3, 40, dtype=torch.float8_e4m3fn)
        kernels.gather_rows(Fp8Weight(codes, torch.zeros(3, 1)), torch.zeros(1, 1, dtype=torch.int64), BF16)

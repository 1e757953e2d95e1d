"""Engram on a GPU in released shapes: tables in device and host memory, in a graph, rows beyond 2^31 bytes."""

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op
from golden_data import RELEASED_CONFIG
from op_cases import poisoned_outputs
from quickseek import formats
from quickseek.config import ModelConfig
from quickseek.ops import engram
from quickseek.ops.cache import CacheView, PlainCodec
from quickseek.ops.engram import DEAD, HashConstants, HostTable, reference
from quickseek.ops.linear import Fp8Weight
from quickseek.ops.rows import StepRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

N, HIDDEN, WIDTH, COLUMNS = 4, 5120, 256, 24
CUDA = torch.device("cuda")
BF16 = torch.bfloat16


def number(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(BF16)


def in_a_graph(call: Callable[[], Tensor]) -> Tensor:
    """The output of the second replay of a graph that holds the call; what it writes is spoilt before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    out.zero_()
    graph.replay()
    return out


def table_of(rows: int, seed: int = 0) -> Fp8Weight:
    return Fp8Weight(*formats.quantize_a8(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))))


@pytest.mark.parametrize("count", [1, 6, 8, 2048])
def test_windows_and_hashes_are_those_of_the_reference(count: int) -> None:
    requests = min(count, 3)
    counts = [count // requests] * requests
    rows = StepRows.build([0, 200, 5][:requests], counts, CUDA)
    ids = torch.randint(0, 99092, (sum(counts),), device=CUDA)
    ids[::7] = DEAD
    storage = torch.randint(0, 99092, (requests + 1, 139, 1), dtype=torch.int32, device=CUDA)
    table = torch.arange(1, requests + 1, device=CUDA).unsqueeze(1)
    history = CacheView(storage, table, PlainCodec(1, torch.int32))
    layout = ModelConfig.from_file(RELEASED_CONFIG).engram_layout
    parts = [torch.tensor(part[1]) for part in (layout.multipliers, layout.primes, layout.offsets)]
    on_cpu, constants = HashConstants(*parts, pad=2), HashConstants(*(part.to(CUDA) for part in parts), pad=2)

    def hashes() -> Tensor:
        return engram.hash_ngrams(engram.token_windows(ids, history, rows, 3), constants)

    with poisoned_outputs():
        windows, found = engram.token_windows(ids, history, rows, 3), hashes()
    assert_bits(windows, reference.token_windows(ids, history, rows, 3, None))
    assert_bits(found.cpu(), reference.hash_ngrams(windows.cpu(), on_cpu))
    assert_bits(in_a_graph(hashes), found)
    with pytest.raises(AssertionError):
        assert_bits(reference.hash_ngrams(windows + 1, constants), found)


@pytest.mark.parametrize("place", ["device", "pinned", "mapped"])
@pytest.mark.parametrize("rows", [1, 6, 384])
def test_rows_come_from_wherever_the_table_lies(place: str, rows: int, tmp_path: Path) -> None:
    table = table_of(5000)
    numbers = torch.randint(0, 5000, (rows, COLUMNS), device=CUDA)
    expected = reference.gather_rows(table, numbers.cpu(), BF16)
    if place == "pinned":
        table = Fp8Weight(table.codes.pin_memory(), table.scales.pin_memory())
    if place == "mapped":
        table = mapped(table, tmp_path / "table")
    placed = HostTable(table, CUDA, copied_bytes=0 if place == "mapped" else 1 << 30) if place != "pinned" else None
    weight = table if placed is None else placed.weight
    with poisoned_outputs():
        found = engram.gather_rows(weight, numbers, BF16)
    assert_bits(found.cpu(), expected)
    assert_bits(in_a_graph(lambda: engram.gather_rows(weight, numbers, BF16)), found)
    with pytest.raises(AssertionError):
        assert_bits(engram.gather_rows(weight, numbers.flip(1), BF16).cpu(), expected)
    if placed is not None:
        torch.cuda.synchronize()
        placed.close()


def mapped(table: Fp8Weight, path: Path) -> Fp8Weight:
    """The table as the checkpoint reader maps it: both tensors in one file, mapped privately."""
    codes, scales = table.codes.view(torch.uint8).flatten(), table.scales.flatten()
    path.write_bytes(b"header!!" + bytes(codes.numpy()) + bytes(scales.numpy()))
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    whole = torch.frombuffer(view, dtype=torch.uint8)[8:]
    first = whole[: codes.numel()].view(torch.float8_e4m3fn).view(table.codes.shape)
    return Fp8Weight(first, whole[codes.numel() :].view(table.scales.shape))


def test_a_table_in_pageable_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="expected what HostTable gives"):
        engram.gather_rows(table_of(10), torch.zeros(1, 1, dtype=torch.int64, device=CUDA), BF16)


def test_a_table_that_the_driver_does_not_lock_is_an_error_that_later_launches_survive() -> None:
    table = table_of(64)
    pinned = Fp8Weight(table.codes.pin_memory(), table.scales.pin_memory())  # locked already: refused a second time
    with pytest.raises(RuntimeError, match=r"does not lock .* bytes in host memory"):
        HostTable(pinned, CUDA, copied_bytes=0)
    assert float(torch.ones(3, device=CUDA).sum()) == 3.0


def test_rows_beyond_two_to_the_31_bytes_are_found() -> None:
    count = (1 << 31) // WIDTH + 100
    codes = torch.zeros(count, WIDTH, dtype=torch.uint8, device=CUDA)
    scales = torch.full((count, WIDTH // 32), 127, dtype=torch.uint8, device=CUDA)
    numbers = torch.tensor([[count - 1, count - 50], [0, count - 1]], device=CUDA)
    codes[count - 1], codes[count - 50] = 0x38, 0x40  # 1 and 2
    table = Fp8Weight(codes.view(torch.float8_e4m3fn), scales)
    found = engram.gather_rows(table, numbers, BF16).unflatten(1, (2, WIDTH))
    assert found[:, :, 0].tolist() == [[1.0, 2.0], [0.0, 1.0]]
    assert found[:, :, -1].tolist() == [[1.0, 2.0], [0.0, 1.0]]


@pytest.mark.parametrize("rows", [1, 6, 8, 48, 1024])
def test_the_injection_is_that_of_the_reference(rows: int) -> None:
    streams, key_value = number(rows, N, HIDDEN, seed=1), number(rows, (N + 1) * HIDDEN, seed=2)
    q, k = number(N, HIDDEN, seed=3), number(N, HIDDEN, seed=4)
    dead = torch.arange(rows, device=CUDA) % 5 == 3
    key_value[3::5] = torch.nan

    def inject() -> Tensor:
        return engram.inject(streams, key_value, q, k, dead, 1e-20)

    with poisoned_outputs():
        found = inject()
    assert_op(found, reference.inject(streams, key_value, q, k, dead, 1e-20))
    assert_bits(found[dead], streams[dead])
    assert_bits(inject(), found, "a second run")
    assert_bits(in_a_graph(inject), found)
    with pytest.raises(AssertionError):
        assert_op(found, reference.inject(streams, key_value, q, -k, dead, 1e-20))

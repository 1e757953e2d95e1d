"""Kernels that write and read records of caches, against the reference in bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compare import assert_bits
from op_cases import normal, poisoned_outputs
from quickseek.ops.cache import SCRATCH, Codec, GlobalKvCodec, IndexKeyCodec, PlainCodec, WindowCodec
from quickseek.ops.quantize import reference

kernels = pytest.importorskip("quickseek.ops.quantize.triton")

TABLE = torch.tensor([[5, 1, 7], [2, 6, 3]])
REQUESTS = torch.tensor([0, 0, 1, 1, 0, 1, 1])
ROWS = torch.tensor([0, 5, 5, 11, -1, 2, 3])
CODECS: list[tuple[Codec, torch.dtype]] = [
    (WindowCodec(64), torch.bfloat16),
    (GlobalKvCodec(64), torch.bfloat16),
    (IndexKeyCodec(32), torch.bfloat16),
    (WindowCodec(96), torch.float32),
    (GlobalKvCodec(48), torch.float32),
    (IndexKeyCodec(96), torch.bfloat16),
    (PlainCodec(1, torch.int32), torch.int64),
    (PlainCodec(20, torch.float32), torch.float32),
    (PlainCodec(6, torch.bfloat16), torch.float32),
]
EVERY = pytest.mark.parametrize(("codec", "dtype"), CODECS, ids=[f"{codec.kind} {codec.width}" for codec, _ in CODECS])


def blocks(codec: Codec) -> Tensor:
    """Eight blocks of four records, each byte or value 77 until it is written."""
    return torch.full((8, 4, codec.record), 77, dtype=codec.dtype)


def values(codec: Codec, dtype: torch.dtype) -> Tensor:
    """Rows that lie in a wider tensor; among them zeros of both signs and tiny ones."""
    x = normal(len(ROWS), codec.width + 3) * 5
    x[1] = 0.0
    x[2, ::2] = -0.0
    x[3] *= 1e-25
    return x.to(dtype)[:, : codec.width]


def kept(storage: Tensor) -> Tensor:
    """All blocks but scratch, whose content means nothing."""
    assert SCRATCH == 0
    return storage[1:].cpu()


@EVERY
def test_rows_are_packed_where_the_reference_packs_them(codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    x, ours, theirs = values(codec, dtype), blocks(codec).to(device), blocks(codec)
    place = (TABLE.to(device), codec, REQUESTS.to(device))
    kernels.write_records(ours, *place, ROWS.to(device), x.to(device))
    reference.write_records(theirs, TABLE, codec, REQUESTS, ROWS, x)
    assert_bits(kept(ours), kept(theirs))
    kernels.write_records(ours, *place, (ROWS - 1).to(device), x.to(device))
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(kept(ours), kept(theirs))


@EVERY
@pytest.mark.parametrize("shape", ["rows", "lists"])
def test_rows_are_read_as_the_reference_reads_them(
    shape: str, codec: Codec, dtype: torch.dtype, device: torch.device
) -> None:
    storage = blocks(codec)
    reference.write_records(storage, TABLE, codec, REQUESTS, ROWS, values(codec, dtype))
    rows = torch.tensor([[0, 5, -1, 5], [11, -1, 2, 3]])
    requests, rows = (REQUESTS, ROWS) if shape == "rows" else (torch.tensor([[0], [1]]), rows)
    with poisoned_outputs():
        out = kernels.read_records(
            storage.to(device), TABLE.to(device), codec, requests.to(device), rows.to(device), dtype
        ).cpu()
    expected = reference.read_records(storage, TABLE, codec, requests, rows, dtype)
    assert_bits(out, expected)
    assert (out[rows < 0] == 0).all()
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(out.flip(0), expected)


@pytest.mark.parametrize(
    ("starts", "counts"), [((0, 0), (1, 3)), ((3, 2), (4, 5)), ((9, 0), (2, 4)), ((0, 7), (11, 1))]
)
def test_a_ring_keeps_the_last_rows_of_a_step(
    starts: tuple[int, int], counts: tuple[int, int], device: torch.device
) -> None:
    codec, table = WindowCodec(32), torch.tensor([[5], [2]])
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    requests = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
    ends = torch.tensor([s + n for s, n in zip(starts, counts, strict=True)])
    x = normal(sum(counts), 32, dtype=torch.bfloat16)

    def run(form: Callable[..., None], ends: Tensor, device: torch.device) -> Tensor:
        storage = blocks(codec).to(device)
        form(storage, table.to(device), codec, *(t.to(device) for t in (requests, positions, ends, x)))
        return kept(storage)

    expected = run(reference.keep_records, ends, torch.device("cpu"))
    assert_bits(run(kernels.keep_records, ends, device), expected)
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(run(kernels.keep_records, ends + 4, device), expected)


@pytest.mark.parametrize("codec", [WindowCodec(64), GlobalKvCodec(64), IndexKeyCodec(64)], ids=lambda c: c.kind)
def test_a_nan_reaches_its_own_group_of_its_own_row_only(codec: Codec, device: torch.device) -> None:
    x = values(codec, torch.bfloat16).contiguous()
    spoilt, found = x.clone(), []
    spoilt[2, 3] = torch.nan
    for rows in (x, spoilt):
        storage = blocks(codec).to(device)
        place = (TABLE.to(device), codec, REQUESTS.to(device), ROWS.to(device))
        kernels.write_records(storage, *place, rows.to(device))
        found.append(kernels.read_records(storage, *place, torch.float32).cpu())
    nan = found[1].isnan()
    assert nan[2, 3] and not nan[2, 32:].any() and not nan[[0, 1, 3, 4, 5, 6]].any()
    assert_bits(found[1][~nan], found[0][~nan])


def test_nothing_is_written_for_a_negative_row(device: torch.device) -> None:
    codec = WindowCodec(32)
    storage, rows = blocks(codec).to(device), torch.full_like(ROWS, -1)
    x = values(codec, torch.bfloat16).to(device)
    place = (TABLE.to(device), codec, REQUESTS.to(device))
    kernels.write_records(storage, *place, rows.to(device), x)
    assert_bits(kept(storage), kept(blocks(codec)))
    kernels.write_records(storage, *place, rows.abs().to(device), x)
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(kept(storage), kept(blocks(codec)))


def test_what_kernels_do_not_take_is_refused_by_name(device: torch.device) -> None:
    codec, x = WindowCodec(32), torch.zeros(7, 32, dtype=torch.float64, device=device)
    storage, table, requests, rows = (t.to(device) for t in (blocks(codec), TABLE, REQUESTS, ROWS))
    with pytest.raises(ValueError, match=r"values has dtype torch.float64"):
        kernels.write_records(storage, table, codec, requests, rows, x)
    with pytest.raises(ValueError, match=r"rows has dtype torch.int32: expected torch.int64"):
        kernels.write_records(storage, table, codec, requests, rows.int(), x.float())
    with pytest.raises(ValueError, match=r"storage has shape .*: expected \[\*, \*, 33\]"):
        kernels.write_records(storage[..., :32], table, codec, requests, rows, x.float())

"""Caches: the record formats of spec/model.md 6.10, and where rows are written and read."""

from typing import Literal

import pytest
import torch

from compare import assert_bits
from op_cases import normal, poisoned_cache
from quickseek import formats
from quickseek.ops.cache import (
    SCRATCH,
    CacheView,
    Codec,
    GlobalKvCodec,
    IndexKeyCodec,
    PlainCodec,
    WindowCodec,
)

PACKED = [
    (WindowCodec(512), 528, formats.fake_quantize_a8),
    (GlobalKvCodec(512), 288, formats.fake_quantize_q4k),
    (IndexKeyCodec(128), 68, formats.fake_quantize_q4i),
]


@pytest.mark.parametrize(("codec", "size", "quantise"), PACKED)
def test_a_packed_record_has_its_size_and_holds_the_fake_quantised_values(
    codec: Codec, size: int, quantise: object
) -> None:
    assert (codec.record, codec.dtype) == (size, torch.uint8)
    x = normal(9, codec.width, dtype=torch.bfloat16)
    records = codec.encode(x)
    assert records.shape == (9, size) and records.dtype == torch.uint8
    assert_bits(codec.decode(records, torch.bfloat16), quantise(x))  # type: ignore[operator]
    assert codec.decode(records, torch.float32).dtype == torch.float32
    spoilt = records.clone()
    spoilt[:, 0] ^= 1
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(codec.decode(spoilt, torch.bfloat16), quantise(x))  # type: ignore[operator]


@pytest.mark.parametrize("codec", [WindowCodec(64), IndexKeyCodec(64)])
def test_encoding_what_was_decoded_changes_nothing(codec: Codec) -> None:
    once = codec.decode(codec.encode(normal(9, 64, dtype=torch.bfloat16)), torch.bfloat16)
    assert_bits(codec.decode(codec.encode(once), torch.bfloat16), once)


def test_values_come_first_in_a_record_and_scales_last() -> None:
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    window, global_kv, index = WindowCodec(64).encode(x), GlobalKvCodec(64).encode(x), IndexKeyCodec(64).encode(x)
    # 1/448 lies above 2^-9, so A8's scale is 2^-8; Q4k's is 1/6 rounded to E4M3; Q4i's is 1/4.
    assert window[0, 64:].tolist() == [127 - 8] * 2
    assert formats.e4m3_to_float32(global_kv[0, 32:].contiguous()).tolist() == [0.171875] * 4
    assert index[0, 32:].tolist() == [127 - 2] * 2


def test_a_plain_record_is_the_values_in_its_dtype() -> None:
    codec = PlainCodec(5, torch.float32)
    x = normal(3, 5)
    assert_bits(codec.encode(x), x.float())
    assert codec.decode(codec.encode(x), torch.float64).dtype == torch.float64


# ---------------------------------------------------------------------------------------------- addressing


def paged() -> CacheView:
    """Two requests of three blocks of four rows, in scattered blocks."""
    storage = torch.full((8, 4, 2), torch.nan, dtype=torch.float64)
    return CacheView(storage, torch.tensor([[5, 1, 7], [2, 6, 3]]), PlainCodec(2, torch.float64))


def test_rows_go_through_the_block_table() -> None:
    view = paged()
    requests, rows = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 5, 5, 11])
    view.write(requests, rows, normal(4, 2))
    for (block, offset), value in zip([(5, 0), (1, 1), (6, 1), (3, 3)], normal(4, 2), strict=True):
        assert_bits(view.storage[block, offset], value)
    assert int(view.storage.isnan().all(-1).sum()) == 8 * 4 - 4, "nothing else is written"
    assert_bits(view.gather(requests, rows, torch.float64), normal(4, 2))


def test_requests_and_rows_broadcast_when_gathered() -> None:
    view = paged()
    view.write(torch.zeros(12, dtype=torch.int64), torch.arange(12), normal(12, 2))
    rows = torch.tensor([[0, 11, -1], [3, -1, 4]])
    found = view.gather(torch.tensor([[0], [0]]), rows, torch.float64)
    assert found.shape == (2, 3, 2)
    assert_bits(found[0, 1], normal(12, 2)[11])
    assert (found[rows < 0] == 0).all(), "a negative row is zeros, whatever scratch holds"


def test_negative_rows_are_written_to_scratch_only() -> None:
    view = paged()
    view.write(torch.tensor([0, 1]), torch.tensor([-1, 2]), normal(2, 2))
    touched = torch.nonzero(~view.storage.isnan().all(-1)).tolist()
    assert touched == [[SCRATCH, 0], [2, 2]]


def test_a_ring_wraps_positions_and_keeps_negative_ones() -> None:
    ring = poisoned_cache(1, 5, 2)
    assert ring.ring_rows(torch.tensor([-2, -1, 0, 4, 5, 13])).tolist() == [-2, -1, 0, 4, 0, 3]
    assert ring.block_rows == 5


def test_a_row_that_was_never_written_is_told_from_one_that_was() -> None:
    view = paged()
    view.write(torch.tensor([0]), torch.tensor([1]), normal(1, 2))
    found = view.gather(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.float64)
    assert found[0].isfinite().all() and found[1].isnan().all()


@pytest.mark.parametrize(("codec", "group"), [(WindowCodec, 32), (GlobalKvCodec, 16), (IndexKeyCodec, 32)])
def test_a_packed_row_has_whole_groups(codec: type[Codec], group: int) -> None:
    assert codec(3 * group).width == 3 * group  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=f"width = {group + 8}: expected a multiple of {group}"):
        codec(group + 8)  # type: ignore[call-arg]


TABLE = torch.tensor([[1, 2], [3, 4]])


def view(storage: torch.Tensor, table: torch.Tensor = TABLE) -> CacheView:
    return CacheView(storage, table, PlainCodec(6, torch.float32))


@pytest.mark.parametrize("part", ["record", "block", "storage"])
def test_a_cache_is_whole_up_to_the_part_that_a_kernel_takes_as_one(
    part: Literal["record", "block", "storage"],
) -> None:
    wide = torch.zeros(10, 8, 12)
    gaps = {"record": wide[::2, ::2, ::2], "block": wide[::2, ::2, :6], "storage": torch.zeros(10, 4, 6)[::2]}
    whole = {"record": gaps["block"], "block": gaps["storage"], "storage": torch.zeros(5, 4, 6)}
    view(whole[part]).expect_whole("pages", part)
    view(torch.zeros(5, 4, 6)).expect_whole("pages", part)
    with pytest.raises(ValueError, match=rf"pages has strides .*: expected each {part} without gaps"):
        view(gaps[part]).expect_whole("pages", part)


def test_strides_of_single_blocks_and_records_mean_nothing() -> None:
    view(torch.zeros(9, 9, 12)[:1, :1, :6], TABLE[:, :1]).expect_whole("pages", "storage")
    with pytest.raises(ValueError, match="strides"):
        view(torch.zeros(9, 9, 12)[:1, :2, :6], TABLE[:, :1]).expect_whole("pages", "storage")


def test_a_table_or_records_of_another_kind_are_named() -> None:
    storage = torch.zeros(5, 4, 6)
    for wrong, message in (
        (view(storage.double()), r"pages has dtype torch.float64: expected torch.float32"),
        (view(storage[..., :5]), r"pages has shape .*: expected \[\*, \*, 6\]"),
        (view(storage, TABLE.int()), r"table of pages has dtype torch.int32"),
        (view(storage, TABLE[0]), r"table of pages has shape \(2,\)"),
        (view(storage, TABLE.T.contiguous().T), r"table of pages has strides \(1, 2\): expected each row without gaps"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong.expect_whole("pages", "record")
    view(storage, TABLE).expect_whole("pages", "record")

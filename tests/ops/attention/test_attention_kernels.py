"""The kernels of attention against the reference: borders of window, ring and tiles, lists, heads, NaN."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import BF16, AttentionCase, BlockCase, in_three_calls, moved, turned
from compare import assert_bits, assert_op
from op_cases import assert_nan_stays
from quickseek.ops import attention as door
from quickseek.ops.attention import reference
from quickseek.ops.cache import IndexKeyCodec
from quickseek.ops.norm_rope import Rotation

kernels = pytest.importorskip("quickseek.ops.attention.triton")

BORDERS = [
    ([0], [1]), ([0], [3]), ([63], [1]), ([64], [2]), ([69], [2]), ([70], [1]), ([71], [1]), ([77], [1]), ([78], [2]),
    ([0, 200, 3], [4, 1, 2]),
]  # fmt: skip
"""Starts and counts, with a window of 70, a ring of 78 and, for so few rows, tiles of 16 or 32."""


def found(case: AttentionCase | BlockCase, device: torch.device) -> Tensor:
    return moved(case, device).run(kernels).cpu()  # type: ignore[no-any-return]


def with_programs(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: count)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize(("starts", "counts"), BORDERS, ids=str)
def test_outputs_are_those_of_the_reference_at_every_border(
    starts: list[int], counts: list[int], packed: bool, device: torch.device
) -> None:
    case = AttentionCase.build(starts, counts, packed=packed)
    out = found(case, device)
    assert_op(out, case.run(reference))
    # One key fewer, for the last row of each request, is noticed.
    fewer = replace(case, oldest=(case.rows.ends - 70).clamp_min(0) + 1)
    with pytest.raises(AssertionError):
        assert_op(out, fewer.run(reference))
    assert case.lists is not None
    with pytest.raises(AssertionError):
        assert_op(out, replace(case, lists=case.lists[:, 1:]).run(reference))


def test_many_rows_of_a_prompt_see_their_window_in_the_step(device: torch.device) -> None:
    case = AttentionCase.build([30, 0], [72, 2], heads=2, width=32, listed=0)
    out = found(case, device)
    assert_op(out, case.run(reference))
    with pytest.raises(AssertionError):
        assert_op(out, replace(case, step_kv=case.step_kv.roll(1, 0)).run(reference))


def test_however_a_row_is_split_it_gives_the_same(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    case = AttentionCase.build([100, 5], [2, 1], listed=140, written=150)
    expected = case.run(reference)
    for programs in (1, 9, 1000):
        with_programs(monkeypatch, programs)
        out = found(case, device)
        assert_op(out, expected)
        assert_bits(found(case, device), out, "a repeated run")
    with pytest.raises(AssertionError):
        assert_op(out, replace(case, lists=case.lists[:, :64]).run(reference))  # type: ignore[index]


def test_what_no_program_wrote_is_not_taken(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    case = AttentionCase.build([3], [1], listed=140)
    assert case.lists is not None
    case = replace(case, lists=case.lists.index_fill(1, torch.arange(40, 140), -1))
    expected, made = case.run(reference), list[Tensor]()
    empty = torch.empty

    def spoilt(*args: Any, **options: Any) -> Tensor:
        made.append(empty(*args, **options).fill_(torch.nan))
        return made[-1]

    with_programs(monkeypatch, 1000)
    there = moved(case, device)
    monkeypatch.setattr(torch, "empty", spoilt)
    out = there.run(kernels)
    monkeypatch.undo()
    assert_op(out.cpu(), expected)
    parts = [tensor for tensor in made if tensor.ndim == 4]
    assert len(parts) == 1 and parts[0].isnan().any(), "parts that have seen no key are not written"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize(("tile", "warps"), [(tile, warps) for _, tile, warps in kernels.TILES])
def test_tiles_of_every_size_give_the_references_outputs(
    tile: int, warps: int, packed: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = AttentionCase.build([71, 0], [2, 3], listed=75, written=80, packed=packed)
    block = BlockCase.build([77, 5], 5, packed=packed)
    monkeypatch.setattr(kernels, "TILES", ((1 << 31, tile, warps),))
    out = found(case, device)
    assert_op(out, case.run(reference))
    assert_op(found(block, device), block.run(reference))
    with pytest.raises(AssertionError):
        assert_op(out, replace(case, lists=case.lists[:, :-1]).run(reference))  # type: ignore[index]


def test_a_plan_takes_all_tiles_and_no_more_programs_than_there_should_be() -> None:
    for programs in (1, 6, 48, 131, 132, 133, 2048):
        for tiles in range(1, 14):
            each = kernels.tiles_of_a_program(programs, tiles, 132)
            parts = -(-tiles // each)
            assert 1 <= each <= tiles
            assert each == tiles or programs * parts <= 132
            assert each == 1 or programs * -(-tiles // (each - 1)) > 132, "no fewer would do"


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    case = AttentionCase.build([0, 200, 3], [2, 1, 2])
    out = found(case, device)
    other = replace(case, queries=case.queries.clone(), lists=case.lists.clone())  # type: ignore[union-attr]
    other.queries[1:] = 3.0
    other.lists[1:] = -1  # type: ignore[index]
    assert_bits(found(other, device)[0], out[0])
    with pytest.raises(AssertionError):
        assert_bits(found(other, device)[1], out[1])


def test_lists_that_name_nothing_leave_the_window_and_the_sink(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = AttentionCase.build([0, 80], [2, 2])
    none = replace(case, lists=torch.full_like(case.lists, -1))  # type: ignore[arg-type]
    expected = replace(case, pages=None, lists=None).run(reference)
    for programs in (1, 1000):
        with_programs(monkeypatch, programs)
        assert_op(found(none, device), expected)
    with pytest.raises(AssertionError):
        assert_op(found(case, device), expected)
    no_width = replace(case, lists=case.lists[:, :0])  # type: ignore[index]
    assert_op(found(no_width, device), expected)


def test_lists_may_have_any_order_and_name_a_row_twice(device: torch.device) -> None:
    case = AttentionCase.build([40], [3], listed=80)
    assert case.lists is not None
    turned = replace(case, lists=case.lists.flip(1).roll(5, 1))
    assert_op(found(turned, device), case.run(reference))
    twice = replace(case, lists=torch.cat((case.lists, case.lists[:, :60]), 1))
    assert_op(found(twice, device), twice.run(reference))
    with pytest.raises(AssertionError):
        assert_op(found(twice, device), case.run(reference))


def test_window_keys_before_the_oldest_position_do_not_exist(device: torch.device) -> None:
    case = AttentionCase.build([0, 200, 100], [3, 3, 2], listed=0)
    part = replace(case, oldest=torch.tensor([1, 201, 95]))
    out = found(part, device)
    assert_op(out, part.run(reference))
    with pytest.raises(AssertionError):
        assert_op(out, case.run(reference))


def test_a_row_whose_only_key_is_itself_gives_its_value(device: torch.device) -> None:
    case = AttentionCase.build([0, 50], [1, 1], listed=0)
    case = replace(case, oldest=torch.tensor([0, 50]), sinks=torch.full((3,), -1e4))
    out = found(case, device)
    assert_bits(out, case.step_kv.unsqueeze(1).expand_as(out).contiguous())
    some = replace(case, oldest=torch.tensor([0, 49]))
    with pytest.raises(AssertionError):
        assert_bits(found(some, device), out)


def test_a_sink_far_above_takes_everything_and_large_scores_do_not_overflow(device: torch.device) -> None:
    case = AttentionCase.build([100], [2])
    sinks = torch.tensor([1e4, -1e4, 0.0])
    high = replace(case, sinks=sinks)
    out = found(high, device)
    assert_op(out, high.run(reference))
    assert (out[:, 0] == 0).all() and (out[:, 1] != 0).any()
    large = replace(case, queries=case.queries * 300)
    out = found(large, device)
    assert out.isfinite().all()
    assert_op(out, large.run(reference))
    with pytest.raises(AssertionError):
        assert_op(out, case.run(reference))


def test_zeros_and_negative_zeros_are_keys_like_others(device: torch.device) -> None:
    case = AttentionCase.build([100], [2])
    for zero in (0.0, -0.0):
        some = replace(case, step_kv=torch.full_like(case.step_kv, zero), queries=torch.full_like(case.queries, zero))
        out = found(some, device)
        assert_op(out, some.run(reference))
    with pytest.raises(AssertionError):
        assert_op(out, case.run(reference))


@pytest.mark.parametrize(
    ("heads", "width", "packed"),
    [(1, 32, True), (17, 32, True), (40, 32, False), (2, 96, True), (16, 160, False), (4, 24, False)],
    ids=str,
)
def test_any_number_of_heads_and_channels(heads: int, width: int, packed: bool, device: torch.device) -> None:
    case = AttentionCase.build([90], [2], heads=heads, width=width, packed=packed, window=20, listed=30, written=40)
    out = found(case, device)
    assert_op(out, case.run(reference))
    with pytest.raises(AssertionError):
        assert_op(out, replace(case, sinks=case.sinks + 3).run(reference))


# ---------------------------------------------------------------------------------------------- NaN


@pytest.mark.parametrize("programs", [1, 1000])
def test_a_nan_reaches_the_rows_that_see_it_alone(
    programs: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    with_programs(monkeypatch, programs)
    case = AttentionCase.build([0, 200], [3, 1], heads=1, width=32, listed=8)
    assert found(case, device).isfinite().all(), "every record that was not written is NaN"
    assert_nan_stays(lambda queries: found(replace(case, queries=queries), device), case.queries, 3)

    def run_kv(kv: Tensor) -> Tensor:
        return found(replace(case, step_kv=kv), device)

    assert_nan_stays(run_kv, case.step_kv, 1, rows=[0, 3])
    spoilt = case.step_kv.clone()
    spoilt[1] = torch.nan
    assert run_kv(spoilt)[2].isnan().all(), "a later row of the request sees it"


def test_a_nan_record_reaches_the_rows_that_name_it_alone(device: torch.device) -> None:
    case = AttentionCase.build([80], [3], listed=4)
    lists = torch.tensor([[0, 1, 2, -1], [1, 2, 3, -1], [0, 3, -1, -1]])
    case = replace(case, lists=lists)
    clean = found(case, device)
    assert case.pages is not None
    case.pages.storage[case.pages.table[0, 0], 0] = 255
    out = found(case, device)
    assert out[[0, 2]].isnan().all()
    assert_bits(out[1], clean[1])


def test_a_nan_in_the_ring_reaches_the_rows_whose_window_holds_it_alone(device: torch.device) -> None:
    case = AttentionCase.build([100], [4], listed=0)
    clean = found(case, device)
    # Position 32 is the first of the window of position 101 and outside that of 102.
    case.window.storage[case.window.table[0, 0], 32] = 255
    out = found(case, device)
    assert out[:2].isnan().all()
    assert_bits(out[2:], clean[2:])


# ---------------------------------------------------------------------------------------------- draft blocks


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize(("last", "size"), [([0], 5), ([69], 5), ([300, 0], 6), ([77, 78], 1)], ids=str)
def test_blocks_are_those_of_the_reference(
    last: list[int], size: int, packed: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = BlockCase.build(last, size, packed=packed)
    expected = case.run(reference)
    for programs in (1, 1000):
        with_programs(monkeypatch, programs)
        out = found(case, device)
        assert_op(out, expected)
    with pytest.raises(AssertionError):
        assert_op(out, replace(case, last=case.last - 1, sinks=case.sinks + 1).run(reference))


def test_a_block_longer_than_the_window_sees_all_of_itself(device: torch.device) -> None:
    case = BlockCase.build([20, 3], 6, window=4)
    out = found(case, device)
    assert_op(out, case.run(reference))
    with pytest.raises(AssertionError):
        assert_op(out, replace(case, block_kv=case.block_kv.flip(0)).run(reference))


def test_a_nan_block_reaches_no_other_block(device: torch.device) -> None:
    case = BlockCase.build([40, 0, 11], 2, heads=1, width=32)
    assert_nan_stays(lambda x: found(replace(case, queries=x), device), case.queries, 1)
    assert_nan_stays(lambda x: found(replace(case, block_kv=x), device), case.block_kv, 1)


# ---------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.zeros(2, 3, 64)}, r"queries has dtype torch.float32: expected torch.bfloat16"),
        ({"step_kv": torch.zeros(2, 64)}, r"step_kv has dtype torch.float32: expected torch.bfloat16"),
        ({"sinks": torch.zeros(3, dtype=BF16)}, r"sinks has dtype torch.bfloat16: expected torch.float32"),
    ],
)
def test_values_of_another_dtype_are_refused(change: dict[str, Any], message: str, device: torch.device) -> None:
    case = AttentionCase.build([5], [2])
    with pytest.raises(ValueError, match=message):
        found(replace(case, **change), device)


def test_caches_that_the_kernel_cannot_read_are_refused(device: torch.device) -> None:
    case = AttentionCase.build([5], [2])
    assert case.pages is not None
    with pytest.raises(ValueError, match="global_kv has records of kind q4i: expected plain or q4k"):
        found(replace(case, pages=replace(case.pages, codec=IndexKeyCodec(64))), device)
    narrow = AttentionCase.build([5], [2], width=32)
    with pytest.raises(ValueError, match="window has rows of 32 values: expected 64"):
        found(replace(case, window=narrow.window), device)
    strided = replace(case.pages, storage=case.pages.storage.transpose(0, 1))
    with pytest.raises(ValueError, match="global_kv has strides"):
        found(replace(case, pages=strided), device)


# ------------------------------------------------------------------------------------------ rotation


@pytest.mark.parametrize("pairs", [1, 16, 32])
@pytest.mark.parametrize("programs", [1, 132], ids=["whole", "split"])
def test_a_rotation_inside_gives_the_bits_of_rotations_around_it(
    pairs: int, programs: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    with_programs(monkeypatch, programs)
    whole = AttentionCase.build([100, 5, 0], [2, 1, 3])
    for case in (turned(whole, pairs), turned(BlockCase.build([90, 3], 4), pairs)):
        there = moved(case, device)
        out = there.run(kernels)
        assert_bits(out, in_three_calls(there, kernels), "rotated around")
        assert_op(out.cpu(), case.run(reference))
        assert_bits(case.run(reference), in_three_calls(case, reference), "the reference rotated around")
        with pytest.raises(AssertionError):
            assert_op(out.cpu(), replace(case, turn=replace(case.turn, sin=-case.turn.sin)).run(reference))


def test_heads_wider_than_a_power_of_two_and_many_rows_are_rotated(device: torch.device) -> None:
    # 96 channels in a tile of 128, and so many rows that each is one program's.
    case = turned(AttentionCase.build([30, 0], [72, 2], heads=2, width=96, listed=0), 24)
    there = moved(case, device)
    assert_bits(there.run(kernels), in_three_calls(there, kernels), "rotated around")
    assert_op(there.run(kernels).cpu(), case.run(reference))


def test_a_nan_channel_that_is_not_rotated_stays_there(device: torch.device) -> None:
    case = turned(AttentionCase.build([3], [1], heads=1, listed=0), 16)
    turn = case.turn
    assert turn is not None
    keys = case.step_kv.clone()
    keys[:, 0] = torch.nan
    assert replace(case, step_kv=keys).run(reference).isnan().all(), "a NaN in a key spoils its row"
    keys = case.step_kv.clone()
    keys[:, 5] = torch.inf
    case = replace(case, step_kv=keys, queries=case.queries.abs().index_fill(2, torch.tensor([5]), 0.0))
    there = moved(case, device)
    assert_bits(there.run(kernels), in_three_calls(there, kernels), "infinity")


def test_rotations_of_another_size_are_refused(device: torch.device) -> None:
    case = moved(turned(AttentionCase.build([3], [2]), 16), device)
    for wrong in (case.turn[:1], replace(case.turn, sin=case.turn.sin[:, :1])):
        with pytest.raises(ValueError, match=r"turn\."):
            door.sparse_attention(
                case.queries, case.step_kv, case.window, case.rows, case.sinks, window_size=70, oldest=case.oldest,
                global_kv=case.pages, lists=case.lists, turn=wrong,
            )  # fmt: skip
    wide = replace(case, turn=Rotation(torch.ones(2, 33, device=device), torch.ones(2, 33, device=device)))
    with pytest.raises(ValueError, match="66 that turn"):
        wide.run(kernels)
    odd = replace(case, turn=replace(case.turn, cos=case.turn.cos.double()))
    with pytest.raises(ValueError, match=r"turn\.cos"):
        odd.run(kernels)

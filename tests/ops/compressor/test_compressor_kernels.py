"""Compressor kernels against the reference."""

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op, assert_relative
from op_cases import assert_nan_stays, normal, poisoned_outputs
from quickseek.ops.cache import CacheView, Codec, GlobalKvCodec, IndexKeyCodec, PlainCodec
from quickseek.ops.compressor import reference
from quickseek.ops.norm_rope import Rotation, rotary_frequencies, rotation
from quickseek.ops.rows import StepRows

kernels = pytest.importorskip("quickseek.ops.compressor.triton")

EPS = 1e-20
BF16 = torch.bfloat16
STEPS = [((0, 0), (1, 2)), ((1, 4), (3, 1)), ((5, 2), (8, 8)), ((7, 0), (9, 13))]
"""Starts and rows of two requests; the ring of 9 or 10 rows is overrun by the last step."""


def on(device: torch.device, rows: StepRows) -> StepRows:
    names = ("positions", "requests", "first_rows", "starts", "ends")
    moved = {name: getattr(rows, name).to(device) for name in names}
    return StepRows(**moved, max_rows=rows.max_rows, max_length=rows.max_length)


def view(codec: Codec, table: list[list[int]], rows: int, device: torch.device | str = "cpu") -> CacheView:
    """Blocks 1 to 7 and scratch, in which every byte or value is 77 until it is written."""
    storage = torch.full((8, rows, codec.record), 77, dtype=codec.dtype)
    return CacheView(storage.to(device), torch.tensor(table).to(device), codec)


def ring_of(width: int, ratio: int, starts: tuple[int, ...]) -> CacheView:
    """Rings in which the rows that the step may not read are NaN."""
    ring = view(PlainCodec(2 * width, torch.float32), [[5], [2]], ratio - 1 + 8)
    ring.storage.fill_(torch.nan)
    for request, start in enumerate(starts):
        for position in range(max(0, start - ratio + 1), start):
            ring.storage[int(ring.table[request]), position % ring.block_rows] = normal(2 * width, seed=position)
    return ring


def moved(ring: CacheView, device: torch.device) -> CacheView:
    return CacheView(ring.storage.to(device, copy=True), ring.table.to(device), ring.codec)


@pytest.mark.parametrize(("ratio", "width"), [(2, 32), (3, 20)])
@pytest.mark.parametrize(("starts", "counts"), STEPS)
def test_latents_and_open_rows_are_the_references(
    starts: tuple[int, int], counts: tuple[int, int], ratio: int, width: int, device: torch.device
) -> None:
    rows, ring = StepRows.build(list(starts), list(counts)), ring_of(width, ratio, starts)
    raw, weight = normal(sum(counts), 2, width, dtype=torch.float32), normal(width, seed=9, dtype=BF16)
    raw[:, 1] *= 20
    closed, there = reference.closed_groups(rows.positions, ratio) >= 0, moved(ring, device)
    inputs = raw.to(device), there, on(device, rows), ratio
    with poisoned_outputs():
        pooled = kernels.pool(*inputs).cpu()
        latents = kernels.pooled_latents(*inputs, weight.to(device), EPS, BF16).cpu()
    expected = reference.pool(raw, ring, rows, ratio)
    expected_latents = reference.pooled_latents(raw, ring, rows, ratio, weight, EPS, BF16)
    assert closed.any() or max(counts) < ratio
    if closed.any():
        assert_relative(pooled[closed], expected[closed], 1e-6)
        assert_op(latents[closed], expected_latents[closed])
        with pytest.raises(AssertionError, match="relative error"):
            assert_relative(pooled[closed].flip(1), expected[closed], 1e-6)
        with pytest.raises(AssertionError, match="outside the bound"):
            assert_op(latents[closed].flip(1), expected_latents[closed])
    # What is written to the scratch block, the first, means nothing.
    kept = torch.nan_to_num(ring.storage[1:], 55.0)
    assert_bits(torch.nan_to_num(there.storage[1:].cpu(), 55.0), kept, "open rows")
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(torch.nan_to_num(there.storage[1:].cpu(), 56.0), kept)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_step_that_would_overwrite_what_it_reads_keeps_its_rows_afterwards(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Position 9 of a ring of 9 rows lies on position 0, which row 1 reads; nine rows from 1 on reach it."""
    weight = normal(32, seed=9, dtype=dtype)
    for count, together in ((8, True), (9, False)):
        rows, ring = StepRows.build([1, 0], [count, 1]), ring_of(32, 2, (1, 0))
        assert (rows.max_rows + 1 <= ring.block_rows) == together
        raw = normal(count + 1, 2, 32, dtype=torch.float32)
        there = moved(ring, device)
        out = kernels.pooled_latents(raw.to(device), there, on(device, rows), 2, weight.to(device), EPS, dtype).cpu()
        expected = reference.pooled_latents(raw, ring, rows, 2, weight, EPS, dtype)
        assert_op(out[0], expected[0])
        with pytest.raises(AssertionError, match="outside the bound"):
            assert_op(out[0], expected[2])


def test_a_nan_row_reaches_its_own_group_only(device: torch.device) -> None:
    rows, ring = StepRows.build([1, 4], [4, 3]), moved(ring_of(32, 2, (1, 4)), device)
    weight, raw = normal(32, seed=9, dtype=BF16).to(device), normal(7, 2, 32, dtype=torch.float32)

    def latents(raw: Tensor) -> Tensor:
        return kernels.pooled_latents(raw.to(device), ring, on(device, rows), 2, weight, EPS, BF16).cpu()

    closed = [row for row, group in enumerate(reference.closed_groups(rows.positions, 2).tolist()) if group >= 0]
    assert closed == [0, 2, 5]
    fresh = ring.storage.clone()

    def from_the_same_ring(raw: Tensor) -> Tensor:
        ring.storage.copy_(fresh)
        return latents(raw)

    assert_nan_stays(from_the_same_ring, raw, 2, [0, 5])


def caches(packed: bool, widths: tuple[int, int], device: torch.device | str = "cpu") -> tuple[CacheView, CacheView]:
    """Global KV in blocks of 4 rows and index keys in blocks of 4."""
    codecs: tuple[Codec, Codec] = (
        (GlobalKvCodec(widths[0]), IndexKeyCodec(widths[1]))
        if packed
        else (PlainCodec(widths[0], BF16), PlainCodec(widths[1], BF16))
    )
    table = [[3, 1, 4, 7], [2, 5, 6, 7]]
    first, second = (view(codec, table, 4, device) for codec in codecs)
    return first, second


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("ratio", "starts", "counts"), [(1, (0, 3), (2, 4)), (2, (1, 4), (4, 3)), (2, (0, 8), (1, 1))])
@pytest.mark.parametrize("keep_from", [None, (2, 5)])
def test_groups_are_written_as_the_reference_writes_them(
    keep_from: tuple[int, int] | None,
    ratio: int,
    starts: tuple[int, int],
    counts: tuple[int, int],
    packed: bool,
    device: torch.device,
) -> None:
    rows, widths = StepRows.build(list(starts), list(counts)), (64, 32)
    latents, keys = normal(sum(counts), 64, dtype=BF16), normal(sum(counts), 32, seed=1, dtype=BF16)
    key_weight = normal(32, seed=2, dtype=BF16)
    turn = rotation(rows.positions - ratio + 1, rotary_frequencies(16, 1e4))
    first = None if keep_from is None else torch.tensor(keep_from)

    def run(form: object, device: torch.device, first: Tensor | None) -> tuple[Tensor, Tensor]:
        there = caches(packed, widths, device)
        inputs = [x.to(device) for x in (latents, keys, key_weight)]
        angle = Rotation(turn.cos.to(device), turn.sin.to(device))
        first = None if first is None else first.to(device)
        form.write_groups(*inputs, EPS, angle, on(device, rows), ratio, *there, first, not packed)  # type: ignore[attr-defined]
        return there[0].storage[1:].cpu(), there[1].storage[1:].cpu()

    found, expected = run(kernels, device, first), run(reference, torch.device("cpu"), first)
    for ours, theirs in zip(found, expected, strict=True):
        # A last place of the norm or of the rotation may put a value on the other side of a rounding.
        assert (ours != theirs).float().mean() <= 0.005
        assert ((ours == 77) == (theirs == 77)).all(-1).all(), "rows that are written"
    spoilt = run(kernels, device, torch.tensor([99, 99]))
    wrote = bool((expected[0] != 77).any())
    assert wrote == any((int(p) + 1) % ratio == 0 and (first is None or int(p) >= int(first[int(r)]))
                        for p, r in zip(rows.positions, rows.requests, strict=True))  # fmt: skip
    assert (spoilt[0] == 77).all() and (spoilt[1] == 77).all()


def test_what_kernels_do_not_take_is_refused_by_name(device: torch.device) -> None:
    rows, ring = on(device, StepRows.build([0], [2])), moved(ring_of(32, 2, (0, 0)), device)
    with pytest.raises(ValueError, match=r"raw has dtype torch.float64: expected torch.float32"):
        kernels.pool(torch.zeros(2, 2, 32, dtype=torch.float64, device=device), ring, rows, 2)
    latents, keys = torch.zeros(2, 64, device=device), torch.zeros(2, 32, dtype=BF16, device=device)
    angle = Rotation(torch.ones(2, 8, device=device), torch.zeros(2, 8, device=device))
    pair = caches(True, (64, 32), device)
    with pytest.raises(ValueError, match=r"keys has dtype torch.bfloat16: expected torch.float32"):
        kernels.write_groups(latents, keys, keys[0], EPS, angle, rows, 2, *pair, None, False)


@pytest.mark.parametrize("member", [0, 1, 2])
def test_a_gate_of_minus_infinity_weighs_nothing_wherever_it_is(member: int, device: torch.device) -> None:
    rows, ring = StepRows.build([0], [3]), ring_of(20, 3, (0,))
    raw = normal(3, 2, 20, dtype=torch.float32)
    raw[member, 1] = -torch.inf
    found = kernels.pool(raw.to(device), moved(ring, device), on(device, rows), 3).cpu()[2]
    expected = reference.pool(raw, ring, rows, 3)[2]
    assert_relative(found, expected, 1e-6)
    others = [i for i in range(3) if i != member]
    weights = torch.softmax(raw[others, 1], 0)
    assert_relative(found, (weights * raw[others, 0]).sum(0), 1e-6)
    with pytest.raises(AssertionError, match="relative error"):
        assert_relative(found, raw[:, 0].mean(0), 1e-6)

"""Kernels that read and write caches, on drawn batches, tables, records and layouts: records, compressor, Engram."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawn_memory import (
    FEW,
    SPECIAL,
    Both,
    assert_numbers,
    assert_same,
    both,
    by_interpreter,
    indices,
    layouts,
    numbers,
)
from quickseek.ops import compressor, engram
from quickseek.ops.cache import CacheView, Codec, GlobalKvCodec, IndexKeyCodec, PlainCodec, WindowCodec
from quickseek.ops.linear import Fp8Weight
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows

pytestmark = by_interpreter
BF16, FP32 = torch.bfloat16, torch.float32
batches = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 7)), min_size=1, max_size=3)
"""Start and rows of each request of a step."""


@st.composite
def codecs(draw: st.DrawFn) -> Codec:
    kind = draw(st.sampled_from((WindowCodec, GlobalKvCodec, IndexKeyCodec, PlainCodec)))
    if kind is PlainCodec:
        return PlainCodec(draw(st.integers(1, 40)), draw(st.sampled_from((BF16, FP32, torch.int32, torch.int64))))
    return kind(draw(st.integers(1, 5)) * (16 if kind is GlobalKvCodec else 32))


@st.composite
def caches(draw: st.DrawFn, requests: int, block_rows: int, blocks: int, codec: Codec) -> CacheView:
    """A cache of drawn records, its blocks in any order; block 0 is scratch."""
    count = requests * blocks
    order = torch.randperm(count, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31)))) + 1
    shape = (count + 1, block_rows, codec.record)
    if codec.dtype == torch.uint8:
        seed = draw(st.integers(0, 2**31))
        storage = torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    else:
        storage = draw(numbers(shape, codec.dtype, () if not codec.dtype.is_floating_point else (0.0, torch.nan)))
    return CacheView(storage, order.view(requests, blocks), codec)


def step_of(batch: list[tuple[int, int]]) -> StepRows:
    return StepRows.build([start for start, _ in batch], [count for _, count in batch])


def assert_same_caches(ran: Both, count: int) -> None:
    """What the first ``count`` arguments, caches, hold outside scratch."""
    for found, expected in zip(ran.arguments[:count], ran.expected_arguments[:count], strict=True):
        assert_same(found.storage[1:], expected.storage[1:], "records")


@FEW
@given(st.data(), codecs(), st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), layouts)
def test_records_are_written_and_read_as_by_the_reference(
    data: st.DataObject, codec: Codec, requests: int, block_rows: int, blocks: int, layout: tuple[int, str]
) -> None:
    cache = data.draw(caches(requests, block_rows, blocks, codec))
    places = [(request, row) for request in range(requests) for row in range(block_rows * blocks)]
    chosen = data.draw(st.lists(st.sampled_from(places), unique=True, max_size=6))
    chosen += [(0, -1)] * data.draw(st.integers(0, 2))
    numbers_of = torch.tensor([*chosen, (0, -1)], dtype=torch.int64)
    integer = not codec.dtype.is_floating_point and codec.dtype != torch.uint8
    values = data.draw(
        numbers((len(numbers_of), codec.width), codec.dtype if integer else BF16, () if integer else SPECIAL)
    )
    ran = both(CacheView.write, (cache, numbers_of[:, 0].clone(), numbers_of[:, 1].clone(), values), layout, writes=1)
    if ran is not None:
        assert_same_caches(ran, 1)

    out = codec.dtype if integer else data.draw(st.sampled_from((BF16, FP32)))
    shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple))
    rows = data.draw(indices(shape, -2, block_rows * blocks - 1))
    owners = data.draw(indices(data.draw(st.sampled_from((shape, (*shape[:-1], 1), (1,)))), 0, requests - 1))
    read = both(lambda cache, owners, rows: cache.gather(owners, rows, out), (cache, owners, rows), layout)
    if read is not None:
        assert_same(read.found, read.expected)


@FEW
@given(st.data(), codecs(), batches, st.integers(1, 9), layouts)
def test_rings_keep_what_the_reference_keeps(
    data: st.DataObject, codec: Codec, batch: list[tuple[int, int]], ring: int, layout: tuple[int, str]
) -> None:
    rows = step_of(batch)
    cache = data.draw(caches(len(batch), ring, 1, codec))
    integer = not codec.dtype.is_floating_point and codec.dtype != torch.uint8
    values = data.draw(numbers((len(rows.positions), codec.width), codec.dtype if integer else BF16))
    ran = both(CacheView.keep, (cache, rows.requests, rows.positions, rows.ends, values), layout, writes=1)
    if ran is not None:
        assert_same_caches(ran, 1)


@FEW
@given(st.data(), batches, st.integers(1, 4), st.integers(1, 40), st.integers(0, 12), layouts)
def test_groups_are_pooled_and_kept_as_by_the_reference(
    data: st.DataObject, batch: list[tuple[int, int]], ratio: int, width: int, more: int, layout: tuple[int, str]
) -> None:
    rows = step_of(batch)
    ring = data.draw(caches(len(batch), ratio - 1 + max(1, more), 1, PlainCodec(2 * width, FP32)))
    ring.storage[ring.storage.isnan()] = 0.25
    raw = data.draw(numbers((len(rows.positions), 2, width), FP32, (0.0, torch.nan, torch.inf, -torch.inf), 4))
    weight = data.draw(numbers((width,), BF16))
    dtype = data.draw(st.sampled_from((BF16, FP32)))
    closing = compressor.closed_groups(rows, ratio) >= 0

    pooled = both(lambda raw, ring, rows: compressor.pool(raw, ring, rows, ratio), (raw, ring, rows), layout)
    if pooled is not None:
        assert_numbers(pooled.found[closing], pooled.expected[closing], "pooled")

    def latents(ring: CacheView, raw: Tensor, rows: StepRows, weight: Tensor) -> Tensor:
        return compressor.pooled_latents(raw, ring, rows, ratio, weight, 1e-6, dtype)

    ran = both(latents, (ring, raw, rows, weight), layout, writes=1)
    if ran is not None:
        assert_same_caches(ran, 1)
        assert_numbers(ran.found[closing], ran.expected[closing], "latents")


@FEW
@given(st.data(), batches, st.integers(1, 3), st.booleans(), st.booleans(), layouts)
def test_closed_groups_are_written_as_by_the_reference(
    data: st.DataObject, batch: list[tuple[int, int]], ratio: int, packed: bool, late: bool, layout: tuple[int, str]
) -> None:
    rows = step_of(batch)
    count, block_rows = len(rows.positions), data.draw(st.integers(1, 9))
    widths = [data.draw(st.sampled_from(choice)) for choice in ((16, 48, 64), (32, 96))]
    kinds: list[Codec] = [PlainCodec(width, BF16) for width in widths]
    if packed:
        kinds = [GlobalKvCodec(widths[0]), IndexKeyCodec(widths[1])]
    blocks = rows.max_length // ratio // block_rows + 1
    views = [data.draw(caches(len(batch), block_rows, blocks, kind)) for kind in kinds]
    latents, keys = (data.draw(numbers((count, width), BF16, SPECIAL, 3)) for width in widths)
    # Signs of keys that are about equal, so that no last bit of a norm decides a code.
    keys = torch.where(keys < 0, -1.0, 1.0).to(BF16) if data.draw(st.booleans()) else keys
    angles = data.draw(numbers((count, data.draw(st.integers(1, 8))), FP32, (0.0,), 5))
    keep_from = data.draw(indices((len(batch),), 0, 40)) if late else None

    def call(
        kv: CacheView, index: CacheView, latents: Tensor, keys: Tensor, weight: Tensor, turn: Rotation, rows: StepRows,
        keep_from: Tensor | None,
    ) -> None:  # fmt: skip
        compressor.write_groups(
            latents, keys, weight, 1e-6, turn, rows, ratio, kv, index, keep_from=keep_from, fake_quantise=not packed
        )

    turn = Rotation(angles.cos(), angles.sin())
    ran = both(call, (*views, latents, keys, torch.ones(widths[1]), turn, rows, keep_from), layout, writes=2)
    if ran is None:
        return
    for number, kind in enumerate(kinds):
        found, expected = (arguments[number].storage[1:] for arguments in (ran.arguments, ran.expected_arguments))
        values, wanted = (kind.decode(records, FP32) for records in (found, expected))
        assert torch.equal(values.isnan(), wanted.isnan())
        # A rounding of the norm or of the rotation may move a value by one code: a third of it, or half a step of zero.
        groups = [x.nan_to_num(0, posinf=3e38, neginf=-3e38).double().unflatten(-1, (-1, 16)) for x in (values, wanted)]
        largest = groups[1].abs().amax(-1, keepdim=True)
        apart = (groups[0] - groups[1]).abs() > groups[1].abs() / 2 + largest / 6
        changed = (values != wanted) & ~wanted.isnan()
        assert not apart.any() and changed.sum() <= 0.1 * changed.numel() + 2


@FEW
@given(st.data(), batches, st.integers(1, 4), st.booleans(), layouts)
def test_windows_of_ids_are_those_of_the_reference(
    data: st.DataObject, batch: list[tuple[int, int]], lookback: int, from_ring: bool, layout: tuple[int, str]
) -> None:
    rows = step_of(batch)
    ids = data.draw(indices((len(rows.positions),), -1, 300))
    ring = data.draw(caches(len(batch), lookback + data.draw(st.integers(0, 8)), 1, PlainCodec(1, torch.int32)))
    ring.storage.random_(-1, 300, generator=torch.Generator().manual_seed(lookback))
    given_ids = None if from_ring else data.draw(indices((len(batch), lookback), -1, 300))

    def call(ids: Tensor, ring: CacheView | None, rows: StepRows, earlier: Tensor | None) -> Tensor:
        return engram.token_windows(ids, ring, rows, lookback, earlier)

    ran = both(call, (ids, ring if from_ring else None, rows, given_ids), layout)
    if ran is not None:
        assert_same(ran.found, ran.expected)


@FEW
@given(st.data(), st.integers(0, 40), st.integers(1, 3), st.integers(1, 4), layouts)
def test_hashes_and_table_rows_are_those_of_the_reference(
    data: st.DataObject, rows: int, orders: int, heads: int, layout: tuple[int, str]
) -> None:
    windows = (
        data.draw(indices((rows, orders + 1), -1, 2**17)) if rows else torch.zeros(0, orders + 1, dtype=torch.int64)
    )
    multipliers = data.draw(indices((orders + 1,), 1, 2**44))
    primes = data.draw(indices((orders * heads,), 2, 500))
    offsets = primes.cumsum(0) - primes
    constants = engram.HashConstants(multipliers, primes, offsets, data.draw(st.integers(0, 99)))
    ran = both(engram.hash_ngrams, (windows, constants), layout)
    if ran is None:
        return
    assert_same(ran.found, ran.expected, "hashes")

    width, packed = data.draw(st.integers(1, 3)) * 32, data.draw(st.booleans())
    size = int(primes.sum())
    generator = torch.Generator().manual_seed(width)
    codes = torch.randint(0, 256, (size, width), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 256, (size, width // 32), generator=generator, dtype=torch.uint8)
    stored = Fp8Weight(codes.view(torch.float8_e4m3fn), scales) if packed else data.draw(numbers((size, width), FP32))
    dtype = data.draw(st.sampled_from((BF16, FP32)))
    read = both(lambda table, rows: engram.gather_rows(table, rows, dtype), (stored, ran.expected), layout)
    if read is not None:
        assert_same(read.found, read.expected, "table rows")


@FEW
@given(st.data(), st.integers(0, 5), st.integers(1, 4), st.integers(1, 90), layouts)
def test_injections_are_those_of_the_reference(
    data: st.DataObject, rows: int, copies: int, hidden: int, layout: tuple[int, str]
) -> None:
    streams = data.draw(numbers((rows, copies, hidden), BF16, (0.0, torch.nan), 4))
    key_value = data.draw(numbers((rows, (copies + 1) * hidden), BF16, (0.0, torch.nan), 4))
    weights = [data.draw(numbers((copies, hidden), BF16)) for _ in range(2)]
    dead = torch.rand(rows, generator=torch.Generator().manual_seed(hidden)) < 0.3

    def call(streams: Tensor, key_value: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor) -> Tensor:
        return engram.inject(streams, key_value, q_weight, k_weight, dead, 1e-6)

    ran = both(call, (streams, key_value, *weights, dead), layout)
    if ran is not None:
        assert_numbers(ran.found, ran.expected)

"""Attention and the indexer by kernels, on drawn batches, tables, lists, candidates and layouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compare import assert_op_selections
from drawn_memory import FEW, assert_numbers, assert_same, both, by_interpreter, indices, layouts, numbers
from indexer_cases import IndexerCase, eps_of
from op_cases import normal
from quickseek import formats
from quickseek.ops import attention, indexer
from quickseek.ops.cache import CacheView, Codec, GlobalKvCodec, IndexKeyCodec, PlainCodec, WindowCodec
from quickseek.ops.indexer import Selection
from quickseek.ops.indexer import triton as kernels
from quickseek.ops.rows import StepRows

pytestmark = by_interpreter
BF16, FP32 = torch.bfloat16, torch.float32


@st.composite
def filled(draw: st.DrawFn, codec: Codec, requests: int, block_rows: int, blocks: int) -> CacheView:
    """A cache of normal numbers, its blocks in any order, NaN in scratch."""
    count, seed = requests * blocks, draw(st.integers(0, 2**31))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + 1
    values = normal(count + 1, block_rows, codec.width, seed=seed, dtype=BF16) * 2.0 ** draw(st.integers(-3, 3))
    values[0] = torch.nan
    return CacheView(codec.encode(values), order.view(requests, blocks), codec)


def step_of(batch: list[tuple[int, int]]) -> StepRows:
    return StepRows.build([start for start, _ in batch], [count for _, count in batch])


def spoil(draw: Callable[..., Any], x: Tensor, *values: float) -> Tensor:
    """x with some of the values in up to two places."""
    for value in draw(st.lists(st.sampled_from(values), max_size=2)):
        x[tuple(draw(st.integers(0, size - 1)) for size in x.shape)] = value
    return x


@FEW
@given(
    st.data(),
    st.lists(st.tuples(st.integers(0, 150), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 75),
    st.booleans(),
    layouts,
)
def test_attention_is_that_of_the_reference(
    data: st.DataObject, batch: list[tuple[int, int]], heads: int, groups: int, window: int, packed: bool,
    layout: tuple[int, str],
) -> None:  # fmt: skip
    rows, width = step_of(batch), 32 * groups
    count, ring_rows = len(rows.positions), window + data.draw(st.integers(0, 8))
    ring = data.draw(filled(WindowCodec(width) if packed else PlainCodec(width, BF16), len(batch), ring_rows, 1))
    kind = data.draw(st.sampled_from((None, PlainCodec(width, BF16), GlobalKvCodec(width))))
    pages = lists = None
    if kind is not None:
        block_rows, blocks = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
        pages = data.draw(filled(kind, len(batch), block_rows, blocks))
        lists = data.draw(indices((count, data.draw(st.integers(0, 12))), -1, block_rows * blocks - 1))
        lists = lists.repeat(1, data.draw(st.integers(1, 12)))
    queries = spoil(data.draw, data.draw(numbers((count, heads, width))), torch.nan, torch.inf, 300.0)
    # An infinite key may have no weight: whether nothing times infinity shows is of no use to anybody.
    step_kv = spoil(data.draw, data.draw(numbers((count, width), BF16, largest=3)), torch.nan, 300.0)
    sinks = data.draw(numbers((heads,), FP32, (0.0, -torch.inf, 100.0)))
    oldest = data.draw(indices((len(batch),), 0, 160))

    def call(
        queries: Tensor, step_kv: Tensor, ring: CacheView, rows: StepRows, sinks: Tensor, oldest: Tensor,
        pages: CacheView | None, lists: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return attention.sparse_attention(
            queries, step_kv, ring, rows, sinks, window_size=window, oldest=oldest, global_kv=pages, lists=lists
        )

    ran = both(call, (queries, step_kv, ring, rows, sinks, oldest, pages, lists), layout)
    if ran is not None:
        assert_numbers(ran.found, ran.expected)


@FEW
@given(
    st.data(), st.lists(st.integers(-1, 150), min_size=1, max_size=3), st.integers(1, 7), st.integers(1, 20),
    st.integers(1, 75), st.booleans(), layouts,
)  # fmt: skip
def test_draft_blocks_attend_as_by_the_reference(
    data: st.DataObject, last: list[int], size: int, heads: int, window: int, packed: bool, layout: tuple[int, str]
) -> None:
    width, slots = 32 * data.draw(st.integers(1, 3)), len(last) + 1
    codec = WindowCodec(width) if packed else PlainCodec(width, BF16)
    ring = data.draw(filled(codec, slots, window + data.draw(st.integers(0, 8)), 1))
    queries = spoil(data.draw, data.draw(numbers((len(last), size, heads, width))), torch.nan, torch.inf, 300.0)
    block_kv = spoil(data.draw, data.draw(numbers((len(last), size, width), BF16, largest=3)), torch.nan, 300.0)
    requests = data.draw(st.permutations(range(slots)).map(lambda order: torch.tensor(order[: len(last)])))
    sinks = data.draw(numbers((heads,), FP32, (0.0, -torch.inf, 100.0)))

    def call(
        queries: Tensor, block_kv: Tensor, ring: CacheView, requests: Tensor, last: Tensor, sinks: Tensor
    ) -> Tensor:
        return attention.block_attention(queries, block_kv, ring, requests, last, sinks, window_size=window)

    ran = both(call, (queries, block_kv, ring, requests, torch.tensor(last), sinks), layout)
    if ran is not None:
        assert_numbers(ran.found, ran.expected)


@FEW
@given(
    st.data(), st.lists(st.tuples(st.integers(0, 120), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 20), st.integers(1, 4), st.booleans(), st.booleans(), layouts,
)  # fmt: skip
def test_selections_are_those_of_the_reference(
    data: st.DataObject, batch: list[tuple[int, int]], heads: int, ratio: int, packed: bool, whole: bool,
    layout: tuple[int, str],
) -> None:  # fmt: skip
    """``whole`` numbers make every score exact, so that lists are those of the reference, ties included."""
    rows, width = step_of(batch), data.draw(st.sampled_from((32, 64)))
    count, groups, block_rows = len(rows.positions), rows.max_length // ratio, data.draw(st.integers(1, 9))
    codec = IndexKeyCodec(width) if packed else PlainCodec(width, BF16)
    keys = data.draw(filled(codec, len(batch), block_rows, groups // block_rows + 1))
    queries = formats.fake_quantize_q4i(
        data.draw(numbers((count, heads, width), BF16, (0.0, torch.nan) if whole else (0.0,)))
    )
    weights = data.draw(numbers((count, heads), FP32, (0.0, torch.nan) if whole else (0.0,), 2))
    if whole:
        queries, weights = queries.sign(), weights.round().clamp(-4, 4)
        keys.storage[1:] = codec.encode(codec.decode(keys.storage[1:], BF16).sign())
    top_k, block_size = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    publish, blocks = data.draw(st.integers(0, 6)), -(-groups // block_size)
    candidates = None
    if blocks and data.draw(st.booleans()):
        drawn = torch.rand(count, blocks, generator=torch.Generator().manual_seed(heads)).argsort(1)
        candidates = drawn[:, : data.draw(st.integers(1, blocks))].contiguous()
        candidates[torch.rand(candidates.shape, generator=torch.Generator().manual_seed(ratio)) < 0.2] = -1
    scale = data.draw(st.sampled_from((1.0, 0.25)))

    def call(queries: Tensor, weights: Tensor, keys: CacheView, rows: StepRows, candidates: Tensor | None) -> Selection:
        return indexer.select(
            queries, weights, keys, rows, ratio=ratio, top_k=top_k, block_size=block_size, publish_blocks=publish,
            candidates=candidates, weight_scale=scale,
        )  # fmt: skip

    ran = both(call, (queries, weights, keys, rows, candidates), layout)
    if ran is None:
        return
    case = IndexerCase(queries, weights * scale, keys, rows, ratio)
    chosen = case.scores() if candidates is None else case.restricted(candidates, block_size)
    pairs = [(ran.found.lists, ran.expected.lists, chosen)]
    if publish:
        pairs.append((ran.found.candidates, ran.expected.candidates, case.block_scores(block_size)))
    else:
        assert ran.found.candidates is None
    for found, expected, scores in pairs:
        assert found.shape == expected.shape and found.dtype == expected.dtype
        if whole or not groups:
            assert_same(found.sort(1).values, expected.sort(1).values, "members")
        else:
            finite = scores[scores.isfinite()]
            assert_op_selections(found, scores, found.shape[1], eps_of(scores) if finite.numel() else 0.0)


@FEW
@given(st.data(), st.integers(1, 2))
def test_a_tree_of_small_leaves_chooses_the_same(data: st.DataObject, requests: int) -> None:
    batch = [(data.draw(st.integers(60, 250)), 1) for _ in range(requests)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK", 32)
        choose = test_selections_are_those_of_the_reference.hypothesis.inner_test  # type: ignore[attr-defined]
        choose(data, batch, 3, 1, True, True, (0, "between"))

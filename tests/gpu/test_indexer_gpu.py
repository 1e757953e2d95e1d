"""Selection on a GPU in released shapes: 32 heads of 128, lists of 512 groups, 2,048 candidate blocks of 8."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op_selections
from indexer_cases import IndexerCase, eps_of
from quickseek.ops import indexer as door
from quickseek.ops.cache import CacheView, IndexKeyCodec
from quickseek.ops.indexer import Selection, reference
from quickseek.ops.rows import StepRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOP_K, SIZE, BLOCKS = 512, 8, 2048
DEVICE = torch.device("cuda", 0)
RELEASED = {"heads": 32, "width": 128, "block_rows": 64}


def select(case: IndexerCase, publish: int = 0, candidates: Tensor | None = None, top_k: int = TOP_K) -> Selection:
    return door.select(
        case.queries, case.weights, case.keys, case.rows,
        ratio=case.ratio, top_k=top_k, block_size=SIZE, publish_blocks=publish, candidates=candidates,
    )  # fmt: skip


def released_case(rows: int, length: int, ratio: int) -> IndexerCase:
    """``rows`` rows of up to 8 requests that end at ``length`` and somewhat before."""
    requests = min(rows, 8)
    counts = [rows // requests + (i < rows % requests) for i in range(requests)]
    starts = [length - 517 * i - count for i, count in enumerate(counts)]
    return IndexerCase.build(starts, counts, ratio=ratio, seed=rows, **RELEASED).to(DEVICE)


def wide_keys(groups: int, seed: int = 0) -> CacheView:
    """Packed keys of one request in shuffled blocks of 64, of random codes and scales, made on the GPU."""
    codec = IndexKeyCodec(128)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    blocks = -(-groups // 64)
    storage = torch.randint(
        0, 256, (blocks + 1, 64, codec.record), dtype=torch.uint8, device=DEVICE, generator=generator
    )
    storage[..., 64:] = storage[..., 64:] % 4 + 125
    table = torch.randperm(blocks, device=DEVICE, generator=generator) + 1
    return CacheView(storage, table.unsqueeze(0), codec)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("rows", [1, 6, 8, 48])
def test_decode_rows_get_the_lists_of_the_reference(rows: int, ratio: int) -> None:
    case = released_case(rows, 40_000, ratio)
    scores = case.scores()
    assert_op_selections(select(case).lists, scores, TOP_K, eps_of(scores))
    with pytest.raises(AssertionError):
        wrong = replace(case, rows=replace(case.rows, positions=case.rows.positions - 4000))
        assert_op_selections(select(wrong).lists, scores, TOP_K, eps_of(scores))


@pytest.mark.parametrize("rows", [1, 6, 48])
def test_candidate_blocks_and_what_is_chosen_inside_them(rows: int) -> None:
    case = released_case(rows, 40_000, 1)
    scores = case.scores()
    published = select(case, publish=BLOCKS)
    assert published.candidates is not None and published.candidates.shape == (rows, BLOCKS)
    assert_op_selections(published.lists, scores, TOP_K, eps_of(scores))
    assert_op_selections(published.candidates, case.block_scores(SIZE), BLOCKS, eps_of(scores))
    fewer = published.candidates[:, :100].contiguous()
    inside = select(case, candidates=fewer).lists
    assert_op_selections(inside, case.restricted(fewer, SIZE), TOP_K, eps_of(scores))
    with pytest.raises(AssertionError):
        assert_op_selections(inside, scores, TOP_K, eps_of(scores))


def test_rows_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    case = IndexerCase.build([1500, 0], [700, 1300], **RELEASED).to(DEVICE)
    scores = case.scores()
    whole = select(case, publish=100)
    assert whole.candidates is not None
    assert_op_selections(whole.lists, scores, TOP_K, eps_of(scores))
    assert_op_selections(whole.candidates, case.block_scores(SIZE), 100, eps_of(scores))
    inside = select(case, candidates=whole.candidates).lists
    assert_op_selections(inside, case.restricted(whole.candidates, SIZE), TOP_K, eps_of(scores))
    from quickseek.ops.indexer import triton as kernels

    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 4 << 20)
    parts = select(case, publish=100)
    assert parts.candidates is not None
    assert_bits(parts.lists, whole.lists, "in chunks of rows")
    assert_bits(parts.candidates, whole.candidates, "in chunks of rows")
    assert_bits(select(case, candidates=whole.candidates).lists, inside, "in chunks of rows")


def test_a_decode_row_gets_the_bits_of_the_same_row_in_a_prompt() -> None:
    case = released_case(384, 20_000, 1)
    lists = select(case).lists
    last = int(case.rows.first_rows[1])
    position = int(case.rows.positions[last - 1])
    alone = IndexerCase(
        case.queries[last - 1 : last], case.weights[last - 1 : last], case.keys,
        StepRows.build([position], [1], DEVICE), 1,
    )  # fmt: skip
    assert_bits(select(alone).lists, lists[last - 1 : last])


def test_a_graph_replays_the_bits_of_a_call_and_follows_positions() -> None:
    case = released_case(6, 30_000, 1)
    # The host's bound is far above what rows see.
    case = replace(case, rows=replace(case.rows, max_length=500_000))
    first = select(case, publish=BLOCKS)
    assert first.candidates is not None
    inside = select(case, candidates=first.candidates)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = select(case, publish=BLOCKS)
        second = select(case, candidates=found.candidates)
    assert found.candidates is not None
    for _ in range(5):
        for out in (found.lists, found.candidates, second.lists):
            out.fill_(-7777)
        graph.replay()
        assert_bits(found.lists, first.lists)
        assert_bits(found.candidates, first.candidates)
        assert_bits(second.lists, inside.lists)
    case.rows.positions.sub_(25_000)
    graph.replay()
    eager = select(case, publish=BLOCKS)
    assert_bits(found.lists, eager.lists)
    with pytest.raises(AssertionError):
        assert_bits(found.lists, first.lists)


@pytest.mark.parametrize("rows", [1, 6])
def test_a_million_groups(rows: int) -> None:
    length = 1 << 20
    keys = wide_keys(length)
    case = replace(
        IndexerCase.build([0], [rows], **RELEASED), rows=StepRows.build([length - rows], [rows]), keys=keys
    ).to(DEVICE)  # fmt: skip
    found = select(case, publish=BLOCKS)
    scores = case.scores()
    assert found.candidates is not None
    assert_op_selections(found.lists, scores, TOP_K, eps_of(scores))
    assert_op_selections(found.candidates, case.block_scores(SIZE), BLOCKS, eps_of(scores))
    inside = select(case, candidates=found.candidates).lists
    assert_op_selections(inside, case.restricted(found.candidates, SIZE), TOP_K, eps_of(scores))
    for _ in range(3):
        again = select(case, publish=BLOCKS)
        assert again.candidates is not None
        assert_bits(again.lists, found.lists)
        assert_bits(again.candidates, found.candidates)


def test_equal_scores_of_a_million_groups_go_to_the_lowest() -> None:
    length = 1 << 20
    case = IndexerCase.build([0], [2], **RELEASED)
    case = replace(case, rows=StepRows.build([length - 2], [2]), keys=wide_keys(length), weights=0 * case.weights)
    found = select(case.to(DEVICE), publish=BLOCKS)
    assert_bits(found.lists, torch.arange(TOP_K, device=DEVICE).expand(2, -1))
    expected = torch.arange(BLOCKS, device=DEVICE)
    expected[-1] = (length - 1) // SIZE
    assert found.candidates is not None
    assert_bits(found.candidates, expected.expand(2, -1))


def test_blocks_that_lie_beyond_two_to_the_31_bytes() -> None:
    codec = IndexKeyCodec(128)
    near = wide_keys(4096)
    blocks = 2**31 // (64 * codec.record) + 70
    storage = torch.zeros(blocks, 64, codec.record, dtype=torch.uint8, device=DEVICE)
    table = torch.arange(blocks - 1, blocks - 65, -1, device=DEVICE).unsqueeze(0)
    storage[table[0]] = near.storage[near.table[0]]
    case = replace(IndexerCase.build([0], [1], **RELEASED), rows=StepRows.build([4095], [1]), keys=near).to(DEVICE)
    far = replace(case, keys=CacheView(storage, table, codec))
    found = select(case, publish=100)
    there = select(far, publish=100)
    assert_bits(there.lists, found.lists)
    assert_bits(select(far, candidates=there.candidates).lists, select(case, candidates=found.candidates).lists)
    storage[table[0, found.lists[0, 0] // 64]] = 0
    with pytest.raises(AssertionError):
        assert_bits(select(far).lists, found.lists)


def test_a_nan_row_and_a_nan_key_stay_where_they_are() -> None:
    case = released_case(6, 20_000, 1)
    clean = select(case, publish=BLOCKS)
    case.queries[3] = torch.nan
    spoilt = select(case, publish=BLOCKS)
    others = [0, 1, 2, 4, 5]
    assert clean.candidates is not None and spoilt.candidates is not None
    assert_bits(spoilt.lists[others], clean.lists[others])
    assert_bits(spoilt.candidates[others], clean.candidates[others])
    assert_bits(spoilt.lists[3], torch.arange(TOP_K, device=DEVICE), "NaN ranks as in a descending sort")
    expected = reference.select(case.queries, case.weights, case.keys, case.rows, 1, TOP_K, SIZE, BLOCKS, None, 1.0)
    assert expected.candidates is not None
    assert set(spoilt.candidates[3].tolist()) == set(expected.candidates[3].tolist())

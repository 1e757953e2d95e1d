"""Attention on a GPU in released shapes: 512 channels, a window of 128, lists of 512."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_cases import AttentionCase, BlockCase, moved
from compare import assert_bits, assert_op
from quickseek.ops import linear as linear_op
from quickseek.ops import norm_rope
from quickseek.ops.attention import reference
from quickseek.ops.cache import CacheView, GlobalKvCodec, WindowCodec
from quickseek.ops.linear import Fp8Weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEVICE = torch.device("cuda", 0)
WIDTH, WINDOW, LISTED = 512, 128, 512


@pytest.fixture(scope="module")
def kernels():  # type: ignore[no-untyped-def]
    from quickseek.ops.attention import triton

    return triton


def released(rows: int, heads: int = 16, *, packed: bool = True, listed: int = LISTED) -> AttentionCase:
    """``rows`` rows of up to 8 requests, the first of which begins at position 0."""
    requests = min(rows, 8)
    counts = [rows // requests + (i < rows % requests) for i in range(requests)]
    starts = [0, *(100 + 211 * i for i in range(1, requests))] if requests > 1 else [5000]
    case = AttentionCase.build(
        starts, counts, heads=heads, width=WIDTH, window=WINDOW, listed=listed, written=700, packed=packed, seed=rows
    )
    return moved(case, DEVICE)  # type: ignore[no-any-return]


def one_less(case: AttentionCase) -> AttentionCase:
    """Without the oldest window key of the last row of each request."""
    return replace(case, oldest=(case.rows.ends - case.window_size).clamp_min(0) + 1)


def assert_right(case: AttentionCase, out: Tensor) -> None:
    assert_op(out, case.run(reference))
    with pytest.raises(AssertionError):
        assert_op(out, one_less(case).run(reference))


@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (6, 16), (8, 16), (48, 16), (6, 64), (6, 8)])
def test_decode_rows_are_those_of_the_reference(rows: int, heads: int, kernels) -> None:  # type: ignore[no-untyped-def]
    case = released(rows, heads)
    out = case.run(kernels)
    assert_right(case, out)
    for _ in range(3):
        assert_bits(case.run(kernels), out, "a repeated run")


def test_layers_without_global_kv_and_plain_caches(kernels) -> None:  # type: ignore[no-untyped-def]
    for case in (released(6, listed=0), released(6, packed=False)):
        assert_right(case, case.run(kernels))


@pytest.mark.parametrize("listed", [0, LISTED])
def test_rows_of_a_prompt(listed: int, kernels) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase.build(
        [1500, 0], [700, 1300], heads=16, width=WIDTH, window=WINDOW, listed=listed, written=600
    )  # fmt: skip
    case = moved(case, DEVICE)
    out = case.run(kernels)
    assert_right(case, out)
    assert_bits(case.run(kernels), out, "a repeated run")


@pytest.mark.parametrize("last", [[4000], [0, 127, 128, 5, 900, 901, 902, 903]], ids=len)
def test_draft_blocks(last: list[int], kernels) -> None:  # type: ignore[no-untyped-def]
    case = moved(BlockCase.build(last, 5, heads=16, width=WIDTH, window=WINDOW), DEVICE)
    out = case.run(kernels)
    assert_op(out, case.run(reference))
    with pytest.raises(AssertionError):
        assert_op(out, replace(case, last=case.last - 1).run(reference))


def test_a_graph_replays_the_bits_of_a_call_and_follows_positions_and_lists(kernels) -> None:  # type: ignore[no-untyped-def]
    case = released(6)
    assert case.lists is not None
    first = case.run(kernels)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.sparse_attention(
            case.queries, case.step_kv, case.window, case.rows, case.sinks, WINDOW, case.oldest, case.pages, case.lists
        )
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        assert_bits(out, first)
    case.lists[:, 100:] = -1
    case.oldest.add_(case.rows.starts)
    graph.replay()
    assert_bits(out, case.run(kernels))
    assert_op(out, case.run(reference))
    with pytest.raises(AssertionError):
        assert_bits(out, first)


def test_records_beyond_two_gigabytes_and_contexts_of_a_million(kernels) -> None:  # type: ignore[no-untyped-def]
    """Every block that is read begins more than 2^31 bytes behind the first."""
    case = released(6)
    generator = torch.Generator(DEVICE).manual_seed(1)

    def far(codec: WindowCodec | GlobalKvCodec, rows: int, count: int) -> CacheView:
        beyond = 2**31 // (rows * codec.record) + 1
        storage = torch.empty(beyond + count, rows, codec.record, dtype=torch.uint8, device=DEVICE)
        storage[beyond:] = torch.randint(0, 256, (count, rows, codec.record), device=DEVICE, generator=generator)
        # Scales around one, and E4M3 codes that are no NaN.
        if isinstance(codec, WindowCodec):
            storage[beyond:, :, :WIDTH] &= 0xBF
            storage[beyond:, :, WIDTH:] = 127
        else:
            storage[beyond:, :, WIDTH // 2 :] = 0x30
        order = torch.randperm(count, device=DEVICE, generator=generator) + beyond
        return CacheView(storage, order.unsqueeze(0) if count > 6 else order[:6].unsqueeze(1), codec)

    pages = far(GlobalKvCodec(WIDTH), 64, 16384)
    lists = torch.randint(0, 1 << 20, (6, LISTED), device=DEVICE, generator=generator)
    case = replace(
        case, window=far(WindowCodec(WIDTH), WINDOW + 8, 6),
        pages=replace(pages, table=pages.table.expand(6, -1).contiguous()), lists=lists,
    )  # fmt: skip
    out = case.run(kernels)
    assert out.isfinite().all()
    assert_right(case, out)


@pytest.mark.parametrize("rows", [1, 6, 48])
def test_keys_that_are_read_while_the_queries_are_made_are_those_of_the_step(rows: int, kernels) -> None:  # type: ignore[no-untyped-def]
    """Keys of the step, then queries by a product that takes a while, as a layer makes them, replay after replay."""
    case, heads, latents = released(rows), 16, 1024
    generator = torch.Generator(DEVICE).manual_seed(rows)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).to(torch.bfloat16)

    codes = drawn(heads * WIDTH, latents).to(torch.float8_e4m3fn)
    scales = torch.full((heads * WIDTH // 32, latents // 32), 122, dtype=torch.uint8, device=DEVICE)
    weight, ones = Fp8Weight(codes, scales), torch.ones(latents, dtype=torch.bfloat16, device=DEVICE)
    keys, latent = drawn(rows, WIDTH), drawn(rows, latents)

    def run(queries_last: bool) -> Tensor:
        step_kv = norm_rope.rms_norm(keys, ones[:WIDTH], 1e-6)
        queries = linear_op.linear(norm_rope.rms_norm(latent, ones, 1e-6), weight)
        if not queries_last:
            torch.cuda.synchronize()
        out: Tensor = kernels.sparse_attention(
            queries.view(rows, heads, WIDTH), step_kv, case.window, case.rows, case.sinks, WINDOW, case.oldest,
            case.pages, case.lists, None, queries_last,
        )  # fmt: skip
        return out

    run(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(True)
    before = None
    for _ in range(200):
        keys.copy_(drawn(rows, WIDTH))
        latent.copy_(drawn(rows, latents))
        expected = run(False)
        graph.replay()
        assert_bits(out, expected)
        assert before is None or not torch.equal(out, before)
        before = out.clone()
    queries = linear_op.linear(norm_rope.rms_norm(latent, ones, 1e-6), weight).view(rows, heads, WIDTH)
    made = replace(case, queries=queries, step_kv=norm_rope.rms_norm(keys, ones[:WIDTH], 1e-6))
    assert_op(out, made.run(reference))

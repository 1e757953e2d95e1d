"""Quantisation, cache records and the compressor on a GPU in released shapes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_op, assert_relative
from op_cases import poisoned_outputs
from quickseek.ops import compressor, quantize, rings
from quickseek.ops.cache import CacheView, Codec, GlobalKvCodec, IndexKeyCodec, PlainCodec, WindowCodec
from quickseek.ops.compressor import reference as compressor_reference
from quickseek.ops.norm_rope import Rotation, rotary_frequencies, rotation
from quickseek.ops.quantize import reference
from quickseek.ops.rows import StepRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CUDA, CPU, BF16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
CODECS: list[Codec] = [WindowCodec(512), GlobalKvCodec(512), IndexKeyCodec(128)]
PACKED = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.kind)
ROWS = (1, 6, 48, 2048)
EPS = 1e-20


def number(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def in_a_graph(call: Callable[[], object], spoil: Callable[[], object]) -> None:
    """Replay a graph that holds the call twice, what it writes being spoilt before each."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        spoil()
        graph.replay()
    torch.cuda.synchronize()


def view(codec: Codec, requests: int, rows: int, blocks: int, device: torch.device) -> CacheView:
    """Every request in blocks of its own, in no order; block 0 is scratch."""
    order = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(3)) + 1
    storage = torch.full((requests * blocks + 1, rows, codec.record), 77, dtype=codec.dtype)
    return CacheView(storage.to(device), order.view(requests, blocks).to(device), codec)


def on(device: torch.device, rows: StepRows) -> StepRows:
    names = ("positions", "requests", "first_rows", "starts", "ends")
    moved = {name: getattr(rows, name).to(device) for name in names}
    return StepRows(**moved, max_rows=rows.max_rows, max_length=rows.max_length)


# ---------------------------------------------------------------------------------------------- quantisation


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["fake_quantize_a8", "fake_quantize_q4i", "fake_quantize_q4k"])
def test_fake_quantisation_gives_the_values_of_the_format(name: str, rows: int) -> None:
    x = number(rows, 4, 128, seed=rows)
    x[0, 0, :32] = 0.0
    x[0, 1, ::2] *= -0.0
    with poisoned_outputs():
        out = getattr(quantize, name)(x.to(CUDA)).cpu()
    expected = getattr(reference, name)(x)
    assert_bits(out, expected)
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(out, getattr(reference, name)(x * 1.25))


@pytest.mark.parametrize("rows", ROWS)
def test_codes_scales_and_their_swizzle_are_those_of_the_reference(rows: int) -> None:
    x = number(rows, 5120, seed=rows)
    with poisoned_outputs():
        codes, scales = quantize.quantize_a8(x.to(CUDA))
        swizzled = quantize.swizzle_scales(scales).cpu()
    expected, expected_scales = reference.quantize_a8(x)
    assert_bits(codes.view(torch.uint8).cpu(), expected.view(torch.uint8))
    assert_bits(scales.cpu(), expected_scales)
    assert_bits(swizzled, reference.swizzle_scales(expected_scales))
    with pytest.raises(AssertionError):
        assert_bits(swizzled, reference.swizzle_scales(expected_scales.flip(1)))


# ---------------------------------------------------------------------------------------------- records


@PACKED
@pytest.mark.parametrize("rows", ROWS)
def test_records_are_those_of_the_reference_and_are_read_back(rows: int, codec: Codec) -> None:
    requests, numbers = torch.arange(rows) % 3, torch.arange(rows) // 3 + 5
    numbers[rows // 2] = -1 if rows > 1 else numbers[0]
    x, blocks = number(rows, codec.width + 64, seed=rows)[:, : codec.width], -(-(rows + 8) // 64)
    ours, theirs = view(codec, 3, 64, blocks, CUDA), view(codec, 3, 64, blocks, CPU)
    ours.write(requests.to(CUDA), numbers.to(CUDA), x.to(CUDA))
    theirs.write(requests, numbers, x)
    assert_bits(ours.storage[1:].cpu(), theirs.storage[1:])
    with poisoned_outputs():
        found = ours.gather(requests.to(CUDA), numbers.to(CUDA), BF16).cpu()
        lists = ours.gather(requests[:, None].to(CUDA), numbers.expand(2, -1).T.to(CUDA), torch.float32).cpu()
    assert_bits(found, theirs.gather(requests, numbers, BF16))
    assert_bits(lists[:, 1], found.float())
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(found, theirs.gather(requests, numbers, BF16) * 2)


@pytest.mark.parametrize("codec", [WindowCodec(512), PlainCodec(512, BF16)], ids=lambda codec: codec.kind)
def test_blocks_beyond_two_to_the_31_elements_are_written_and_read(codec: Codec) -> None:
    block_rows = 136
    blocks = -(-(1 << 31) // (block_rows * codec.record)) + 2
    storage = torch.empty(blocks, block_rows, codec.record, dtype=codec.dtype, device=CUDA)
    last, first = blocks - 1, blocks - 1 - (1 << 31) // (block_rows * codec.record)
    storage[[first, first + 1, last]] = 77
    big = CacheView(storage, torch.tensor([[last]], device=CUDA), codec)
    assert last * storage.stride(0) > 1 << 31
    x, rows = number(6, 512), torch.arange(130, 136)
    requests = torch.zeros(6, dtype=torch.int64)
    big.write(requests.to(CUDA), rows.to(CUDA), x.to(CUDA))
    small = CacheView(torch.full((2, *storage.shape[1:]), 77, dtype=codec.dtype), torch.tensor([[1]]), codec)
    small.write(requests, rows, x)
    assert_bits(storage[last].cpu(), small.storage[1])
    assert_bits(big.gather(requests.to(CUDA), rows.to(CUDA), BF16).cpu(), small.gather(requests, rows, BF16))
    assert (storage[first] == 77).all() and (storage[first + 1] == 77).all(), "where a cut offset would lie"
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(storage[last].cpu(), small.storage[0])


def test_a_ring_is_kept_and_read_beside_the_step_inside_a_graph() -> None:
    """Uniform rows are made in the graph too, from starts that only the device knows."""
    codec = WindowCodec(512)
    starts, x = torch.tensor([0, 127, 128, 1000]), number(24, 512)

    def run(device: torch.device) -> tuple[CacheView, Callable[[], Tensor]]:
        ring, there, values = view(codec, 4, 136, 1, device), starts.to(device), x.to(device)
        distance = torch.arange(3, device=device)

        def call() -> Tensor:
            rows = StepRows.uniform(there, 6, 2000)
            found = rings.earlier_rows(values, ring, rows, distance)
            rings.keep(ring, rows, values)
            return found

        return ring, call

    ring, call = run(CUDA)
    kept: list[Tensor] = []
    in_a_graph(lambda: kept.append(call()), lambda: (ring.storage.fill_(77), *(k.fill_(7) for k in kept)))
    theirs, expected = run(CPU)
    found = expected()
    assert_bits(kept[-1].cpu(), found)
    assert_bits(ring.storage[1:].cpu(), theirs.storage[1:])
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(ring.storage[1:].cpu().roll(1, 1), theirs.storage[1:])


# ---------------------------------------------------------------------------------------------- compressor


def compressed(rows: StepRows, device: torch.device, raw: Tensor, ring: CacheView) -> tuple[Tensor, Tensor]:
    weight = number(512, seed=5)
    pooled = compressor.pool(raw.to(device), ring, rows, 2)
    latents = compressor.pooled_latents(raw.to(device), ring, rows, 2, weight.to(device), EPS, BF16)
    return pooled, latents


@pytest.mark.parametrize("counts", [(1,), (6, 1), (6,) * 8, (1025, 1023)])
def test_latents_and_open_rows_are_the_references(counts: tuple[int, ...]) -> None:
    rows = StepRows.build([5 + 2 * i for i in range(len(counts))], list(counts))
    raw, codec = number(sum(counts), 2, 512, dtype=torch.float32), PlainCodec(1024, torch.float32)
    ours, theirs = view(codec, len(counts), 9, 1, CUDA), view(codec, len(counts), 9, 1, CPU)
    with poisoned_outputs():
        pooled, latents = compressed(on(CUDA, rows), CUDA, raw, ours)
    expected, expected_latents = compressed(rows, CPU, raw, theirs)
    closed = compressor_reference.closed_groups(rows.positions, 2) >= 0
    assert_relative(pooled.cpu()[closed], expected[closed], 1e-6)
    assert_op(latents.cpu()[closed], expected_latents[closed])
    assert_bits(ours.storage[1:].cpu(), theirs.storage[1:])
    with pytest.raises(AssertionError):
        assert_op(latents.cpu()[closed].flip(1), expected_latents[closed])


@pytest.mark.parametrize("counts", [(1,), (6,) * 8, (2048,)])
@pytest.mark.parametrize("ratio", [1, 2])
def test_groups_are_written_as_the_reference_writes_them(ratio: int, counts: tuple[int, ...]) -> None:
    rows = StepRows.build([5 + 70 * i for i in range(len(counts))], list(counts))
    latents, keys, weight = number(sum(counts), 512), number(sum(counts), 128, seed=1), number(128, seed=2)
    frequencies = rotary_frequencies(64, 160000.0, factor=16.0, original_length=65536)
    turn = rotation(rows.positions - ratio + 1, frequencies)
    found = []
    for device in (CUDA, CPU):
        blocks = -(-rows.max_length // (64 * ratio))
        caches = [view(codec, len(counts), 64, blocks, device) for codec in (GlobalKvCodec(512), IndexKeyCodec(128))]
        angle = Rotation(turn.cos.to(device), turn.sin.to(device))
        inputs = [x.to(device) for x in (latents, keys, weight)]
        compressor.write_groups(*inputs, EPS, angle, on(device, rows), ratio, *caches)
        found.append([cache.storage[1:].cpu() for cache in caches])
    for ours, theirs in zip(*found, strict=True):
        # A last place of the norm or of the rotation may put a value on the other side of a rounding.
        written = (theirs != 77).any(-1)
        assert torch.equal((ours != 77).any(-1), written)
        different = (ours[written] != theirs[written]).float().mean()
        assert different <= 0.002, f"{different} of the bytes differ"
        assert (ours[written].flip(1) != theirs[written]).float().mean() > 0.5


def test_the_compressor_runs_in_a_graph_and_gives_the_same_bits() -> None:
    starts, raw = torch.tensor([3, 8, 500], device=CUDA), number(18, 2, 512, dtype=torch.float32).to(CUDA)
    weight, keys, key_weight = number(512).to(CUDA), number(18, 128, seed=1).to(CUDA), number(128, seed=2).to(CUDA)
    frequencies = rotary_frequencies(64, 1e4).to(CUDA)
    ring = view(PlainCodec(1024, torch.float32), 3, 9, 1, CUDA)
    caches = [view(codec, 3, 64, 5, CUDA) for codec in (GlobalKvCodec(512), IndexKeyCodec(128))]

    def call() -> None:
        rows = StepRows.uniform(starts, 6, 600)
        latents = compressor.pooled_latents(raw, ring, rows, 2, weight, EPS, BF16)
        turn = rotation(rows.positions - 1, frequencies)
        compressor.write_groups(latents, keys, key_weight, EPS, turn, rows, 2, *caches)

    def spoil(value: int = 77) -> None:
        for cache in (ring, *caches):
            cache.storage.fill_(value)

    spoil()
    call()
    expected = [cache.storage[1:].clone() for cache in (ring, *caches)]
    in_a_graph(call, spoil)
    for cache, eager in zip((ring, *caches), expected, strict=True):
        assert_bits(cache.storage[1:], eager)
        with pytest.raises(AssertionError, match="differ in bits"):
            assert_bits(cache.storage[1:].roll(1, 1), eager)

"""Cases of ``quantize``, records of caches and ``compressor``: a rank of TP 4 in the released model.

Small tensors: what counts is the launch. PyTorch has none of these formats, so its own way is the reference's
expressions, which no graph can hold for Q4i and Q4k (they copy a table from the host): those have no alternative.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from op_case import ROWS, Build, Case
from quickseek.ops import compressor, quantize, rings
from quickseek.ops.cache import CacheView, Codec, GlobalKvCodec, IndexKeyCodec, PlainCodec, WindowCodec
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.quantize import reference
from quickseek.ops.rows import StepRows

BLOCK_ROWS, LISTED = 64, 512
HEAD, INDEX_HEAD, INDEX_HEADS, ROPE = 512, 128, 32, 64
EPS = 1e-20


def bf16(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).to(torch.bfloat16)


def each(make: Callable[[torch.device], Callable[[], object]]) -> Build:
    """Copies of what a call reads and writes: ``make`` builds one with its call."""
    return lambda device, copies: [make(device) for _ in range(copies)]


def step(rows: int, device: torch.device) -> StepRows:
    """Decode rows of requests of up to 6 each."""
    each_request = 6 if rows % 6 == 0 else 1
    starts = torch.arange(rows // each_request, device=device) % 64 + 301
    return StepRows.uniform(starts, each_request, 400)


def view(codec: Codec, requests: int, rows: int, blocks: int, device: torch.device) -> CacheView:
    table = torch.arange(1, requests * blocks + 1, device=device).view(requests, blocks)
    storage = torch.zeros(requests * blocks + 1, rows, codec.record, dtype=codec.dtype, device=device)
    return CacheView(storage, table, codec)


def fake(rows: int, name: str) -> Build:
    def make(device: torch.device) -> Callable[[], object]:
        x = bf16(rows, INDEX_HEADS, INDEX_HEAD, device=device)
        return lambda: getattr(quantize, name)(x)

    return each(make)


def codes(rows: int, width: int, *, alternative: bool) -> Build:
    def make(device: torch.device) -> Callable[[], object]:
        x = bf16(rows, width, device=device)
        return lambda: (reference if alternative else quantize).quantize_a8(x)

    return each(make)


def keep(rows: int) -> Build:
    def make(device: torch.device) -> Callable[[], object]:
        x, ring = bf16(rows, HEAD, device=device), view(WindowCodec(HEAD), rows, 136, 1, device)
        where = step(rows, device)
        return lambda: rings.keep(ring, where, x)

    return each(make)


def gather(rows: int, codec: Codec) -> Build:
    def make(device: torch.device) -> Callable[[], object]:
        pages = view(codec, rows, BLOCK_ROWS, 16, device)
        numbers = torch.rand(rows, 16 * BLOCK_ROWS, device=device).argsort(1)[:, :LISTED]
        requests = torch.arange(rows, device=device).unsqueeze(1)
        return lambda: pages.gather(requests, numbers, torch.bfloat16)

    return each(make)


def latents(rows: int) -> Build:
    def make(device: torch.device) -> Callable[[], object]:
        raw, weight = torch.randn(rows, 2, HEAD, device=device), bf16(HEAD, device=device)
        ring, where = view(PlainCodec(2 * HEAD, torch.float32), rows, 9, 1, device), step(rows, device)
        return lambda: compressor.pooled_latents(raw, ring, where, 2, weight, EPS, torch.bfloat16)

    return each(make)


def groups(rows: int) -> Build:
    def make(device: torch.device) -> Callable[[], object]:
        values, keys, weight = (
            bf16(*shape, device=device) for shape in ((rows, HEAD), (rows, INDEX_HEAD), (INDEX_HEAD,))
        )
        turn = Rotation(torch.ones(rows, ROPE // 2, device=device), torch.zeros(rows, ROPE // 2, device=device))
        caches = [
            view(codec, rows, BLOCK_ROWS, 8, device) for codec in (GlobalKvCodec(HEAD), IndexKeyCodec(INDEX_HEAD))
        ]
        where = step(rows, device)
        return lambda: compressor.write_groups(values, keys, weight, EPS, turn, where, 1, *caches)

    return each(make)


def cases(counts: Sequence[int] = ROWS) -> list[Case]:
    """Quantisers of activations, records written and read, and the compressor's two launches."""
    found = []
    for rows in counts:
        values = rows * INDEX_HEADS * INDEX_HEAD
        for name in ("fake_quantize_a8", "fake_quantize_q4i", "fake_quantize_q4k"):
            found.append(Case(name=f"{name} of index queries", rows=rows, bytes=4 * values, build=fake(rows, name)))
        found.append(Case(
            name="quantize_a8 of hidden states", rows=rows, bytes=rows * 5120 * 3 + rows * 160,
            build=codes(rows, 5120, alternative=False), alternative=codes(rows, 5120, alternative=True),
            alternative_name="the reference's expressions",
        ))  # fmt: skip
        found.append(Case(name="window ring kept", rows=rows, bytes=rows * (2 * HEAD + 528), build=keep(rows)))
        for codec in (GlobalKvCodec(HEAD), WindowCodec(HEAD)):
            size = rows * LISTED * (codec.record + 2 * HEAD + 8)
            name = f"{LISTED} rows gathered, {codec.kind}"
            found.append(Case(name=name, rows=rows, bytes=size, build=gather(rows, codec)))
        found.append(Case(name="pooled latents", rows=rows, bytes=rows * HEAD * 26, build=latents(rows)))
        size = rows * (2 * HEAD + 2 * INDEX_HEAD + 288 + 68 + 4 * ROPE)
        found.append(Case(name="groups written", rows=rows, bytes=size, build=groups(rows)))
    return found

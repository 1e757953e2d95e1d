"""Attention in released shapes at TP 4: 16 heads of 512 channels, 64 of them rotated, a window of 128, lists of 512."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from op_case import ROWS, Build, Case, requests_of
from quickseek.ops import attention
from quickseek.ops.cache import SLACK, CacheView, GlobalKvCodec, WindowCodec
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows

HEADS, WIDTH, WINDOW, LISTED, BLOCK_ROWS, DRAFTS, PAIRS = 16, 512, 128, 512, 64, 5, 32
CONTEXT = 65536


def _ring(requests: int, device: torch.device) -> CacheView:
    codec = WindowCodec(WIDTH)
    storage = torch.randint(0, 120, (requests + 1, WINDOW + SLACK, codec.record), dtype=torch.uint8, device=device)
    storage[..., WIDTH:] = 120
    return CacheView(storage, torch.arange(1, requests + 1, device=device).unsqueeze(1), codec)


def _pages(requests: int, device: torch.device) -> CacheView:
    codec, blocks = GlobalKvCodec(WIDTH), CONTEXT // BLOCK_ROWS
    storage = torch.randint(
        0, 120, (requests * blocks + 1, BLOCK_ROWS, codec.record), dtype=torch.uint8, device=device
    )  # fmt: skip
    table = torch.randperm(requests * blocks, device=device).view(requests, blocks) + 1
    return CacheView(storage, table, codec)


def _normal(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16)


def _lists(rows: int, device: torch.device) -> Tensor:
    return torch.rand(rows, CONTEXT, device=device).topk(LISTED, -1).indices


def _turn(rows: int, device: torch.device) -> Rotation:
    angles = torch.rand(rows, PAIRS, device=device)
    return Rotation(angles.cos(), angles.sin())


def _attend(rows: int, reads_global: bool) -> Build:
    def build(device: torch.device, copies: int) -> list[Callable[[], object]]:
        requests = requests_of(rows)
        starts = torch.full((requests,), CONTEXT - rows // requests, device=device)
        step = StepRows.uniform(starts, rows // requests, CONTEXT)
        queries, kv = _normal(rows, HEADS, WIDTH, device=device), _normal(rows, WIDTH, device=device)
        sinks, oldest, turn = torch.zeros(HEADS, device=device), torch.zeros_like(starts), _turn(rows, device)

        def call() -> Callable[[], object]:
            ring = _ring(requests, device)
            pages = _pages(requests, device) if reads_global else None
            lists = _lists(rows, device) if reads_global else None
            return lambda: attention.sparse_attention(
                queries, kv, ring, step, sinks, window_size=WINDOW, oldest=oldest, global_kv=pages, lists=lists,
                turn=turn,
            )  # fmt: skip

        return [call() for _ in range(copies)]

    return build


def _block(rows: int) -> Build:
    def build(device: torch.device, copies: int) -> list[Callable[[], object]]:
        blocks = rows // DRAFTS
        queries = _normal(blocks, DRAFTS, HEADS, WIDTH, device=device)
        kv, sinks = _normal(blocks, DRAFTS, WIDTH, device=device), torch.zeros(HEADS, device=device)
        requests = torch.arange(blocks, device=device)
        last, turn = torch.full_like(requests, CONTEXT), _turn(rows, device)

        def call(ring: CacheView) -> Callable[[], object]:
            return lambda: attention.block_attention(
                queries, kv, ring, requests, last, sinks, window_size=WINDOW, turn=turn
            )

        return [call(_ring(blocks, device)) for _ in range(copies)]

    return build


def _torch(rows: int, keys: int) -> Build:
    """scaled_dot_product_attention of gathered BF16 keys of each row, and one for the sink."""

    def build(device: torch.device, copies: int) -> list[Callable[[], object]]:
        queries = _normal(rows, 1, HEADS, WIDTH, device=device)
        mask = torch.zeros(1, 1, HEADS, keys + 1, dtype=torch.bfloat16, device=device)

        def call() -> Callable[[], object]:
            stored = _normal(rows, CONTEXT // 16, WIDTH, device=device)
            chosen = torch.randint(0, CONTEXT // 16, (rows, keys + 1, 1), device=device).expand(-1, -1, WIDTH)

            def run() -> object:
                own = stored.gather(1, chosen).unsqueeze(1)
                return torch.nn.functional.scaled_dot_product_attention(queries, own, own, attn_mask=mask)

            return run

        return [call() for _ in range(copies)]

    return build


def _bytes(rows: int, requests: int, listed: int, window_rows: int) -> int:
    """Ring records once a request, listed records once a row, lists, queries and outputs, this step's rows."""
    ring = requests * window_rows * WindowCodec(WIDTH).record
    pages = rows * listed * (GlobalKvCodec(WIDTH).record + 8)
    return ring + pages + rows * (2 * HEADS + 1) * WIDTH * 2


def cases(counts: Sequence[int] = ROWS) -> list[Case]:
    found = []
    way = "gather of BF16 keys, scaled_dot_product_attention"
    for rows in counts:
        requests = requests_of(rows)
        found += [
            Case(
                name="sparse attention, global KV", rows=rows, bytes=_bytes(rows, requests, LISTED, WINDOW),
                build=_attend(rows, True), alternative=_torch(rows, WINDOW + LISTED), alternative_name=way,
            ),
            Case(
                name="sparse attention, window only", rows=rows, bytes=_bytes(rows, requests, 0, WINDOW),
                build=_attend(rows, False), alternative=_torch(rows, WINDOW), alternative_name=way,
            ),
        ]  # fmt: skip
    found += [
        Case(
            name="draft block", rows=rows, bytes=_bytes(rows, rows // DRAFTS, 0, WINDOW), build=_block(rows),
            alternative=_torch(rows, WINDOW + DRAFTS), alternative_name=way,
        )
        for rows in (5, 40)
    ]  # fmt: skip
    return found

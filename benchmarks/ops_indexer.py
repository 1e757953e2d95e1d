"""Selection in released shapes: scores of packed index keys, exact lists of 512, candidate blocks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from op_case import ROWS, Build, Case, requests_of
from quickseek import formats
from quickseek.ops import indexer
from quickseek.ops.cache import CacheView, IndexKeyCodec
from quickseek.ops.rows import StepRows

HEADS, WIDTH, TOP_K, SIZE, BLOCKS = 32, 128, 512, 8, 2048
BLOCK_ROWS = 64
CODEC = IndexKeyCodec(WIDTH)


def _rows(rows: int, groups: int, device: torch.device) -> StepRows:
    requests = requests_of(rows)
    starts = torch.full((requests,), groups - rows // requests, device=device)
    return StepRows.uniform(starts, rows // requests, groups)


def _keys(rows: int, groups: int, device: torch.device) -> CacheView:
    requests, blocks = requests_of(rows), -(-groups // BLOCK_ROWS)
    size = (requests * blocks + 1, BLOCK_ROWS, CODEC.record)
    storage = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    storage[..., WIDTH // 2 :] = storage[..., WIDTH // 2 :] % 4 + 125
    table = torch.randperm(requests * blocks, device=device).view(requests, blocks) + 1
    return CacheView(storage, table, CODEC)


def _queries(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    queries = torch.randn(rows, HEADS, WIDTH, device=device).to(torch.bfloat16)
    return formats.fake_quantize_q4i(queries), torch.randn(rows, HEADS, device=device)


def _candidates(rows: int, groups: int, device: torch.device) -> Tensor:
    shuffled = torch.rand(rows, groups // SIZE, device=device).argsort(1)
    return shuffled[:, :BLOCKS].sort(1).values.contiguous()


def _select(rows: int, groups: int, publish: int, restricted: bool) -> Build:
    def build(device: torch.device, copies: int) -> list[Callable[[], object]]:
        step, (queries, weights) = _rows(rows, groups, device), _queries(rows, device)
        candidates = _candidates(rows, groups, device) if restricted else None

        def call(keys: CacheView) -> Callable[[], object]:
            return lambda: indexer.select(
                queries, weights, keys, step, ratio=1, top_k=TOP_K, block_size=SIZE,
                publish_blocks=publish, candidates=candidates,
            )  # fmt: skip

        return [call(_keys(rows, groups, device)) for _ in range(copies)]

    return build


def _torch(rows: int, groups: int, publish: int, restricted: bool) -> Build:
    """BF16 products of keys that are BF16 already (four times the bytes), and torch.topk."""

    def build(device: torch.device, copies: int) -> list[Callable[[], object]]:
        queries, weights = _queries(rows, device)
        requests, narrow = requests_of(rows), weights.to(torch.bfloat16)
        members = None
        if restricted:
            blocks = _candidates(rows, groups, device)
            members = (blocks.unsqueeze(-1) * SIZE + torch.arange(SIZE, device=device)).flatten(1)
            members = members.view(requests, -1)

        def call(keys: Tensor) -> Callable[[], object]:
            def run() -> object:
                if members is None:
                    products = queries.view(requests, -1, WIDTH) @ keys.transpose(1, 2)
                    products = products.view(rows, HEADS, groups)
                else:
                    own = keys.gather(1, members.unsqueeze(-1).expand(-1, -1, WIDTH))
                    products = queries @ own.view(rows, -1, WIDTH).transpose(1, 2)
                scores = (narrow.unsqueeze(1) @ products.relu_()).squeeze(1)
                found = [scores.topk(TOP_K, -1, sorted=False)]
                if publish:
                    found.append(scores.view(rows, -1, SIZE).amax(-1).topk(publish, -1, sorted=False))
                return found

            return run

        return [
            call(torch.randn(requests, groups, WIDTH, device=device, dtype=torch.bfloat16)) for _ in range(copies)
        ]  # fmt: skip

    return build


def cases(counts: Sequence[int] = ROWS) -> list[Case]:
    found = []
    for name, groups, publish, restricted in (
        ("select of 16K groups", 1 << 14, 0, False),
        ("select of 128K groups", 1 << 17, 0, False),
        ("select of 128K groups, blocks published", 1 << 17, BLOCKS, False),
        ("select inside candidates of 128K groups", 1 << 17, 0, True),
    ):
        for rows in counts:
            requests = requests_of(rows)
            read = rows * BLOCKS * SIZE if restricted else requests * groups
            found.append(
                Case(
                    name=name, rows=rows, bytes=min(read, requests * groups) * CODEC.record,
                    build=_select(rows, groups, publish, restricted),
                    alternative=_torch(rows, groups, publish, restricted), alternative_name="BF16 matmul and topk",
                )
            )  # fmt: skip
    return found

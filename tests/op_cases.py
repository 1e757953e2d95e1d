"""Inputs for tests of operations: seeded numbers, caches whose unwritten records are NaN, and what a NaN may touch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from compare import assert_bits
from quickseek.ops.cache import CacheView, PlainCodec
from quickseek.ops.rows import StepRows


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def poisoned_cache(requests: int, rows: int, width: int, dtype: torch.dtype = torch.float64) -> CacheView:
    """One block a request, each record NaN until it is written (-7 777 for integers); block 0 is scratch."""
    fill = torch.nan if dtype.is_floating_point else -7777
    storage = torch.full((requests + 1, rows, width), fill, dtype=dtype)
    return CacheView(storage, torch.arange(1, requests + 1).unsqueeze(1), PlainCodec(width, dtype))


def filled_ring(values: Sequence[Tensor], starts: Sequence[int], rows: int) -> CacheView:
    """A poisoned ring that holds, for request i, the last ``rows`` of ``values[i][: starts[i]]`` by position."""
    ring = poisoned_cache(len(values), rows, values[0].shape[1], values[0].dtype)
    for request, (value, start) in enumerate(zip(values, starts, strict=True)):
        for position in range(max(0, start - rows), start):
            ring.storage[request + 1, position % rows] = value[position]
    return ring


def filled_pages(values: Sequence[Tensor], rows: int) -> CacheView:
    """Poisoned paged rows that hold ``values[i]`` from row 0 on for request i."""
    pages = poisoned_cache(len(values), rows, values[0].shape[1], values[0].dtype)
    for request, value in enumerate(values):
        pages.storage[request + 1, : value.shape[0]] = value
    return pages


def step(values: Sequence[Tensor], rows: StepRows) -> Tensor:
    """The rows of a step, taken from each request's whole sequence of values."""
    parts = zip(values, rows.starts.tolist(), rows.ends.tolist(), strict=True)
    return torch.cat([value[start:end] for value, start, end in parts])


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Within, ``torch.empty`` gives NaN or -7 777, so that what a kernel leaves unwritten shows."""
    shipped: Callable[..., Tensor] = torch.empty

    def poisoned(*size: object, **options: object) -> Tensor:
        out = shipped(*size, **options)
        if out.dtype.is_floating_point and out.element_size() > 1:
            return out.fill_(torch.nan)
        return out.fill_(-7777) if out.dtype.is_signed else out.fill_(201)

    torch.empty = poisoned  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = shipped


def assert_nan_stays(run: Callable[[Tensor], Tensor], x: Tensor, row: int, rows: Sequence[int] | None = None) -> None:
    """A NaN in row ``row`` of x reaches that row of the output; the bits of all others (or of ``rows``) stay."""
    clean, spoilt = run(x), x.clone()
    spoilt[row] = torch.nan
    out = run(spoilt)
    others = [i for i in range(clean.shape[0]) if i != row] if rows is None else list(rows)
    assert_bits(out[others], clean[others], "rows without the NaN")
    if out.dtype.is_floating_point:
        assert out[row].isnan().any(), "the NaN of a row must show in it"

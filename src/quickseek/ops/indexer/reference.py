"""Selection in plain PyTorch: score every group of a request, then sort."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quickseek.numerics import wide_dtype
from quickseek.ops.cache import CacheView
from quickseek.ops.rows import StepRows

INFINITY = float("inf")


@dataclass(frozen=True)
class Selection:
    """int64 ``lists`` [T, k] of group numbers; from a candidate source, ``candidates`` [T, blocks]; -1: none."""

    lists: Tensor
    candidates: Tensor | None


def scores(queries: Tensor, weights: Tensor, keys: CacheView, rows: StepRows, groups: int) -> Tensor:
    """[T, groups] in the wide dtype: ``sum_h weight[h] * relu(query[h] . key)``, visible or not."""
    wide = wide_dtype(queries.dtype)
    out = torch.empty(queries.shape[0], groups, dtype=wide, device=queries.device)
    numbers = torch.arange(groups, device=queries.device)
    first = [*rows.first_rows.tolist(), queries.shape[0]]
    for request in range(len(first) - 1):
        span = slice(first[request], first[request + 1])
        table = keys.gather(torch.full_like(numbers, request), numbers, wide)
        products = torch.matmul(queries[span].to(wide), table.T).relu()
        out[span] = torch.matmul(weights[span].to(wide).unsqueeze(1), products).squeeze(1)
    return out


def top_lowest_index(values: Tensor, k: int) -> Tensor:
    """Indices [T, min(k, N)] of the largest values, ties to the lowest index; -1 where the value is -inf."""
    ordered, indices = torch.sort(values, dim=-1, descending=True, stable=True)
    return torch.where(ordered == -INFINITY, -1, indices)[:, :k]


def candidate_blocks(visible_scores: Tensor, n_visible: Tensor, block_size: int, count: int) -> Tensor:
    """Blocks [T, up to count] by their best member; the block of the newest visible group is always among them."""
    groups = visible_scores.shape[1]
    padded = torch.nn.functional.pad(visible_scores, (0, -groups % block_size), value=-INFINITY)
    best = padded.unflatten(1, (-1, block_size)).amax(-1)
    newest = (n_visible - 1) // block_size
    pinned = torch.arange(best.shape[1], device=best.device) == newest.unsqueeze(1)
    return top_lowest_index(best.masked_fill(pinned, INFINITY), count)


def in_blocks(candidates: Tensor, groups: int, block_size: int) -> Tensor:
    """Mask [T, groups]: whether a group lies in one of the row's candidate blocks."""
    blocks = -(-groups // block_size)
    mask = torch.zeros(candidates.shape[0], blocks + 1, dtype=torch.bool, device=candidates.device)
    mask.scatter_(1, torch.where(candidates < 0, blocks, candidates), True)
    return mask[:, :blocks].repeat_interleave(block_size, 1)[:, :groups]


def select(
    queries: Tensor,
    weights: Tensor,
    keys: CacheView,
    rows: StepRows,
    ratio: int,
    top_k: int,
    block_size: int,
    publish_blocks: int,
    candidates: Tensor | None,
    weight_scale: float,
) -> Selection:
    groups = rows.max_length // ratio
    n_visible = (rows.positions + 1) // ratio
    numbers = torch.arange(groups, device=queries.device)
    visible = numbers < n_visible.unsqueeze(1)
    scaled = weights.to(wide_dtype(queries.dtype)) * weight_scale
    # With no more groups than the list holds, every group left by the masks is chosen whatever its score, and no more
    # blocks exist than a candidate set of that many groups could hold.
    unscored = groups <= top_k and (not publish_blocks or groups <= publish_blocks * block_size)
    values = visible.to(torch.float32).log() if unscored else scores(queries, scaled, keys, rows, groups)
    values = values.masked_fill(~visible, -INFINITY)
    published = candidate_blocks(values, n_visible, block_size, publish_blocks) if publish_blocks else None
    if candidates is not None:
        values = values.masked_fill(~in_blocks(candidates, groups, block_size), -INFINITY)
    return Selection(top_lowest_index(values, top_k), published)

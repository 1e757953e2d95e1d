"""Accepting and replacing drafts in plain PyTorch, on any device (spec/model.md 10.4)."""

from collections.abc import Callable

import torch
from torch import Tensor

from quickseek.ops.sampling.parameters import SparseDistribution, Verified
from quickseek.ops.sampling.reference import leading, upto


def reject(
    target: Tensor,
    draft_tokens: Tensor,
    draft: SparseDistribution | Tensor,
    draft_counts: Tensor,
    *,
    accept: Tensor,
    residual: Tensor,
    bonus: Tensor,
    draw: Callable[[Tensor, Tensor], Tensor],
) -> Verified:
    """``accept`` [B, k], ``residual`` and ``bonus`` [B, k + 1]: uniform numbers of each row; ``draw``: the device's."""
    batch, rows, vocabulary = target.shape
    drafted = draft_tokens.unsqueeze(2)
    if isinstance(draft, Tensor):
        chance = draft.gather(2, drafted).squeeze(2)
    else:
        chance = torch.where(draft.ids == drafted, draft.probabilities, 0.0).sum(2)
    # u < P / Q without the division. A draft outside its Q was not drawn from it (a drafter's row was NaN): no test of
    # P / Q makes it follow P, while rejecting it does, because its Q is then zero and the excess is P itself.
    taken = (accept * chance < target[:, :-1].gather(2, drafted).squeeze(2)) & (chance > 0)
    accepted = leading(taken, draft_counts)

    last = accepted.unsqueeze(1)
    row = target.gather(1, last.unsqueeze(2).expand(batch, 1, vocabulary)).squeeze(1)
    rejected = accepted < draft_counts
    excess = (row - _dense_row(draft, accepted, rows - 1, vocabulary).to(row.dtype)).clamp_min(0)
    # Where P and Q are equal up to rounding there may be no excess at all.
    replace = (rejected & (excess.sum(1) > 0)).unsqueeze(1)
    number = torch.where(rejected, residual.gather(1, last).squeeze(1), bonus.gather(1, last).squeeze(1))
    token = draw(torch.where(replace, excess, row), number)
    tokens = torch.cat((draft_tokens, draft_tokens.new_zeros(batch, 1)), 1).scatter(1, last, token.unsqueeze(1))
    return Verified(accepted, upto(tokens, accepted))


def _dense_row(draft: SparseDistribution | Tensor, number: Tensor, count: int, vocabulary: int) -> Tensor:
    """Q [B, V] of draft ``number`` [B]; of any one where there is no such draft."""
    if count == 0:
        return torch.zeros(number.shape[0], vocabulary, dtype=torch.float64, device=number.device)
    index = number.clamp_max(count - 1).view(-1, 1, 1)
    if isinstance(draft, Tensor):
        return draft.gather(1, index.expand(-1, 1, vocabulary)).squeeze(1)
    ids, chances = (part.gather(1, index.expand(-1, 1, part.shape[2])).squeeze(1) for part in draft)
    return torch.zeros(ids.shape[0], vocabulary, dtype=chances.dtype, device=ids.device).scatter_add(1, ids, chances)

"""Token choice in plain PyTorch."""

import torch
from torch import Tensor

from quickseek.ops.sampling.parameters import LogProbabilities, SparseDistribution, Verified
from quickseek.ops.sampling.philox import uniform as uniform

_LOWEST_TEMPERATURE = 1e-6
"""Rows of temperature 0 are replaced afterwards; until then they must not divide by it."""


def valid(logits: Tensor) -> Tensor:
    return logits.amax(-1).isfinite()


def greedy(logits: Tensor) -> Tensor:
    ids = torch.arange(logits.shape[-1], device=logits.device)
    largest = logits.amax(-1, keepdim=True)
    # Nothing is less than a NaN: such a row gets id 0.
    return torch.where(logits < largest, logits.shape[-1] - 1, ids).amin(-1)


def probabilities(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor | None = None, min_p: Tensor | None = None
) -> Tensor:
    vocabulary = logits.shape[-1]
    hot = _softmax(logits, temperature)
    if min_p is not None:
        border = min_p.to(torch.float64).unsqueeze(1) * hot.amax(-1, keepdim=True)
        hot = torch.where(hot >= border, hot, 0.0)
    ordered, order = torch.sort(hot, dim=-1, descending=True, stable=True)
    if top_k is not None:
        limit = torch.where(top_k > 0, top_k, vocabulary).unsqueeze(1)
        ordered = torch.where(torch.arange(vocabulary, device=logits.device) < limit, ordered, 0.0)
    ordered = _normalise(ordered)
    # A token stays while the tokens before it have not yet reached top_p; the first always stays.
    # Rounded sums may reach 1 early, so a top_p of 1 is said to be off.
    reach = torch.where(top_p < 1, top_p.to(torch.float64), 2.0).unsqueeze(1)
    kept = ordered.cumsum(-1) - ordered < reach
    kept[:, 0] = True
    hot = _normalise(torch.zeros_like(hot).scatter_(1, order, torch.where(kept, ordered, 0.0)))
    # Not one_hot, which reads its argument from the host on some devices.
    best = torch.arange(vocabulary, device=logits.device) == greedy(logits).unsqueeze(1)
    one = (best & valid(logits).unsqueeze(1)).to(torch.float64)
    return torch.where((temperature == 0).unsqueeze(1), one, hot)


def most_likely(logits: Tensor, temperature: Tensor, count: int) -> SparseDistribution:
    """The ``count`` most likely ids of each row and their renormalised probabilities, ties to the lowest id."""
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ordered, order = ordered[:, :count], order[:, :count]
    one = torch.zeros(ordered.shape, dtype=torch.float64, device=logits.device)
    one[:, 0] = valid(logits).to(torch.float64)
    hot = _softmax(ordered, temperature)
    return SparseDistribution(order, torch.where((temperature == 0).unsqueeze(1), one, hot))


def draw(probability: Tensor, uniform: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds ``uniform`` [T]; never an id of probability 0."""
    total = probability.cumsum(-1)
    target = (uniform * total[:, -1]).unsqueeze(1)
    found = torch.searchsorted(total, target, right=True).squeeze(1)
    ids = torch.arange(probability.shape[-1], device=probability.device)
    last = torch.where(probability > 0, ids, 0).amax(-1)
    return torch.minimum(found, last)


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> LogProbabilities:
    values = torch.log_softmax(logits.to(torch.float64), -1)
    chosen = values.gather(1, tokens.unsqueeze(1))
    rank = (values > chosen).sum(1) + 1
    ordered, order = torch.sort(values, dim=-1, descending=True, stable=True)
    return LogProbabilities(
        chosen.squeeze(1).to(torch.float32), rank, order[:, :top], ordered[:, :top].to(torch.float32)
    )


def match(chosen: Tensor, draft_tokens: Tensor, draft_counts: Tensor) -> Verified:
    accepted = leading(chosen[:, :-1] == draft_tokens, draft_counts)
    return Verified(accepted, upto(chosen, accepted))


def leading(taken: Tensor, draft_counts: Tensor) -> Tensor:
    """How many of the first ``draft_counts`` drafts are taken before one is not."""
    within = torch.arange(taken.shape[1], device=taken.device) < draft_counts.unsqueeze(1)
    return (taken & within).to(torch.int64).cumprod(1).sum(1)


def upto(tokens: Tensor, accepted: Tensor) -> Tensor:
    """``tokens`` [B, k + 1] up to number ``accepted`` [B], then -1."""
    rows = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(rows <= accepted.unsqueeze(1), tokens, -1)


def _softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """float64 of logits over temperature; zeros in a row that holds no choice."""
    scale = temperature.to(torch.float64).clamp_min(_LOWEST_TEMPERATURE).unsqueeze(1)
    hot = torch.softmax(logits.to(torch.float64) / scale, -1)
    return torch.where(valid(logits).unsqueeze(1), hot, 0.0)


def _normalise(probability: Tensor) -> Tensor:
    """Rows that sum to 1, or stay zero."""
    total = probability.sum(-1, keepdim=True)
    return torch.where(total > 0, probability / total, 0.0)

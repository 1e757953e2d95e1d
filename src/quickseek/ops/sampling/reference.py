"""Token choice in plain PyTorch."""

import torch
from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    ids = torch.arange(logits.shape[-1], device=logits.device)
    largest = logits.amax(-1, keepdim=True)
    return torch.where(logits == largest, ids, logits.shape[-1] - 1).amin(-1)


def probabilities(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    wide = logits.to(torch.float64)
    hot = torch.softmax(wide / temperature.to(torch.float64).clamp_min(1e-6).unsqueeze(1), -1)
    ordered, order = torch.sort(hot, dim=-1, descending=True, stable=True)
    # A token stays while the tokens before it have not yet reached top_p; the first always stays.
    kept = ordered.cumsum(-1) - ordered < top_p.to(torch.float64).unsqueeze(1)
    kept[:, 0] = True
    hot = torch.zeros_like(hot).scatter_(1, order, torch.where(kept, ordered, 0.0))
    hot = hot / hot.sum(-1, keepdim=True)
    one = torch.nn.functional.one_hot(greedy(logits), logits.shape[-1]).to(torch.float64)
    return torch.where((temperature == 0).unsqueeze(1), one, hot)


def draw(probability: Tensor, uniform: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds ``uniform`` [T]; never an id of probability 0."""
    total = probability.cumsum(-1)
    target = (uniform * total[:, -1]).unsqueeze(1)
    found = torch.searchsorted(total, target, right=True).squeeze(1)
    ids = torch.arange(probability.shape[-1], device=probability.device)
    last = torch.where(probability > 0, ids, 0).amax(-1)
    return torch.minimum(found, last)

"""Penalties, bias, grammar masks and forbidden ends in plain PyTorch, on any device: elementwise and scattered."""

import torch
from torch import Tensor

from quickseek.ops.sampling.parameters import Bias, Ends, Penalties

_NEVER = float("-inf")


def row_numbers(rows: int, device: torch.device) -> Tensor:
    return torch.arange(rows, device=device)


def drafts_before(draft_tokens: Tensor) -> Tensor:
    batch, count = draft_tokens.shape
    rows = row_numbers(count + 1, draft_tokens.device)
    before = rows[:count] < rows.unsqueeze(1)
    return torch.where(before, draft_tokens.unsqueeze(1), -1).reshape(batch * (count + 1), count)


def adjust(
    logits: Tensor, penalties: Penalties | None, bias: Bias | None, bitmask: Tensor | None, ends: Ends | None
) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if penalties is not None:
        logits = _penalise(logits, penalties)
    if bias is not None:
        # A padding id adds 0 to id 0.
        values = torch.where(bias.ids >= 0, bias.values.to(logits.dtype), 0.0)
        logits = logits.scatter_add(1, bias.ids.clamp_min(0), values)
    if bitmask is not None:
        logits = torch.where(allowed(bitmask, logits.shape[1]), logits, _NEVER)
    if ends is not None:
        logits = _forbid(logits, ends)
    return logits


def _penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    counts = penalties.output_counts[penalties.slots].to(logits.dtype)
    counts = counts.scatter_add(1, penalties.drafts.clamp_min(0), (penalties.drafts >= 0).to(logits.dtype))
    repetition, frequency, presence = (
        value.to(logits.dtype).unsqueeze(1) for value in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    seen = (counts > 0) | penalties.prompt_seen[penalties.slots]
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * counts - presence * (counts > 0)


def allowed(bitmask: Tensor, vocabulary: int) -> Tensor:
    """bool [T, V] of int32 words [T, ceil(V / 32)]."""
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    return ((bitmask.unsqueeze(-1) >> bits) & 1).flatten(1)[:, :vocabulary].bool()


def _forbid(logits: Tensor, ends: Ends) -> Tensor:
    listed = torch.zeros_like(logits, dtype=torch.int32)
    listed = listed.scatter_add(1, ends.ids.clamp_min(0), (ends.ids >= 0).to(torch.int32)) > 0
    without = torch.where(listed & ends.forbidden.unsqueeze(1), _NEVER, logits)
    choice = (without > _NEVER).any(-1, keepdim=True)
    return torch.where(choice, without, logits)

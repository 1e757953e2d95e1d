"""Choosing tokens: greedy, or by temperature and top-p with numbers keyed by (seed, position, purpose)."""

from torch import Tensor

from quickseek.ops.checks import expect_shape
from quickseek.ops.sampling import philox, reference

PURPOSE_TOKEN = 0
"""Purpose of the draw that chooses a token of the target; other purposes draw independent numbers."""
PURPOSE_DRAFT = 1
"""Purpose of the draw that chooses a draft."""


def greedy(logits: Tensor) -> Tensor:
    """int64 [T]: the largest logit of each row [T, V], ties to the lowest id."""
    return reference.greedy(logits)


def probabilities(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """float64 [T, V] of logits [T, V]; a temperature of 0 gives one-hot rows. ``temperature``, ``top_p``: [T]."""
    expect_shape("temperature", temperature, [logits.shape[0]])
    expect_shape("top_p", top_p, [logits.shape[0]])
    return reference.probabilities(logits, temperature, top_p)


def uniform(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """float64 [T] in [0, 1): Philox4x32-10 keyed by the int64 seed, counted by position and purpose."""
    return philox.uniform(seeds, positions, purpose)


def sample(
    logits: Tensor, temperature: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor, purpose: int
) -> Tensor:
    """int64 [T]: a token of each row; the same arguments always give the same token (design.md 4.8)."""
    return reference.draw(probabilities(logits, temperature, top_p), uniform(seeds, positions, purpose))

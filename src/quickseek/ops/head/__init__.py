"""Output heads: vocabulary logits, and the draft's Markov bias and confidence (spec/model.md 5.5, 10.3)."""

from torch import Tensor

from quickseek.ops import linear as linear_op
from quickseek.ops.checks import expect_shape
from quickseek.ops.forms import form


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[T, V] in the wide dtype of normalised hidden states [T, H] and a head [V, H] (or one rank's rows of it)."""
    return linear_op.linear_wide(hidden, weight)


def confidence(collapsed: Tensor, markov: Tensor, weight: Tensor) -> Tensor:
    """Acceptance estimate [T] in (0, 1) of un-normalised collapsed states [T, H] and Markov rows [T, r] (spec 10.3).

    ``weight`` [1, H + r].
    """
    expect_shape("markov", markov, [collapsed.shape[0], None])
    expect_shape("weight", weight, [1, collapsed.shape[1] + markov.shape[1]])
    out: Tensor = form(__name__, collapsed).confidence(collapsed, markov, weight)
    return out

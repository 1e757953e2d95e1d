"""What goes into and comes out of the choice of tokens: plain tuples of tensors, so that a graph can hold them."""

from typing import NamedTuple

from torch import Tensor


class Penalties(NamedTuple):
    """Penalties of T rows from the tokens of their requests, which live by request slot (S slots, V ids).

    ``output_counts`` int32 [S, V]: how often each id stands in the answer so far, the row's anchor included.
    ``prompt_seen`` bool [S, V]: whether the prompt holds it. ``slots`` int64 [T]: the slot of each row.
    ``drafts`` int64 [T, k]: the drafts of the same step that stand before the row's prediction, -1 for none
    (``drafts_before``). ``presence``, ``frequency``, ``repetition`` [T]: neutral at 0, 0 and 1.
    """

    output_counts: Tensor
    prompt_seen: Tensor
    slots: Tensor
    drafts: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor


class Bias(NamedTuple):
    """Numbers added to logits: ``ids`` int64 [T, B], -1 for none, each id once a row; ``values`` [T, B]."""

    ids: Tensor
    values: Tensor


class Ends(NamedTuple):
    """Ids that end an answer, ``ids`` int64 [T, E] with -1 for none, forbidden where ``forbidden`` bool [T].

    ``forbidden`` is true of a row while the tokens before its prediction, drafts included, are fewer than min_tokens.
    """

    ids: Tensor
    forbidden: Tensor


class SparseDistribution(NamedTuple):
    """Probabilities of a few ids: ``ids`` int64 [..., W], ``probabilities`` float64 [..., W]; the others have none."""

    ids: Tensor
    probabilities: Tensor


class Verified(NamedTuple):
    """``accepted`` int64 [B]: drafts that stand; ``tokens`` int64 [B, k + 1]: those, one more, then -1."""

    accepted: Tensor
    tokens: Tensor


class LogProbabilities(NamedTuple):
    """Natural logarithms, float32, of T rows.

    ``chosen`` [T] and ``rank`` int64 [T] (1: the most likely) of the chosen token; ``ids`` int64 [T, n] and ``values``
    [T, n] of the most likely ones, in falling order.
    """

    chosen: Tensor
    rank: Tensor
    ids: Tensor
    values: Tensor

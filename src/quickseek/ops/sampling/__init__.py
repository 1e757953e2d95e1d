"""Choosing tokens: penalties and masks, distributions, random numbers by (seed, position, purpose), verifying drafts.

Every function takes rows with parameters of their own ([T] tensors; a neutral value switches one off), reads no tensor
from the host and returns shapes that depend on shapes only, so a graph can hold it. What a row holds never
reaches another row: a row with NaN or without any finite logit has no probabilities, gets id 0, and ``valid`` tells.
"""

from torch import Tensor

from quickseek.ops.checks import expect_shape
from quickseek.ops.forms import form
from quickseek.ops.sampling import adjust_reference, verify_reference
from quickseek.ops.sampling.parameters import Bias as Bias
from quickseek.ops.sampling.parameters import Ends as Ends
from quickseek.ops.sampling.parameters import LogProbabilities as LogProbabilities
from quickseek.ops.sampling.parameters import Penalties as Penalties
from quickseek.ops.sampling.parameters import SparseDistribution as SparseDistribution
from quickseek.ops.sampling.parameters import Verified as Verified

PURPOSE_TOKEN = 0
"""Purpose of the draw that chooses a token of the target, the bonus token included; purposes are independent."""
PURPOSE_DRAFT = 1
"""Purpose of the draw that chooses a draft."""
PURPOSE_ACCEPT = 2
"""Purpose of the number that a sampled draft's acceptance is held against."""
PURPOSE_RESIDUAL = 3
"""Purpose of the draw that replaces a rejected sampled draft."""

DRAFT_WIDTH = 64
"""Drafts are sampled from the drafter's most likely ids only, as many as this (design.md 4.8)."""


def uniform(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """float64 [T] in [0, 1): Philox4x32-10 keyed by the int64 seed, counted by position and purpose."""
    expect_shape("positions", positions, seeds.shape)
    return form(__name__, seeds).uniform(seeds, positions, purpose)


def valid(logits: Tensor) -> Tensor:
    """bool [T]: whether a row of logits [T, V] holds a choice: no NaN, no +inf, at least one finite number."""
    return form(__name__, logits).valid(logits)


def greedy(logits: Tensor) -> Tensor:
    """int64 [T]: the largest logit of each row [T, V], ties to the lowest id; 0 in a row with a NaN."""
    return form(__name__, logits).greedy(logits)


# ------------------------------------------------------------------------------------------ adjusting


def drafts_before(draft_tokens: Tensor) -> Tensor:
    """int64 [B * (k + 1), k]: for row r of each request, its drafts 1..r of ``draft_tokens`` int64 [B, k], then -1."""
    expect_shape("draft_tokens", draft_tokens, [None, None])
    return adjust_reference.drafts_before(draft_tokens)


def adjust(
    logits: Tensor,
    *,
    penalties: Penalties | None = None,
    bias: Bias | None = None,
    bitmask: Tensor | None = None,
    ends: Ends | None = None,
) -> Tensor:
    """Logits [T, V] after what the requests ask for, in float32 or wider; the input stays as it is.

    In this order: repetition penalty (a seen id's positive logit is divided, a negative one multiplied), frequency and
    presence penalties (answer only), bias, the grammar's ``bitmask`` int32 [T, ceil(V / 32)] (bit i % 32 of word
    i // 32 allows id i; a row of -1 allows all), and the ends that min_tokens forbids. Ends stay where
    nothing else is left, as when a grammar is complete.
    """
    rows, vocabulary = logits.shape
    if penalties is not None:
        expect_shape("penalties.output_counts", penalties.output_counts, [None, vocabulary])
        expect_shape("penalties.prompt_seen", penalties.prompt_seen, [penalties.output_counts.shape[0], vocabulary])
        expect_shape("penalties.drafts", penalties.drafts, [rows, None])
        for name in ("slots", "presence", "frequency", "repetition"):
            expect_shape(f"penalties.{name}", getattr(penalties, name), [rows])
    if bias is not None:
        expect_shape("bias.ids", bias.ids, [rows, None])
        expect_shape("bias.values", bias.values, bias.ids.shape)
    if bitmask is not None:
        expect_shape("bitmask", bitmask, [rows, -(-vocabulary // 32)])
    if ends is not None:
        expect_shape("ends.ids", ends.ids, [rows, None])
        expect_shape("ends.forbidden", ends.forbidden, [rows])
    return adjust_reference.adjust(logits, penalties, bias, bitmask, ends)


# ------------------------------------------------------------------------------------------ choosing


def probabilities(
    logits: Tensor, temperature: Tensor, top_p: Tensor, *, top_k: Tensor | None = None, min_p: Tensor | None = None
) -> Tensor:
    """float64 [T, V] of logits [T, V]; parameters [T], neutral at top_p 1, top_k 0 (or -1) and min_p 0.

    Temperature, then min_p (at least that part of the largest probability), then the top_k most likely, then the
    smallest set of the most likely that reaches top_p of what is left; ties stay with the lowest id. A temperature of 0
    gives one-hot rows. The reference sorts; on a GPU the threshold is found by counting (top_k) or adding up (top_p)
    what lies above, and ties at the border are filled in the order of ids.
    """
    for name, value in (("temperature", temperature), ("top_p", top_p), ("top_k", top_k), ("min_p", min_p)):
        if value is not None:
            expect_shape(name, value, [logits.shape[0]])
    return form(__name__, logits).probabilities(logits, temperature, top_p, top_k, min_p)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    purpose: int,
    *,
    top_k: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """int64 [T]: a token of each row; the same arguments always give the same token (design.md 4.8).

    ``seeds`` and ``positions`` int64 [T]; a position is the one at which the token will stand.
    """
    expect_shape("seeds", seeds, [logits.shape[0]])
    chances = probabilities(logits, temperature, top_p, top_k=top_k, min_p=min_p)
    return form(__name__, chances).draw(chances, uniform(seeds, positions, purpose))


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> LogProbabilities:
    """Of ``tokens`` int64 [T] under softmax of logits [T, V], and of the ``top`` (0..V) most likely ids of each row.

    What a request reports are the model's own logits, before ``adjust`` and temperature. Ties go to the lowest id.
    """
    expect_shape("tokens", tokens, [logits.shape[0]])
    if not 0 <= top <= logits.shape[1]:
        raise ValueError(f"top = {top}: expected 0 to the {logits.shape[1]} ids of a row")
    return form(__name__, logits).log_probabilities(logits, tokens, top)


# ------------------------------------------------------------------------------------------ speculation


def draft_distribution(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, SparseDistribution]:
    """Drafts int64 [B] from a drafter's corrected logits [B, V], and the distribution Q that they come from.

    Q is softmax(logits / temperature) of the ``DRAFT_WIDTH`` most likely ids (all, if there are fewer), renormalised;
    one-hot at temperature 0. ``positions`` int64 [B]: where the drafts would stand. Stack the Q of k drafts along
    dimension 1 for ``verify``.
    """
    for name, value in (("temperature", temperature), ("seeds", seeds), ("positions", positions)):
        expect_shape(name, value, [logits.shape[0]])
    kept = form(__name__, logits).most_likely(logits, temperature, min(DRAFT_WIDTH, logits.shape[1]))
    index = form(__name__, logits).draw(kept.probabilities, uniform(seeds, positions, PURPOSE_DRAFT))
    return kept.ids.gather(1, index.unsqueeze(1)).squeeze(1), kept


def match(chosen: Tensor, draft_tokens: Tensor, draft_counts: Tensor) -> Verified:
    """Accept drafts [B, k] while each equals the target's own choice for its row, int64 ``chosen`` [B, k + 1].

    With ``greedy`` this is greedy verification. With ``sample`` (purpose ``PURPOSE_TOKEN``) it is rejection sampling of
    greedy drafts: a draft d is accepted with probability P(d), and otherwise the token follows P without d. The tokens
    are then those that decoding without drafts would choose from the same seed. ``draft_counts`` int64 [B]: how many
    drafts of each request are to be verified.
    """
    batch, count = draft_tokens.shape
    expect_shape("chosen", chosen, [batch, count + 1])
    expect_shape("draft_counts", draft_counts, [batch])
    return form(__name__, chosen).match(chosen, draft_tokens, draft_counts)


def verify(
    target_probabilities: Tensor,
    draft_tokens: Tensor,
    draft_probabilities: SparseDistribution | Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    draft_counts: Tensor,
) -> Verified:
    """Rejection sampling (spec/model.md 10.4): the tokens follow the target's distribution, whatever the drafts.

    ``target_probabilities`` P float64 [B, k + 1, V], from ``probabilities``; row r predicts position ``positions`` + r.
    ``draft_tokens`` int64 [B, k]. ``draft_probabilities`` Q: what each draft was sampled from, sparse [B, k, W] or
    dense [B, k, V]; None for greedy drafts (``match``). ``seeds``, ``positions``, ``draft_counts`` int64 [B].

    Draft d of row r is accepted with probability min(1, P(d) / Q(d)); the first rejected one is replaced by a draw from
    max(P - Q, 0) renormalised; if the request's ``draft_counts`` drafts are all accepted, the bonus comes from the row
    after them. One-hot rows (temperature 0) accept exactly while drafts equal the argmax.
    """
    batch, count = draft_tokens.shape
    expect_shape("target_probabilities", target_probabilities, [batch, count + 1, None])
    for name, value in (("seeds", seeds), ("positions", positions), ("draft_counts", draft_counts)):
        expect_shape(name, value, [batch])
    numbers = positions.unsqueeze(1) + adjust_reference.row_numbers(count + 1, positions.device)

    def draws(purpose: int) -> Tensor:
        keys = seeds.unsqueeze(1).expand_as(numbers)
        return uniform(keys.flatten(), numbers.flatten(), purpose).view_as(numbers)

    if draft_probabilities is None:
        chosen = form(__name__, seeds).draw(target_probabilities.flatten(0, 1), draws(PURPOSE_TOKEN).flatten())
        return match(chosen.view(batch, count + 1), draft_tokens, draft_counts)
    if isinstance(draft_probabilities, SparseDistribution):
        ids, chances = draft_probabilities
        expect_shape("draft_probabilities.ids", ids, [batch, count, None])
        expect_shape("draft_probabilities.probabilities", chances, ids.shape)
    else:
        expect_shape("draft_probabilities", draft_probabilities, [batch, count, target_probabilities.shape[2]])
    return verify_reference.reject(
        target_probabilities,
        draft_tokens,
        draft_probabilities,
        draft_counts,
        accept=draws(PURPOSE_ACCEPT)[:, :count],
        residual=draws(PURPOSE_RESIDUAL),
        bonus=draws(PURPOSE_TOKEN),
        draw=form(__name__, seeds).draw,
    )

"""What the two phases minimise: next-token loss, then the drafter's distance from the frozen backbone."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from miniature.backbone import backbone, logits
from miniature.data import IGNORED, targets
from miniature.drafter import draft
from miniature.layers import Hashing, Turn, Values
from miniature.rounding import Rounding
from miniature.weights import Weights, values
from quickseek.config import ModelConfig

LESSON_WEIGHT = 1.0
"""Weight of the indexers' loss; it reaches no other parameter."""
LATER_DRAFT = 0.85
"""Weight of a draft's loss over that of the draft before it, without which it is worth nothing, unless one is given."""


@dataclass(frozen=True)
class Outcome:
    """``loss`` to minimise; ``figures``: 0-dim tensors to log; ``loads`` by router bias."""

    loss: Tensor
    figures: dict[str, Tensor]
    loads: dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What both objectives need.

    ``later``: weight of a draft's loss over that of the draft before it. ``greedy``: share of the drafter's target that
    is the backbone's most likely token alone; the rest is its distribution.
    """

    config: ModelConfig
    hashing: Hashing
    rotation: dict[bool, Turn]
    dtype: torch.dtype
    dropout: float = 0.0
    taught: int = 0
    later: float = LATER_DRAFT
    greedy: float = 0.0


def next_token(setting: Setting, weights: Weights, ids: Tensor, rounding: Rounding) -> Outcome:
    """Cross entropy of ids [B, T + 1] plus the indexers' lesson."""
    found = values(setting.config, weights, setting.dtype, rounding, draft=False)
    states = backbone(
        setting.config,
        found,
        setting.hashing,
        ids[:, :-1],
        rounding,
        rotation=setting.rotation,
        dropout=setting.dropout,
        taught=setting.taught,
    )
    scores = logits(found, states.hidden)
    loss = F.cross_entropy(scores.flatten(0, 1), targets(ids).flatten(), ignore_index=IGNORED)
    figures = {"loss": loss.detach(), "lesson": states.lesson.detach()}
    return Outcome(loss + LESSON_WEIGHT * states.lesson, figures, states.loads)


def acceptance(
    setting: Setting,
    frozen: Values,
    weights: Weights,
    ids: Tensor,
    aux: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    rounding: Rounding,
) -> Outcome:
    """How far the drafts after ``anchors`` [B, A] of ids [B, T] are from the frozen backbone's own distribution.

    The loss of a draft is the cross entropy to its target plus the probability that rejection sampling from that
    target refuses it; the confidence learns the probability of a refusal by the backbone's distribution itself.
    ``frozen``: the backbone's values; ``aux`` and ``hidden`` [B, T, ...]: its states (``bank.Bank``).
    """
    config, block = setting.config, setting.config.dspark_block_size
    with torch.no_grad():
        places = anchors.unsqueeze(-1) + 1 + torch.arange(block, device=ids.device)
        previous = ids.gather(1, places.flatten(1)).view(places.shape)
        chosen = hidden.gather(1, places.flatten(1).unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        wanted = torch.softmax(logits(frozen, chosen), -1).view(*places.shape, -1)
        target = _sharpened(wanted, setting.greedy)
    found = values(config, weights, setting.dtype, rounding, draft=True)
    drafts = draft(
        config,
        found,
        frozen,
        aux,
        anchors,
        previous,
        setting.rotation[False],
        rounding,
        dropout=setting.dropout,
    )
    guesses = torch.log_softmax(drafts.logits, -1)
    drawn = guesses.exp()
    accepted = torch.minimum(drawn.detach(), wanted).sum(-1)
    refused = 1 - torch.minimum(drawn, target).sum(-1)
    entropy = -(target * guesses).sum(-1)
    importance = setting.later ** torch.arange(block, device=ids.device)
    importance = importance / importance.sum()
    confident = F.binary_cross_entropy_with_logits(drafts.confidence, accepted)
    loss = ((entropy + refused).mean((0, 1)) * importance).sum()
    agree = (drafts.logits.argmax(-1) == wanted.argmax(-1)).to(torch.float32)
    figures = {
        "loss": loss.detach(),
        "sampled_length": accepted.cumprod(-1).sum(-1).mean(),
        "greedy_length": agree.cumprod(-1).sum(-1).mean(),
        "confidence_loss": confident.detach(),
    }
    return Outcome(loss + confident, figures, drafts.loads)


def _sharpened(wanted: Tensor, share: float) -> Tensor:
    """Distributions [..., V] with ``share`` of their mass moved to their most likely token."""
    if share == 0.0:
        return wanted
    tokens = torch.arange(wanted.shape[-1], device=wanted.device)
    likeliest = (tokens == wanted.argmax(-1, keepdim=True)).to(wanted.dtype)
    return torch.lerp(wanted, likeliest, share)

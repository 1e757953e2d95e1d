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
"""Weight of a draft's loss over that of the draft before it, without which it is worth nothing."""


@dataclass(frozen=True)
class Outcome:
    """``loss`` to minimise; ``figures``: 0-dim tensors to log; ``loads`` by router bias."""

    loss: Tensor
    figures: dict[str, Tensor]
    loads: dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What both objectives need. ``anchors``: how many of a sequence teach the drafter."""

    config: ModelConfig
    hashing: Hashing
    rotation: dict[bool, Turn]
    dtype: torch.dtype
    dropout: float = 0.0
    taught: int = 0
    anchors: int = 0


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
    setting: Setting, frozen: Values, weights: Weights, ids: Tensor, rounding: Rounding, seed: Tensor
) -> Outcome:
    """How far the drafts after random anchors of ids [B, T] are from the frozen backbone's own distribution.

    The loss of a draft is the cross entropy to the backbone's distribution plus the probability that rejection sampling
    refuses it; the confidence learns that probability. ``frozen``: the backbone's values; ``seed``: uniform [B, A] that
    chooses the anchors.
    """
    config, block = setting.config, setting.config.dspark_block_size
    on = Rounding(on=True)
    with torch.no_grad():
        states = backbone(config, frozen, setting.hashing, ids, on, rotation=setting.rotation)
        span = ids.shape[1] - block - 1
        anchors = (seed * span).to(torch.int64)
        places = anchors.unsqueeze(-1) + 1 + torch.arange(block, device=ids.device)
        previous = ids.gather(1, places.flatten(1)).view(places.shape)
        chosen = states.hidden.gather(1, places.flatten(1).unsqueeze(-1).expand(-1, -1, states.hidden.shape[-1]))
        wanted = torch.softmax(logits(frozen, chosen), -1).view(*places.shape, -1)
    found = values(config, weights, setting.dtype, rounding, draft=True)
    drafts = draft(
        config,
        found,
        frozen,
        states.aux,
        anchors,
        previous,
        setting.rotation[False],
        rounding,
        dropout=setting.dropout,
    )
    guesses = torch.log_softmax(drafts.logits, -1)
    accepted = torch.minimum(guesses.exp(), wanted).sum(-1)
    entropy = -(wanted * guesses).sum(-1)
    importance = LATER_DRAFT ** torch.arange(block, device=ids.device)
    importance = importance / importance.sum()
    confident = F.binary_cross_entropy_with_logits(drafts.confidence, accepted.detach())
    loss = ((entropy + 1 - accepted).mean((0, 1)) * importance).sum()
    agree = (drafts.logits.argmax(-1) == wanted.argmax(-1)).to(torch.float32)
    figures = {
        "loss": loss.detach(),
        "sampled_length": accepted.detach().cumprod(-1).sum(-1).mean(),
        "greedy_length": agree.cumprod(-1).sum(-1).mean(),
        "confidence_loss": confident.detach(),
    }
    return Outcome(loss + confident, figures, drafts.loads)

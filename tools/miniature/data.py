"""Training sequences: windows of the text, some of them laid out as a user's message and its answer."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quickseek.checkpoint.miniature_tokenizer import CONTROL_TOKENS
from quickseek.tokenizer import dsml

BEGIN, USER, ASSISTANT, THINK_END = (
    CONTROL_TOKENS.index(token) for token in (dsml.BEGIN_OF_SENTENCE, dsml.USER, dsml.ASSISTANT, dsml.THINK_END)
)
CHAT_SHARE = 0.15
"""Sequences whose first part is a user's message: the answer to a text is the text's continuation."""
LEAST_MESSAGE = 8
IGNORED = -100
"""Target of a position that is not learned (the default of PyTorch's cross entropy)."""


@dataclass(frozen=True)
class Text:
    """Token ids int64 on the training device, and the bytes that they stand for."""

    train: Tensor
    held_out: Tensor
    held_out_bytes: int

    @classmethod
    def load(cls, directory: Path, held_out_bytes: int, device: torch.device) -> "Text":
        """The ids that ``corpus.prepare`` wrote."""
        with np.load(directory / "tokens.npz") as arrays:
            train, held_out = (torch.from_numpy(arrays[name].astype(np.int64)) for name in ("train", "heldout"))
        return cls(train.to(device), held_out.to(device), held_out_bytes)


def draw(text: Text, batch: int, length: int, seed: int, step: int) -> Tensor:
    """Ids [batch, length] of one step, a function of seed and step alone: BOS, then a window of the text."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text.train) - length, (batch,), generator=generator)
    chat = torch.rand(batch, generator=generator) < CHAT_SHARE
    message = torch.randint(LEAST_MESSAGE, max(length // 2, LEAST_MESSAGE + 1), (batch,), generator=generator)
    # A message of no length stands for a plain sequence.
    plan = torch.stack((starts, torch.where(chat, message, 0))).to(text.train.device, non_blocking=True)
    return lay_out(text.train, plan[0], plan[1], length)


def lay_out(tokens: Tensor, starts: Tensor, message: Tensor, length: int) -> Tensor:
    """Ids [B, length] of windows of ``tokens`` from ``starts`` [B]; the first ``message`` [B] tokens are the user's."""
    place = torch.arange(length, device=tokens.device)
    message = message.unsqueeze(1)
    chat, after = message > 0, place >= message + 2
    shift = 1 + chat * (1 + 2 * after)
    ids = tokens[(starts.unsqueeze(1) + place - shift).clamp_min(0)]
    ids = torch.where(chat & (place == 1), USER, ids)
    ids = torch.where(chat & (place == message + 2), ASSISTANT, ids)
    ids = torch.where(chat & (place == message + 3), THINK_END, ids)
    return torch.where(place == 0, BEGIN, ids)


def targets(ids: Tensor) -> Tensor:
    """What each position of ids [B, T] predicts, [B, T - 1]; control tokens of the layout are not learned."""
    following = ids[:, 1:]
    return torch.where((following == ASSISTANT) | (following == USER) | (following == THINK_END), IGNORED, following)


def held_out_windows(held_out: Tensor, length: int, count: int) -> Tensor:
    """Ids [windows, length] of ``count`` windows spread evenly over the held-out ids, or of all; each after BOS."""
    stride = length - 1
    total = len(held_out) // stride
    windows = held_out[: total * stride].view(total, stride)
    if count < total:
        windows = windows[torch.arange(count, device=held_out.device) * total // count]
    return torch.nn.functional.pad(windows, (1, 0), value=BEGIN)

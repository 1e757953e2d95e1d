"""What the frozen backbone makes of a set of sequences, computed once for all steps of the drafter."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from miniature.backbone import backbone
from miniature.layers import Values
from miniature.objectives import Setting
from miniature.rounding import Rounding

AT_ONCE = 64
"""Sequences of one forward."""
KEPT = 16
"""One answer of so many is kept from training, to be measured on."""


@dataclass(frozen=True)
class Bank:
    """Rows of W tokens: ``ids`` int64 [N, W], ``aux`` [N, W, targets * H] and normalised ``hidden`` [N, W, H].

    ``first`` int64 [N]: the earliest position of each row that may be an anchor.
    """

    ids: Tensor
    aux: Tensor
    hidden: Tensor
    first: Tensor

    def cut(self, width: int, window: int) -> "Bank":
        """Rows of ``width`` cut from each row, about ``window`` of them shared by neighbours.

        A cut that does not begin its row has its first anchor where all rows of the window are its own: the drafter's
        attention depends on differences of positions alone. ValueError if the rows are shorter.
        """
        length = self.ids.shape[1]
        if length < width:
            raise ValueError(f"rows of {length} tokens: expected at least the {width} of the answers")
        count = 1 + round((length - width) / (width - window))
        starts = [(length - width) * number // max(1, count - 1) for number in range(count)]
        return joined(self._piece(slice(start, start + width), window - 1 if start else 0) for start in starts)

    def _piece(self, places: slice, least: int) -> "Bank":
        first = (self.first - places.start).clamp_min(least)
        return Bank(self.ids[:, places], self.aux[:, places], self.hidden[:, places], first)

    def rows(self, chosen: Tensor) -> "Bank":
        """The rows of index ``chosen``."""
        return Bank(self.ids[chosen], self.aux[chosen], self.hidden[chosen], self.first[chosen])

    def anchors(self, count: int, block: int, generator: torch.Generator) -> Tensor:
        """int64 [N, count] positions, drawn evenly from ``first`` on, with ``block`` + 1 tokens after each."""
        first = self.first.unsqueeze(1)
        seed = torch.rand(len(self.ids), count, generator=generator).to(first.device)
        return first + (seed * (self.ids.shape[1] - block - 1 - first)).to(torch.int64)


def joined(banks: Iterable[Bank]) -> Bank:
    """The rows of all, which have one width."""
    parts = [(bank.ids, bank.aux, bank.hidden, bank.first) for bank in banks]
    return Bank(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


@torch.no_grad()
def taught(setting: Setting, frozen: Values, ids: Tensor, first: int = 0) -> Bank:
    """The rounded backbone's states of ids [N, W]."""
    banks = []
    for some in ids.split(AT_ONCE):
        states = backbone(setting.config, frozen, setting.hashing, some, Rounding(on=True), rotation=setting.rotation)
        banks.append(Bank(some, states.aux, states.hidden, torch.full_like(some[:, 0], first)))
    return joined(banks)


@dataclass(frozen=True)
class Answers:
    """What the model wrote after prompts: ids int64 [N, W], of which ``prompt`` tokens of each row are not its own."""

    ids: Tensor
    prompt: int

    @classmethod
    def load(cls, files: list[Path], device: torch.device) -> "Answers":
        """The parts that tools/write_text.py wrote. ValueError if they differ in their lengths."""
        ids, prompts = [], set()
        for file in files:
            with np.load(file) as part:
                ids.append(torch.from_numpy(part["ids"].astype(np.int64)))
                prompts.add((int(part["prompt"]), ids[-1].shape[1]))
        if len(prompts) != 1:
            raise ValueError(f"prompts and widths of the answers are {sorted(prompts)}: expected one pair")
        return cls(torch.cat(ids).to(device), prompts.pop()[0])

    def split(self) -> tuple["Answers", "Answers"]:
        """Those to learn from, and the one of every KEPT to measure on."""
        kept = torch.arange(len(self.ids), device=self.ids.device) % KEPT == KEPT - 1
        return Answers(self.ids[~kept], self.prompt), Answers(self.ids[kept], self.prompt)


@dataclass(frozen=True)
class Material:
    """What the drafter learns from: rows of the text, and rows that the model wrote, of one width."""

    text: Bank
    own: Bank | None

    def draw(self, batch: int, share: float, anchors: int, block: int, seed: int, step: int) -> tuple[Tensor, ...]:
        """ids, aux, hidden [batch, W, ...] and anchors [batch, anchors] of a step, by seed and step alone.

        ``share`` of the rows, rounded, are of the model's own text if there is any.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        written = round(share * batch) if self.own is not None else 0
        parts = [(self.text, batch - written)] + ([(self.own, written)] if self.own is not None else [])
        drawn = [
            bank.rows(torch.randint(len(bank.ids), (count,), generator=generator).to(bank.ids.device))
            for bank, count in parts
        ]
        rows = joined(drawn)
        return rows.ids, rows.aux, rows.hidden, rows.anchors(anchors, block, generator)

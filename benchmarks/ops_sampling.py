"""Choosing tokens over the released vocabulary from FP32 logits: greedy, sampled, drafted, with log-probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from op_case import ROWS, Calls, Case
from quickseek.ops import sampling
from quickseek.ops.sampling import reference

VOCABULARY = 129280
FLAT, PEAKED = 3.0, 6.0
"""Widths of logits: top_p 0.95 takes about 12,000 ids of a flat row, and fewer than 200 of a peaked one."""
MOST_SAMPLED = 48
"""The float64 distributions of more rows would not fit into many copies."""


@dataclass(frozen=True)
class Rows:
    """Logits [T, V] and what requests ask for: temperature, top_p, top_k and min_p [T], seeds and positions."""

    logits: Tensor
    limits: tuple[Tensor, Tensor, Tensor, Tensor]
    seeds: Tensor


def _rows(logits: Tensor) -> Rows:
    rows = logits.shape[0]
    ones = torch.ones(rows, device=logits.device)
    seeds = torch.arange(rows, device=logits.device)
    return Rows(logits, (ones, 0.95 * ones, torch.full_like(seeds, 50), 0 * ones), seeds)


def _over_rows(count: int, call: Callable[[Rows], object], width: float) -> Callable[[torch.device, int], Calls]:
    """Calls over rows of normal logits of that width."""

    def build(device: torch.device, copies: int) -> Calls:
        held = [_rows(width * torch.randn(count, VOCABULARY, device=device)) for _ in range(copies)]
        return [lambda one=one: call(one) for one in held]  # type: ignore[misc]

    return build


def _sample(rows: Rows) -> object:
    temperature, top_p, top_k, min_p = rows.limits
    return sampling.sample(rows.logits, temperature, top_p, rows.seeds, rows.seeds, 0, top_k=top_k, min_p=min_p)


def _torch_sample(rows: Rows) -> object:
    chances = reference.probabilities(rows.logits, *rows.limits)
    return chances.div(torch.empty_like(chances).exponential_()).argmax(-1)


def _sample_by_mass(rows: Rows) -> object:
    temperature, top_p, _, _ = rows.limits
    return sampling.sample(rows.logits, temperature, top_p, rows.seeds, rows.seeds, 0)


def _torch_sample_by_mass(rows: Rows) -> object:
    chances = reference.probabilities(rows.logits, *rows.limits[:2])
    return chances.div(torch.empty_like(chances).exponential_()).argmax(-1)


def _draft(rows: Rows) -> object:
    return sampling.draft_distribution(rows.logits, rows.limits[0], rows.seeds, rows.seeds)


def _torch_draft(rows: Rows) -> object:
    values, ids = torch.topk(rows.logits, sampling.DRAFT_WIDTH)
    chances = torch.softmax(values, -1)
    return ids.gather(1, chances.div(torch.empty_like(chances).exponential_()).argmax(-1, keepdim=True))


def _log(rows: Rows) -> object:
    return sampling.log_probabilities(rows.logits, rows.seeds, 20)


def _torch_log(rows: Rows) -> object:
    values = torch.log_softmax(rows.logits, -1)
    return (values > values.gather(1, rows.seeds.unsqueeze(1))).sum(1), torch.topk(values, 20)


Kind = tuple[str, Callable[[Rows], object], Callable[[Rows], object], str, float]
"""Name, this operation, PyTorch's own way, what that is, and the width of the logits."""


def cases(counts: Sequence[int] = ROWS) -> list[Case]:
    found, race = [], "sort and an exponential race"
    for rows in counts:
        kinds: list[Kind] = [
            ("greedy", lambda held: sampling.greedy(held.logits), lambda held: held.logits.argmax(-1), "argmax", FLAT)
        ]
        if rows <= MOST_SAMPLED:
            kinds += [
                ("sample, top_k and top_p", _sample, _torch_sample, race, FLAT),
                ("sample, top_p alone", _sample_by_mass, _torch_sample_by_mass, race, FLAT),
                ("sample, top_p alone, peaked", _sample_by_mass, _torch_sample_by_mass, race, PEAKED),
                ("draft from 64", _draft, _torch_draft, "topk and an exponential race", FLAT),
                ("log-probabilities, top 20", _log, _torch_log, "log_softmax and topk", FLAT),
            ]
        for name, ours, theirs, what, width in kinds:
            found.append(
                Case(
                    name=f"sampling {name}",
                    rows=rows,
                    bytes=rows * VOCABULARY * 4,
                    build=_over_rows(rows, ours, width),
                    alternative=_over_rows(rows, theirs, width),
                    alternative_name=what,
                )
            )
    return found

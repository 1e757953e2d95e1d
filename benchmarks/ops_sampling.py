"""Choosing tokens over the released vocabulary from FP32 logits: greedy, sampled, drafted, with log-probabilities."""

from collections.abc import Callable

import torch
from torch import Tensor

from op_case import Calls, Case
from quickseek.ops import sampling
from quickseek.ops.sampling import reference

VOCABULARY = 129280
ROWS = (1, 6, 8, 48, 384)
MOST_SAMPLED = 48
"""The float64 distributions of more rows would not fit into many copies."""


def _over_logits(rows: int, call: Callable[[Tensor], object]) -> Callable[[torch.device, int], Calls]:
    def build(device: torch.device, copies: int) -> Calls:
        logits = [3 * torch.randn(rows, VOCABULARY, device=device) for _ in range(copies)]
        return [lambda one=one: call(one) for one in logits]  # type: ignore[misc]

    return build


def _parameters(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ones = torch.ones(rows, device=device)
    return ones, 0.95 * ones, torch.full((rows,), 50, device=device), 0 * ones


def _sample(logits: Tensor) -> object:
    rows = logits.shape[0]
    temperature, top_p, top_k, min_p = _parameters(rows, logits.device)
    seeds = torch.arange(rows, device=logits.device)
    return sampling.sample(logits, temperature, top_p, seeds, seeds, 0, top_k=top_k, min_p=min_p)


def _torch_sample(logits: Tensor) -> object:
    chances = reference.probabilities(logits, *_parameters(logits.shape[0], logits.device))
    return chances.div(torch.empty_like(chances).exponential_()).argmax(-1)


def _draft(logits: Tensor) -> object:
    seeds = torch.arange(logits.shape[0], device=logits.device)
    return sampling.draft_distribution(logits, torch.ones(logits.shape[0], device=logits.device), seeds, seeds)


def _torch_draft(logits: Tensor) -> object:
    values, ids = torch.topk(logits, sampling.DRAFT_WIDTH)
    chances = torch.softmax(values, -1)
    return ids.gather(1, chances.div(torch.empty_like(chances).exponential_()).argmax(-1, keepdim=True))


def _log(logits: Tensor) -> object:
    return sampling.log_probabilities(logits, torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device), 20)


def _torch_log(logits: Tensor) -> object:
    values = torch.log_softmax(logits, -1)
    return (values > values[:, :1]).sum(1), torch.topk(values, 20)


def cases() -> list[Case]:
    found = []
    for rows in ROWS:
        kinds = [("greedy", lambda logits: sampling.greedy(logits), lambda logits: logits.argmax(-1), "argmax")]
        if rows <= MOST_SAMPLED:
            kinds += [
                ("sample, top_k and top_p", _sample, _torch_sample, "sort and an exponential race"),
                ("draft from 64", _draft, _torch_draft, "topk and an exponential race"),
                ("log-probabilities, top 20", _log, _torch_log, "log_softmax and topk"),
            ]
        for name, ours, theirs, what in kinds:
            found.append(
                Case(
                    name=f"sampling {name}",
                    rows=rows,
                    bytes=rows * VOCABULARY * 4,
                    build=_over_logits(rows, ours),
                    alternative=_over_logits(rows, theirs),
                    alternative_name=what,
                )
            )
    return found

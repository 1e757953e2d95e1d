"""Judging all answers of a long run by the reference: many in one step, steps on several processes."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine_cases import reference_of
from model_driver import Batch
from quickseek.model.causal_lm import CausalLM
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import SoloWorld, World, set_default_world

Answer = tuple[list[int], list[int]]
"""A prompt and what followed it."""
AT_ONCE = 16
"""Answers of one step: the reference unpacks its weights once for all of them, a fifth of the time of each alone."""
MOST_PROCESSES = 8


@torch.inference_mode()
def behind_each(model: CausalLM, answers: Sequence[Answer]) -> list[Tensor]:
    """Of each answer what ``behind_the_best`` says of it alone."""
    found = []
    for first in range(0, len(answers), AT_ONCE):
        part = answers[first : first + AT_ONCE]
        ids = [torch.tensor([*prompt, *answer[:-1]]) for prompt, answer in part]
        logits = Batch(model, len(part), max(map(len, ids))).run(ids).split([len(one) for one in ids])
        for (prompt, answer), rows in zip(part, logits, strict=True):
            rows = rows[len(prompt) - 1 :]
            chosen = rows.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
            found.append((rows.amax(1) - chosen) / rows.std())
    return found


def judged(directory: Path, token_map: Tensor, answers: Sequence[Answer], processes: int | None = None) -> list[Tensor]:
    """``behind_each`` by the reference of a checkpoint; ``processes`` None: as many as are worth their beginning."""
    if processes is None:
        processes = min(MOST_PROCESSES, -(-len(answers) // (2 * AT_ONCE)))
    if processes <= 1:
        return behind_each(reference_of(directory, token_map), answers)
    shares = spawn(judge_share, processes, directory, token_map.cpu(), list(answers), timeout_s=600)
    return [shares[number % processes][number // processes] for number in range(len(answers))]


def judge_share(world: World, directory: Path, token_map: Tensor, answers: list[Answer]) -> list[Tensor]:
    """Every ``size``-th answer, from the rank's own on; ranks share nothing but the work."""
    torch.set_num_threads(1)
    set_default_world(SoloWorld())
    return behind_each(reference_of(directory, token_map), answers[world.rank :: world.size])

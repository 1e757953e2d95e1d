"""Runs of the engine, and how an answer is judged where another order of summation may choose another token."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from model_driver import Batch
from quickseek.checkpoint.miniature import write_miniature
from quickseek.engine.answer import RequestOutput
from quickseek.engine.request import Request
from quickseek.engine.runner import Runner
from quickseek.model.causal_lm import CausalLM, load_model
from quickseek.numerics import Numerics

CLOSE_CALL = 2.0
"""Standard deviations of logits: with random weights another order of summation moves one in a hundred by 0.6 to 0.9
and turned choices up to 1.7 apart; a token taken at random is about 3 behind."""
OWN_SHARE = 0.4
"""Of tokens that are the reference's own choice: with random weights 0.55 to 0.65 by another order of summation (a CPU
whose ranks round their parts, GPUs), none by chance."""


def written(folder: Path, config: str) -> Path:
    """A miniature on disk, in a folder of its name."""
    write_miniature(folder / config, config)
    return folder / config


def reference_of(directory: Path, token_map: Tensor) -> CausalLM:
    """The model of a checkpoint on the CPU, in trained mode; ``token_map`` on any device."""
    model, _ = load_model(directory, Numerics.trained())
    model.set_token_map(token_map)
    return model


@torch.inference_mode()
def behind_the_best(model: CausalLM, prompts: list[list[int]], tokens: list[list[int]]) -> Tensor:
    """How far each token's logit is behind the best one of the reference, over the logits' standard deviation."""
    found = []
    for ids, answer in zip(prompts, tokens, strict=True):
        logits = Batch(model).run(torch.tensor([*ids, *answer[:-1]]))[len(ids) - 1 :]
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        found.append((logits.amax(1) - chosen) / logits.std())
    return torch.cat(found)


def finished(runner: Runner, requests: Sequence[Request]) -> list[RequestOutput]:
    """Outputs of requests that are added at once and run to their end."""
    for request in requests:
        runner.add(request)
    outputs = {}
    while not runner.idle:
        for update in runner.step():
            outputs[update.output.request_id] = update.output
    found = [outputs[request.request_id] for request in requests]
    assert all(output.error is None for output in found), [output.error for output in found]
    return found

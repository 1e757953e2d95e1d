"""Figures taken while training: held-out loss, draft lengths, and whether a GPU does what training needs."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from miniature.backbone import backbone, logits
from miniature.bank import Bank
from miniature.data import Text, held_out_windows
from miniature.layers import Values
from miniature.objectives import Setting, acceptance
from miniature.rounding import Rounding
from miniature.sinkhorn import alternate, sinkhorn
from miniature.training import Phase, Stepper, set_rate
from miniature.weights import Weights, values

AT_ONCE = 32


@torch.no_grad()
def held_out(setting: Setting, weights: Weights, text: Text, context: int, count: int) -> dict[str, float]:
    """Bits per byte and perplexity of ``count`` windows of held-out text, not rounded and rounded."""
    windows = held_out_windows(text.held_out, context + 1, count)
    per_token = text.held_out_bytes / len(text.held_out)
    figures = {}
    for name, rounding in (("held_out", Rounding(on=False)), ("held_out_rounded", Rounding(on=True))):
        found = values(setting.config, weights, setting.dtype, rounding, draft=False)
        losses = []
        for ids in windows.split(AT_ONCE):
            states = backbone(setting.config, found, setting.hashing, ids[:, :-1], rounding, rotation=setting.rotation)
            scores = logits(found, states.hidden).flatten(0, 1)
            losses.append(F.cross_entropy(scores, ids[:, 1:].flatten(), reduction="sum"))
        loss = float(torch.stack(losses).sum()) / (windows.shape[0] * context)
        figures[f"{name}_bits_per_byte"] = loss / math.log(2) / per_token
        figures[f"{name}_perplexity"] = math.exp(loss)
    return figures


@torch.no_grad()
def draft_lengths(
    setting: Setting, frozen: Values, weights: Weights, rows: Bank, anchors: int, name: str
) -> dict[str, float]:
    """Mean accepted drafts on rows that are not trained on, the target's context being those rows."""
    generator = torch.Generator().manual_seed(0)
    places = rows.anchors(anchors, setting.config.dspark_block_size, generator)
    on = Rounding(on=True)
    outcome = acceptance(setting, frozen, weights, rows.ids, rows.aux, rows.hidden, places, on)
    return {f"{name}_{key}": float(value) for key, value in outcome.figures.items()}


def smoke(make: Callable[..., Any], steps: int = 8) -> None:
    """Print what this GPU does with a step of each phase: kernels, captures, times and memory."""
    device = torch.cuda.get_device_name()
    print("device", device, "torch", torch.__version__)
    matrix = torch.rand(1000, 4, 4, device="cuda") + 0.1
    error = float((sinkhorn(matrix, 1e-6, 20) - alternate(matrix, 1e-6, 20)).abs().max())
    print("sinkhorn error", error)
    for phase in ("backbone_phase", "draft_phase"):
        made = getattr(make(), phase)()
        for graph in (False, True):
            for rounds in (False, True):
                _time(made, rounds, graph, True, steps)
        torch.use_deterministic_algorithms(False)
        _time(made, True, True, False, steps)
        torch.use_deterministic_algorithms(True, warn_only=True)
        print(made.measure(), flush=True)


def _time(made: Phase, rounds: bool, graph: bool, deterministic: bool, steps: int) -> None:
    set_rate(made.optimizer, 1e-4)
    torch.cuda.reset_peak_memory_stats()
    stepper = Stepper(made.weights, made.optimizer, made.objective(Rounding(on=rounds)), graph=graph)
    losses = [round(float(stepper(*made.inputs(step))["loss"]), 4) for step in range(5)]
    torch.cuda.synchronize()
    since = time.monotonic()
    for step in range(steps):
        stepper(*made.inputs(step))
    torch.cuda.synchronize()
    taken = (time.monotonic() - since) / steps
    memory = torch.cuda.max_memory_allocated() / 2**30
    words = f"rounding {rounds} graph {graph} deterministic {deterministic}"
    print(f"{made.name}: {words}: {taken * 1e3:.1f} ms, {memory:.1f} GiB, losses {losses}", flush=True)

"""The loop of both phases: optimiser, schedule, CUDA graph, time limit, log, and state to resume from."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from miniature.objectives import Outcome
from miniature.rounding import Rounding

BALANCE_RATE = 1e-3
"""Step of a router's selection bias per update: towards experts that got fewer rows than the mean."""
CLIP = 1.0
EAGER_STEPS = 3
"""Steps before a step is captured: they allocate what a capture may not."""
SYNC_EVERY = 10


@dataclass(frozen=True)
class Schedule:
    """Learning rate and quantisation by progress in [0, 1]. ``round_from``: progress at which rounding begins."""

    peak: float
    warmup_steps: int
    round_from: float
    floor: float = 0.02

    def rate(self, step: int, progress: float) -> float:
        """Linear warm-up, then a cosine down to ``floor`` of the peak."""
        cosine = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.peak * min(1.0, (step + 1) / self.warmup_steps) * cosine

    def rounding(self, progress: float) -> Rounding:
        """Whether a step at this progress rounds."""
        return Rounding(on=progress >= self.round_from)


@dataclass(frozen=True)
class Limit:
    """When a phase ends: after ``steps``, or at the time ``until`` (``time.monotonic``), counted from ``since``."""

    steps: int | None
    since: float = 0.0
    until: float = math.inf

    def progress(self, step: int) -> float:
        """Share of the phase that is done before ``step``; 1 or more ends it."""
        if self.steps is not None:
            return step / self.steps
        return (time.monotonic() - self.since) / (self.until - self.since)


# ---------------------------------------------------------------------------------------------- optimiser


def is_buffer(name: str) -> bool:
    """Whether a tensor is set by rule and not by gradients."""
    return name.endswith(("gate.bias", "gate.bias_vl"))


def decays(name: str, weight: Tensor) -> bool:
    """Whether weight decay applies: matrices of linear layers, but no embeddings, tables, gains or mixing weights."""
    small = weight.dim() < 2 or name.endswith(("q_weight", "k_weight"))
    return not small and "embed" not in name and ".hc_" not in name


def optimizer(weights: Mapping[str, Tensor], decay: float) -> torch.optim.AdamW:
    """AdamW over the tensors that take gradients; on a GPU fit for a graph."""
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    groups = [
        {"params": [w for n, w in trained.items() if decays(n, w) is wanted], "weight_decay": decay if wanted else 0.0}
        for wanted in (True, False)
    ]
    device = next(iter(trained.values())).device
    on_gpu = device.type == "cuda"
    rate = torch.zeros((), device=device) if on_gpu else 0.0
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-9, fused=on_gpu, capturable=on_gpu)


def set_rate(chosen: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group, in place where it is a tensor."""
    for group in chosen.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@torch.no_grad()
def balance(weights: Mapping[str, Tensor], loads: Mapping[str, Tensor]) -> None:
    """Move every router's selection bias against its load error, and the bias of image rows with it."""
    for name, load in loads.items():
        weights[name].add_(BALANCE_RATE * torch.sign(load.mean() - load))
        weights[f"{name}_vl"].copy_(weights[name])


# ---------------------------------------------------------------------------------------------- one step


class Stepper:
    """One training step on fixed inputs: eager, or recorded once into a CUDA graph and replayed.

    ``objective`` maps the inputs to an ``Outcome``.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        chosen: torch.optim.Optimizer,
        objective: Callable[..., Outcome],
        *,
        graph: bool,
    ) -> None:
        self.weights, self.optimizer, self.objective = weights, chosen, objective
        self.parameters = [p for group in chosen.param_groups for p in group["params"]]
        self.wants_graph, self.eager_steps = graph, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Tensor] = []
        self.figures: dict[str, Tensor] = {}

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Figures (0-dim tensors, overwritten by the next step) of a step on ``inputs``."""
        if not self.wants_graph:
            return self._step(inputs)
        if not self.inputs:
            self.inputs = [x.clone() for x in inputs]
        for kept, x in zip(self.inputs, inputs, strict=True):
            kept.copy_(x)
        if self.eager_steps < EAGER_STEPS:
            self.eager_steps += 1
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.figures = self._step(self.inputs)
            torch.cuda.current_stream().wait_stream(side)
            return self.figures
        if self.graph is None:
            self._drop_gradients()
            # The capture allocates from a pool of its own: what the eager steps held must be free for it.
            torch.cuda.empty_cache()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.figures = self._step(self.inputs)
        self.graph.replay()
        return self.figures

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _step(self, inputs: Any) -> dict[str, Tensor]:
        self._drop_gradients()
        outcome = self.objective(*inputs)
        outcome.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, CLIP, foreach=True)
        self.optimizer.step()
        balance(self.weights, outcome.loads)
        return {**outcome.figures, "norm": norm.detach()}


# ---------------------------------------------------------------------------------------------- one phase


@dataclass
class Phase:
    """Everything of one phase that a resumed run needs, and how to go on.

    ``objective(rounding)`` gives the objective of a step; ``inputs(step)`` its inputs; ``measure()`` figures on the
    held-out text, logged ``measurements`` times.
    """

    name: str
    weights: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    objective: Callable[[Rounding], Callable[..., Outcome]]
    inputs: Callable[[int], tuple[Tensor, ...]]
    measure: Callable[[], dict[str, float]]
    seed: int
    graph: bool = False
    measurements: int = 10
    step: int = 0

    def run(self, limit: Limit, log: "Log", stop_at: int | None = None, state: Path | None = None) -> None:
        """Train until the limit, or until ``stop_at`` steps are done; each measurement leaves the file ``state``."""
        stepper, rounding, measured = None, None, 0
        progress = limit.progress(self.step)
        while progress < 1.0 and (stop_at is None or self.step < stop_at):
            wanted = self.schedule.rounding(progress)
            if wanted != rounding:
                # The old graph holds its memory until it is gone.
                stepper, rounding = None, wanted
                stepper = Stepper(self.weights, self.optimizer, self.objective(wanted), graph=self.graph)
            assert stepper is not None
            torch.manual_seed(self.seed * 1_000_003 + self.step)
            rate = self.schedule.rate(self.step, progress)
            set_rate(self.optimizer, rate)
            figures = stepper(*self.inputs(self.step))
            if self.step % SYNC_EVERY == 0:
                log.write(self.name, self.step, progress, rate=rate, rounds=wanted.on, **_numbers(figures))
            self.step += 1
            progress = limit.progress(self.step)
            if progress * self.measurements >= measured + 1 or progress >= 1.0:
                measured = int(progress * self.measurements)
                log.write(self.name, self.step, progress, **self.measure())
                if state is not None:
                    self.save(state)
        for parameter in stepper.parameters if stepper is not None else ():
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs to go on bit for bit."""
        return {"name": self.name, "step": self.step, "weights": self.weights, "optimizer": self.optimizer.state_dict()}

    def save(self, file: Path) -> None:
        """Replace ``file`` by the state, at once."""
        part = file.with_name(f"{file.name}.part")
        torch.save(self.state(), part)
        part.replace(file)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken. ValueError if it is of another phase."""
        if state["name"] != self.name:
            raise ValueError(f"state is of phase {state['name']!r}: expected {self.name!r}")
        self.step = state["step"]
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])


def _numbers(figures: Mapping[str, Tensor]) -> dict[str, float]:
    return dict(zip(figures, torch.stack([f.float() for f in figures.values()]).tolist(), strict=True))


class Log:
    """JSON lines of a run, with the seconds since its start; each line is also printed."""

    def __init__(self, path: Path, since: float, *, echo: bool = True) -> None:
        self.file: TextIO = path.open("a", encoding="utf-8")
        self.since, self.echo = since, echo

    def write(self, phase: str, step: int, progress: float, **figures: float | bool | str) -> None:
        """One line."""
        rounded = {key: round(v, 6) if isinstance(v, float) else v for key, v in figures.items()}
        seconds = round(time.monotonic() - self.since, 2)
        line = {"phase": phase, "step": step, "progress": round(progress, 4), "seconds": seconds, **rounded}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.echo and (step % 200 == 0 or "held_out" in " ".join(figures)):
            print(json.dumps(line), flush=True)


def parts(weights: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in dictionaries of at most ``most`` bytes each."""
    group: dict[str, Tensor] = {}
    size = 0
    for name, weight in weights.items():
        bytes_of = weight.numel() * weight.element_size()
        if group and size + bytes_of > most:
            yield group
            group, size = {}, 0
        group[name] = weight.detach().cpu()
        size += bytes_of
    yield group

"""Runs of one batch by the stock layers and by the executor, side by side, on any number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compare import assert_float64
from model_helpers import (
    FEW_ITERATIONS,
    FLOAT64,
    Driver,
    config_of,
    forward,
    logical_weights,
    prompt,
    token_map,
    visible_state,
)
from quickseek.config import DecodeConfig, ModelConfig
from quickseek.decode.executor import SpecializedDecode
from quickseek.decode.gates import Gates
from quickseek.engine.graphs import EagerGraphs
from quickseek.model.causal_lm import CausalLM
from quickseek.model.loader import TensorSource
from quickseek.numerics import Numerics
from quickseek.parallel.world import SoloWorld, World

BORDERS = ((1,), (6,), (4, 4), (6, 2, 1), (6, 6, 4), (6, 6, 5), (6,) * 8)
"""Rows of each request of a step: 1, 6, 8, 9, 16, 17 and 48 rows, the borders of the gates."""
MAX_REQUESTS = 9


def build(config: ModelConfig, world: World | None = None, numerics: Numerics = FLOAT64) -> CausalLM:
    """A model of its own, which a test may change."""
    world = SoloWorld() if world is None else world
    model = CausalLM(config, numerics, world=world, draft=config.num_nextn_predict_layers > 0)
    model.load(TensorSource(logical_weights(config)))
    if config.engram_layer_ids:
        model.set_token_map(token_map(config))
    return model.eval()


@dataclass
class Seen:
    """What a run gave, step by step: logits, auxiliary states, drafts, and every state that a later step may read."""

    logits: list[Tensor] = field(default_factory=list)
    aux: list[list[Tensor]] = field(default_factory=list)
    drafts: list[list[Tensor]] = field(default_factory=list)
    state: list[dict[str, Tensor]] = field(default_factory=list)


class Requests(Driver):
    """Requests with prompts of different lengths. ``recorded``: decode steps stand for a graph."""

    def __init__(self, model: CausalLM, recorded: bool, requests: int = MAX_REQUESTS) -> None:
        super().__init__(model, max_requests=requests, max_length=64)
        self.recorded = recorded
        self.slots = [self.state.acquire() for _ in range(requests)]
        self.ids = {slot: prompt(64, 3 + slot) for slot in self.slots}
        prompts = {slot: self.ids[slot][: 9 + 2 * number] for number, slot in enumerate(self.slots)}
        self.feed(prompts, num_prefills=len(prompts))

    def context(self, slots: Sequence[int], counts: Sequence[int]) -> Any:
        context = self.state.context(slots, counts)
        return EagerGraphs().record(context) if self.recorded else context

    def decode(self, counts: Sequence[int], seen: Seen, keep: int = 1) -> None:
        """One step in which request i runs ``counts[i]`` rows and keeps at most ``keep``; then a draft pass."""
        slots = self.slots[: len(counts)]
        lengths = [self.state.length(slot) for slot in slots]
        rows = [self.ids[s][n : n + c] for s, n, c in zip(slots, lengths, counts, strict=True)]
        context = self.context(slots, counts)
        hidden, aux = forward(self.model, torch.cat(rows), context)
        seen.logits.append(self.model.logits(hidden))
        seen.aux.append(aux)
        draft = self.model.draft
        if draft is not None and len(aux) == len(self.model.config.dspark_target_layer_ids):
            draft.write_context(aux, context.rows, context)
        for slot, count in zip(slots, counts, strict=True):
            self.state.commit(slot, min(count, keep))
        if draft is not None:
            seen.drafts.append(self.draft(slots))
        seen.state.append(
            {f"{slot} {n}": t for slot in slots for n, t in visible_state(self.model, self.state, slot).items()}
        )

    def draft(self, slots: Sequence[int]) -> list[Tensor]:
        draft, embed = self.model.draft, self.model.backbone.embed
        assert draft is not None and embed is not None
        context, last = self.state.draft_context(slots)
        context = EagerGraphs().record(context) if self.recorded else context
        anchors = torch.stack([self.ids[slot][self.state.length(slot)] for slot in slots])
        drafts = draft.propose(anchors, last, embed, self.model.head, context)
        return [drafts.tokens, drafts.logits, drafts.confidence]


def decode_all(model: CausalLM, recorded: bool, shapes: Sequence[Sequence[int]]) -> Seen:
    """Decode steps of all ``shapes`` in turn, after prompts."""
    seen, requests = Seen(), Requests(model, recorded)
    for counts in shapes:
        requests.decode(counts, seen, keep=1 + len(counts) % 2)
    return seen


@dataclass
class Pair:
    """The same steps by the stock layers and by the executor, and how many steps and passes the executor ran."""

    stock: Seen
    executor: Seen
    runs: int
    draft_runs: int
    open: list[str]
    forks: dict[str, int]


def both(
    world: World,
    shapes: Sequence[Sequence[int]] = BORDERS,
    changes: dict[str, Any] | None = None,
    gates: Gates | None = None,
    off: tuple[str, ...] = (),
) -> Pair:
    """A rank's pair of runs of a changed tiny-tp; picklable."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        model = build(config_of("tiny-tp", **FEW_ITERATIONS | (changes or {})), world)
        stock = decode_all(model, False, shapes)
        executor = SpecializedDecode.for_target(model, DecodeConfig(off=off), gates=gates)
        found = decode_all(model, True, shapes)
    draft_runs = 0 if executor.draft is None else executor.draft.runs
    forks = {stream.name: stream.forks for stream in executor.streams.all}
    return Pair(stock, found, executor.runs, draft_runs, executor.streams.open, forks)


def assert_same(found: Seen, wanted: Seen) -> None:
    """*float64* for every value, identical for every draft."""
    for name in ("logits", "aux", "drafts", "state"):
        assert len(getattr(found, name)) == len(getattr(wanted, name))
    for step, (ours, theirs) in enumerate(zip(found.logits, wanted.logits, strict=True)):
        assert_float64(ours, theirs, f"logits of step {step}")
    for step, (ours_, theirs_) in enumerate(zip(found.aux, wanted.aux, strict=True)):
        for number, (mine, other) in enumerate(zip(ours_, theirs_, strict=True)):
            assert_float64(mine, other, f"auxiliary state {number} of step {step}")
    for mine_, other_ in zip(found.drafts, wanted.drafts, strict=True):
        assert torch.equal(mine_[0], other_[0])
        assert_float64(mine_[1], other_[1], "draft logits")
        assert_float64(mine_[2], other_[2], "confidence")
    for step, (ours__, theirs__) in enumerate(zip(found.state, wanted.state, strict=True)):
        for name, tensor in theirs__.items():
            assert_float64(ours__[name], tensor, f"{name} after step {step}")

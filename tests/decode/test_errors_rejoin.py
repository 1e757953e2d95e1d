"""An exception in any part of a step leaves nothing forked, and the next step is right."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from decode_runs import build
from torch import Tensor

from compare import assert_float64
from model_helpers import Driver, config_of, differs, forward, prompt
from quickseek.config import DecodeConfig
from quickseek.decode.attention import AttentionStep, DraftAttentionStep
from quickseek.decode.boundary import Boundaries, BoundaryAllReduce
from quickseek.decode.engram import EngramPrefetch
from quickseek.decode.executor import SpecializedDecode
from quickseek.decode.moe import MoEStep
from quickseek.decode.streams import SideStreams
from quickseek.engine.graphs import EagerGraphs
from quickseek.model.attention import Attention
from quickseek.model.backbone import DeepseekV4Model
from quickseek.model.engram import Engram
from quickseek.model.hyper_connections import HyperConnections
from quickseek.model.moe import MixtureOfExperts
from quickseek.ops.collectives import AllReduceMHC
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import World

PARTS: list[tuple[type, str, int]] = [
    (SpecializedDecode, "embed", 1),
    (DeepseekV4Model, "share", 1),
    (EngramPrefetch, "lookup", 1),
    (EngramPrefetch, "start", 1),
    (EngramPrefetch, "forward", 2),
    (Engram, "gather", 2),
    (Boundaries, "first", 1),
    (Boundaries, "pre", 2),
    (Boundaries, "sublayer", 1),
    (Boundaries, "sublayer", 8),
    (Boundaries, "mean", 2),
    (Boundaries, "join", 5),
    (Boundaries, "post_only", 2),
    (Boundaries, "post_only", 3),
    (BoundaryAllReduce, "__call__", 4),
    (AllReduceMHC, "__call__", 4),
    (AllReduceMHC, "finalize", 4),
    (HyperConnections, "forward", 1),
    (HyperConnections, "forward", 7),
    (AttentionStep, "run", 3),
    (Attention, "latents", 3),
    (Attention, "select", 5),
    (Attention, "write_global", 3),
    (Attention, "attended", 5),
    (Attention, "keep_window", 5),
    (Attention, "output", 5),
    (MoEStep, "run", 8),
    (MixtureOfExperts, "shared_part", 2),
    (MixtureOfExperts, "routed_part", 2),
]
"""Where a step fails: a method, and at which of its calls."""
DRAFT_PARTS: list[tuple[type, str, int]] = [
    (DraftAttentionStep, "run", 2),
    (MoEStep, "run", 3),
    (HyperConnections, "forward", 2),
    (Boundaries, "sublayer", 4),
]


class Planted(RuntimeError):
    """The exception of these tests."""


@dataclass
class Scene:
    """A decode step of two requests, what the stock layers give for it, and an executor to run it."""

    driver: Driver
    executor: SpecializedDecode
    ids: Tensor
    wanted: tuple[Tensor, list[Tensor]]
    wanted_drafts: Tensor

    @property
    def context(self) -> Any:
        return EagerGraphs().record(self.driver.state.context([1, 2], [4, 2]))

    def step(self) -> tuple[Tensor, list[Tensor]]:
        return forward(self.driver.model, self.ids, self.context)

    def drafts(self, recorded: bool = True) -> Tensor:
        draft, embed = self.driver.model.draft, self.driver.model.backbone.embed
        assert draft is not None and embed is not None
        context, last = self.driver.state.draft_context([1, 2])
        context = EagerGraphs().record(context) if recorded else context
        return draft.propose(torch.tensor([9, 8]), last, embed, self.driver.model.head, context).logits

    def assert_right(self) -> None:
        hidden, aux = self.step()
        assert_float64(hidden, self.wanted[0])
        for ours, theirs in zip(aux, self.wanted[1], strict=True):
            assert_float64(ours, theirs)


@pytest.fixture(scope="module")
def scene() -> Scene:
    driver = Driver(build(config_of("tiny")), max_requests=2)
    first, second = (driver.state.acquire() for _ in range(2))
    assert (first, second) == (1, 2)
    driver.feed({1: prompt(21), 2: prompt(10, 5)}, num_prefills=2)
    ids = prompt(6, 9)
    wanted = forward(driver.model, ids, driver.state.context([1, 2], [4, 2]))
    drafts = Scene(driver, None, ids, wanted, ids).drafts(recorded=False)  # type: ignore[arg-type]
    return Scene(driver, SpecializedDecode.for_target(driver.model, DecodeConfig()), ids, wanted, drafts)


def plant(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int) -> None:
    """Make the ``call``-th call of a method raise, after it has done its work."""
    original, calls = getattr(owner, name), iter(range(1, 10_000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if next(calls) == call:
            raise Planted(name)
        return out

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(("owner", "name", "call"), PARTS)
def test_a_failing_part_leaves_everything_joined_and_the_next_step_right(scene, monkeypatch, owner, name, call):
    runs = scene.executor.runs
    with monkeypatch.context() as patch:
        plant(patch, owner, name, call)
        with pytest.raises(Planted, match=name):
            scene.step()
    assert scene.executor.streams.open == [] and scene.executor.runs == runs
    assert not scene.executor.engram._heads and not scene.executor.engram._projected
    scene.assert_right()
    assert scene.executor.runs == runs + 1


@pytest.mark.parametrize(("owner", "name", "call"), DRAFT_PARTS)
def test_a_failing_draft_pass_leaves_everything_joined_and_the_next_one_right(scene, monkeypatch, owner, name, call):
    with monkeypatch.context() as patch:
        plant(patch, owner, name, call)
        with pytest.raises(Planted, match=name):
            scene.drafts()
    assert scene.executor.streams.open == []
    assert_float64(scene.drafts(), scene.wanted_drafts)


def test_without_the_join_at_the_end_of_a_step_open_work_is_seen(scene, monkeypatch):
    """Negative control: the tests above can tell."""
    with monkeypatch.context() as patch:
        patch.setattr(SideStreams, "join", lambda self: None)
        plant(patch, MixtureOfExperts, "shared_part", 2)
        with pytest.raises(Planted):
            scene.step()
        assert scene.executor.streams.open == ["mhc", "shared_expert"]
    scene.executor.streams.join()
    scene.assert_right()


def test_a_step_that_lost_a_rows_coefficients_is_seen(scene, monkeypatch):
    """Negative control: "right" is a comparison that fails."""
    original = BoundaryAllReduce.__call__

    def without_pre(self: Any, pending: Any, state: Any, pre: Any = None, *rest: Any) -> Any:
        return original(self, pending, state, None if pre is None else pre.flip(-1), *rest)

    with monkeypatch.context() as patch:
        patch.setattr(BoundaryAllReduce, "__call__", without_pre)
        assert differs(scene.step()[0], scene.wanted[0])
    scene.assert_right()


# ---------------------------------------------------------------------------------------------- two ranks

RANK_PARTS = [(Boundaries, "sublayer", 3), (MixtureOfExperts, "shared_part", 2), (AllReduceMHC, "finalize", 4)]


def fail_together(world: World) -> list[tuple[list[str], Tensor, Tensor]]:
    """For each of ``RANK_PARTS``: what is open after all ranks failed in it, the next step, and what is right."""
    torch.set_num_threads(1)
    driver = Driver(build(config_of("tiny-tp"), world), max_requests=2)
    assert (driver.state.acquire(), driver.state.acquire()) == (1, 2)
    driver.feed({1: prompt(21), 2: prompt(10, 5)}, num_prefills=2)
    ids = prompt(6, 9)
    wanted = forward(driver.model, ids, driver.state.context([1, 2], [4, 2]))[0]
    executor = SpecializedDecode.for_target(driver.model, DecodeConfig())
    scene = Scene(driver, executor, ids, (wanted, []), wanted)
    seen = []
    for part in RANK_PARTS:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, *part)
            with pytest.raises(Planted):
                scene.step()
        seen.append((executor.streams.open, scene.step()[0], wanted))
    return seen


def test_ranks_that_fail_together_go_on_together():
    for seen in spawn(fail_together, 2):
        for still_open, found, wanted in seen:
            assert still_open == []
            assert_float64(found, wanted)

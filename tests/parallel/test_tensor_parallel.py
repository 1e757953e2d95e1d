"""Tensor parallel runs of the stock model in exact float64 equal the run of one rank (equality.md 2, *float64*)."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64
from model_helpers import FLOAT64, Driver, Selections, differs, prompt, recorded_selections, token_map
from quickseek.checkpoint.miniature import write_miniature
from quickseek.errors import RankDisagreement
from quickseek.model.causal_lm import load_model
from quickseek.model.moe import Router
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import SoloWorld, World, split

LENGTHS = (23, 14)


@dataclass
class Run:
    """What one rank saw: logits of every step, all choices of indexers and routers, its replicated caches, drafts."""

    logits: list[Tensor] = field(default_factory=list)
    selections: Selections = field(default_factory=dict)
    experts: list[Tensor] = field(default_factory=list)
    caches: dict[str, Tensor] = field(default_factory=dict)
    drafts: list[Tensor] = field(default_factory=list)


def run(world: World, directory: str, seed: int = 0) -> Run:
    """Two requests of unequal length: a prompt and a chunk each, a verify step of six rows, drafts."""
    model, checkpoint = load_model(directory, FLOAT64, world=world, draft=True)
    model.set_token_map(token_map(checkpoint.config))
    seen = Run()

    def keep_experts(_module: object, _inputs: object, routing: object) -> None:
        seen.experts.append(routing.experts)

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(keep_experts)
    driver = Driver(model, max_requests=2, max_length=64)
    slots = [driver.state.acquire() for _ in LENGTHS]
    ids = {slot: prompt(count + 9, seed + 7 * slot) for slot, count in zip(slots, LENGTHS, strict=True)}
    with recorded_selections(model, seen.selections, slots):
        for first, last in ((0, -9), (-9, -6), (-6, None)):
            found = driver.feed({slot: tokens[first:last] for slot, tokens in ids.items()})
            seen.logits.append(torch.cat([found[slot] for slot in slots]))
    for slot in slots:
        seen.caches |= {f"{slot} {name}": tensor for name, tensor in driver.visible(slot).items()}
    context, last = driver.state.draft_context(slots)
    anchors = torch.tensor([ids[slot][-1] for slot in slots])
    drafts = model.draft.propose(anchors, last, model.backbone.embed, model.head, context)
    seen.drafts = [value for value in vars(drafts).values() if isinstance(value, Tensor)]
    return seen


def run_in_groups(world: World, directory: str) -> Run:
    """The first half of the ranks runs one prompt, the second another, at the same time."""
    group = split(world, world.size // 2)
    return run(group, directory, seed=world.rank // group.size)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("tiny-tp")
    write_miniature(directory, "tiny-tp", overwrite=True)
    return str(directory)


@pytest.fixture(scope="module")
def alone(checkpoint) -> Run:
    return run(SoloWorld(), checkpoint)


def assert_same(found: Run, wanted: Run) -> None:
    """*float64* for every value, identical for every choice."""
    assert found.selections == wanted.selections
    assert len(found.experts) == len(wanted.experts)
    for ours, theirs in zip(found.experts, wanted.experts, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(found.logits + found.drafts, wanted.logits + wanted.drafts, strict=True):
        assert_float64(ours, theirs)
    assert found.caches.keys() == wanted.caches.keys()
    for name, tensor in wanted.caches.items():
        assert_float64(found.caches[name], tensor, name)


def assert_ranks_alike(runs: list[Run]) -> None:
    """*bits*: every rank holds the same logits and drafts."""
    for other in runs[1:]:
        for ours, theirs in zip(other.logits + other.drafts, runs[0].logits + runs[0].drafts, strict=True):
            assert_bits(ours, theirs)


# Two ranks: the groups of ``test_two_groups_in_one_world_each_give_the_result_of_one_rank``.
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_degree_gives_the_logits_choices_caches_and_drafts_of_one_rank(checkpoint, alone, ranks):
    runs = spawn(run, ranks, checkpoint, timeout_s=300)
    assert_ranks_alike(runs)
    for one in runs:
        assert_same(one, alone)


def test_two_groups_in_one_world_each_give_the_result_of_one_rank(checkpoint, alone):
    runs = spawn(run_in_groups, 4, checkpoint, timeout_s=300)
    other = run(SoloWorld(), checkpoint, seed=1)
    assert_ranks_alike(runs[:2])
    assert_ranks_alike(runs[2:])
    for rank, one in enumerate(runs):
        assert_same(one, alone if rank < 2 else other)
    # Negative control: the groups' results can be told apart.
    assert differs(runs[2].logits[0], alone.logits[0])


class LosingWorld(SoloWorld):
    """A world of one that loses what its peer adds: the embedding and every sublayer stay partial sums."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        return torch.cat((x, torch.zeros_like(x)), dim)


def test_a_rank_whose_peer_is_lost_gives_other_logits(checkpoint, alone):
    """Negative control of the comparison: the shards of one rank are not the model."""
    lost = run(LosingWorld(), checkpoint)
    assert differs(lost.logits[0], alone.logits[0])
    with pytest.raises(AssertionError):
        assert_same(lost, alone)
    nudged = replace(alone, logits=[alone.logits[0] * (1 + 1e-8), *alone.logits[1:]])
    with pytest.raises(AssertionError, match="relative error"):
        assert_same(nudged, alone)


def refusals(world: World, attempts: list[tuple[list[str], list[bool]]]) -> list[str]:
    """What each attempt to load (a directory and the draft option for every rank) tells this rank."""
    told = []
    for directories, drafts in attempts:
        try:
            load_model(directories[world.rank], FLOAT64, world=world, draft=drafts[world.rank])
            told.append("loaded")
        except RankDisagreement as error:
            told.append(str(error))
    return told


def test_a_rank_that_disagrees_at_start_makes_all_ranks_raise_the_same_error(checkpoint, tmp_path):
    other, absent, neither = str(tmp_path / "tiny"), str(tmp_path / "absent"), [False, False]
    write_miniature(other, "tiny")
    first, second = spawn(
        refusals,
        2,
        [
            ([checkpoint, other], neither),
            ([checkpoint, checkpoint], [True, False]),
            ([checkpoint, absent], neither),
            ([checkpoint, checkpoint], neither),
        ],
    )
    assert first == second
    configuration, option, fault, agreed = first
    assert "moe_intermediate_size (rank 0: 256; rank 1: 64)" in configuration
    assert "vocab_size" not in configuration, "only what differs is named"
    assert option == "ranks disagree on draft (rank 0: True; rank 1: False)"
    assert fault == f"opening the checkpoint failed: rank 1: CheckpointError: {absent}: no such directory"
    assert agreed == "loaded"

"""The whole language model: backbone, head and drafter, loaded from a checkpoint."""

import logging
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor, nn

from quickseek.checkpoint.reader import Checkpoint
from quickseek.config import ModelConfig
from quickseek.errors import CheckpointError
from quickseek.model.backbone import DeepseekV4Model
from quickseek.model.dspark import DraftHead
from quickseek.model.loader import WeightLoader, WeightSource
from quickseek.model.vocabulary import VocabParallelHead
from quickseek.numerics import Numerics
from quickseek.parallel.world import World, default_world, require_agreement, together

logger = logging.getLogger(__name__)


class CausalLM(nn.Module):
    """Backbone, vocabulary head and, with ``draft``, the DSpark head of one rank."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        *,
        world: World | None = None,
        draft: bool = False,
        decoder_replay: bool = False,
    ) -> None:
        super().__init__()
        world = default_world() if world is None else world
        self.config, self.numerics, self.world = config, numerics, world
        self.backbone = DeepseekV4Model(config=config, world=world, numerics=numerics, decoder_replay=decoder_replay)
        self.head = VocabParallelHead(config, config.hidden_size, numerics, world)
        self.draft = DraftHead(config, numerics, world) if draft else None
        if draft:
            self.backbone.aux_hidden_state_layers = config.dspark_target_layer_ids

    def set_token_map(self, token_map: Tensor) -> None:
        """Compressed id of every token id, int [vocab_size] (spec/model.md 8.1); after the weights are in place."""
        self.backbone.hashes.set_token_map(token_map.to(self.head.weight.device))

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, V] in the wide dtype of the backbone's hidden states [T, H]."""
        out: Tensor = self.head(hidden)
        return out

    def load(self, source: WeightSource) -> set[str]:
        """Fill this rank's parameters; returns the names used."""
        loader = WeightLoader(source, self.numerics)
        self.backbone.load(loader)
        self.head.load(loader, "head.weight")
        if self.draft is not None:
            self.draft.load(loader)
        return loader.loaded


def load_model(
    directory: str | Path,
    numerics: Numerics,
    *,
    world: World | None = None,
    draft: bool = False,
    decoder_replay: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[CausalLM, Checkpoint]:
    """Build a model and load this rank's weights; every tensor is accounted for before the first is read.

    Raises ConfigError or CheckpointError naming the key, file or tensor. Vision tensors are skipped with one line.
    Collective over ``world``: if ranks find different configurations, options or faults, all raise RankDisagreement.
    """
    world = default_world() if world is None else world
    groups = ("text", "draft") if draft else ("text",)

    def opened() -> Checkpoint:
        checkpoint = Checkpoint.open(directory)
        checkpoint.check(groups)
        return checkpoint

    checkpoint = together(world, "opening the checkpoint", opened)
    facts = {field.name: getattr(checkpoint.config, field.name) for field in fields(checkpoint.config)}
    require_agreement(world, {**facts, "numerics": numerics, "draft": draft, "decoder_replay": decoder_replay})
    vision = sum(checkpoint.spec(name).group == "vision" for name in checkpoint.names)
    if vision:
        logger.warning("skipping %d vision tensors: this model reads text only", vision)
    with torch.device("meta"):
        model = CausalLM(checkpoint.config, numerics, world=world, draft=draft, decoder_replay=decoder_replay)
    model.to_empty(device=device)
    model.load(checkpoint)
    unread = checkpoint.unread(groups)
    if unread:
        raise CheckpointError(f"{directory}: {len(unread)} tensors were not read, {unread[0]} among them")
    return model.eval(), checkpoint

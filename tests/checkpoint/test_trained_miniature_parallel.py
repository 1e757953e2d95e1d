"""The miniature in the package on two ranks: float64 logits and drafts of one rank (equality.md 2, *float64*)."""

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64
from model_helpers import FLOAT64, Driver
from quickseek.checkpoint.hub import resolve
from quickseek.model.causal_lm import load_model
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import SoloWorld, World
from quickseek.tokenizer.compressed_ids import compressed_id_table
from quickseek.tokenizer.tokenizer import Tokenizer

TEXT = (
    "And it came to pass in the evening, that Emma walked out of the house with her father, and they went up into the "
    "city together; for the king had sent unto them, saying, Let no man be sorry for what is done. The ladies of the "
    "neighbourhood were much surprised, but Mr. Knightley was not, and he said so to his brother with a smile."
)
VERIFIED = 6
"""Tokens of the last step, as many as a verify step of five drafts has."""


def run(world: World) -> list[Tensor]:
    """Logits of a prompt and of a verify step after it, then tokens, logits and confidence of the drafts."""
    model, checkpoint = load_model(resolve("miniature"), FLOAT64, world=world, draft=True)
    config = checkpoint.config
    tokenizer = Tokenizer.from_directory(resolve("miniature"), vocab_size=config.vocab_size)
    model.set_token_map(compressed_id_table(tokenizer, config.vocab_size))
    ids = torch.tensor([tokenizer.bos_id, *tokenizer.encode(TEXT)])
    # Windows, lists and candidates are a choice.
    assert len(ids) - VERIFIED > config.candidate_topk_blocks * config.candidate_block_size
    driver = Driver(model, max_requests=1, max_length=128)
    slot = driver.state.acquire()
    found = [driver.feed({slot: part})[slot] for part in (ids[:-VERIFIED], ids[-VERIFIED:])]
    context, last = driver.state.draft_context([slot])
    drafts = model.draft.propose(ids[-1:], last, model.backbone.embed, model.head, context)
    return found + [value for value in vars(drafts).values() if isinstance(value, Tensor)]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert_float64(ours, theirs)


def test_two_ranks_give_the_logits_and_drafts_of_one() -> None:
    alone = run(SoloWorld())
    first, second = spawn(run, 2, timeout_s=120)
    for ours, theirs in zip(first, second, strict=True):
        assert_bits(ours, theirs)
    assert_same(first, alone)
    with pytest.raises(AssertionError, match="relative error"):
        assert_same([alone[0] * (1 + 1e-8), *alone[1:]], first)

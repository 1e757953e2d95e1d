"""Trained mode on a CPU: how far the executor's logits are from the stock model's, and what may not matter at all."""

from pathlib import Path

import pytest
import torch
from decode_runs import decode_all
from torch import Tensor

from compare import LogitDistance, assert_bits, assert_model, logit_distance
from model_helpers import config_of, token_map
from quickseek.checkpoint.miniature import write_miniature
from quickseek.config import DecodeConfig
from quickseek.decode.executor import SpecializedDecode
from quickseek.model.causal_lm import load_model
from quickseek.numerics import Numerics
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import SoloWorld, World

SHAPES = ((1,), (6, 2), (6, 6, 5))
BOUND = LogitDistance(median=0.15, p99=0.77)
"""Stock logits of ``SHAPES`` on two ranks against one rank: tiny-tp, torch 2.13 on a CPU. Random weights magnify one
rounding through sixteen quantised sublayers, so most rows are equal and a few are far."""


def trained(world: World, directory: str) -> list[list[Tensor]]:
    """Logits of the steps ``SHAPES``: stock, the executor, the executor without replicated embedding."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        model, _ = load_model(directory, Numerics.trained(), world=world, draft=True)
        model.set_token_map(token_map(config_of("tiny-tp")))
        found = [decode_all(model, False, SHAPES).logits]
        for off in ((), ("replicated_embedding",)):
            executor = SpecializedDecode.for_target(model, DecodeConfig(off=off))
            found.append(decode_all(model, True, SHAPES).logits)
            assert executor.runs == len(SHAPES)
            assert (executor.embedding is not None) == (world.size > 1 and not off)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("checkpoint") / "tiny-tp"
    write_miniature(path, "tiny-tp")
    return str(path)


@pytest.fixture(scope="module")
def one_rank(directory: str) -> list[list[Tensor]]:
    return trained(SoloWorld(), directory)


@pytest.fixture(scope="module")
def two_ranks(directory: str) -> list[list[list[Tensor]]]:
    return spawn(trained, 2, directory)


def test_the_bound_is_the_distance_of_two_orders_of_summation_in_the_stock_model(one_rank, two_ranks):
    """One rank sums in one order, two ranks in another; the bound is that distance over all rows."""
    found = logit_distance(torch.cat(two_ranks[0][0]), torch.cat(one_rank[0]))
    assert found.median == pytest.approx(BOUND.median, rel=0.5) and found.p99 == pytest.approx(BOUND.p99, rel=0.5)


def test_the_executor_is_no_further_from_stock_than_another_order_of_summation(one_rank, two_ranks):
    for stock, executor, _ in (one_rank, two_ranks[0]):
        print(assert_model(torch.cat(executor), torch.cat(stock), BOUND))
        # Negative control: the logits of another row.
        with pytest.raises(AssertionError, match="distance"):
            assert_model(torch.cat(executor).roll(1, 0), torch.cat(stock), BOUND)


def test_ranks_agree_in_bits_and_the_replicated_embedding_changes_none(two_ranks):
    first, second = two_ranks
    for step in range(len(SHAPES)):
        assert_bits(first[1][step], second[1][step])
        assert_bits(first[1][step], first[2][step])

"""The executor gives the stock model's logits, states and drafts (equality.md 2, *float64*), on 1, 2 and 4 ranks."""

from dataclasses import replace

import pytest
import torch
from decode_runs import BORDERS, Pair, assert_same, both

from compare import assert_bits
from quickseek.decode.gates import GATES, PATHS
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import SoloWorld

FEW = ((1,), (6, 2, 1))
GATED = ((1,), (6, 2, 1), (6, 6, 4), (6, 6, 5), (6,) * 8)
"""Steps on both sides of every gate: 1, 9, 16, 17 and 48 rows, the last of eight requests."""
WITHOUT_ENGRAM = {"engram_layer_ids": (), "engram_num_embeddings": ()}


def assert_taken(pair: Pair, shapes: int, draft: bool = True) -> None:
    """Every decode step and pass went through the executor, and came back whole."""
    assert (pair.runs, pair.draft_runs) == (shapes, shapes if draft else 0)
    assert pair.open == []


@pytest.mark.parametrize(("ranks", "shapes", "changes"), [(2, BORDERS, {}), (4, GATED, {}), (2, FEW, WITHOUT_ENGRAM)])
def test_every_degree_gives_the_stock_models_logits_at_every_gate_border(ranks, shapes, changes):
    pairs = spawn(both, ranks, shapes, changes, timeout_s=400)
    for pair in pairs:
        assert_taken(pair, len(shapes))
        assert_same(pair.executor, pair.stock)
        for ours, theirs in zip(pair.executor.logits, pairs[0].executor.logits, strict=True):
            assert_bits(ours, theirs)


@pytest.mark.parametrize("changes", [{}, WITHOUT_ENGRAM, {"num_nextn_predict_layers": 0}])
def test_one_rank_gives_the_stock_models_logits_with_and_without_engram_and_drafter(changes):
    if changes == {"num_nextn_predict_layers": 0}:
        changes = {**changes, "dspark_target_layer_ids": (), "compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1)}
    pair = both(SoloWorld(), changes=changes)
    assert_taken(pair, len(BORDERS), draft="num_nextn_predict_layers" not in changes)
    assert_same(pair.executor, pair.stock)
    assert pair.forks["engram"] == (0 if "engram_layer_ids" in changes else 5)


def test_rows_of_a_step_beyond_every_gate_run_inline_and_give_the_same():
    pair = both(SoloWorld(), shapes=((6,) * 8, (6,) * 8 + (1,)))
    assert_taken(pair, 2)
    assert_same(pair.executor, pair.stock)
    forks_at_48 = both(SoloWorld(), shapes=((6,) * 8,)).forks
    # 49 rows add no fork to the coefficients' stream; its draft pass of 45 rows does.
    assert pair.forks["mhc"] < 2 * forks_at_48["mhc"]


@pytest.mark.parametrize("path", PATHS)
def test_each_path_can_be_switched_off_alone_and_nothing_changes(path):
    pair = both(SoloWorld(), shapes=((6, 2, 1),), off=(path,))
    assert_taken(pair, 1, draft=path != "draft")
    assert_same(pair.executor, pair.stock)


@pytest.mark.parametrize("kind", GATES)
def test_the_gates_of_every_kind_of_device_give_the_same(kind):
    pair = both(SoloWorld(), shapes=((6, 2, 1), (6, 6, 5)), gates=GATES[kind])
    assert_taken(pair, 2)
    assert_same(pair.executor, pair.stock)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return both(SoloWorld(), shapes=((6, 2, 1),))


@pytest.mark.parametrize("what", ["logits", "aux", "drafts", "state"])
def test_a_value_that_is_off_by_a_hundred_millionth_is_noticed(pair, what):
    """Negative control of the comparison, kind by kind."""
    nudged = replace(pair.stock, logits=list(pair.stock.logits))

    def off(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * (1 + 1e-8)

    if what == "logits":
        nudged = replace(nudged, logits=[off(tensor) for tensor in pair.stock.logits])
    elif what == "state":
        name = next(name for name in pair.stock.state[0] if name.endswith("layers.6.window"))
        nudged = replace(nudged, state=[pair.stock.state[0] | {name: off(pair.stock.state[0][name])}])
    elif what == "aux":
        nudged = replace(nudged, aux=[[off(tensor) for tensor in step] for step in pair.stock.aux])
    else:
        tokens, logits, confidence = pair.stock.drafts[0]
        nudged = replace(nudged, drafts=[[tokens, off(logits), confidence]])
    with pytest.raises(AssertionError, match="relative error"):
        assert_same(pair.executor, nudged)

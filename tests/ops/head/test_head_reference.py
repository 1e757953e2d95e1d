"""Vocabulary logits and the draft's confidence (spec/model.md 5.5, 10.3)."""

import pytest
import torch

from compare import assert_float64
from op_cases import assert_nan_stays, normal
from quickseek.ops import head as door


def test_logits_of_bf16_states_are_float32_products() -> None:
    hidden, weight = normal(3, 16, dtype=torch.bfloat16), normal(20, 16, seed=1, dtype=torch.bfloat16)
    out = door.logits(hidden, weight)
    assert out.dtype == torch.float32
    assert (out.double() - hidden.double() @ weight.double().T).abs().max() < 1e-5
    rounded = out.to(torch.bfloat16).double()
    assert (rounded - hidden.double() @ weight.double().T).abs().max() > 1e-5, "a BF16 result would be told apart"


def test_a_shard_of_the_head_gives_its_columns() -> None:
    hidden, weight = normal(3, 16), normal(20, 16, seed=1)
    assert_float64(door.logits(hidden, weight[5:12]), door.logits(hidden, weight)[:, 5:12].contiguous())


def test_confidence_is_the_sigmoid_of_state_and_bigram_row() -> None:
    state, markov, weight = normal(4, 8), normal(4, 6, seed=1), normal(1, 14, seed=2)
    expected = 1 / (1 + torch.exp(-(state @ weight[0, :8] + markov @ weight[0, 8:])))
    assert_float64(door.confidence(state, markov, weight), expected)
    with pytest.raises(AssertionError):
        assert_float64(door.confidence(state, markov.flip(0), weight), expected)


def test_a_bf16_confidence_is_computed_in_float32() -> None:
    state, markov = normal(4, 8, dtype=torch.bfloat16), normal(4, 6, seed=1, dtype=torch.bfloat16)
    out = door.confidence(state, markov, normal(1, 14, seed=2, dtype=torch.bfloat16))
    assert out.dtype == torch.float32 and ((out > 0) & (out < 1)).all()


def test_a_nan_row_stays_in_its_row() -> None:
    weight = normal(20, 16, seed=1)
    assert_nan_stays(lambda x: door.logits(x, weight), normal(4, 16), 1)
    markov, proj = normal(4, 6, seed=1), normal(1, 22, seed=2)
    assert_nan_stays(lambda x: door.confidence(x, markov, proj), normal(4, 16), 1)


def test_a_weight_of_another_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(1, 13\): expected \[1, 14\]"):
        door.confidence(normal(4, 8), normal(4, 6), normal(1, 13))

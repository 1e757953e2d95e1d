"""A graph could hold every function: none reads a tensor from the host, and no shape depends on data."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quickseek.ops import sampling

BATCH, DRAFTS, VOCABULARY = 3, 2, 100
ROWS = BATCH * (DRAFTS + 1)


def whole(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.int64)


def penalties() -> sampling.Penalties:
    counts, seen = torch.zeros(5, VOCABULARY, dtype=torch.int32), torch.zeros(5, VOCABULARY, dtype=torch.bool)
    drafts = sampling.drafts_before(torch.zeros(BATCH, DRAFTS, dtype=torch.int64))
    return sampling.Penalties(counts, seen, whole(ROWS), drafts, *torch.ones(3, ROWS))


def adjust() -> tuple[Tensor, ...]:
    ids = torch.zeros(ROWS, 4, dtype=torch.int64)
    adjusted = sampling.adjust(
        torch.randn(ROWS, VOCABULARY),
        penalties=penalties(),
        bias=sampling.Bias(ids, torch.zeros(ROWS, 4)),
        bitmask=torch.zeros(ROWS, 4, dtype=torch.int32),
        ends=sampling.Ends(ids, torch.zeros(ROWS, dtype=torch.bool)),
    )
    return (adjusted, sampling.valid(adjusted), sampling.greedy(adjusted))


def choose() -> tuple[Tensor, ...]:
    logits, ones = torch.randn(ROWS, VOCABULARY), torch.ones(ROWS)
    tokens = sampling.sample(logits, ones, ones, whole(ROWS), whole(ROWS), 0, top_k=whole(ROWS), min_p=ones)
    return (tokens, *sampling.log_probabilities(logits, tokens, 5))


def speculate(form: str) -> tuple[Tensor, ...]:
    logits, target = torch.randn(BATCH, VOCABULARY), torch.rand(BATCH, DRAFTS + 1, VOCABULARY, dtype=torch.float64)
    _, kept = sampling.draft_distribution(logits, torch.ones(BATCH), whole(BATCH), whole(BATCH))
    sparse = sampling.SparseDistribution(*(torch.stack([part] * DRAFTS, 1) for part in kept))
    draft = {"greedy": None, "sparse": sparse, "dense": target[:, :-1]}[form]
    drafts = torch.zeros(BATCH, DRAFTS, dtype=torch.int64)
    return tuple(sampling.verify(target, drafts, draft, whole(BATCH), whole(BATCH), whole(BATCH)))


@pytest.mark.parametrize(
    "function",
    [adjust, choose, *(lambda form=form: speculate(form) for form in ("greedy", "sparse", "dense"))],
    ids=["adjust", "choose", "greedy drafts", "sampled drafts", "dense drafts"],
)
def test_a_function_runs_on_tensors_without_data(function: Callable[[], tuple[Tensor, ...]]) -> None:
    shapes = [result.shape for result in function()]
    with FakeTensorMode():
        assert [result.shape for result in function()] == shapes


def test_reading_a_tensor_or_its_data_for_a_shape_is_noticed() -> None:
    with FakeTensorMode():
        tokens = sampling.greedy(torch.randn(ROWS, VOCABULARY))
        with pytest.raises(Exception, match="_local_scalar_dense"):
            int(tokens[0])
        with pytest.raises(Exception, match="nonzero"):
            torch.nonzero(tokens)

"""The stock model on a GPU: trained-mode logits, drafts and caches as its CPU reference gives them (equality.md 2)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compare import LogitDistance, assert_bits, assert_model, logit_distance
from model_driver import Batch
from model_helpers import prompt, token_map
from quickseek.checkpoint.miniature import write_miniature
from quickseek.model.causal_lm import CausalLM, load_model
from quickseek.numerics import Numerics

pytestmark = pytest.mark.gpu

CONFIGS = ("tiny", "tiny-tp", "mid")
LENGTH = 180
CHUNKS = (100, 1, 1, 6, 1, 48, 5, 1, 17)


@pytest.fixture(scope="module", params=CONFIGS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, CausalLM]:
    """The same packed checkpoint on the GPU and on the CPU."""
    directory: Path = tmp_path_factory.mktemp("checkpoint") / request.param
    config = write_miniature(directory, request.param)
    loaded = []
    for device in ("cuda", "cpu"):
        model, _ = load_model(directory, Numerics.trained(), draft=True, device=device)
        model.set_token_map(token_map(config))
        loaded.append(model)
    return loaded[0], loaded[1]


def run(model: CausalLM, ids: Tensor, chunks: tuple[int, ...]) -> tuple[Batch, Tensor]:
    batch = Batch(model)
    return batch, torch.cat([batch.run(part).cpu() for part in ids.split(list(chunks))])


def other_orders(run_reference: Callable[[], Tensor]) -> list[Tensor]:
    """What the reference gives when the terms of every product are added in another order."""
    right, found = F.linear, []

    def halves(x: Tensor, weight: Tensor) -> Tensor:
        parts = (right(x[..., i::2].contiguous(), weight[..., i::2].contiguous()) for i in range(2))
        return sum(parts, torch.zeros(()))

    for order in (lambda x, weight: right(x.flip(-1), weight.flip(-1)), halves):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "linear", order)
            found.append(run_reference())
    return found


def bound_of(expected: Tensor, others: list[Tensor]) -> LogitDistance:
    """Three times what other orders of summation do: selections near a border make that large for random weights."""
    distances = [logit_distance(other, expected) for other in others]
    print("other orders of the reference:", *distances)
    return LogitDistance(
        3 * max(d.median for d in distances) + 0.01, min(3 * max(d.p99 for d in distances) + 0.05, 1.9)
    )


@torch.inference_mode()
def test_logits_are_the_references_whole_and_in_chunks(models: tuple[CausalLM, CausalLM]) -> None:
    gpu, cpu = models
    ids = prompt(LENGTH)
    expected = run(cpu, ids, (LENGTH,))[1]
    bound = bound_of(expected, other_orders(lambda: run(cpu, ids, (LENGTH,))[1]))
    for chunks in ((LENGTH,), CHUNKS):
        print(f"{chunks}: {assert_model(run(gpu, ids, chunks)[1], expected, bound)}, allowed {bound}")
    with pytest.raises(AssertionError, match="distance"):
        assert_model(run(gpu, prompt(LENGTH, 1), CHUNKS)[1], expected, bound)


@torch.inference_mode()
def test_draft_logits_are_the_references(models: tuple[CausalLM, CausalLM]) -> None:
    def first_draft(model: CausalLM) -> Tensor:
        return run(model, prompt(LENGTH), CHUNKS)[0].draft([17]).logits[:, 0].cpu()

    expected = first_draft(models[1])
    bound = bound_of(expected, other_orders(lambda: first_draft(models[1])))
    print(f"{assert_model(first_draft(models[0]), expected, bound)}, allowed {bound}")
    with pytest.raises(AssertionError, match="distance"):
        assert_model(run(models[0], prompt(LENGTH), CHUNKS)[0].draft([18]).logits[:, 0].cpu(), expected, bound)


@torch.inference_mode()
def test_runs_repeat_bit_for_bit(models: tuple[CausalLM, CausalLM]) -> None:
    first, second = (run(models[0], prompt(LENGTH), CHUNKS)[1] for _ in range(2))
    assert_bits(first, second, "logits of two runs")
    assert not torch.equal(first, run(models[0], prompt(LENGTH, 1), CHUNKS)[1])

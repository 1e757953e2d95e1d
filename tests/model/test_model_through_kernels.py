"""A whole model through its kernels, without a GPU: prompt, decode and drafts as the reference gives them.

Every mechanism in the smallest sizes, in trained mode: the distance of the logits is held to that of references
whose sums are rounded as finely as the kernels'.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compare import LogitDistance, assert_model, logit_distance
from drawn_memory import by_interpreter, through_kernels
from model_driver import Batch
from model_helpers import SMALLEST as CONFIG
from model_helpers import token_map
from quickseek.checkpoint.miniature import miniature_tensors
from quickseek.model.causal_lm import CausalLM
from quickseek.model.loader import TensorSource
from quickseek.numerics import Numerics
from quickseek.ops.attention import reference as attention

pytestmark = by_interpreter
OPERATIONS = {path.parent.name for path in Path(attention.__file__).parents[1].glob("*/triton.py")}
KEPT_BITS = 18
"""Attention's kernels add weights of 16 bits or more; most of the last places are as in FP32."""


@dataclass(frozen=True)
class Run:
    """``logits`` [rows, V] of all steps, ``drafts`` [2, V]: logits of the first draft of each request."""

    logits: Tensor
    drafts: Tensor


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """With packed weights and caches, as a GPU runs it."""
    loaded = CausalLM(CONFIG, Numerics.trained(), draft=True)
    loaded.load(TensorSource(miniature_tensors(CONFIG)))
    loaded.set_token_map(token_map(CONFIG))
    return loaded.eval()


@torch.inference_mode()
def run(model: CausalLM, shift: int = 0) -> Run:
    """Prompts of 12 and 6 tokens in two chunks, a step with two drafts each of which one is kept, and new drafts."""
    first, second = ((step * torch.arange(15) + 11 + shift) % 120 for step in (37, 53))
    batch = Batch(model, 2, max_length=48)
    steps = [
        batch.run([first[:7], second[:4]], prefill=True),
        batch.run([first[7:12], second[4:6]], prefill=True),
        batch.run([first[12:], second[6:9]], commit=2),
    ]
    return Run(torch.cat(steps), batch.draft([17 + shift, 18 + shift]).logits[:, 0])


@contextmanager
def attention_of(change: Callable[..., Tensor]) -> Iterator[None]:
    """Within, attention of the reference is ``change(shipped, ...)``."""
    shipped: Any = attention.sink_softmax
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "sink_softmax", lambda *arguments: change(shipped, *arguments))
        yield


def rounded_otherwise(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def change(shipped: Any, *arguments: Tensor) -> Tensor:
        out: Tensor = shipped(*arguments)
        return out * (1 + 2.0**-KEPT_BITS * torch.randn(out.shape, generator=generator))

    return change


def bound_of(found: list[LogitDistance]) -> LogitDistance:
    return LogitDistance(max(d.median for d in found) + 0.005, max(d.p99 for d in found) + 0.05)


def test_a_model_through_its_kernels_gives_the_references_logits_and_drafts(model: CausalLM) -> None:
    expected = run(model)
    others = []
    for seed in range(8):
        with attention_of(rounded_otherwise(seed)):
            others.append(run(model))
    logits = bound_of([logit_distance(other.logits, expected.logits) for other in others])
    drafts = bound_of([logit_distance(other.drafts, expected.drafts) for other in others])
    with through_kernels() as asked:
        found = run(model)
    assert asked == OPERATIONS
    print(f"{assert_model(found.logits, expected.logits, logits, 'logits')}, allowed {logits}")
    print(f"{assert_model(found.drafts, expected.drafts, drafts, 'drafts')}, allowed {drafts}")

    wrong = [run(model, 1)]
    for change in (
        lambda shipped, q, keys, seen, sinks: shipped(q, keys, seen, torch.full_like(sinks, -torch.inf)),
        lambda shipped, q, keys, seen, sinks: shipped(q, keys, seen & (keys != keys[:, -1:]).any(-1), sinks),
    ):
        with attention_of(change):
            wrong.append(run(model))
    for other in wrong:
        print(logit_distance(other.logits, expected.logits), logit_distance(other.drafts, expected.drafts))
        with pytest.raises(AssertionError, match="logits: distance"):
            assert_model(other.logits, expected.logits, logits)
    with pytest.raises(AssertionError, match="drafts: distance"):
        assert_model(wrong[0].drafts, expected.drafts, drafts, "drafts")

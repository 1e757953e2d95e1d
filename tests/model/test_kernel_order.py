"""What kernels read before they wait has been written by then: the order in which a model launches them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_model_through_kernels import CONFIG, run
from torch.utils._python_dispatch import TorchDispatchMode

from drawn_memory import by_interpreter, through_kernels
from model_helpers import token_map
from quickseek.checkpoint.miniature import miniature_tensors
from quickseek.model.causal_lm import CausalLM
from quickseek.model.loader import TensorSource
from quickseek.numerics import Numerics
from quickseek.ops import triton_chain

pytestmark = by_interpreter

PRODUCTS = {"_few", "_held", "_tiled"}
"""Kernels of linear operations."""
READS_EARLY = {"down", "_attend early"}
"""Kernels that read before their wait what other kernels of a step have written."""
LETS_GO_FIRST = {"_add_up"}
"""Kernels that let the next one start before they have waited."""


class Computations(TorchDispatchMode):
    """Notes the operations of PyTorch that launch something, beside kernels."""

    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self.launched, self.inside = launched, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if not self.inside and not func.is_view and "empty" not in name and "detach" not in name:
            self.launched.append(name)
        return out


@contextmanager
def launches() -> Iterator[list[str]]:
    """Names of what is launched within, in order; ``_attend`` that reads early is "_attend early"."""
    launched: list[str] = []
    mode = Computations(launched)
    begin: Callable[..., Any] = triton_chain.Chained.__getitem__

    def noted(self: triton_chain.Chained, grid: Any) -> Callable[..., Any]:
        launch = begin(self, grid)

        def call(*arguments: Any, **options: Any) -> Any:
            launched.append(self.__name__ + (" early" if options.get("queries_last") else ""))
            mode.inside = True
            try:
                return launch(*arguments, **options)
            finally:
                mode.inside = False

        return call

    with pytest.MonkeyPatch.context() as patch, through_kernels(), mode:
        patch.setattr(triton_chain.Chained, "__getitem__", noted)
        yield launched


def breaches(launched: list[str]) -> list[str]:
    """Neighbours of which the second may read before its wait what is not written by then."""
    return [
        f"{one}, {other}"
        for one, other in pairwise(launched)
        if (other == "_attend early" and one not in PRODUCTS) or (one in LETS_GO_FIRST and other in READS_EARLY)
    ]


def test_attention_follows_the_product_that_makes_its_queries() -> None:
    """Prompts, decode steps and drafts; what a GPU launches instead of a product of few rows is one kernel too."""
    loaded = CausalLM(CONFIG, Numerics.trained(), draft=True)
    loaded.load(TensorSource(miniature_tensors(CONFIG)))
    loaded.set_token_map(token_map(CONFIG))
    with launches() as launched:
        run(loaded.eval())
    steps, layers = 3, CONFIG.num_hidden_layers
    assert launched.count("_attend early") == steps * layers + CONFIG.num_nextn_predict_layers
    assert "_attend" not in launched and launched.count("_add_up") == launched.count("_attend early")
    assert not breaches(launched)


@pytest.mark.parametrize(
    ("launched", "wrong"),
    [
        (["_latents", "_few", "_attend early", "_add_up", "_few"], []),
        (["_few", "_latents", "_attend early"], ["_latents, _attend early"]),
        (["_few", "aten.add.Tensor", "_attend early"], ["aten.add.Tensor, _attend early"]),
        (["_few", "_latents", "_attend"], []),
        (["_add_up", "down"], ["_add_up, down"]),
    ],
)
def test_an_order_that_breaks_the_promise_is_noticed(launched: list[str], wrong: list[str]) -> None:
    assert breaches(launched) == wrong


def test_what_pytorch_launches_is_seen_and_views_are_not() -> None:
    with launches() as launched:
        x = torch.ones(4, 4)
        x.view(16).unflatten(0, (2, 8))
        x.add_(1)
    assert launched == ["aten.ones.default", "aten.add_.Tensor"]

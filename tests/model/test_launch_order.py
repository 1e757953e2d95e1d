"""Stock layers launch attention right behind the product that makes its queries, prompts, steps and drafts alike."""

import pytest
import torch
from test_model_through_kernels import run

from drawn_memory import by_interpreter
from kernel_order import breaches, launches
from model_helpers import SMALLEST as CONFIG
from model_helpers import token_map
from quickseek.checkpoint.miniature import miniature_tensors
from quickseek.decode.streams import SideStream
from quickseek.model.causal_lm import CausalLM
from quickseek.model.loader import TensorSource
from quickseek.numerics import Numerics

pytestmark = by_interpreter


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
        (["_few", "join", "_attend early"], ["join, _attend early"]),
        (["_few", "_attend of others"], ["_few, _attend of others"]),
    ],
)
def test_an_order_that_breaks_the_promise_is_noticed(launched: list[str], wrong: list[str]) -> None:
    assert breaches(launched) == wrong


def test_what_pytorch_launches_and_joins_are_seen_and_views_are_not() -> None:
    with launches() as launched:
        x = torch.ones(4, 4)
        x.view(16).unflatten(0, (2, 8))
        side = SideStream("side", torch.device("cpu"))
        with side.fork():
            x.add_(1)
        side.join()
        side.join()
    assert launched == ["aten.ones.default", "aten.add_.Tensor", "join"]

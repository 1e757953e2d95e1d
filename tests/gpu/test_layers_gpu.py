"""Layers one at a time on a GPU, each fed what entered it in the CPU reference, so that nothing adds up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model_driver import Batch
from model_helpers import prompt, token_map
from quickseek.checkpoint.miniature import write_miniature
from quickseek.model.causal_lm import CausalLM, load_model
from quickseek.model.layer import Layer
from quickseek.numerics import Numerics

pytestmark = pytest.mark.gpu

LENGTH = 180
MEDIAN, MOST = 0.01, 0.03
"""Relative error of a row of streams: in the median, and of nine rows in ten (a route or a selection may differ)."""


class Recorded:
    """What entered and left every layer and every injection of one prompt on the CPU."""

    def __init__(self, model: CausalLM) -> None:
        self.entered: dict[str, tuple[Any, ...]] = {}
        self.left: dict[str, Any] = {}
        self.lists: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        hooks = []
        for name, module in modules(model).items():
            hooks.append(module.register_forward_pre_hook(self.enter(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(self.leave(name)))
        Batch(model).run(prompt(LENGTH))
        for hook in hooks:
            hook.remove()

    def enter(self, name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.entered[name] = (args, kwargs)
            if not name.endswith("engram"):
                self.lists[name] = args[2].lists, args[2].candidates

        return hook

    def leave(self, name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self.left[name] = output

        return hook


def modules(model: CausalLM) -> dict[str, nn.Module]:
    """The layers and injections of the backbone, in order."""
    found: dict[str, nn.Module] = {}
    for layer in model.backbone.layers:
        assert isinstance(layer, Layer)
        if layer.engram is not None:
            found[f"{layer.prefix}.engram"] = layer.engram
        found[layer.prefix] = layer
    return found


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    wide = expected.double().flatten(1)
    return (actual.cpu().double().flatten(1) - wide).norm(dim=1) / wide.norm(dim=1)


def assert_rows(actual: Tensor, expected: Tensor, what: str) -> None:
    errors = row_errors(actual, expected)
    median, most = float(errors.quantile(0.5)), float(errors.quantile(0.9))
    print(f"{what}: relative error of a row {median:.4f} in the median, {most:.4f} for nine in ten")
    assert median <= MEDIAN and most <= MOST, what


@pytest.mark.parametrize("config", ["tiny", "tiny-tp", "mid"])
@torch.inference_mode()
def test_every_layer_gives_the_streams_of_the_reference(config: str, tmp_path: Path) -> None:
    written = write_miniature(tmp_path / "checkpoint", config)
    gpu, cpu = (load_model(tmp_path / "checkpoint", Numerics.trained(), device=device)[0] for device in ("cuda", "cpu"))
    for model in (gpu, cpu):
        model.set_token_map(token_map(written))
    recorded = Recorded(cpu)
    batch = Batch(gpu)
    context = batch.state.context(batch.slots, [LENGTH])
    shared = gpu.backbone.share(context, torch.zeros(LENGTH, dtype=torch.bool, device="cuda"))
    for name, module in modules(gpu).items():
        args, options = recorded.entered[name]
        if name.endswith("engram"):
            found = module(*(arg.cuda() for arg in args))
            assert_rows(found, recorded.left[name], name)
            continue
        lists, candidates = recorded.lists[name]
        shared.lists = None if lists is None else lists.cuda()
        shared.candidates = None if candidates is None else candidates.cuda()
        streams, pre = module(args[0].cuda(), args[1].cuda(), shared, context, **options)
        expected, expected_pre = recorded.left[name]
        assert_rows(streams, expected, name)
        assert_rows(pre, expected_pre, f"{name} pre-mix")
        with pytest.raises(AssertionError):
            assert_rows(args[0], expected, f"{name} left out")

"""What a model computed on the way, under the names of tests/golden/base/README.md sections 4 and 5."""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from quickseek.model.attention import Attention
from quickseek.model.causal_lm import CausalLM
from quickseek.model.layer import Layer
from quickseek.ops.mhc import Mixes
from quickseek.ops.moe import Routing


class Recorder:
    """While entered, keeps inputs and outputs of every sublayer of a model and its drafter.

    ``steps`` has one mapping per forward of the backbone; drafter values go into the last one. Rows come first.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model, self.steps = model, list[dict[str, Tensor]]()
        self._handles: list[Any] = []

    def __enter__(self) -> "Recorder":
        model = self.model
        self._handles.append(model.backbone.register_forward_pre_hook(lambda *_: self.steps.append({})))
        assert model.backbone.norm is not None
        self._on(model.backbone.hashes, lambda _, out: self._keep("engram_hash", torch.stack(out, 1)))
        self._both(model.backbone.norm, "collapsed", "normed")
        for layer in model.backbone.layers:
            assert isinstance(layer, Layer)
            self._layer(layer)
        if model.draft is not None:
            self._both(model.draft.main_proj, "main_hidden", None)
            self._both(model.draft.main_norm, None, "main_x")
            self._both(model.draft.norm, "draft.collapsed", None)
            self._on(model.head, lambda _, out: self._keep("base_logits", out))
            for stage in model.draft.stages:
                assert isinstance(stage, Layer)
                self._layer(stage)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def last(self) -> dict[str, Tensor]:
        """Everything kept since the last forward of the backbone began."""
        return self.steps[-1]

    def joined(self) -> dict[str, Tensor]:
        """The rows of all steps one after the other; lists of unequal width are padded with -1."""
        names = self.steps[0].keys()
        return {name: _stack_rows([step[name] for step in self.steps]) for name in names}

    # ------------------------------------------------------------------------------------------ hooks

    def _keep(self, name: str, value: Tensor) -> None:
        self.steps[-1][name] = value.detach().clone()

    def _on(self, module: nn.Module, then: Any) -> None:
        self._handles.append(module.register_forward_hook(lambda _, args, out: then(args, out)))

    def _both(self, module: nn.Module, into: str | None, out_of: str | None) -> None:
        def then(args: Any, out: Tensor) -> None:
            for name, value in ((into, args[0]), (out_of, out)):
                if name is not None:
                    self._keep(name, value)

        self._on(module, then)

    def _layer(self, layer: Layer) -> None:
        name = layer.prefix
        self._mixes(layer.hc_attn, f"{name}.stream_attn", f"{name}.attn")
        self._mixes(layer.hc_ffn, f"{name}.stream_ffn", f"{name}.ffn")
        self._both(layer.attn, f"{name}.attn.in", f"{name}.attn.out")
        self._both(layer.ffn, f"{name}.ffn.in", f"{name}.ffn.out")
        self._on(layer.attn, lambda args, _: self._lists(layer, args[1]))
        self._on(layer.ffn.gate, lambda _, out: self._routing(name, out))

        def leaving(_: Any, out: tuple[Tensor, Tensor]) -> None:
            self._keep(f"{name}.stream_out", out[0])
            self._keep(f"{name}.pre", out[1])

        self._on(layer, leaving)

    def _mixes(self, module: nn.Module, streams: str, prefix: str) -> None:
        def then(args: Any, mixes: Mixes) -> None:
            entering = args[0]
            if entering.dim() == 2:
                entering = entering.unsqueeze(1).expand(-1, mixes.pre.shape[1], -1)
            self._keep(streams, entering)
            for part in ("pre", "post", "comb"):
                self._keep(f"{prefix}.{part}", getattr(mixes, part))

        self._on(module, then)

    def _lists(self, layer: Layer, shared: Any) -> None:
        attention = layer.attn
        assert isinstance(attention, Attention)
        if attention.reads_global:
            self._keep(f"{layer.prefix}.attn.topk", shared.lists)
        if layer.layer == self.model.config.candidate_source_layer_id:
            self._keep(f"{layer.prefix}.attn.candidates", shared.candidates)

    def _routing(self, prefix: str, routing: Routing) -> None:
        experts, order = torch.sort(routing.experts, -1)
        self._keep(f"{prefix}.router.index", experts)
        self._keep(f"{prefix}.router.weight", routing.weights.gather(1, order))


def _stack_rows(parts: list[Tensor]) -> Tensor:
    width = max(part.shape[-1] for part in parts)
    return torch.cat(
        [torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=-1) for part in parts]
        if parts[0].dtype == torch.int64
        else parts
    )

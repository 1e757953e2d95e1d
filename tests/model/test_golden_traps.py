"""Negative control of the golden tests: each mistake of tests/golden/base/README.md section 7, planted, is noticed.

A mistake is a changed configuration value, a changed model, or a replaced operation. Each row of the table has the
prompt length at which it must show and the change of the logits that the README measured for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import golden_data
from compare import relative_error
from golden_check import Run, compare_case, compare_draft
from golden_data import golden
from quickseek import formats
from quickseek.model import backbone as backbone_module
from quickseek.model.attention import Attention, BlockShared, DraftAttention
from quickseek.model.causal_lm import CausalLM
from quickseek.ops import mhc as mhc_door
from quickseek.ops import moe as moe_door
from quickseek.ops.attention import reference as attention_op
from quickseek.ops.compressor import reference as compressor_op
from quickseek.ops.engram import reference as engram_op
from quickseek.ops.indexer import reference as indexer_op
from quickseek.ops.linear import reference as linear_op
from quickseek.ops.mhc import reference as mhc_op
from quickseek.ops.moe import reference as moe_op
from quickseek.ops.norm_rope import reference as rope_op
from recorder import Recorder

LIMIT = 1e-4
Wrong = Callable[..., Any]


@dataclass(frozen=True)
class Mistake:
    """``length``: prompt at which it shows; ``moves``: change of the logits there according to the README.

    The drafter's are given there as a range, 15 % to 40 % of the base logits.

    ``changes``: configuration values. ``where``, ``name``, ``wrong``: attribute to replace by ``wrong(right)``.
    ``model``: a last change to the loaded model.
    """

    what: str
    length: int
    moves: float
    changes: dict[str, Any] = field(default_factory=dict)
    where: Any = None
    name: str = ""
    wrong: Wrong | None = None
    model: Callable[[CausalLM], None] | None = None

    def plant(self, patch: pytest.MonkeyPatch) -> CausalLM:
        if self.wrong is not None:
            patch.setattr(self.where, self.name, self.wrong(getattr(self.where, self.name)))
        # A model is loaded again where loading itself may be wrong.
        fresh = bool(self.changes or self.model) or self.where is formats
        model = golden_data.altered_base_model(**self.changes) if fresh else golden_data.base_model(golden_data.EXACT)
        if self.model is not None:
            self.model(model)
        return model


# ---------------------------------------------------------------------------------------------- wrong operations


def arguments(change: Callable[..., tuple[Any, ...]]) -> Wrong:
    """The right operation on changed arguments."""
    return lambda right: lambda *args: right(*change(*args))


def result(change: Callable[[Any], Any]) -> Wrong:
    """The right operation with a changed result."""
    return lambda right: lambda *args, **options: change(right(*args, **options))


def own_pre(right: Wrong) -> Wrong:
    """Collapse with the coefficients computed last, which are the sublayer's own."""
    newest: list[Tensor] = []

    def coefficients(*args: Any, **options: Any) -> mhc_op.Mixes:
        mixes: mhc_op.Mixes = right(*args, **options)
        newest[:] = [mixes.pre]
        return mixes

    mhc_op_collapse = mhc_op.collapse
    coefficients.collapse = lambda streams, _: mhc_op_collapse(streams, newest[0])  # type: ignore[attr-defined]
    return coefficients


def half_split(right: Wrong) -> Wrong:
    def wrong(x: Tensor, turn: rope_op.Rotation, inverse: bool) -> Tensor:
        width = 2 * turn.cos.shape[-1]
        pairs = torch.arange(width).view(2, -1).T.flatten()
        order = torch.cat((torch.arange(x.shape[-1] - width), x.shape[-1] - width + pairs))
        return right(x[..., order], turn, inverse)[..., torch.argsort(order)]

    return wrong


def yarn_everywhere(right: Wrong) -> Wrong:
    def wrong(config: Any, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        same_theta = replace(config, compress_rope_theta=config.rope_theta)
        return right(same_theta, dtype, device)[1], right(config, dtype, device)[1]

    return wrong


def window_without_yarn(right: Wrong) -> Wrong:
    def wrong(self: Attention, x: Tensor, turn: rope_op.Rotation) -> tuple[Tensor, Tensor]:
        positions = torch.arange(x.shape[0])
        plain = backbone_module.rotary_frequencies(self.config, x.dtype, x.device)[0]
        return right(self, x, turn)[0], right(self, x, rope_op.rotation(positions, plain))[1]

    return wrong


def last_token_of_group(right: Wrong) -> Wrong:
    def wrong(*args: Any) -> Any:
        shared = right(*args)
        shared.group_turns = dict.fromkeys(shared.group_turns, shared.turns[True])
        return shared

    return wrong


def sinks_times(factor: Callable[[int], float]) -> Wrong:
    return arguments(lambda queries, keys, seen, sinks: (queries, keys, seen, sinks * factor(queries.shape[-1])))


def select_with(**changed: Callable[..., Any]) -> Wrong:
    """The right selection with some arguments replaced by a function of all of them."""
    names = ["queries", "weights", "keys", "rows", "ratio", "top_k", "block_size", "publish_blocks"]
    names += ["candidates", "weight_scale"]

    def wrapper(right: Wrong) -> Wrong:
        def wrong(*args: Any) -> Any:
            given = dict(zip(names, args, strict=True))
            return right(**(given | {name: change(given) for name, change in changed.items()}))

        return wrong

    return wrapper


def restricted_source(right: Wrong) -> Wrong:
    def wrong(*args: Any) -> indexer_op.Selection:
        found: indexer_op.Selection = right(*args)
        if found.candidates is None:
            return found
        return indexer_op.Selection(right(*args[:-3], 0, found.candidates, args[-1]).lists, found.candidates)

    return wrong


def unpinned(right: Wrong) -> Wrong:
    def wrong(scores: Tensor, n_visible: Tensor, block_size: int, count: int) -> Tensor:
        padded = F.pad(scores, (0, -scores.shape[1] % block_size), value=-torch.inf)
        return indexer_op.top_lowest_index(padded.unflatten(1, (-1, block_size)).amax(-1), count)

    return wrong


def without_relu(right: Wrong) -> Wrong:
    def wrong(*args: Any) -> Tensor:
        with mock.patch.object(torch.Tensor, "relu", lambda x: x):
            out: Tensor = right(*args)
            return out

    return wrong


def mean_pooling(right: Wrong) -> Wrong:
    def wrong(raw: Tensor, *args: Any) -> Tensor:
        out: Tensor = right(torch.stack((raw[:, 0], torch.zeros_like(raw[:, 1])), 1), *args)
        return out

    return wrong


def route_with(
    weights_from: Callable[[Tensor, Tensor], Tensor] = lambda scores, _: scores,
    bias: float = 1.0,
    renormalise: bool = True,
) -> Wrong:
    def wrong(x: Tensor, weight: Tensor, added: Tensor, top_k: int, scale: float, *_: Any) -> moe_op.Routing:
        scores = moe_op.router_scores(x @ weight.T)
        experts = torch.sort(scores + bias * added, dim=-1, descending=True, stable=True).indices[:, :top_k]
        chosen = weights_from(scores, added).gather(1, experts)
        return moe_op.Routing(experts, chosen * scale / (chosen.sum(-1, keepdim=True) if renormalise else 1.0))

    return lambda right: wrong


def symmetric_clamp(right: Wrong) -> Wrong:
    def wrong(gate_up: Tensor, limit: float) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate.clamp(-limit, limit)) * up.clamp(-limit, limit)

    return wrong


def linear_gate(right: Wrong) -> Wrong:
    def wrong(*args: Any) -> Tensor:
        with mock.patch.object(torch, "sqrt", lambda x: x):
            out: Tensor = right(*args)
            return out

    return wrong


def joint_norm(right: Wrong) -> Wrong:
    """Query weights rescaled so that the norms of each stream and key are exchanged for those over all of them."""

    def wrong(streams: Tensor, key_value: Tensor, q: Tensor, k: Tensor, dead: Tensor, eps: float) -> Tensor:
        keys = key_value[:, : streams[0].numel()].view_as(streams)
        powers = [part.square().mean(-1) for part in (streams, keys)]
        factor = torch.stack([own / own.mean(-1, keepdim=True) for own in powers]).prod(0).sqrt()
        rows = [
            right(streams[i : i + 1], key_value[i : i + 1], q * factor[i].unsqueeze(1), k, dead[i : i + 1], eps)
            for i in range(streams.shape[0])
        ]
        return torch.cat(rows)

    return wrong


def older_source(model: CausalLM) -> None:
    attention = model.backbone.layers[5].attn
    assert isinstance(attention, Attention)
    attention.kv_source = 2


MISTAKES = [
    Mistake("RMS epsilon 1e-6", 7, 2.1e-1, changes={"rms_norm_eps": 1e-6}),
    Mistake("19 Sinkhorn rounds", 7, 1.6e-4, changes={"hc_sinkhorn_iters": 19}),
    Mistake("comb transposed", 7, 7.7e-2, where=mhc_op, name="mixes_of",
            wrong=result(lambda m: replace(m, comb=m.comb.transpose(1, 2)))),
    Mistake("post without the factor 2", 7, 4.0e-1, where=mhc_op, name="mixes_of",
            wrong=result(lambda m: replace(m, post=m.post / 2))),
    Mistake("no inverse RoPE", 7, 2.0e-1, where=rope_op, name="apply_rope",
            wrong=lambda right: lambda x, turn, inverse: x if inverse else right(x, turn, inverse)),
    Mistake("half-split RoPE", 7, 2.1e-1, where=rope_op, name="apply_rope", wrong=half_split),
    Mistake("no YaRN", 7, 5.5e-2, changes={"rope_factor": 1.0}),
    Mistake("YaRN also on ratio-0 layers", 7, 3.0e-2, where=backbone_module, name="rotary_frequencies",
            wrong=yarn_everywhere),
    Mistake("theta 10000 for all window KV", 7, 4.2e-2, where=Attention, name="latents", wrong=window_without_yarn),
    Mistake("rotation of the last token of a group", 7, 2.2e-2, where=backbone_module.DeepseekV4Model, name="share",
            wrong=last_token_of_group),
    Mistake("no sink", 7, 4.4e-1, where=attention_op, name="sink_softmax",
            wrong=arguments(lambda q, k, seen, sinks: (q, k, seen, torch.full_like(sinks, -torch.inf)))),
    Mistake("sink times the softmax scale", 7, 1.8e-1, where=attention_op, name="sink_softmax",
            wrong=sinks_times(lambda width: width**-0.5)),
    Mistake("window one shorter", 64, 2.1e-1, changes={"sliding_window": 15}),
    Mistake("top-k one smaller", 64, 1.2e-1, changes={"index_topk": 15}),
    Mistake("all visible groups attended", 64, 2.2e-1, where=indexer_op, name="select",
            wrong=select_with(top_k=lambda given: 256, candidates=lambda given: None)),
    Mistake("re-index layer ignores the candidates", 64, 1.2e-1, where=indexer_op, name="select",
            wrong=select_with(candidates=lambda given: None)),
    Mistake("newest candidate block not pinned", 64, 9.8e-2, where=indexer_op, name="candidate_blocks",
            wrong=unpinned),
    Mistake("candidate source restricts itself", 64, 1.3e-1, where=indexer_op, name="select",
            wrong=restricted_source),
    Mistake("re-index layer reuses the source list", 64, 1.1e-1, changes={"index_source_layer_ids": (2, 4, 6)}),
    Mistake("no relu in the indexer", 64, 1.6e-1, where=indexer_op, name="scores", wrong=without_relu),
    Mistake("no per-head index weights", 64, 2.6e-1, where=indexer_op, name="select",
            wrong=select_with(weights=lambda given: torch.ones_like(given["weights"]))),
    Mistake("own group invisible", 7, 2.4e-1, where=indexer_op, name="select",
            wrong=select_with(rows=lambda given: replace(given["rows"], positions=given["rows"].positions - 1))),
    Mistake("mean pooling", 7, 1.9e-1, where=compressor_op, name="pool", wrong=mean_pooling),
    Mistake("per-head norm on q", 7, 2.5e-1, where=Attention, name="queries",
            wrong=result(lambda q: q * q.square().mean(-1, keepdim=True).rsqrt())),
    Mistake("wo_a groups in the wrong order", 7, 7.8e-1, where=linear_op, name="grouped_linear",
            wrong=arguments(lambda x, weight: (x.flip(1), weight))),
    Mistake("router weights from biased scores", 7, 1.0e-1, where=moe_op, name="route",
            wrong=route_with(weights_from=lambda scores, added: scores + added)),
    Mistake("router bias ignored", 7, 1.6e-1, where=moe_op, name="route", wrong=route_with(bias=0.0)),
    Mistake("router weights not renormalised", 7, 9.6e-1, where=moe_op, name="route",
            wrong=route_with(renormalise=False)),
    Mistake("sigmoid router", 7, 2.2e-1, where=moe_op, name="router_scores", wrong=lambda right: torch.sigmoid),
    Mistake("route scale on the shared expert", 7, 3.0e-1, where=moe_op, name="finalize",
            wrong=arguments(lambda routed, shared: (routed, 1.5 * shared))),
    Mistake("no SwiGLU clamp", 7, 8.5e-1, changes={"swiglu_limit": 1e9}),
    Mistake("no clamp in the shared expert", 7, 6.4e-1, where=moe_door, name="shared_expert",
            wrong=lambda right: lambda x, w13, w2, limit: right(x, w13, w2, limit=1e9)),
    Mistake("gate clamped on both sides", 7, 9.1e-2, where=moe_op, name="swiglu", wrong=symmetric_clamp),
    Mistake("FP4 nibbles swapped", 7, 5.3e-1, where=formats, name="unpack_nibbles",
            wrong=result(lambda codes: codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))),
    Mistake("no Engram", 7, 2.2e-1, where=engram_op, name="inject", wrong=lambda right: lambda streams, *_: streams),
    Mistake("Engram gate without the square root", 7, 7.1e-3, where=engram_op, name="inject", wrong=linear_gate),
    Mistake("hash of raw token ids", 7, 2.6e-1, model=lambda model: model.set_token_map(torch.arange(512))),
    Mistake("n-gram padding with 0", 7, 3.1e-1, changes={"engram_pad_token_id": 0}),
    Mistake("Engram norm over all streams", 7, 1.4e-3, where=engram_op, name="inject", wrong=joint_norm),
    Mistake("a reuse layer reads an older source", 7, 1.8e-1, model=older_source),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_planted_mistake_is_noticed(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    want = golden(f"exact.len{mistake.length}")
    run = Run(mistake.plant(monkeypatch), want["ids"])
    moved = relative_error(run.logits, want["logits"])
    print(f"{mistake.what}: logits move by {moved:.1e}, README {mistake.moves:.1e}")
    assert moved > LIMIT and 0.7 * mistake.moves < moved < 1.4 * mistake.moves
    with pytest.raises(AssertionError):
        compare_case(run, want, LIMIT)


def test_pre_of_the_own_sublayer_is_noticed(exact_model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = own_pre(mhc_door.coefficients)
    monkeypatch.setattr(mhc_door, "coefficients", wrong)
    monkeypatch.setattr(mhc_op, "collapse", wrong.collapse)  # type: ignore[attr-defined]
    want = golden("exact.len7")
    run = Run(exact_model, want["ids"])
    assert relative_error(run.logits, want["logits"]) > LIMIT
    with pytest.raises(AssertionError):
        compare_case(run, want, LIMIT)


def test_the_comparison_passes_without_a_mistake(exact_model: CausalLM) -> None:
    for length in (7, 64):
        compare_case(Run(exact_model, golden(f"exact.len{length}")["ids"]), golden(f"exact.len{length}"), LIMIT)


# ---------------------------------------------------------------------------------------------- the drafter


def causal_block(right: Wrong) -> Wrong:
    def wrong(queries: Tensor, block_kv: Tensor, *args: Any) -> Tensor:
        *others, turn, queries_last = args
        numbers, rows = torch.arange(queries.shape[:2].numel()).view(queries.shape[:2]), []
        for i in range(1, queries.shape[1] + 1):
            seen = right(queries[:, :i], block_kv[:, :i], *others, turn[numbers[:, :i].flatten()], queries_last)
            rows.append(seen[:, -1:])
        return torch.cat(rows, 1)

    return wrong


def draft_forward(change: Callable[[DraftAttention, BlockShared], BlockShared]) -> Wrong:
    def wrapper(right: Wrong) -> Wrong:
        return lambda self, x, shared, context: right(self, x, change(self, shared), context)

    return wrapper


def one_position_later(attention: DraftAttention, shared: BlockShared) -> BlockShared:
    positions = (shared.last.unsqueeze(1) + 2 + torch.arange(shared.size)).flatten()
    plain = backbone_module.rotary_frequencies(attention.config, torch.float32, positions.device)[0]
    return replace(shared, turns={False: rope_op.rotation(positions, plain)})


def layer_outputs(model: CausalLM) -> None:
    model.backbone.aux_hidden_state_layers = tuple(i + 1 for i in model.config.dspark_target_layer_ids)


DRAFT_MISTAKES = [
    Mistake("causal block", 64, 0.25, where=attention_op, name="block_attention", wrong=causal_block),
    Mistake("context window one shorter", 64, 0.25, where=attention_op, name="block_attention",
            wrong=arguments(lambda *args: (*args[:6], args[6] - 1, *args[7:]))),
    Mistake("positions off by one", 64, 0.25, where=DraftAttention, name="forward",
            wrong=draft_forward(one_position_later)),
    Mistake("newest context row missing", 64, 0.25, where=DraftAttention, name="forward",
            wrong=draft_forward(lambda _, shared: replace(shared, last=shared.last - 1))),
    Mistake("layer outputs instead of inputs", 64, 0.25, model=layer_outputs),
]  # fmt: skip


@pytest.mark.parametrize("mistake", DRAFT_MISTAKES, ids=lambda mistake: mistake.what)
def test_a_planted_mistake_of_the_drafter_is_noticed(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    want = golden("exact.draft64")
    run = Run(mistake.plant(monkeypatch), golden("exact.len64")["ids"])
    with Recorder(run.batch.model) as recorder:
        recorder.steps.append({})
        run.batch.draft([int(want["anchor"])])
    moved = relative_error(recorder.last["base_logits"], want["base_logits"])
    print(f"{mistake.what}: base logits move by {moved:.1e}")
    assert mistake.moves / 2 < moved < 2 * mistake.moves
    with pytest.raises(AssertionError):
        compare_draft(run, want, LIMIT)

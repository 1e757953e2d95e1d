"""The golden checkpoint in trained mode: end to end against the released program, and one layer at a time.

No two programs agree closely end to end (tests/golden/base/README.md section 6): a BF16 rounding moves values to other
bins, then to other experts and positions. The tables hold what was measured here, with torch 2.13.0 on a CPU in one
thread, so that drift is seen; the tests allow 1.5 times that, and never more than the README does.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import compare
import golden_data
from golden_check import Run
from golden_data import LENGTHS, RELEASED, golden
from model_driver import Batch
from quickseek.model.causal_lm import CausalLM
from quickseek.model.layer import Layer
from quickseek.numerics import Numerics
from quickseek.ops import linear as linear_op
from quickseek.ops.indexer import Selection
from quickseek.ops.moe import Routing
from quickseek.ops.moe.reference import router_scores
from recorder import Recorder

LOGITS_RMS = {1: 0.044, 7: 0.071, 64: 0.091, 200: 0.128}
"""RMS error of the logits against ``released.len*``, routing weight before the down projection as there."""
LAYER_RMS = {"attn.out": 0.110, "stream_ffn": 0.0154, "ffn.out": 0.0557}
"""Largest RMS error over the layers, each fed the float32 inputs of ``exact.len64`` and its selections."""
README_RMS, README_COSINE = 0.2, 0.95


def rms_error(actual: Tensor, expected: Tensor) -> float:
    wide = expected.to(torch.float64)
    return float((actual.to(torch.float64) - wide).norm() / wide.norm())


def overlap(run: Run, want: dict[str, Tensor]) -> float:
    """Mean share of the golden selections that the run has too."""
    shares = []
    for name, expected in want.items():
        if name.endswith("topk") and expected.shape[1]:
            pairs = zip(compare.member_sets(run.kept[name]), compare.member_sets(expected), strict=True)
            shares += [len(ours & theirs) / len(theirs) for ours, theirs in pairs if theirs]
    return sum(shares) / len(shares) if shares else 1.0


@pytest.mark.parametrize("length", LENGTHS)
def test_trained_mode_is_as_close_to_the_released_program_as_two_summation_orders(
    released_model: CausalLM, length: int
) -> None:
    want = dict(golden(f"released.len{length}"))
    run = Run(released_model, want["ids"])
    cosine = torch.nn.functional.cosine_similarity(run.logits.double(), want["logits"].double(), dim=-1)
    error, shared = rms_error(run.logits, want["logits"]), overlap(run, want)
    top = float((run.logits.argmax(1) == want["logits"].argmax(1)).double().mean())
    print(
        f"released.len{length}: RMS {error:.3f}, cosine min {float(cosine.min()):.4f}, top-1 {top:.1%}, "
        f"selections {shared:.1%}"
    )
    assert float((cosine > README_COSINE).double().mean()) >= 0.9
    assert error < min(README_RMS, 1.5 * LOGITS_RMS[length])
    assert shared > 0.8 and top >= 0.7
    for name, expected in want.items():
        if name.endswith("stream_out"):
            assert rms_error(run.kept[name][want["stream_positions"]], expected) < 0.15, name


def test_a_missing_clamp_is_far_beyond_the_drift() -> None:
    want = golden("released.len7")
    wrong = golden_data.altered_base_model(RELEASED, swiglu_limit=1e9)
    assert rms_error(Run(wrong, want["ids"]).logits, want["logits"]) > README_RMS


def test_two_summation_orders_of_bf16_stay_within_the_recorded_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = golden_data.base_model(Numerics.trained()), golden("exact.len64")["ids"]
    first = Run(model, ids).logits
    right = F.linear
    monkeypatch.setattr(F, "linear", lambda x, weight: right(x.flip(-1), weight.flip(-1)))
    found = compare.assert_model(Run(model, ids).logits, first, golden_data.BF16_ORDERS)
    print(f"two summation orders of every product: {found}")
    assert found.p99 > golden_data.BF16_ORDERS.p99 / 4, "the bound is not far above what it was measured from"
    # A list one shorter moves the logits less than the order of summation does: only layers one at a time show it.
    wrong = golden_data.altered_base_model(Numerics.trained(), swiglu_limit=2.0)
    with pytest.raises(AssertionError, match="distance"):
        compare.assert_model(Run(wrong, ids).logits, first, golden_data.BF16_ORDERS)


def test_packed_caches_hold_exactly_the_fake_quantised_values(released_model: CausalLM) -> None:
    ids = golden("released.len64")["ids"]
    plain = golden_data.base_model(replace(RELEASED, packed_caches=False))
    sizes = (40, 1, 1, 22)
    compare.assert_bits(Batch(released_model).chunks(ids, sizes), Batch(plain).chunks(ids, sizes))
    unquantised = golden_data.base_model(replace(RELEASED, packed_caches=False, quantize_caches=False))
    with pytest.raises(AssertionError, match="differ in bits"):
        compare.assert_bits(Batch(unquantised).chunks(ids, sizes), Batch(plain).chunks(ids, sizes))


# ---------------------------------------------------------------------------------------------- one layer at a time


def one_layer(model: CausalLM, number: int, *, force: bool) -> dict[str, Tensor]:
    """What layer ``number`` computes from the inputs of exact.len64; ``force``: with its selections and experts."""
    want, config = golden("exact.len64"), model.config
    batch = Batch(model)
    context = batch.state.context(batch.slots, [64])
    shared = model.backbone.share(context, torch.zeros(64, dtype=torch.bool))
    layer = model.backbone.layers[number]
    assert isinstance(layer, Layer)
    source = config.kv_source(number)
    if source is not None and source != number:
        for cache, key in (("global_kv", "compressed_kv"), ("index_k", "index_k")):
            values = want[f"layers.{source}.attn.{key}"].to(model.numerics.dtype)
            rows = torch.arange(values.shape[0])
            context.view(f"layers.{source}.{cache}").write(torch.zeros_like(rows), rows, values)
        shared.lists = want[f"layers.{number}.attn.topk"].to(torch.int64)
        if config.reads_candidates(number):
            inside = want[f"layers.{config.candidate_source_layer_id}.attn.candidates"] > 0
            blocks = inside.unflatten(1, (-1, config.candidate_block_size)).any(-1)
            shared.candidates = torch.where(blocks, torch.arange(blocks.shape[1]), -1)
    handles = _force(layer, want) if force else []
    pre = want[f"layers.{number - 1}.ffn.pre"] if number else torch.eye(4)[:1].expand(64, -1)
    with Recorder(model) as recorder:
        recorder.steps.append({})
        layer(want[f"layers.{number}.stream_attn"].to(model.numerics.dtype), pre, shared, context)
    for handle in handles:
        handle.remove()
    return recorder.last


def _force(layer: Layer, want: dict[str, Tensor]) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that put the golden lists and experts in place of the layer's own."""
    name = layer.prefix

    def experts(gate: torch.nn.Module, args: tuple[Tensor, ...], _: Routing) -> Routing:
        chosen = want[f"{name}.router.index"].to(torch.int64)
        scores = router_scores(linear_op.linear_wide(args[0], gate.weight)).gather(1, chosen)
        return Routing(chosen, scores / scores.sum(-1, keepdim=True) * layer.ffn.config.routed_scaling_factor)

    handles = [layer.ffn.gate.register_forward_hook(experts)]
    if layer.attn.indexer is not None:
        lists = want[f"{name}.attn.topk"].to(torch.int64)
        handles.append(layer.attn.indexer.register_forward_hook(lambda *args: Selection(lists, args[-1].candidates)))
    return handles


@pytest.mark.parametrize("number", range(9))
def test_one_layer_fed_with_golden_inputs_is_exact_in_float32(exact_model: CausalLM, number: int) -> None:
    want = golden("exact.len64")
    kept = one_layer(exact_model, number, force=False)
    for part in ("attn.in", "attn.out", "stream_ffn", "ffn.in", "ffn.out"):
        name = f"layers.{number}.{part}"
        compare.assert_relative(kept[name][want["positions"]], want[name], 1e-5, name)


@pytest.mark.parametrize("place", ["before", "after"])
def test_one_layer_fed_with_golden_inputs_stays_within_the_quantisation_noise(place: str) -> None:
    want = golden("exact.len64")
    model = golden_data.base_model(replace(Numerics.trained(), routed_weight=place))
    worst = dict.fromkeys(LAYER_RMS, 0.0)
    for number in range(9):
        kept = one_layer(model, number, force=True)
        for part in worst:
            name = f"layers.{number}.{part}"
            worst[part] = max(worst[part], rms_error(kept[name][want["positions"]], want[name]))
    print(f"one layer at a time, routing weight {place} the down projection: {worst}")
    for part, measured in LAYER_RMS.items():
        assert worst[part] < 1.5 * measured, f"{part}: RMS error {worst[part]:.3f}, measured {measured:.3f}"


def test_a_wrong_clamp_is_noticed_in_one_layer_of_trained_mode() -> None:
    want = golden("exact.len64")
    kept = one_layer(golden_data.altered_base_model(RELEASED, swiglu_limit=2.0), 3, force=True)
    assert rms_error(kept["layers.3.ffn.out"][want["positions"]], want["layers.3.ffn.out"]) > 2 * LAYER_RMS["ffn.out"]

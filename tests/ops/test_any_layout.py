"""Any argument of a door may lie in memory with gaps: kernels give the same bits, or refuse it before they launch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import AttentionCase, BlockCase
from drawn_memory import assert_same, both, by_interpreter, tensors_of
from indexer_cases import IndexerCase
from linear_cases import quantized, weight_of
from moe_cases import drawn, packed_experts, routing_of
from op_cases import normal
from quickseek.ops import attention, compressor, engram, head, indexer, linear, mhc, moe, norm_rope, quantize, sampling
from quickseek.ops.cache import CacheView, GlobalKvCodec, IndexKeyCodec, PlainCodec, WindowCodec
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows

pytestmark = by_interpreter
BF16, FP32 = torch.bfloat16, torch.float32
ROWS = StepRows.build([3, 0], [3, 2])
COUNT = len(ROWS.positions)


@dataclass(frozen=True)
class Case:
    """A call, its arguments, and how many of the first ones it writes to; not ``kept``: what it writes is scratch."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    writes: int = 0
    kept: bool = True


def x(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed, dtype=dtype)


def cache(codec: Any, rows: int, blocks: int = 1, seed: int = 0) -> CacheView:
    """A cache of two requests."""
    storage = codec.encode(100 * x(2 * blocks + 1, rows, codec.width, dtype=FP32, seed=seed))
    return CacheView(storage, torch.arange(2 * blocks, 0, -1).view(2, blocks), codec)


def turn(rows: int, pairs: int) -> Rotation:
    angles = x(rows, pairs, dtype=FP32, seed=9)
    return Rotation(angles.cos(), angles.sin())


def row_cases() -> dict[str, Case]:
    mixes = mhc.Mixes(x(3, 4, dtype=FP32), x(3, 4, dtype=FP32), x(3, 4, 4, dtype=FP32))
    parameters = x(24, dtype=FP32)
    return {
        "quantize_a8": Case(quantize.quantize_a8, (x(3, 64),)),
        "fake_quantize_q4k": Case(quantize.fake_quantize_q4k, (x(2, 3, 48),)),
        "swizzle_scales": Case(quantize.swizzle_scales, (x(5, 3).view(torch.uint8).contiguous(),)),
        "rms_norm": Case(lambda x, weight: norm_rope.rms_norm(x, weight, 1e-6), (x(3, 40), x(40))),
        "rotation": Case(norm_rope.rotation, (torch.tensor([7, 1, 30]), x(4, dtype=FP32))),
        "apply_rope": Case(norm_rope.apply_rope, (x(3, 2, 16), turn(3, 4))),
        "apply_rope over": Case(
            lambda x, turn: norm_rope.apply_rope(x, turn, overwrite=True), (x(3, 2, 16), turn(3, 4)), 1, kept=False
        ),
        "normalised_latents": Case(
            lambda x, q, kv, turn: norm_rope.normalised_latents(x, q, kv, 1e-6, turn, quantise=True),
            (x(3, 104), x(40), x(64), turn(3, 4)),
        ),
        "normalised_kv": Case(
            lambda x, kv, turn: norm_rope.normalised_kv(x, kv, 1e-6, turn, quantise=True), (x(3, 64), x(64), turn(3, 4))
        ),
        "mhc coefficients": Case(
            lambda streams, fn, scale, base: mhc.coefficients(
                streams, fn, scale, base, norm_eps=1e-6, hc_eps=1e-6, iterations=3, hc_mult=4
            ),
            (x(3, 4, 8), x(24, 32, dtype=FP32), parameters[:3].clone(), parameters),
        ),
        "mhc post": Case(mhc.post, (x(3, 4, 8), x(3, 8), mixes)),
        "mhc collapse": Case(mhc.collapse, (x(3, 4, 8), mixes.pre)),
        "mhc stream_mean": Case(mhc.stream_mean, (x(3, 4, 8),)),
        "confidence": Case(head.confidence, (x(3, 40), x(3, 5), x(1, 45))),
    }


def cache_cases() -> dict[str, Case]:
    requests, places = torch.tensor([0, 1, 1, 0]), torch.tensor([3, 5, -1, 0])
    open_rows = cache(PlainCodec(24, FP32), 9)
    constants = engram.HashConstants(torch.tensor([3, 5, 7]), torch.tensor([11, 13, 17, 19]), torch.arange(4) * 20, 2)
    table = linear.Fp8Weight(x(9, 32).to(torch.float8_e4m3fn), torch.arange(120, 129).to(torch.uint8).view(9, 1))
    ids = torch.arange(COUNT) * 7
    cases = {
        "pool": Case(lambda raw, ring: compressor.pool(raw, ring, ROWS, 2), (x(COUNT, 2, 12, dtype=FP32), open_rows)),
        "pooled_latents": Case(
            lambda ring, raw, weight: compressor.pooled_latents(raw, ring, ROWS, 2, weight, 1e-6, BF16),
            (open_rows, x(COUNT, 2, 12, dtype=FP32), x(12)), 1,
        ),
        "write_groups": Case(
            lambda kv, index, latents, keys, weight, turn, keep: compressor.write_groups(
                latents, keys, weight, 1e-6, turn, ROWS, 2, kv, index, keep_from=keep
            ),
            (
                cache(GlobalKvCodec(48), 2, 2), cache(IndexKeyCodec(32), 2, 2), x(COUNT, 48), x(COUNT, 32), x(32),
                turn(COUNT, 4), torch.tensor([4, 0]),
            ), 2,
        ),
        "token_windows": Case(
            lambda ids, ring: engram.token_windows(ids, ring, ROWS, 2), (ids, cache(PlainCodec(1, torch.int32), 5))
        ),
        "given ids": Case(
            lambda ids, given: engram.token_windows(ids, None, ROWS, 2, given), (ids, torch.tensor([[5, 6], [-1, -1]]))
        ),
        "hash_ngrams": Case(engram.hash_ngrams, (torch.tensor([[5, 6, 7], [8, -1, 9]]), constants)),
        "gather_rows": Case(
            lambda table, rows: engram.gather_rows(table, rows, BF16), (table, torch.tensor([[5, 6], [8, 1]]))
        ),
        "inject": Case(
            lambda streams, memory, q, k, dead: engram.inject(streams, memory, q, k, dead, 1e-6),
            (x(3, 2, 8), x(3, 24), x(2, 8), x(2, 8, seed=1), torch.tensor([False, True, False])),
        ),
    }  # fmt: skip
    for codec in (WindowCodec(32), GlobalKvCodec(48), IndexKeyCodec(32), PlainCodec(5, torch.int32)):
        values = (10 * x(4, codec.width)).to(torch.int32 if codec.kind == "plain" else BF16)
        arguments = (cache(codec, 3, 2), requests, places, values)
        cases[f"write {codec.kind}"] = Case(CacheView.write, arguments, 1)
        cases[f"keep {codec.kind}"] = Case(CacheView.keep, (*arguments[:2], places, torch.tensor([5, 6]), values), 1)
        dtype = values.dtype
        cases[f"read {codec.kind}"] = Case(lambda c, r, p, dtype=dtype: c.gather(r, p, dtype), arguments[:3])
    return cases


def list_cases() -> dict[str, Case]:
    cases = {}
    for packed in (True, False):
        case = AttentionCase.build([3, 0], [3, 2], heads=2, width=32, window=5, listed=6, written=9, packed=packed)
        block = BlockCase.build([4, 9], 2, heads=2, width=32, window=5, packed=packed)
        selected = IndexerCase.build([20, 9], [2, 1], ratio=2, heads=3, packed=packed)
        cases[f"sparse_attention packed={packed}"] = Case(
            lambda q, kv, ring, sinks, oldest, pages, lists: attention.sparse_attention(
                q, kv, ring, ROWS, sinks, window_size=5, oldest=oldest, global_kv=pages, lists=lists
            ),
            (case.queries, case.step_kv, case.window, case.sinks, torch.tensor([2, 0]), case.pages, case.lists),
        )
        cases[f"block_attention packed={packed}"] = Case(
            lambda *a: attention.block_attention(*a, window_size=5),
            (block.queries, block.block_kv, block.window, block.requests, block.last, block.sinks),
        )
        for name, candidates in (("", None), (" of candidates", torch.tensor([[1, 0], [2, -1], [0, 1]]))):
            cases[f"select packed={packed}{name}"] = Case(
                lambda q, w, keys, candidates, rows=selected.rows: indexer.select(
                    q, w, keys, rows, ratio=2, top_k=3, block_size=2, publish_blocks=2, candidates=candidates
                ),
                (selected.queries, selected.weights, selected.keys, candidates),
            )
    return cases


def product_cases() -> dict[str, Case]:
    cases = {}
    for kind in ("bf16", "fp8", "fp4"):
        weight = weight_of(kind, 40, 64)
        for rows in (3, 20):
            cases[f"linear {kind} {rows}"] = Case(linear.linear, (x(rows, 64), weight))
            if kind != "bf16":
                cases[f"linear of codes {kind} {rows}"] = Case(linear.linear, (quantized(x(rows, 64)), weight))
        cases[f"grouped {kind}"] = Case(linear.grouped_linear, (x(3, 2, 64), weight))
    experts, routing = packed_experts(4, 64, 32), routing_of(drawn(3, 4, 2))
    routed = moe.UnfinalizedMoE(x(6, 64), routing.weights, torch.tensor([[0, 5], [2, -1], [4, 1]], dtype=torch.int32))
    cases |= {
        "linear_wide": Case(linear.linear_wide, (x(3, 40), x(7, 40))),
        "linear_wide of FP32": Case(linear.linear_wide, (x(3, 40, dtype=FP32), x(7, 40))),
        "route": Case(
            lambda x, weight, bias, image_bias, image_rows: moe.route(
                x, weight, bias, top_k=2, scale=1.5, image_bias=image_bias, image_rows=image_rows
            ),
            (x(3, 64), x(5, 64), x(5, dtype=FP32), x(5, dtype=FP32, seed=3), torch.tensor([True, False, True])),
        ),
        "routed_experts": Case(lambda *a: moe.routed_experts(*a, limit=5.0), (x(3, 64), routing, experts)),
        "shared_expert": Case(
            lambda *a: moe.shared_expert(*a, limit=5.0), (x(3, 64), weight_of("fp8", 64, 64), weight_of("fp8", 64, 32))
        ),
        "finalize": Case(moe.finalize, (routed, x(3, 64))),
    }
    return cases


def sampling_cases() -> dict[str, Case]:
    logits, seeds = x(2, 20, dtype=FP32), torch.arange(2) * 10**12
    temperature, top_p, min_p = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, 0.6], [0.9, 0.5], [0.02, 0.0]))
    top_k, counts = torch.tensor([9, 5]), torch.tensor([3, 2])
    target = torch.softmax(x(2, 4, 20, dtype=torch.float64), -1)
    drafts = target.argmax(-1)[:, :3].contiguous()
    return {
        "probabilities": Case(
            lambda logits, t, p, k, m: sampling.probabilities(logits, t, p, top_k=k, min_p=m),
            (logits, temperature, top_p, top_k, min_p),
        ),
        "sample": Case(
            lambda x, t, p, s, q: sampling.sample(x, t, p, s, q, 0), (logits, temperature, top_p, seeds, seeds + 1)
        ),
        "greedy": Case(sampling.greedy, (logits,)),
        "valid": Case(sampling.valid, (logits,)),
        "log_probabilities": Case(lambda x, tokens: sampling.log_probabilities(x, tokens, 5), (logits, top_k)),
        "draft_distribution": Case(sampling.draft_distribution, (logits, temperature, seeds, seeds + 1)),
        "verify": Case(
            sampling.verify, (target, drafts, target[:, :3].flip(-1).contiguous(), seeds, seeds + 2, counts)
        ),
        "match": Case(sampling.match, (target.argmax(-1), drafts, counts)),
    }


CASES = row_cases() | cache_cases() | list_cases() | product_cases() | sampling_cases()


def check(case: Case) -> None:
    """Bits of every result and of what is written, with each argument in each layout, against contiguous ones."""

    def results(layout: tuple[int, str]) -> list[Tensor] | None:
        ran = both(case.call, case.arguments, layout, case.writes)
        return None if ran is None else tensors_of((ran.found, ran.arguments[: case.writes if case.kept else 0]))

    expected = results((len(tensors_of(case.arguments)), "between"))
    assert expected
    for number, argument in enumerate(tensors_of(case.arguments)):
        for layout in ("rows", "turned") if argument.dim() > 1 else ("rows",):
            for found, wanted in zip(results((number, layout)) or expected, expected, strict=True):
                assert_same(found, wanted, f"argument {number}, {layout}")


@pytest.mark.parametrize("name", CASES)
def test_any_argument_may_lie_in_gaps_or_is_refused(name: str) -> None:
    check(CASES[name])


def test_a_kernel_that_takes_gaps_for_values_is_noticed() -> None:
    def trusting(x: Tensor) -> Tensor:
        return torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())

    with pytest.raises(AssertionError, match="argument 0, rows"):
        check(Case(trusting, (x(3, 5),)))

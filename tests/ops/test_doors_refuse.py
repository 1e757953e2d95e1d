"""Doors refuse what does not fit before anything is launched: kernels trust the shapes that reach them."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from op_cases import filled_ring, normal
from quickseek.ops import attention, compressor, engram, forms, head, indexer, linear, mhc, moe, quantize, sampling
from quickseek.ops.cache import CacheView
from quickseek.ops.engram import HashConstants
from quickseek.ops.linear import Fp4Weight, Fp8Weight, QuantizedRows
from quickseek.ops.mhc import Mixes
from quickseek.ops.moe import ExpertWeights, Routing, UnfinalizedMoE
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows

ROWS, N, HIDDEN, EXPERTS = 3, 2, 8, 4
STEP = StepRows.build([0], [ROWS])
Fits = dict[str, torch.Tensor]


def ring() -> CacheView:
    return filled_ring([normal(ROWS, HIDDEN)], [0], 16)


def post(post: torch.Tensor, comb: torch.Tensor) -> object:
    return mhc.post(normal(ROWS, N, HIDDEN), normal(ROWS, HIDDEN), Mixes(pre=post, post=post, comb=comb))


def attend(queries: torch.Tensor, lists: torch.Tensor, oldest: torch.Tensor) -> object:
    kv, count = ring(), queries.shape[0]
    return attention.sparse_attention(
        queries, normal(count, HIDDEN), kv, STEP, normal(2), window_size=4, oldest=oldest, global_kv=kv, lists=lists
    )


def select(candidates: torch.Tensor) -> object:
    options = {"ratio": 1, "top_k": 2, "block_size": 2}
    return indexer.select(normal(ROWS, 2, HIDDEN), normal(ROWS, 2), ring(), STEP, candidates=candidates, **options)


def route(image_bias: torch.Tensor, image_rows: torch.Tensor) -> object:
    options = {"top_k": 2, "scale": 1.0, "image_bias": image_bias, "image_rows": image_rows}
    return moe.route(normal(ROWS, HIDDEN), normal(EXPERTS, HIDDEN), normal(EXPERTS), **options)  # type: ignore[arg-type]


def experts(experts: torch.Tensor, weights: torch.Tensor) -> object:
    matrices = ExpertWeights(normal(EXPERTS, 2 * HIDDEN, HIDDEN), normal(EXPERTS, HIDDEN, HIDDEN))
    return moe.routed_experts(normal(ROWS, HIDDEN), Routing(experts, weights), matrices, limit=10.0)


def finalize(rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> object:
    return moe.finalize(UnfinalizedMoE(rows, weights, index), normal(ROWS, HIDDEN))


def inject(k_weight: torch.Tensor, dead: torch.Tensor) -> object:
    streams, key_value = normal(ROWS, N, HIDDEN), normal(ROWS, (N + 1) * HIDDEN)
    return engram.inject(streams, key_value, normal(N, HIDDEN), k_weight, dead, 1e-6)


def attend_blocks(queries: torch.Tensor, last: torch.Tensor, sinks: torch.Tensor) -> object:
    kv, requests = normal(*queries.shape[:2], HIDDEN), integers(1)
    return attention.block_attention(queries, kv, ring(), requests, last, sinks, window_size=4)


def hash_ngrams(windows: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor) -> object:
    return engram.hash_ngrams(windows, HashConstants(integers(3) + 1, primes + 7, offsets, 0))


def write_groups(latents: torch.Tensor, keys: torch.Tensor, sin: torch.Tensor, keep_from: torch.Tensor) -> object:
    """With caches as wide as what is written, so that nothing but the groups can be wrong."""
    kv, index = filled_ring([latents], [0], 16), filled_ring([keys], [0], 16)
    turn, weight = Rotation(torch.ones(ROWS, 2), sin), normal(keys.shape[1])
    compressor.write_groups(
        latents, keys, weight, 1e-6, turn, STEP, 1, kv, index, keep_from=keep_from, fake_quantise=True
    )
    return None


def bytes_(*shape: int) -> torch.Tensor:
    return torch.full(shape, 127, dtype=torch.uint8)


def blocks(codes: torch.Tensor, scales: torch.Tensor) -> object:
    return linear.linear(normal(ROWS, codes.shape[1]), Fp8Weight(codes.view(torch.float8_e4m3fn), scales))


def groups_of_blocks(scales: torch.Tensor) -> object:
    return linear.grouped_linear(normal(ROWS, 2, 64), Fp8Weight(bytes_(70, 64).view(torch.float8_e4m3fn), scales))


def packed_pairs(scales: torch.Tensor) -> object:
    return linear.linear(normal(ROWS, 64), Fp4Weight(bytes_(33, 32), scales))


def plain(weight: torch.Tensor) -> object:
    return linear.linear(normal(ROWS, 8), weight)


def quantised(x: torch.Tensor) -> object:
    """Rows of codes whose number of columns fits the weight's; its scales are for 32 columns each."""
    inner = x.shape[1]
    weight = Fp8Weight(bytes_(5, inner).view(torch.float8_e4m3fn), bytes_(1, -(-inner // 32)))
    return linear.linear(QuantizedRows(x.view(torch.float8_e4m3fn), bytes_(ROWS, inner // 32)), weight)


def confidence(markov: torch.Tensor) -> object:
    return head.confidence(normal(ROWS, HIDDEN), markov, normal(1, HIDDEN + markov.shape[1]))


def token_windows(ids: torch.Tensor) -> object:
    return engram.token_windows(ids, None, STEP, 2, integers(1, 2))


def gather(rows: torch.Tensor, scales: torch.Tensor) -> object:
    table = Fp8Weight(bytes_(4, 64).view(torch.float8_e4m3fn), scales)
    return engram.gather_rows(table, rows, torch.float32)


def sample(seeds: torch.Tensor, positions: torch.Tensor) -> object:
    return sampling.sample(normal(ROWS, 9), torch.ones(ROWS), torch.ones(ROWS), seeds, positions, 0)


def write(requests: torch.Tensor) -> None:
    cache = ring()
    quantize.write_records(cache.storage, cache.table, cache.codec, requests, integers(ROWS), normal(ROWS, HIDDEN))


def keep(requests: torch.Tensor, ends: torch.Tensor) -> None:
    cache = ring()
    place = (cache.storage, cache.table, cache.codec)
    quantize.keep_records(*place, requests, integers(ROWS), ends, normal(ROWS, HIDDEN))


def integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


GROUPS = {
    "latents": normal(ROWS, 16), "keys": normal(ROWS, 32), "sin": torch.zeros(ROWS, 2), "keep_from": integers(1),
}  # fmt: skip
CALLS: list[tuple[Callable[..., object], Fits, dict[str, torch.Tensor]]] = [
    (post, {"post": normal(ROWS, N), "comb": normal(ROWS, N, N)},
     {"post": normal(ROWS, N + 1), "comb": normal(ROWS, N, N + 1)}),
    (post, {"post": normal(ROWS, N), "comb": normal(ROWS, N, N)}, {"post": normal(ROWS, N).float()}),
    (attend, {"queries": normal(ROWS, 2, HIDDEN), "lists": integers(ROWS, 1) - 1, "oldest": integers(1)},
     {"queries": normal(ROWS + 1, 2, HIDDEN), "lists": integers(ROWS, 1).int(), "oldest": integers(2)}),
    (select, {"candidates": integers(ROWS, 2)}, {"candidates": integers(ROWS - 1, 2)}),
    (select, {"candidates": integers(ROWS, 2)}, {"candidates": integers(ROWS, 2).int()}),
    (route, {"image_bias": normal(EXPERTS), "image_rows": torch.zeros(ROWS, dtype=torch.bool)},
     {"image_bias": normal(EXPERTS + 1), "image_rows": torch.zeros(ROWS + 1, dtype=torch.bool)}),
    (experts, {"experts": integers(ROWS, 2), "weights": normal(ROWS, 2)},
     {"experts": integers(ROWS + 1, 2), "weights": normal(ROWS, 3)}),
    (finalize, {"rows": normal(6, HIDDEN), "weights": normal(ROWS, 2), "index": integers(ROWS, 2)},
     {"rows": normal(6, HIDDEN + 1), "weights": normal(ROWS, 3), "index": integers(ROWS - 1, 2)}),
    (inject, {"k_weight": normal(N, HIDDEN), "dead": torch.zeros(ROWS, dtype=torch.bool)},
     {"k_weight": normal(N + 1, HIDDEN), "dead": torch.zeros(1, dtype=torch.bool)}),
    (attend_blocks, {"queries": normal(1, ROWS, 2, HIDDEN), "last": integers(1), "sinks": normal(2)},
     {"queries": normal(2, ROWS, 2, HIDDEN), "last": integers(2), "sinks": normal(3)}),
    (hash_ngrams, {"windows": integers(ROWS, 3), "primes": integers(4), "offsets": integers(4)},
     {"windows": integers(ROWS, 2), "primes": integers(5), "offsets": integers(6)}),
    (write_groups, GROUPS, {"latents": normal(ROWS, 24), "keys": normal(ROWS, 48), "keep_from": integers(2)}),
    (write_groups, GROUPS, {"sin": torch.zeros(ROWS, 1), "keep_from": integers(1).int()}),
    (blocks, {"codes": bytes_(70, 64), "scales": bytes_(3, 2)}, {"scales": bytes_(2, 2)}),
    (blocks, {"codes": bytes_(70, 64), "scales": bytes_(3, 2)}, {"scales": bytes_(3, 1)}),
    (groups_of_blocks, {"scales": bytes_(3, 2)}, {"scales": bytes_(2, 2)}),
    (packed_pairs, {"scales": bytes_(33, 2)}, {"scales": bytes_(33, 1)}),
    (plain, {"weight": normal(5, 8)}, {"weight": normal(2, 5, 8)}),
    (quantised, {"x": bytes_(ROWS, 64)}, {"x": bytes_(ROWS, 40)}),
    (confidence, {"markov": normal(ROWS, 4)}, {"markov": normal(ROWS - 1, 4)}),
    (token_windows, {"ids": integers(ROWS)}, {"ids": integers(ROWS + 1)}),
    (gather, {"rows": integers(ROWS, 2), "scales": bytes_(4, 2)}, {"rows": integers(ROWS), "scales": bytes_(3, 2)}),
    (sample, {"seeds": integers(ROWS), "positions": integers(ROWS)}, {"seeds": integers(ROWS - 1)}),
    (write, {"requests": integers(ROWS)}, {"requests": integers(ROWS - 1)}),
    (keep, {"requests": integers(ROWS), "ends": integers(1) + 9},
     {"requests": integers(1), "ends": integers(ROWS)}),
]  # fmt: skip
REFUSED = [(call, fits, name, wrong) for call, fits, wrongs in CALLS for name, wrong in wrongs.items()]


NAMES = [f"{call.__name__}-{name}" for call, _, name, _ in REFUSED]


@pytest.mark.parametrize(("call", "fits", "name", "wrong"), REFUSED, ids=NAMES)
def test_what_does_not_fit_is_named_before_anything_runs(
    call: Callable[..., object], fits: Fits, name: str, wrong: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(**fits)

    def launched(door: str, on_cuda: bool) -> ModuleType:
        raise AssertionError(f"{door} launched something")

    monkeypatch.setattr(forms, "_module", launched)
    with pytest.raises(ValueError, match=name):
        call(**fits | {name: wrong})

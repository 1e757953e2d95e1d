"""Driving the stock model in tests: deterministic models, steps by request, selections and visible state."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from compare import assert_float64
from quickseek.checkpoint.miniature import miniature_config
from quickseek.checkpoint.recipe import logical_shapes, logical_weight
from quickseek.config import ModelConfig
from quickseek.model.causal_lm import CausalLM
from quickseek.model.context import ForwardContext
from quickseek.model.indexer import Indexer
from quickseek.model.loader import TensorSource
from quickseek.model.state import ContiguousState, cache_specs
from quickseek.numerics import Numerics

FLOAT64 = Numerics.exact(torch.float64)


FEW_ITERATIONS = {"hc_sinkhorn_iters": 2}
"""For comparisons of steps that do the same to each token: iterations of its mixes take an eighth of a step's time."""


def config_of(name: str = "tiny", **changes: Any) -> ModelConfig:
    """A miniature configuration with some keys changed."""
    return replace(miniature_config(name), **changes)


SMALLEST: ModelConfig = config_of(
    vocab_size=128,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    head_dim=32,
    q_lora_rank=32,
    o_groups=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    hc_sinkhorn_iters=2,
    # Full and Reuse at ratio 2, a candidate source and a Reindex at ratio 1; the drafter has the window alone.
    compress_ratios=(2, 2, 1, 1, 0),
    kv_source_layer_ids=(0, 2),
    index_source_layer_ids=(0, 2, 3),
    index_n_heads=4,
    index_topk=4,
    candidate_source_layer_id=2,
    candidate_topk_blocks=3,
    candidate_block_size=2,
    engram_layer_ids=(1,),
    engram_num_embeddings=(434,),
    engram_compressed_vocab_size=66,
    num_nextn_predict_layers=1,
    dspark_block_size=3,
    dspark_target_layer_ids=(2, 3),
    dspark_n_routed_experts=2,
    dspark_num_experts_per_tok=1,
)
"""Every mechanism in the smallest sizes."""


@lru_cache(maxsize=4096)
def _weight(name: str, shape: tuple[int, ...]) -> Tensor:
    return logical_weight(name, shape)


def logical_weights(config: ModelConfig) -> dict[str, Tensor]:
    """The deterministic float64 weights of a configuration (spec/model.md 15.1)."""
    return {name: _weight(name, shape) for name, shape in logical_shapes(config).items()}


def token_map(config: ModelConfig) -> Tensor:
    """Compressed ids without a tokenizer (spec/model.md 15)."""
    return torch.tensor([t if t < 3 else 3 + (t - 3) // 2 for t in range(config.vocab_size)])


def prompt(count: int, seed: int = 0) -> Tensor:
    """``count`` token ids in 8..507; seed 0 gives the golden prompt (spec/model.md 15.2)."""
    i = torch.arange(count)
    if seed == 0:
        return (37 * i + 11) % 500 + 8
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, 508, (count,), generator=generator)


@lru_cache(maxsize=32)
def _model(config: ModelConfig, numerics: Numerics, decoder_replay: bool) -> CausalLM:
    model = CausalLM(config, numerics, draft=config.num_nextn_predict_layers > 0, decoder_replay=decoder_replay)
    model.load(TensorSource(logical_weights(config)))
    model.set_token_map(token_map(config))
    return model.eval()


def exact_model(config: ModelConfig | None = None, *, decoder_replay: bool = False) -> CausalLM:
    """The float64 model of a configuration with logical weights; shared between tests, so not to be changed."""
    return _model(config_of() if config is None else config, FLOAT64, decoder_replay)


def poison(state: ContiguousState, slot: int | None = None) -> None:
    """Fill the caches of one slot, or of all (scratch included), with values that spoil whatever reads them."""
    for cache in state.caches.values():
        part = cache.tensor if slot is None else cache.tensor[slot]
        if cache.tensor.dtype == torch.uint8:
            part.fill_(255)
        else:
            part.fill_(float("nan") if cache.tensor.dtype.is_floating_point else 2**31 - 1)


@dataclass
class Driver:
    """A model with its state. ``poisoned``: memory that no one wrote, or a released slot, holds NaN."""

    model: CausalLM
    max_requests: int = 4
    max_length: int = 128
    poisoned: bool = True
    state: ContiguousState = field(init=False)

    def __post_init__(self) -> None:
        model = self.model
        self.state = ContiguousState(
            model.config,
            model.numerics,
            max_requests=self.max_requests,
            max_length=self.max_length,
            draft=model.draft is not None,
        )
        if self.poisoned:
            poison(self.state)

    def run(self, step: Mapping[int, Tensor], *, num_prefills: int = 0, **inputs: Any) -> dict[int, Tensor]:
        """Logits [rows, V] by slot of one forward over ``step``; draft context is written, nothing is committed."""
        slots, counts = list(step), [len(ids) for ids in step.values()]
        context = self.state.context(slots, counts, num_prefills=num_prefills)
        hidden, aux = forward(self.model, torch.cat(list(step.values())), context, **inputs)
        if self.model.draft is not None:
            self.model.draft.write_context(aux, context.rows, context)
        return dict(zip(slots, self.model.logits(hidden).split(counts), strict=True))

    def feed(self, step: Mapping[int, Tensor], **options: Any) -> dict[int, Tensor]:
        """``run`` and commit every row."""
        logits = self.run(step, **options)
        for slot, ids in step.items():
            self.state.commit(slot, len(ids))
        return logits

    def release(self, slot: int) -> None:
        self.state.release(slot)
        if self.poisoned:
            poison(self.state, slot)

    def visible(self, slot: int) -> dict[str, Tensor]:
        return visible_state(self.model, self.state, slot)


def forward(model: CausalLM, ids: Tensor, context: ForwardContext, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    """Hidden states and auxiliary states (none without a drafter) of a flattened batch."""
    out = model.backbone(ids, context.rows.positions, context=context, **inputs)
    return out if isinstance(out, tuple) else (out, [])


def visible_state(model: CausalLM, state: ContiguousState, slot: int) -> dict[str, Tensor]:
    """Every row of a request's caches that a later step may read, oldest first, by cache name.

    Window rings: the last window - 1 positions; draft rings: the last window; paged rows: those of closed groups;
    open groups: the rows of the group under way; token history: the look-back.
    """
    config, length = model.config, state.length(slot)
    specs = cache_specs(config, model.numerics, draft=model.draft is not None)
    visible = {}
    for name, spec in specs.items():
        cache = state.caches[name].tensor[slot]
        if spec.ring == 0:
            visible[name] = cache[: length // spec.ratio].clone()
            continue
        if name.endswith("open_group"):
            ratio = config.ratio(int(name.split(".")[1]))
            reach = length % ratio
        elif name.endswith("window"):
            reach = config.sliding_window - (0 if name.startswith("mtp.") else 1)
        else:
            reach = config.engram_layout.lookback
        positions = torch.arange(max(0, length - reach), length)
        visible[name] = cache[positions % spec.ring].clone()
    return visible


def differs(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are not equal in the sense "float64", for negative controls."""
    try:
        assert_float64(found, expected)
    except AssertionError:
        return True
    return False


def assert_state_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str = "") -> None:
    """Visible states tensor by tensor."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_float64(found[name], tensor, f"{what} {name}")


Selections = dict[tuple[str, int, int], tuple[frozenset[int], frozenset[int] | None]]
"""(indexer, request's slot, position) to its list and its published candidate blocks."""


@contextmanager
def recorded_selections(model: CausalLM, into: Selections, slots: Sequence[int] | None = None) -> Iterator[None]:
    """Record what every indexer selects; ``slots`` names the requests of each batch, None: one request, slot 0."""

    def record(module: Indexer, arguments: tuple[Any, ...], selection: Any) -> None:
        rows = arguments[2].rows
        for row, (request, position) in enumerate(zip(rows.requests.tolist(), rows.positions.tolist(), strict=True)):
            lists = frozenset(selection.lists[row].tolist()) - {-1}
            blocks = None
            if selection.candidates is not None:
                blocks = frozenset(selection.candidates[row].tolist()) - {-1}
            slot = 0 if slots is None else slots[request]
            into[f"layers.{module.layer}", slot, position] = (lists, blocks)

    handles = [m.register_forward_hook(record) for m in model.modules() if isinstance(m, Indexer)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Alone:
    """What one request gives when its whole prompt runs at once: logits [N, V], selections and visible state."""

    logits: Tensor
    selections: Selections
    state: dict[str, Tensor]


@lru_cache(maxsize=256)
def _alone(config: ModelConfig, ids: tuple[int, ...]) -> Alone:
    driver = Driver(exact_model(config), max_requests=1, max_length=len(ids))
    slot = driver.state.acquire()
    selections: Selections = {}
    with recorded_selections(driver.model, selections):
        logits = driver.feed({slot: torch.tensor(ids)})[slot]
    return Alone(logits, selections, driver.visible(slot))


def alone(ids: Tensor, config: ModelConfig | None = None) -> Alone:
    """One-shot prefill of ``ids`` in a batch of one; the expectation of every other order of the same rows."""
    return _alone(config_of() if config is None else config, tuple(ids.tolist()))

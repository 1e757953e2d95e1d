"""State of requests, addressed by absolute position with slack (design.md 4.4, spec/model.md 6.9).

Accepting n rows of a step advances one integer; rejected rows are hidden by it and overwritten later, so nothing is
saved, restored or copied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quickseek.config import ModelConfig
from quickseek.errors import PromptError
from quickseek.model.context import (
    PAGED_GROUP,
    SLOT_GROUP,
    CacheStorage,
    ForwardContext,
    GroupMetadata,
)
from quickseek.model.engram import HISTORY
from quickseek.numerics import Numerics
from quickseek.ops.cache import SLACK, Codec, GlobalKvCodec, IndexKeyCodec, PlainCodec, WindowCodec
from quickseek.ops.rows import StepRows


@dataclass(frozen=True)
class CacheSpec:
    """One cache of the model: its codec, its group, and its rows.

    ``ring``: rows of a ring, addressed by position modulo them; 0 for paged rows, of which a request has one per
    ``ratio`` positions.
    """

    codec: Codec
    group: str
    ring: int = 0
    ratio: int = 1


def cache_specs(
    config: ModelConfig, numerics: Numerics, *, draft: bool, layers: range | None = None
) -> dict[str, CacheSpec]:
    """Every cache of a model or pipeline stage by name (spec 6.9); ``draft`` adds the drafter's rings."""
    layers = range(config.num_hidden_layers) if layers is None else layers
    packed, dtype = numerics.packed_caches, numerics.dtype

    def codec(kind: type[WindowCodec] | type[GlobalKvCodec] | type[IndexKeyCodec], width: int) -> Codec:
        return kind(width) if packed else PlainCodec(width, dtype)

    window = CacheSpec(codec(WindowCodec, config.head_dim), SLOT_GROUP, ring=config.sliding_window + SLACK)
    specs = {f"layers.{layer}.window": window for layer in layers}
    for layer in config.kv_source_layer_ids:
        if layer not in layers:
            continue
        ratio, name = config.ratio(layer), f"layers.{layer}"
        specs[f"{name}.global_kv"] = CacheSpec(codec(GlobalKvCodec, config.head_dim), PAGED_GROUP, ratio=ratio)
        specs[f"{name}.index_k"] = CacheSpec(codec(IndexKeyCodec, config.index_head_dim), PAGED_GROUP, ratio=ratio)
        if ratio > 1:
            raw = PlainCodec(2 * config.head_dim, numerics.wide)
            specs[f"{name}.open_group"] = CacheSpec(raw, SLOT_GROUP, ring=ratio - 1 + SLACK)
    if config.engram_layer_ids:
        ids = PlainCodec(1, torch.int32)
        specs[HISTORY] = CacheSpec(ids, SLOT_GROUP, ring=config.engram_layout.lookback + SLACK)
    if draft:
        specs |= {f"mtp.{stage}.window": window for stage in range(config.num_nextn_predict_layers)}
    return specs


class RequestState(Protocol):
    """State of many requests: caches, and how many positions of each are committed."""

    caches: Mapping[str, CacheStorage]

    def acquire(self) -> int:
        """A free request slot, at length 0."""

    def release(self, slot: int) -> None:
        """Give a slot back; its content need not be cleared."""

    def length(self, slot: int) -> int:
        """Committed positions of a request."""

    def commit(self, slot: int, count: int) -> None:
        """Count ``count`` more positions of the rows of the last step as committed."""

    def context(self, slots: Sequence[int], counts: Sequence[int], *, num_prefills: int = 0) -> ForwardContext:
        """The step in which request ``slots[i]`` runs ``counts[i]`` rows after its committed ones."""


class ContiguousState:
    """``RequestState`` with one contiguous range of rows per request: no paging, for any device.

    Slot 0 is scratch. ``max_length``: positions that a request can hold.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        *,
        max_requests: int,
        max_length: int,
        draft: bool = False,
        device: torch.device | str = "cpu",
        layers: range | None = None,
    ) -> None:
        self.max_length, self.device = max_length, torch.device(device)
        self.caches: dict[str, CacheStorage] = {}
        for name, spec in cache_specs(config, numerics, draft=draft, layers=layers).items():
            rows = spec.ring or -(-max_length // spec.ratio)
            shape = (max_requests + 1, rows, spec.codec.record)
            tensor = torch.zeros(shape, dtype=spec.codec.dtype, device=self.device)
            self.caches[name] = CacheStorage(tensor, spec.codec, spec.group)
        self._lengths = [0] * (max_requests + 1)
        self._free = list(range(max_requests, 0, -1))

    def acquire(self) -> int:
        if not self._free:
            raise RuntimeError(f"all {len(self._lengths) - 1} request slots are taken")
        slot = self._free.pop()
        self._lengths[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        self._check(slot)
        self._free.append(slot)

    def length(self, slot: int) -> int:
        self._check(slot)
        return self._lengths[slot]

    def commit(self, slot: int, count: int) -> None:
        self._check(slot)
        if count < 0 or self._lengths[slot] + count > self.max_length:
            raise ValueError(
                f"commit of {count} rows at length {self._lengths[slot]}: expected 0 up to {self.max_length}"
            )
        self._lengths[slot] += count

    def context(self, slots: Sequence[int], counts: Sequence[int], *, num_prefills: int = 0) -> ForwardContext:
        for slot in slots:
            self._check(slot)
        if len(set(slots)) != len(slots):
            raise ValueError(f"slots = {list(slots)}: expected each request once")
        starts = [self._lengths[slot] for slot in slots]
        rows = StepRows.build(starts, list(counts), self.device)
        if rows.max_length > self.max_length:
            raise PromptError(
                f"the step reaches position {rows.max_length - 1}: the state holds {self.max_length} positions"
            )
        table = torch.tensor([[slot] for slot in slots], dtype=torch.int64, device=self.device)
        metadata = {group: GroupMetadata(rows, table, num_prefills) for group in (SLOT_GROUP, PAGED_GROUP)}
        return ForwardContext(metadata, self.caches)

    def draft_context(self, slots: Sequence[int]) -> tuple[ForwardContext, Tensor]:
        """Context of a draft pass over ``slots``, and the last committed position int64 [B] of each."""
        return self.context(slots, [1] * len(slots)), torch.tensor(
            [self._lengths[slot] - 1 for slot in slots], device=self.device
        )

    def _check(self, slot: int) -> None:
        if not 0 < slot < len(self._lengths) or slot in self._free:
            raise ValueError(f"slot {slot} is not a request's: expected one that acquire gave")

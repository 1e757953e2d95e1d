"""The memory of all requests: paged rows behind block tables, and per-slot state (design.md 4, spec/model.md 6.9)."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quickseek.config import ModelConfig
from quickseek.engine.staging import staging_on
from quickseek.errors import ConfigError
from quickseek.model.context import PAGED_GROUP, SLOT_GROUP, CacheStorage, ForwardContext, GroupMetadata
from quickseek.model.state import CacheSpec, cache_specs
from quickseek.numerics import Numerics
from quickseek.ops.cache import SCRATCH
from quickseek.ops.rows import StepRows

BLOCK_MULTIPLE = 8
"""A block's size in tokens is a multiple of this."""
GUARD_BYTES = 256
"""Canary bytes on either side of a pool in debug mode."""
CANARY = 0xA5


class PoolOverrun(RuntimeError):
    """A canary around a pool was overwritten; names the pool and the step after which it was found."""


class Pools:
    """Caches of ``num_slots`` request slots and ``num_blocks`` blocks of ``block_tokens`` positions.

    Both counts include the scratch slot and block, number 0. One block table serves the global KV and the index keys
    of every source layer. ``tables`` int64 [num_slots, blocks of a request] lives on the device and is written by
    stream-ordered copies (through ``staging``, which others may use too); an entry of 0 is scratch, so rows that a
    request does not own are written there.
    ``guarded`` surrounds every pool with canaries.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        *,
        num_slots: int,
        num_blocks: int,
        block_tokens: int,
        max_model_len: int,
        draft: bool,
        device: torch.device | str = "cpu",
        guarded: bool = False,
    ) -> None:
        if block_tokens < 1 or block_tokens % BLOCK_MULTIPLE:
            raise ConfigError("block_tokens", block_tokens, f"a positive multiple of {BLOCK_MULTIPLE}")
        self.block_tokens, self.device = block_tokens, torch.device(device)
        self.num_slots, self.num_blocks, self.staging = num_slots, num_blocks, staging_on(self.device)
        self._guards: dict[str, tuple[Tensor, int]] = {}
        self.specs = cache_specs(config, numerics, draft=draft)
        self.caches: Mapping[str, CacheStorage] = {
            name: CacheStorage(self._pool(name, spec, guarded), spec.codec, spec.group)
            for name, spec in self.specs.items()
        }
        self.tables = torch.zeros(num_slots, -(-max_model_len // block_tokens), dtype=torch.int64, device=self.device)

    def _pool(self, name: str, spec: CacheSpec, guarded: bool) -> Tensor:
        count = self.num_slots if spec.group == SLOT_GROUP else self.num_blocks
        shape = (count, spec.ring or self.block_tokens // spec.ratio, spec.codec.record)
        if not guarded:
            return torch.zeros(shape, dtype=spec.codec.dtype, device=self.device)
        size = math.prod(shape) * spec.codec.dtype.itemsize
        memory = torch.full((size + 2 * GUARD_BYTES,), CANARY, dtype=torch.uint8, device=self.device)
        self._guards[name] = (memory, size)
        pool = memory[GUARD_BYTES : GUARD_BYTES + size].view(spec.codec.dtype).view(shape)
        return pool.zero_()

    def check_guards(self, step: int) -> None:
        """Raise PoolOverrun naming the pool and ``step`` if a canary has changed; the next check finds it whole."""
        for name, (memory, size) in self._guards.items():
            for place, guard in (("before", memory[:GUARD_BYTES]), ("after", memory[GUARD_BYTES + size :])):
                if bool((guard != CANARY).any()):
                    guard.fill_(CANARY)
                    raise PoolOverrun(f"step {step} wrote {place} the pool {name}")

    @property
    def reach(self) -> int:
        """Positions that a block table can name."""
        return self.tables.shape[1] * self.block_tokens

    # ------------------------------------------------------------------------------------------ tables and copies

    def set_table(self, slot: int, first: int, blocks: list[int]) -> None:
        """Blocks ``first`` and on of the request in ``slot``."""
        self.staging.write(self.tables[slot, first : first + len(blocks)], torch.tensor(blocks, dtype=torch.int64))

    def clear_table(self, slot: int) -> None:
        """Point every position of ``slot`` at scratch."""
        self.tables[slot] = SCRATCH

    def copy_block(self, source: int, target: int) -> None:
        """Copy the rows of one block, in every paged pool: on a GPU, a launch for each."""
        self._copy(PAGED_GROUP, source, target)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy everything that lives by slot, to a snapshot or back from one: on a GPU, a launch for each pool."""
        self._copy(SLOT_GROUP, source, target)

    def _copy(self, group: str, source: int, target: int) -> None:
        for cache in self.caches.values():
            if cache.group == group:
                cache.tensor[target] = cache.tensor[source]

    # ------------------------------------------------------------------------------------------ steps

    def context(
        self,
        slots: Tensor,
        rows: StepRows,
        *,
        num_prefills: int,
        oldest: Tensor | None = None,
        keep_from: Tensor | None = None,
    ) -> ForwardContext:
        """The step ``rows`` of the requests in ``slots`` int64 [B]; no value is read from the device.

        ``oldest``, ``keep_from``: see ``ForwardContext``.
        """
        metadata = {
            SLOT_GROUP: GroupMetadata(rows, slots.unsqueeze(1), num_prefills),
            PAGED_GROUP: GroupMetadata(rows, self.tables[slots], num_prefills),
        }
        return ForwardContext(metadata, self.caches, oldest=oldest, keep_from=keep_from)

    def bytes(self) -> dict[str, int]:
        """Bytes of each pool."""
        return {name: cache.tensor.nbytes for name, cache in self.caches.items()}

"""The memory plan: how many blocks and slots a byte budget holds, in Python integers (spec/model.md 6.9, 6.10)."""

from dataclasses import dataclass

from quickseek.config import ModelConfig
from quickseek.numerics import Numerics


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Sizes of the pools.

    ``num_blocks`` and ``num_slots`` include scratch; slots 1 to ``max_num_seqs`` are the requests', those of
    ``snapshot_slots`` hold snapshots. Bytes: ``block_bytes`` of a block over all paged caches, ``slot_bytes`` of a slot
    over all slot caches.
    """

    block_tokens: int
    num_blocks: int
    max_num_seqs: int
    num_snapshots: int
    max_model_len: int
    num_speculative_tokens: int
    block_bytes: int
    slot_bytes: int
    budget_bytes: int

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        numerics: Numerics,
        *,
        budget_bytes: int,
        max_num_seqs: int,
        max_model_len: int,
        num_snapshots: int = 0,
        num_speculative_tokens: int = 0,
        draft: bool | None = None,
        block_tokens: int = 16,
        layers: range | None = None,
    ) -> "MemoryPlan":
        """As many blocks as the budget holds beside the slots, at most what ``max_num_seqs`` full contexts need.

        ConfigError names the option to change when not even one request fits.
        """
        raise NotImplementedError("MemoryPlan.build")

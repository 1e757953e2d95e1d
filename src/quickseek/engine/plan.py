"""The memory plan: how many blocks and slots a byte budget holds, in Python integers (spec/model.md 6.9, 6.10).

The budget is that of the caches. Beside them, and beside the weights, it counts what the specialized decode keeps on
the device, and how much is left alone for the graphs.
"""

from dataclasses import dataclass, replace
from math import lcm

from quickseek.config import ModelConfig
from quickseek.engine.blocks import rows_ahead
from quickseek.engine.pools import BLOCK_MULTIPLE
from quickseek.engine.prefix import REWIND
from quickseek.errors import ConfigError
from quickseek.model.context import PAGED_GROUP
from quickseek.model.state import CacheSpec, cache_specs
from quickseek.numerics import Numerics
from quickseek.ops.cache import SLACK

MOST_DRAFTS = SLACK - 1 - REWIND
"""Drafts whose rejected rows leave, in a ring, all that the anchor and a snapshot used one row early still read."""
OPTIONS = {
    "budget_bytes": "kv_cache_memory_bytes",
    "num_snapshots": "num_prefix_snapshots",
    "block_tokens": "block_size",
}
"""Fields of the plan that a user sets under another name, which errors use."""
GRAPH_BYTES = 512 << 20
"""Left for graphs, whatever the batch: activations of a step, workspaces of libraries. An allowance, not measured."""
GRAPH_BYTES_A_LOGIT = 32
"""And for each logit of the largest step: V's of all sizes, FP32, are twice those of the largest; 24 bytes for D's
probabilities in FP64 and what they are made of."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Sizes of the pools, scratch included.

    Slots 1 to ``max_num_seqs`` are the requests', the ``num_snapshots`` after them hold snapshots. ``block_bytes``: a
    block over all paged caches; ``slot_bytes``: a slot over all slot caches. Not in the budget: ``mailbox_bytes`` and
    ``embedding_bytes`` of the specialized decode (decode/memory.py), which are there before the caches, None as long as
    no model is loaded; ``graph_bytes``, which stay free for the graphs (0: none are captured).
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
    mailbox_bytes: int | None = None
    embedding_bytes: int | None = None
    graph_bytes: int = 0

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
        block_tokens: int = 16,
        draft: bool | None = None,
        layers: range | None = None,
    ) -> "MemoryPlan":
        """As many blocks as the budget holds beside the slots, at most full contexts for every slot.

        ``draft``: whether the drafter's rings exist; None: if drafts are verified. ``layers``: those of this pipeline
        stage. ConfigError names the option to change when not even a request of two tokens fits.
        """
        draft = num_speculative_tokens > 0 if draft is None else draft
        specs = cache_specs(config, numerics, draft=draft, layers=layers).values()
        multiple = lcm(BLOCK_MULTIPLE, *(spec.ratio for spec in specs))
        smallest = {"block_tokens": multiple, "max_model_len": 2, "num_snapshots": 0, "num_speculative_tokens": 0}
        options = {
            "budget_bytes": budget_bytes,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "num_snapshots": num_snapshots,
            "num_speculative_tokens": num_speculative_tokens,
            "block_tokens": block_tokens,
        }
        for key, value in options.items():
            if value < smallest.get(key, 1):
                raise ConfigError(OPTIONS.get(key, key), value, f"{smallest.get(key, 1)} or more")
        if num_speculative_tokens > MOST_DRAFTS:
            expected = f"at most {MOST_DRAFTS}: rings hold {SLACK} rows beyond what is read"
            raise ConfigError("num_speculative_tokens", num_speculative_tokens, expected)
        if block_tokens % multiple:
            raise ConfigError(OPTIONS["block_tokens"], block_tokens, f"a multiple of {multiple}, so no group is split")
        empty = cls(
            **options,
            num_blocks=1,
            block_bytes=sum(_row_bytes(s) * block_tokens // s.ratio for s in specs if s.group == PAGED_GROUP),
            slot_bytes=sum(_row_bytes(s) * s.ring for s in specs if s.group != PAGED_GROUP),
        )
        return empty._filled()

    def _filled(self) -> "MemoryPlan":
        """The plan with its blocks counted."""
        context = -(-(self.max_model_len - 1 + self.rows_ahead) // self.block_tokens)
        most = 1 + context * (self.max_num_seqs + self.num_snapshots)
        least = 1 + -(-(1 + self.rows_ahead) // self.block_tokens)
        left = self.budget_bytes - self.num_slots * self.slot_bytes
        num_blocks = min(most, left // self.block_bytes) if self.block_bytes else most
        if left >= 0 and num_blocks >= least:
            return replace(self, num_blocks=num_blocks)
        fixed = 2 * self.slot_bytes + least * self.block_bytes
        spare = self.budget_bytes - fixed
        if spare < 0:
            expected = f"{fixed} or more: one request of two tokens"
            raise ConfigError(OPTIONS["budget_bytes"], self.budget_bytes, expected)
        extra = spare // self.slot_bytes
        if self.max_num_seqs - 1 > extra:
            raise ConfigError("max_num_seqs", self.max_num_seqs, f"at most {extra + 1} in {self.budget_bytes} bytes")
        raise ConfigError(
            OPTIONS["num_snapshots"],
            self.num_snapshots,
            f"at most {extra - self.max_num_seqs + 1} beside {self.max_num_seqs} requests in {self.budget_bytes} bytes",
        )

    # ------------------------------------------------------------------------------------------ derived

    @property
    def rows_ahead(self) -> int:
        """Rows beyond its known length for which a decoding request owns blocks."""
        return rows_ahead(self.num_speculative_tokens)

    @property
    def num_slots(self) -> int:
        """Scratch, request and snapshot slots."""
        return 1 + self.max_num_seqs + self.num_snapshots

    @property
    def snapshot_slots(self) -> range:
        """Numbers of the snapshot slots."""
        return range(1 + self.max_num_seqs, self.num_slots)

    @property
    def total_bytes(self) -> int:
        """What all pools take."""
        return self.num_blocks * self.block_bytes + self.num_slots * self.slot_bytes

    @property
    def bytes_per_token(self) -> float:
        """Paged bytes of a token: 890 for the released model in packed records."""
        return self.block_bytes / self.block_tokens

    @property
    def longest(self) -> int:
        """Tokens, prompt and new ones, of the longest request that fits: the context limit, or all blocks."""
        held = (self.num_blocks - 1) * self.block_tokens - self.rows_ahead + 1
        return min(self.max_model_len, held)

    def check_room(self, free_bytes: int) -> None:
        """ConfigError if caches and graphs take more than ``free_bytes``, which the device has left for both."""
        room = free_bytes - self.graph_bytes
        if self.total_bytes > room:
            mib = 1 << 20
            expected = (
                f"at most {max(room, 0)}: {free_bytes / mib:.0f} MiB of the GPU are free, and graphs are left "
                f"{self.graph_bytes / mib:.0f} MiB"
            )
            raise ConfigError(OPTIONS["budget_bytes"], self.budget_bytes, expected)

    def request_bytes(self, length: int) -> int:
        """Bytes that a request of ``length`` rows owns: its slot, and blocks for these rows and those ahead."""
        return self.slot_bytes + -(-(length + self.rows_ahead) // self.block_tokens) * self.block_bytes

    def __str__(self) -> str:
        mib = 1 << 20
        return "\n".join(
            (
                f"state: {self.total_bytes / mib:.1f} of {self.budget_bytes / mib:.1f} MiB",
                f"  {self.num_blocks} blocks of {self.block_tokens} tokens, {self.bytes_per_token:g} bytes a token",
                f"  {self.max_num_seqs} request and {self.num_snapshots} snapshot slots of {self.slot_bytes} bytes",
                f"  longest request {self.longest} of {self.max_model_len} tokens, "
                f"{self.request_bytes(self.longest) / mib:.1f} MiB",
                f"  beside it: {self._beside()}, {self.graph_bytes / mib:.1f} MiB left for graphs",
            )
        )

    def _beside(self) -> str:
        if self.mailbox_bytes is None or self.embedding_bytes is None:
            return "mailboxes and the embedding's replica (counted once the model is loaded)"
        mib = 1 << 20
        return f"mailboxes {self.mailbox_bytes / mib:.1f} MiB, embedding's replica {self.embedding_bytes / mib:.1f} MiB"


def graph_bytes(config: ModelConfig, max_num_seqs: int, num_speculative_tokens: int) -> int:
    """What is left alone on a GPU for the private pool of the graphs: an allowance by the largest step's logits."""
    logits = max_num_seqs * (num_speculative_tokens + 1) * config.vocab_size
    return GRAPH_BYTES + GRAPH_BYTES_A_LOGIT * logits


def _row_bytes(spec: CacheSpec) -> int:
    return spec.codec.record * spec.codec.dtype.itemsize

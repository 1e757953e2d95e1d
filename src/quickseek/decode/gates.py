"""Which path a step takes, by its rows alone: every limit as data, by kind of device (spec/decode.md A.6).

A gate is a host-side decision that all ranks take alike, so it reads the number of rows, and one of them also the
number of requests.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quickseek.errors import ConfigError
from quickseek.model.context import ForwardContext, GraphMode

if TYPE_CHECKING:
    from quickseek.decode.executor import SpecializedDecode

FUSED_MHC_MAX_ROWS = 384
"""Rows of the largest step, and capacity of the boundary's mailboxes: 64 requests of 6 rows."""
MHC_OVERLAP_MAX_ROWS = 48
"""Coefficients and auxiliary means beside the next sublayer; above, they run before it."""
OVERLAP_INPUTS_MAX_ROWS = 1024
"""Side projections of attention beside its queries."""
ENGRAM_PREFETCH_MAX_ROWS = 16
"""Projections of the n-gram memory ahead of the layers; also the size of their buffers."""
LM_HEAD_MAX_ROWS = 16
"""Rows of logits whose shards are gathered by the Lamport kernel."""
ROW_SHARD_MIN_REQUESTS = 8
"""Fewest requests whose rows are divided among ranks for selection."""


@dataclass(frozen=True)
class Gates:
    """The most rows with which each path runs, of ``row_shard`` the fewest requests; 0: never.

    ``side_stream``: coefficients on their own CUDA stream. ``overlap_inputs``: side projections of attention beside
    its queries. ``engram_prefetch``: projections of the n-gram memory ahead of the layers. ``shared_expert``: the
    shared expert beside the routed ones. ``deferred_finalize``: experts summed inside the boundary. ``logits_gather``:
    logits gathered by the Lamport kernel. ``replicated_embedding``: look-up without peers. ``draft``: rows of a draft
    pass. ``row_shard``: each rank selects for its share of the requests.
    """

    side_stream: int = 0
    overlap_inputs: int = 0
    engram_prefetch: int = ENGRAM_PREFETCH_MAX_ROWS
    shared_expert: int = 0
    deferred_finalize: int = FUSED_MHC_MAX_ROWS
    logits_gather: int = LM_HEAD_MAX_ROWS
    replicated_embedding: int = FUSED_MHC_MAX_ROWS
    draft: int = FUSED_MHC_MAX_ROWS
    row_shard: int = ROW_SHARD_MIN_REQUESTS

    def without(self, paths: tuple[str, ...]) -> "Gates":
        """The gates with these paths off; ConfigError for a name that is not a path."""
        unknown = [path for path in paths if path not in PATHS]
        if unknown:
            raise ConfigError("decode_paths_off", list(paths), f"names among {', '.join(PATHS)}")
        return replace(self, **dict.fromkeys(paths, 0))


PATHS = tuple(field.name for field in fields(Gates))
"""The names of all paths; each can be switched off (``DecodeConfig.off``)."""
FORKS = ("side_stream", "overlap_inputs", "engram_prefetch", "shared_expert")
"""Paths on side CUDA streams: ranks in turns take none, so that all their work lies on one."""

_FORKING = Gates(
    side_stream=MHC_OVERLAP_MAX_ROWS, overlap_inputs=OVERLAP_INPUTS_MAX_ROWS, shared_expert=FUSED_MHC_MAX_ROWS
)

# sm90: measured on one H200 (docs/specialized_decode.md); inputs of attention beside its queries gained nothing there.
# sm100 has the published limits, not measured here. A CPU takes every fork, so that tests see each of them joined.
GATES = {"cpu": _FORKING, "sm90": replace(_FORKING, overlap_inputs=0), "sm100": _FORKING}
"""Gates by kind of device."""


def device_kind(device: torch.device | str) -> str:
    """The key of ``GATES`` for a device."""
    device = torch.device(device)
    if device.type != "cuda":
        return "cpu"
    return "sm90" if torch.cuda.get_device_capability(device)[0] == 9 else "sm100"


@dataclass(frozen=True)
class DecodeStep:
    """The gates of one step, fixed on the host. ``context``: what the forward is told; None only in a bare table.

    ``rows``: rows of the step, padded ones among them; the other fields say whether the path of that name runs.
    """

    rows: int
    side_stream: bool
    overlap_inputs: bool
    engram_prefetch: bool
    shared_expert: bool
    deferred_finalize: bool
    row_shard: bool = False
    executor: "SpecializedDecode | None" = None
    context: ForwardContext | None = None

    def run(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        input_ids: Tensor,
        engram_hashes: Tensor | None,
        engram_mask: Tensor | None,
        streams: Tensor | None = None,
    ) -> Any:
        """The backbone's output after its embedding; see ``SpecializedDecode.run``."""
        assert self.executor is not None
        return self.executor.run(self, hidden_states, positions, input_ids, engram_hashes, engram_mask, streams)


def gates_of(rows: int, gates: Gates) -> DecodeStep:
    """The step of ``rows`` rows under ``gates``; ValueError outside 1 to FUSED_MHC_MAX_ROWS."""
    if not 0 < rows <= FUSED_MHC_MAX_ROWS:
        raise ValueError(f"rows = {rows}: expected 1 to {FUSED_MHC_MAX_ROWS}")
    decided = {field.name for field in fields(DecodeStep)} & set(PATHS) - {"row_shard"}
    return DecodeStep(rows=rows, **{path: rows <= getattr(gates, path) for path in decided})


def shards_rows(rows: int, requests: int, ranks: int, fewest: int) -> bool:
    """Whether ``ranks`` ranks divide the selections of a step of ``requests`` requests; ``fewest`` of 0: never."""
    enough = ranks > 1 and 0 < fewest <= requests
    return enough and requests % ranks == 0 and rows % requests == 0


def step_gates(rows: int, executor: "SpecializedDecode") -> DecodeStep:
    """The step of ``rows`` rows of an executor, a function of rows alone; ``plan`` adds what reads the context."""
    return replace(gates_of(rows, executor.gates), executor=executor)


def captures_pure_decode(swa_prefixes: Iterable[str], *, context: ForwardContext) -> bool:
    """Whether ``context`` is of a FULL graph of pure decode that is being recorded, or stands for one on a CPU.

    ``swa_prefixes``: attentions whose window caches must have metadata ("layers.0"). False for a PIECEWISE or eager
    forward, metadata that is no mapping, an absent prefix, or one with a prefill.
    """
    if not context.capturing or context.graph_mode is not GraphMode.FULL or not isinstance(context.metadata, Mapping):
        return False
    for prefix in swa_prefixes:
        cache = context.caches.get(f"{prefix}.window")
        group = None if cache is None else context.metadata.get(cache.group)
        if group is None or group.num_prefills:
            return False
    return True

"""What the specialized decode needs, in the user's words, and the one decision that all ranks take (spec/decode.md K).

Options that would forbid it and that this engine does not have (pipeline, data, expert or context parallelism,
micro-batching, torch.compile of the model, sleep mode, LoRA, KV transfer, batch invariance, graphs of mixed batches)
are no lines of the list.
"""

import functools
import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quickseek.config import DecodeConfig, EngineConfig, ModelConfig
from quickseek.decode.gates import FUSED_MHC_MAX_ROWS, GATES
from quickseek.errors import DecodeUnsupported
from quickseek.parallel.world import World, default_world

logger = logging.getLogger(__name__)

LEAST_CAPABILITY = (9, 0)
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
MOST_STREAMS = 8
KERNEL_PACKAGE = "cutlass"


@dataclass(frozen=True)
class Facts:
    """What one rank's machine has, as far as requirements ask. Of a CPU only ``device`` counts.

    ``engram_memory``: where lookups read n-gram tables: "device", "pinned" host memory, or the "mapped" checkpoint.
    """

    device: str = "cpu"
    name: str = "CPU"
    capability: tuple[int, int] = (0, 0)
    peer_access: bool = True
    kernels: bool = True
    engram_memory: str = "mapped"

    @classmethod
    def probe(cls, config: EngineConfig) -> "Facts":
        """The facts of the device that ``config`` names."""
        device = torch.device(config.device)
        if device.type == "cpu":
            return cls()
        if not torch.cuda.is_available():
            return cls("cuda", "no usable GPU", kernels=_has_kernels())
        index = torch.cuda.current_device() if device.index is None else device.index
        peers = range(min(config.tensor_parallel_size, torch.cuda.device_count()))
        return cls(
            "cuda",
            torch.cuda.get_device_name(index),
            torch.cuda.get_device_capability(index),
            all(peer == index or torch.cuda.can_device_access_peer(index, peer) for peer in peers),
            _has_kernels(),
            # Loading puts tables into one or the other for a GPU, or raises (ops/engram/host_table.py).
            engram_memory="pinned",
        )


def unsupported(config: EngineConfig, model: ModelConfig | None, facts: Facts | None = None) -> list[str]:
    """Every requirement that is missed, each in words that follow "needs"; ``facts`` None: those of this rank.

    ``model`` None: as far as can be said without one.
    """
    return list(_missing(config, model, Facts.probe(config) if facts is None else facts))


def _missing(config: EngineConfig, model: ModelConfig | None, facts: Facts) -> Iterator[str]:
    gpu = facts.device == "cuda"
    if gpu and facts.capability < LEAST_CAPABILITY:
        found = facts.name if facts.capability == (0, 0) else f"{facts.name}, {'.'.join(map(str, facts.capability))}"
        yield f"a GPU of compute capability 9.0 or newer, or device='cpu' (found {found})"
    if gpu and not facts.kernels:
        yield "the CuTe DSL on a GPU (pip install 'quickseek[gpu]')"
    if config.tensor_parallel_size not in TENSOR_PARALLEL_SIZES:
        yield f"tensor_parallel_size 1, 2, 4 or 8 (found {config.tensor_parallel_size})"
    if gpu and config.resolved_mode != "trained":
        yield f"mode='trained' on a GPU, with its packed caches (found {config.resolved_mode!r})"
    if gpu and config.tensor_parallel_size > 1 and not facts.peer_access:
        yield "peer access between the GPUs (NVLink, or PCIe with it enabled)"
    if config.draft_confidence_threshold > 0:
        yield (
            "a fixed number of drafts to verify, draft_confidence_threshold=0 "
            f"(found {config.draft_confidence_threshold})"
        )
    if model is None:
        return
    if gpu and model.engram_layer_ids and facts.engram_memory == "mapped":
        yield "Engram tables in device or pinned host memory (they are read from the mapped checkpoint)"
    if model.hidden_size % 8:
        yield f"a hidden_size that is a multiple of 8 (found {model.hidden_size})"
    if model.hc_mult > MOST_STREAMS:
        yield f"hc_mult of at most {MOST_STREAMS} (found {model.hc_mult})"


def specialized_decode_config(
    config: EngineConfig, model: ModelConfig, *, world: World | None = None, facts: Facts | None = None
) -> DecodeConfig | None:
    """The settings of the specialized decode, or None for the stock decode.

    "stock" asks nobody. "auto" and "latency_specialized" are collective: if any rank misses anything, all ranks raise
    one DecodeUnsupported ("latency_specialized") or all run stock and rank 0 says why in one line ("auto"). What some
    ranks miss names them. ConfigError for a path of ``decode_paths_off`` that does not exist.
    """
    paths = tuple(path.strip() for path in config.decode_paths_off.split(",") if path.strip())
    GATES["cpu"].without(paths)
    if config.decode_backend == "stock":
        return None
    world = default_world() if world is None else world
    missing = unsupported(config, model, facts)
    if not world.all_reduce_min(int(not missing)):
        needs = _told(world.gather_object(missing))
        if config.decode_backend == "latency_specialized":
            raise DecodeUnsupported(needs)
        if world.rank == 0:
            logger.warning("stock decode: the specialized one needs %s", "; ".join(needs))
        return None
    if world.rank == 0:
        logger.info("specialized decode: on, for decode steps of 1 to %d rows", FUSED_MHC_MAX_ROWS)
    return DecodeConfig(off=paths)


def _told(everyone: list[list[str]]) -> list[str]:
    """What ranks miss, once each and in order; what only some miss names them."""
    lines = list(dict.fromkeys(line for missing in everyone for line in missing))
    told = []
    for line in lines:
        ranks = [rank for rank, missing in enumerate(everyone) if line in missing]
        where = "" if len(ranks) == len(everyone) else f" (rank {', '.join(map(str, ranks))})"
        told.append(line + where)
    return told


# ---------------------------------------------------------------------------------------------- optional features


@dataclass(frozen=True)
class CheckedFeature:
    """An optional feature that uses a library's internals, and the versions (major.minor) it was checked with."""

    library: str
    versions: tuple[str, ...]
    instead: str


CHECKED_FEATURES = {
    "NVLink multicast": CheckedFeature("torch", (), "storing to each peer instead"),
}
"""Optional features by name. Multicast stores were compiled and replayed, but never ran on a GPU that has multicast."""


@functools.cache
def uses_checked_library(feature: str) -> bool:
    """Whether an optional feature may be used with the version that is installed; warns once if not."""
    if feature_is_checked(feature):
        return True
    checked = CHECKED_FEATURES[feature]
    found = installed(checked.library)
    versions = " or ".join(checked.versions) or "(no version has been checked yet)"
    logger.warning("%s needs %s %s (found %s); %s", feature, checked.library, versions, found, checked.instead)
    return False


def feature_is_checked(feature: str) -> bool:
    """Whether the version that is installed is one that an optional feature was checked with."""
    checked = CHECKED_FEATURES[feature]
    found = installed(checked.library)
    return found is not None and ".".join(found.split(".")[:2]) in checked.versions


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_kernels() -> bool:
    return importlib.util.find_spec(KERNEL_PACKAGE) is not None

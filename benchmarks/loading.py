"""How much memory loading takes: peak RssAnon of the process against the bytes that the rank keeps, as a JSON line.

    python benchmarks/loading.py [--ranks 1] [--mode trained] [--directory DIR]

The synthetic checkpoint (3.5 GB, and 25 GB of n-gram tables that are sparse on disk) is written to a temporary
directory, or to DIR, where a later run finds it again. With ``--ranks`` N, rank 0's share of N is loaded.
"""

import argparse
import ctypes
import dataclasses
import json
import mmap
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quickseek.checkpoint.inventory import inventory, is_engram_table, payload_bytes
from quickseek.checkpoint.miniature import miniature_config
from quickseek.checkpoint.reader import TORCH_DTYPES, Checkpoint
from quickseek.checkpoint.writer import write_checkpoint
from quickseek.config import ModelConfig
from quickseek.model.causal_lm import load_model
from quickseek.numerics import Numerics
from quickseek.parallel.world import SoloWorld

ENGRAM_ROWS = (48_001_116, 48_003_408)
"""What an ``engram_vocab_size`` of four million gives."""

ALLOWANCE = 512 << 20
"""Anonymous bytes beyond the weights that loading may take: the interpreter, torch, and one tensor at a time."""


def synthetic_config() -> ModelConfig:
    """Between the ``mid`` miniature and the released model."""
    return dataclasses.replace(
        miniature_config("mid"),
        hidden_size=2560,
        moe_intermediate_size=1024,
        num_attention_heads=32,
        n_routed_experts=96,
        engram_vocab_size=4_000_000,
        engram_head_dim=256,
        engram_num_embeddings=ENGRAM_ROWS,
    )


def synthetic_tensors(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Random finite bytes of the right shapes, without the n-gram tables."""
    pool = torch.randint(1, 127, (1 << 26,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for spec in inventory(config).values():
        if not is_engram_table(spec.name):
            yield spec.name, pool[: spec.nbytes].view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


class PeakAnonymous:
    """The largest RssAnon, in bytes, of this process while the block runs, sampled every millisecond."""

    def __enter__(self) -> "PeakAnonymous":
        self.start = self.peak = resident_anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, resident_anonymous())

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self.peak = max(self.peak, resident_anonymous())


def resident_anonymous() -> int:
    """RssAnon of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def cached_bytes(checkpoint: Checkpoint, name: str) -> int:
    """Bytes of a tensor's file pages that any process has brought into memory."""
    tensor = checkpoint.mapped(name)
    address = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - address
    pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE


class OneRank(SoloWorld):
    """Rank 0 of several, enough to load its share; it has no peers to run with."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


def measure(directory: Path, ranks: int, mode: str) -> dict[str, object]:
    """Load rank 0's share and say what it took."""
    numerics = Numerics.trained() if mode == "trained" else Numerics.exact()
    world = SoloWorld() if ranks == 1 else OneRank(ranks)
    began = time.perf_counter()
    with PeakAnonymous() as memory:
        model, checkpoint = load_model(directory, numerics, world=world, draft=True)
    seconds = time.perf_counter() - began
    kept = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    specs = inventory(checkpoint.config)
    tables = [name for name in specs if is_engram_table(name)]
    return {
        "what": "loading",
        "mode": mode,
        "ranks": ranks,
        "checkpoint_mb": payload_bytes(spec for spec in specs.values() if spec.name not in tables) >> 20,
        "engram_tables_mb": payload_bytes(specs[name] for name in tables) >> 20,
        "engram_tables_in_memory_mb": round(sum(cached_bytes(checkpoint, name) for name in tables) / 2**20, 1),
        "kept_mb": kept >> 20,
        "rss_anon_before_mb": memory.start >> 20,
        "peak_rss_anon_mb": memory.peak >> 20,
        "over_kept_mb": (memory.peak - kept) >> 20,
        "allowed_over_kept_mb": ALLOWANCE >> 20,
        "within": memory.peak <= kept + ALLOWANCE,
        "seconds": round(seconds, 2),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mode", default="trained", choices=["trained", "exact"])
    parser.add_argument("--directory", type=Path, help="where the synthetic checkpoint is kept between runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.directory or Path(temporary) / "model"
        if not (directory / "config.json").exists():
            config = synthetic_config()
            tables = [name for name in inventory(config) if is_engram_table(name)]
            write_checkpoint(directory, config, synthetic_tensors(config), sparse=tables)
        print(json.dumps(measure(directory, args.ranks, args.mode)))


if __name__ == "__main__":
    main()

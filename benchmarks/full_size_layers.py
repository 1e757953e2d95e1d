"""One layer of each kind at its released size: loaded from a checkpoint on disk, one row run on a CPU in trained mode.

    python benchmarks/full_size_layers.py [--directory DIR] [--out FILE] [--conditions TEXT] [--kinds window engram ...]

Prints a JSON line per kind: bytes loaded, seconds to load, seconds of the first row, peak RssAnon. The checkpoint is
synthetic: random valid codes and scales. All kinds share one file of routed experts (7.2 GB), whose header is
rewritten for each; the n-gram table has its 101 GB, of which only the rows of the run are on disk. Needs 10 GB of
memory and 9 GB of disk.
"""

import argparse
import json
import math
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from loading import PeakAnonymous
from quickseek.checkpoint.inventory import TensorSpec, inventory, is_engram_table, payload_bytes
from quickseek.checkpoint.reader import Checkpoint
from quickseek.checkpoint.shards import INDEX_NAME
from quickseek.config import ModelConfig
from quickseek.model.backbone import DeepseekV4Model
from quickseek.model.context import ForwardContext
from quickseek.model.dspark import DraftHead
from quickseek.model.layer import Layer
from quickseek.model.loader import WeightLoader
from quickseek.model.state import ContiguousState
from quickseek.numerics import Numerics
from quickseek.parallel.world import SoloWorld

CONFIG = Path(__file__).parent.parent / "tests/golden/released_config.json"
KINDS: dict[str, int | None] = {
    "window": 0,
    "engram": 1,
    "full-2": 2,
    "reuse-2": 3,
    "full-1": 20,
    "reindex": 24,
    "reuse-1": 21,
    "draft": None,
}
"""Kind to a layer of that kind; the draft's three stages hold as many experts as one layer and run together."""

LENGTH = 1200
"""Committed positions before the row: more groups than a list holds, at ratio 1 and at ratio 2."""

HEADER_ROOM = 1 << 20
"""Bytes reserved for the header of the experts' file, so that it can be rewritten in place."""

FP8_SCALES, FP4_SCALES = (119, 122), (117, 120)
"""Ranges of scale bytes that give products of about the size of their inputs."""


# ---------------------------------------------------------------------------------------------- on disk


@dataclass(frozen=True)
class Parts:
    """The tensors of one kind, by the file that holds them."""

    experts: list[TensorSpec]
    table: list[TensorSpec]
    rest: list[TensorSpec]


def parts_of(config: ModelConfig, kind: str) -> Parts:
    layer = KINDS[kind]
    prefix = "mtp." if layer is None else f"layers.{layer}."
    specs = [spec for spec in inventory(config).values() if spec.name.startswith(prefix)]
    experts = [spec for spec in specs if ".ffn.experts." in spec.name]
    table = [spec for spec in specs if is_engram_table(spec.name)]
    return Parts(experts, table, [spec for spec in specs if spec not in experts and spec not in table])


def header_of(specs: Iterable[TensorSpec], room: int = 0) -> bytes:
    """Length and JSON header of a shard that holds ``specs`` one after the other, padded to ``room`` bytes."""
    entries, offset = {}, 0
    for spec in specs:
        end = offset + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    size = room - 8 if room else len(text) + -len(text) % 8
    assert len(text) <= size, f"a header of {len(text)} bytes does not fit into {size}"
    return struct.pack("<Q", size) + text + b" " * (size - len(text))


class RandomBytes:
    """Payloads of random valid codes and scales, the same each time."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.pool = self.random.integers(0, 256, 1 << 26, dtype=np.uint8)

    def payload(self, spec: TensorSpec) -> bytes:
        count = spec.nbytes
        if spec.dtype == "F8_E8M0":
            low, high = FP4_SCALES if ".experts." in spec.name else FP8_SCALES
            return self.random.integers(low, high, count, dtype=np.uint8).tobytes()
        if spec.dtype in ("I8", "F8_E4M3"):
            start = int(self.random.integers(0, self.pool.size))
            codes = np.take(self.pool, np.arange(start, start + count), mode="wrap")
            # Without its highest exponent bit an E4M3 code is below 2 and never NaN.
            return (codes if spec.dtype == "I8" else codes & 0xBF).tobytes()
        values = torch.from_numpy(self.random.standard_normal(spec.shape, dtype=np.float32))
        values = 1.0 + 0.1 * values if "norm.weight" in spec.name else values * spec.shape[-1] ** -0.5
        stored = values.to(torch.bfloat16) if spec.dtype == "BF16" else values
        return stored.view(torch.uint8).numpy().tobytes()


def lay_out(directory: Path, config: ModelConfig, kind: str) -> None:
    """Make ``directory`` the checkpoint of one kind; the experts' payload is written once and kept."""
    parts, payloads = parts_of(config, kind), RandomBytes()
    experts = directory / "experts.safetensors"
    if not experts.exists():
        with experts.open("wb") as file:
            file.write(bytes(HEADER_ROOM))
            for spec in parts.experts:
                file.write(payloads.payload(spec))
    with experts.open("r+b") as file:
        file.write(header_of(parts.experts, HEADER_ROOM))
    with (directory / "rest.safetensors").open("wb") as file:
        file.write(header_of(parts.rest))
        for spec in parts.rest:
            file.write(payloads.payload(spec))
    located = {spec.name: "experts.safetensors" for spec in parts.experts}
    located |= {spec.name: "rest.safetensors" for spec in parts.rest}
    if parts.table:
        with (directory / "table.safetensors").open("wb") as file:
            header = header_of(parts.table)
            file.write(header)
            file.truncate(len(header) + payload_bytes(parts.table))
        located |= {spec.name: "table.safetensors" for spec in parts.table}
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": located}))
    for path in directory.glob("*.safetensors"):
        forget_pages(path)


def forget_pages(path: Path) -> None:
    """Write a file out and drop it from the page cache, so that loading reads the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_table_rows(directory: Path, config: ModelConfig, kind: str, rows: Tensor) -> None:
    """Put random rows where the n-grams of the run point."""
    weight, scale = parts_of(config, kind).table
    start, payloads = len(header_of([weight, scale])), RandomBytes()
    with (directory / "table.safetensors").open("r+b") as file:
        for row in rows.flatten().tolist():
            for spec, offset in ((weight, start), (scale, start + weight.nbytes)):
                one = TensorSpec(spec.name, spec.dtype, (1, spec.shape[1]), spec.group)
                file.seek(offset + row * spec.shape[1])
                file.write(payloads.payload(one))


# ---------------------------------------------------------------------------------------------- one row


def filled_state(config: ModelConfig, numerics: Numerics, layers: range, *, draft: bool) -> tuple[ContiguousState, int]:
    """A request of ``LENGTH`` committed positions whose caches hold random values."""
    state = ContiguousState(config, numerics, max_requests=1, max_length=LENGTH + 8, draft=draft, layers=layers)
    generator = torch.Generator().manual_seed(1)
    for cache in state.caches.values():
        shape = (*cache.tensor.shape[:2], cache.codec.width)
        if cache.codec.dtype == torch.int32:
            cache.tensor.copy_(torch.randint(3, config.engram_compressed_vocab_size, shape, generator=generator))
        else:
            cache.tensor.copy_(cache.codec.encode(torch.randn(shape, generator=generator)))
    slot = state.acquire()
    state.commit(slot, LENGTH)
    return state, slot


def random_streams(config: ModelConfig, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, config.hc_mult, config.hidden_size, generator=generator).to(torch.bfloat16)


def on_meta(make: type, *arguments: object) -> torch.nn.Module:
    with torch.device("meta"):
        module: torch.nn.Module = make(*arguments)
    return module.to_empty(device="cpu")


def load(module: Layer | DraftHead, directory: Path, config: ModelConfig, numerics: Numerics) -> None:
    """Fill a module from the checkpoint, every tensor of which it must use."""
    checkpoint = Checkpoint.open(directory, config)
    loader = WeightLoader(checkpoint, numerics)
    module.load(loader)
    unread = checkpoint.names - loader.loaded
    assert not unread, f"{sorted(unread)[:3]} were not read"


def layer_row(directory: Path, config: ModelConfig, kind: str) -> Iterator[object]:
    """Load a backbone layer, then run one row of it; yields after each: the module, then (before, after)."""
    number = KINDS[kind]
    assert number is not None
    numerics = Numerics.trained()
    first = config.kv_source(number)
    state, slot = filled_state(config, numerics, range(number if first is None else first, number + 1), draft=False)
    context: ForwardContext = state.context([slot], [1])
    with torch.device("meta"):
        ends = DeepseekV4Model(config=config, numerics=numerics, stage=range(1))
    ends.hashes.set_token_map(torch.arange(config.vocab_size) % config.engram_compressed_vocab_size)
    ids, dead = torch.tensor([4321]), torch.zeros(1, dtype=torch.bool)
    hashes = ends.hash_ngrams(ids, dead, context)
    if number in config.engram_layer_ids:
        fill_table_rows(directory, config, kind, hashes[config.engram_layer_ids.index(number)])
    layer = on_meta(Layer, config, number, f"layers.{number}", numerics, SoloWorld())
    assert isinstance(layer, Layer)
    load(layer, directory, config, numerics)
    yield layer
    shared = ends.share(context, dead)
    if config.ratio(number):
        groups = (LENGTH + 1) // config.ratio(number)
        order = torch.randperm(groups, generator=torch.Generator().manual_seed(3))
        shared.lists = order[: config.index_topk].unsqueeze(0)
        blocks = torch.randperm(groups // config.candidate_block_size, generator=torch.Generator().manual_seed(4))
        shared.candidates = blocks[: blocks.shape[0] * 3 // 4].unsqueeze(0)
    streams = before = random_streams(config, 1)
    pre = torch.full((1, config.hc_mult), 0.25)
    if layer.engram is not None:
        streams = layer.engram(streams, layer.engram.gather(hashes[layer.engram.index]), dead)
        assert not torch.equal(streams, before), "the n-gram memory added nothing"
    yield before, layer(streams, pre, shared, context)[0]


def draft_row(directory: Path, config: ModelConfig, kind: str) -> Iterator[object]:
    """Load the drafter's stages, then write one row of context and run one block; yields as ``layer_row``."""
    numerics = Numerics.trained()
    state, slot = filled_state(config, numerics, range(0), draft=True)
    draft = on_meta(DraftHead, config, numerics, SoloWorld())
    assert isinstance(draft, DraftHead)
    load(draft, directory, config, numerics)
    yield draft
    context = state.context([slot], [1])
    states = [row.mean(1) for row in random_streams(config, 3).unsqueeze(1)]
    draft.write_context(states, context.rows, context)
    state.commit(slot, 1)
    context, last = state.draft_context([slot])
    before = random_streams(config, config.dspark_block_size)[:, 0]
    yield before, draft._block_states(torch.tensor([5]), last, lambda ids: before, context)


def measure(directory: Path, kind: str) -> dict[str, object]:
    config = ModelConfig.from_file(CONFIG)
    parts = parts_of(config, kind)
    steps = (layer_row if KINDS[kind] is not None else draft_row)(directory, config, kind)
    with torch.inference_mode(), PeakAnonymous() as memory:
        began = time.perf_counter()
        module = next(steps)
        loaded = time.perf_counter()
        before, after = next(steps)
        done = time.perf_counter()
    assert isinstance(module, torch.nn.Module) and isinstance(after, Tensor) and isinstance(before, Tensor)
    return {
        "what": "full_size_layers",
        "kind": kind,
        "layer": KINDS[kind],
        "rows": after.shape[0],
        "context": LENGTH,
        "bytes_loaded": payload_bytes([*parts.experts, *parts.rest]),
        "table_bytes_on_disk_sparse": payload_bytes(parts.table),
        "largest_matrix": max(math.prod(spec.shape) for spec in parts.rest),
        "kept_bytes": sum(tensor.nbytes for tensor in module.parameters()),
        "load_s": round(loaded - began, 2),
        "first_row_s": round(done - loaded, 2),
        "rss_anon_before_bytes": memory.start,
        "peak_rss_anon_bytes": memory.peak,
        "finite": bool(after.isfinite().all()),
        "changed": not torch.equal(after, before),
        "rms_out": round(float(after.float().square().mean().sqrt()), 3),
        "page_cache": "dropped before loading",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "mode": "trained",
        "device": f"cpu: {processor()}",
        "samples": 1,
    }


def processor() -> str:
    """What the machine calls its processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where the files are written; removed afterwards")
    parser.add_argument("--out", type=Path, help="also write the JSON lines here")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--conditions", default="", help="what else the machine was doing; goes into each line")
    parser.add_argument("--measure", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.directory, args.measure)))
        return
    config, lines = ModelConfig.from_file(CONFIG), []
    directory = Path(tempfile.mkdtemp(prefix="full-size-", dir=args.directory))
    try:
        for kind in args.kinds:
            lay_out(directory, config, kind)
            # A process of its own, so that the peak is this kind's.
            command = [sys.executable, __file__, "--measure", kind, "--directory", str(directory)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            lines.append(json.dumps(json.loads(done.stdout) | {"conditions": args.conditions}))
            print(lines[-1], flush=True)
    finally:
        shutil.rmtree(directory)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

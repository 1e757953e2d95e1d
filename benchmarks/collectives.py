"""What a fused boundary costs between GPUs, beside NCCL and torch's one-shot with separate kernels.

    python benchmarks/collectives.py [--ranks 2] [--rows 1,8,48,384] [--sweep] [--protocols] [--out results.jsonl]

Each figure is the median over graph replays of ``CHAIN`` dependent calls, divided by the calls; ``p50`` and ``p99``
are of single calls, from device time stamps around each (their resolution and own cost are printed). One JSON line a
measurement, with its conditions.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cutlass
import torch
import torch.distributed as dist
from torch import Tensor

from quickseek.ops.collectives import AllReduceMHC, LamportAllGather
from quickseek.ops.collectives.all_reduce import FusedAllReduceMHC
from quickseek.ops.collectives.reference import mhc_boundary
from quickseek.ops.collectives.spec import Boundary, Routed
from quickseek.ops.collectives.stamp import ARGUMENTS, StampKernel
from quickseek.ops.compiled import compiled, current_stream
from quickseek.ops.embedding import ReplicatedEmbedding
from quickseek.ops.quantize import mxfp8_scale_bytes
from quickseek.parallel.fabric import SymmetricFabric, VirtualFabric
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import World

HIDDEN, STREAMS, TOP_K = 5120, 4, 6
CAPACITY = 384
CHAIN, REPLAYS = 100, 30
VOCABULARY = 129280
TARGETS_US = {1: 4.0, 2: 4.0, 4: 4.0, 8: 4.0, 48: 6.0, 384: 25.0}
PROTOCOL_ROWS = (16, 32, 48, 64, 96, 128, 192, 256, 384)
COMPILED_ROWS = (1, 8, 48)
compiled_boundary = torch.compile(mhc_boundary, dynamic=False)


class Inputs:
    """Random operands of one boundary, the same on every rank but for the contribution."""

    def __init__(self, rows: int, rank: int) -> None:
        torch.manual_seed(17)
        cuda: dict[str, Any] = {"device": "cuda"}
        self.rows = rows
        residual = torch.randn(rows, STREAMS, HIDDEN, **cuda).bfloat16()
        post, pre = torch.randn(rows, STREAMS, **cuda), torch.rand(rows, STREAMS, **cuda)
        comb = torch.randn(rows, STREAMS, STREAMS, **cuda).softmax(-1)
        self.boundary = Boundary(residual, post, comb, pre, torch.randn(HIDDEN, **cuda).bfloat16(), 1e-6, None)
        self.residual_only = Boundary(residual, post, comb, None, None, 1e-6, None)
        values = torch.empty(rows, HIDDEN, dtype=torch.float8_e4m3fn, **cuda)
        scales = torch.empty(mxfp8_scale_bytes(rows, HIDDEN), dtype=torch.uint8, **cuda)
        self.quantized = replace(self.boundary, mxfp8_out=(values, scales))
        torch.manual_seed(100 + rank)
        self.x = torch.randn(rows, HIDDEN, **cuda).bfloat16()
        places = torch.randperm(rows * TOP_K, **cuda).view(rows, TOP_K).int()
        self.routed = Routed(
            torch.randn(rows * TOP_K, HIDDEN, **cuda).bfloat16(), torch.rand(rows, TOP_K, **cuda), places, self.x
        )


def chain(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """``CHAIN`` calls in one graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            call()
    return graph


def timed(world: World, call: Callable[[], Any], stamps: bool = False) -> dict[str, float]:
    """Median and worst microseconds a call over replays; with ``stamps`` also of single calls."""
    graph = chain(call)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    world.barrier()
    samples = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        samples.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 / CHAIN for start, end in samples)
    result = {"us": statistics.median(times), "worst_us": times[-1]}
    return result | (single_calls(world, call) if stamps else {})


def single_calls(world: World, call: Callable[[], Any]) -> dict[str, float]:
    """P50 and P99 of single calls: differences of device time stamps, less those of stamps with nothing between."""
    marks = torch.zeros(CHAIN + 1, dtype=torch.int64, device=world.device)
    kernel = compiled(StampKernel, ARGUMENTS, world.device)

    def stamped(body: Callable[[], Any]) -> list[float]:
        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(CHAIN + 1):
                kernel(marks.data_ptr() + 8 * index, current_stream(world.device))
                if index < CHAIN:
                    body()
        found = []
        world.barrier()
        for turn in range(REPLAYS):
            graph.replay()
            torch.cuda.synchronize()
            if turn:
                found += (marks[1:] - marks[:-1]).tolist()[1:]
        return sorted(found)

    empty, full = stamped(lambda: None), stamped(call)
    cost = statistics.median(empty)
    pick = [full[int(len(full) * part)] / 1e3 - cost / 1e3 for part in (0.5, 0.99)]
    steps = {b - a for a, b in itertools.pairwise(empty) if b > a}
    return {"p50_us": pick[0], "p99_us": pick[1], "stamp_cost_us": cost / 1e3, "stamp_step_ns": min(steps, default=0)}


@dataclass
class Shard:
    """A rank's rows of an embedding table."""

    weight: Tensor
    start: int
    end: int
    world: World
    vocab_size: int = VOCABULARY
    reduce_results: bool = True


def fused(world: World, fabric: SymmetricFabric, two_shot_rows: int | None = None, **changes: Any) -> AllReduceMHC:
    """An instance; ``changes`` replace fields of its thresholds."""
    instance = AllReduceMHC(
        hidden_size=HIDDEN, hc_mult=STREAMS, max_num_tokens=CAPACITY, top_k=TOP_K, device=world.device,
        quantize_layer_input=True, residual_only=True, world=world, fabric=fabric, two_shot_rows=two_shot_rows,
    )  # fmt: skip
    if changes:
        implementation = instance.implementation
        assert isinstance(implementation, FusedAllReduceMHC)
        chosen = replace(implementation.thresholds, **changes)
        instance.implementation = FusedAllReduceMHC(instance.shape, fabric, chosen)
    return instance


def forms(instance: AllReduceMHC, given: Inputs) -> dict[str, Callable[[], Any]]:
    implementation = instance.implementation
    return {
        "plain": lambda: implementation.all_reduce(given.x, given.boundary),
        "mxfp8": lambda: implementation.all_reduce(given.x, given.quantized),
        "residual": lambda: implementation.all_reduce(given.x, given.residual_only),
        "finalize": lambda: implementation.finalize(given.routed, given.boundary),
    }


def separate(world: World, given: Inputs) -> dict[str, Callable[[], Any]]:
    """A library's all-reduce, then our kernel for one rank, or what torch.compile makes of the reference."""
    import torch.distributed._symmetric_memory as symmetric

    local = AllReduceMHC(
        hidden_size=HIDDEN, hc_mult=STREAMS, max_num_tokens=CAPACITY, top_k=TOP_K, device=world.device,
        fabric=VirtualFabric.ranks(1, world.device)[0],
    ).implementation  # fmt: skip
    buffer = symmetric.empty(given.rows, HIDDEN, dtype=torch.bfloat16, device=world.device)
    assert dist.group.WORLD is not None
    symmetric.rendezvous(buffer, dist.group.WORLD)
    group = dist.group.WORLD.group_name
    x: Tensor = given.x.clone()

    def nccl() -> None:
        dist.all_reduce(x)
        local.all_reduce(x, given.boundary)

    def one_shot() -> None:
        local.all_reduce(torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group), given.boundary)

    def nccl_compiled() -> None:
        dist.all_reduce(x)
        boundary = given.boundary
        compiled_boundary(
            x, boundary.residual, boundary.post, boundary.comb, boundary.pre, boundary.norm_weight, boundary.norm_eps
        )

    calls: dict[str, Callable[[], Any]] = {
        "nccl + own kernel": nccl,
        "torch one-shot + own kernel": one_shot,
        "own kernel alone": lambda: local.all_reduce(x, given.boundary),
    }
    return calls | ({"nccl + torch.compile": nccl_compiled} if given.rows in COMPILED_ROWS else {})


Add = Callable[[str, int, dict[str, float]], None]


def measure(world: World, rows: list[int], sweep: bool, protocols: bool, geometries: list[str]) -> list[dict[str, Any]]:
    fabric = SymmetricFabric.of(world)
    lines: list[dict[str, Any]] = []

    def add(name: str, count: int, result: dict[str, float]) -> None:
        shown = {key: round(value, 3) for key, value in result.items()}
        lines.append({"what": name, "rows": count} | shown)
        if world.rank == 0:
            print(f"{name:28s} {count:4d}  {shown}", file=sys.stderr, flush=True)

    standard = fused(world, fabric)
    # Each capture collects garbage, which takes long among a compiler's objects.
    gc.collect()
    gc.freeze()
    for count in rows:
        given = Inputs(count, world.rank)
        for name, call in forms(standard, given).items():
            add(name, count, timed(world, call, stamps=name == "plain"))
        for name, call in separate(world, given).items():
            add(name, count, timed(world, call))
    for text in geometries:
        threads, limit, fused_rows = (int(part) for part in text.split("x"))
        other = fused(world, fabric, threads=threads, cluster_limit=limit, fused_rows=fused_rows)
        for count in rows:
            add(f"plain {text}", count, timed(world, forms(other, Inputs(count, world.rank))["plain"]))
    if sweep:
        for count in range(1, 65):
            add("sweep", count, timed(world, forms(standard, Inputs(count, world.rank))["plain"]))
    if protocols:
        compare_protocols(world, fabric, add)
    small(world, fabric, add)
    return lines


def compare_protocols(world: World, fabric: SymmetricFabric, add: Add) -> None:
    """The three forms of the same calls: where each takes over is thresholds.json's to say."""
    never = max(PROTOCOL_ROWS) + 1
    instances = {
        "fused": fused(world, fabric, never),
        "publish, collect": fused(world, fabric, never, fused_rows=0),
        "two-shot": fused(world, fabric, 1),
    }
    for count in PROTOCOL_ROWS:
        given = Inputs(count, world.rank)
        for name, instance in instances.items():
            for kind in ("plain", "finalize"):
                add(f"{name}: {kind}", count, timed(world, forms(instance, given)[kind]))


def small(world: World, fabric: SymmetricFabric, add: Add) -> None:
    """All-gather, and the embedding from a table that the ranks share out and each copies whole."""
    gather = LamportAllGather(rank_capacity_bytes=1 << 20, device=world.device, world=world, fabric=fabric)
    for size in (64, 4096, 32768, 262144):
        x = torch.randn(size // 4, device="cuda")
        add(f"all-gather {size} B", 0, timed(world, partial(gather, x)))
    start, end = (VOCABULARY * rank // world.size for rank in (world.rank, world.rank + 1))
    weight = torch.randn(end - start, HIDDEN, dtype=torch.bfloat16, device="cuda")
    embedding = ReplicatedEmbedding.create(Shard(weight, start, end, world), STREAMS, world)
    assert embedding is not None
    for count in (1, 8, 48):
        ids = torch.randint(0, VOCABULARY, (count,), dtype=torch.int32, device="cuda")
        add("embedding", count, timed(world, partial(embedding, ids)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", default="1,8,48,384")
    parser.add_argument("--geometries", default="", help="threads x cluster limit x fused rows, comma separated")
    parser.add_argument("--sweep", action="store_true", help="every row count from 1 to 64")
    parser.add_argument("--protocols", action="store_true", help="fused, publish and collect, two-shot by rows")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [int(part) for part in args.rows.split(",")]
    if not all(1 <= count <= CAPACITY for count in rows):
        parser.error(f"--rows {args.rows}: 1 to {CAPACITY} each")
    geometries = [part for part in args.geometries.split(",") if part]
    per_rank = spawn(measure, args.ranks, rows, args.sweep, args.protocols, geometries, device="cuda", timeout_s=500)
    conditions = {
        "gpu": torch.cuda.get_device_name(), "ranks": args.ranks, "fabric": "unicast NVLink", "hidden": HIDDEN,
        "streams": STREAMS, "calls": CHAIN, "replays": REPLAYS,
        "torch": torch.__version__, "cutlass_dsl": cutlass.__version__,
    }  # fmt: skip
    text = ""
    for parts in zip(*per_rank, strict=True):
        worst = parts[0] | {key: max(part[key] for part in parts) for key in parts[0] if key.endswith("us")}
        text += json.dumps(worst | conditions) + "\n"
        target = TARGETS_US.get(worst["rows"]) if worst["what"] == "plain" else None
        print(
            f"{worst['what']:28s} {worst['rows']:4d} {worst['us']:8.2f} us" + (f"  target {target}" if target else "")
        )
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

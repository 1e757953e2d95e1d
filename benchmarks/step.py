"""Time of one decode step of a full-size rank on this GPU, from a CUDA graph, over what its memory reads allow.

    python benchmarks/step.py [--ranks 4] [--layers 40] [--steps 1x1,1x6,8x1,8x6] [--context 4096] [--out FILE]
    python benchmarks/step.py --peers --ranks 2 --layers 32 --paths stock,stock_nccl,specialized

A step BxR runs B requests of R rows (the anchor and R - 1 drafts) at ``--context`` committed positions. Weights are
synthetic, made on the GPU: random codes, scales that keep values of the size of their inputs, n-gram tables cut to
``--engram-rows`` rows a layer. Without ``--peers`` there are none: the stock path sums nothing, and the specialized
path stores its contributions where peers would have stored theirs (``LoopbackFabric``) and embeds as stock does, since
no peer sends its part of the table. With ``--peers`` each rank is a process with a GPU of its own, all hold the same
weights (a shard of one is that of the others), and rank 0 prints; "stock_nccl" is the stock path with NCCL's own
all-reduce in place of the gather and ordered sum of ``World.all_reduce``. Replays follow one another without a wait of
the host; a step's time is that between two events. The floor is the time of a plain read of the bytes that the step
must read (weights but those of experts nobody chose, and cache rows), at the rate of one long read in the same run.
What single kernels take (--kernels, --timeline) is told by a profiler, once everything has been timed: a process in
which it has run launches a graph node by node (0.35 us each, H200), one in which it has not in 2 or 3 us.
Prints a JSON line for each step and path.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from full_size_layers import CONFIG, FP4_SCALES, FP8_SCALES
from ops import launched_by, nodes, plain_read_us
from quickseek.config import DecodeConfig, ModelConfig
from quickseek.decode.executor import SpecializedDecode
from quickseek.decode.gates import GATES, PATHS, Gates, device_kind
from quickseek.engine.cycle import Cycle, Needs
from quickseek.engine.graphs import CudaGraphs, Graph, Recorder
from quickseek.engine.pools import Pools
from quickseek.engine.slot_state import SlotState
from quickseek.model.causal_lm import CausalLM
from quickseek.model.layer import Layer
from quickseek.model.moe import Router
from quickseek.numerics import Numerics
from quickseek.ops.linear import Fp8Weight
from quickseek.parallel.fabric import LoopbackFabric
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import SoloWorld, World
from timeline import Bar, middle, picture

READ_BYTES = 1 << 30
STEP_PATHS = ("stock", "stock_nccl", "specialized")
"""Ways to run a step."""
NEEDS_PEERS = "replicated_embedding"
"""What cannot be built without them."""
TIMEOUT_S = 560.0
"""Of a run with peers."""
IN_A_ROW = 200
"""Replays that are launched before the host waits."""
MOST_OF_OTHERS = 1000
"""Replays of the stock paths, however many there are of the specialized one."""


class MissingPeers(World):
    """Rank 0 of ``size`` whose peers are not there: what they would send is this rank's own."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = 0, size, device

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        return torch.cat([x] * self.size, dim)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def all_reduce_min(self, value: int) -> int:
        return value

    def gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def barrier(self) -> None:
        return


def cut(config: ModelConfig, layers: int) -> ModelConfig:
    """The released configuration with its first ``layers`` layers, without a drafter."""
    kept = [layer for layer in config.engram_layer_ids if layer < layers]
    return replace(
        config,
        num_hidden_layers=layers,
        compress_ratios=config.compress_ratios[:layers],
        kv_source_layer_ids=tuple(layer for layer in config.kv_source_layer_ids if layer < layers),
        index_source_layer_ids=tuple(layer for layer in config.index_source_layer_ids if layer < layers),
        candidate_source_layer_id=config.candidate_source_layer_id if config.candidate_source_layer_id < layers else -1,
        engram_layer_ids=tuple(kept),
        engram_num_embeddings=config.engram_num_embeddings[: len(kept)],
        num_nextn_predict_layers=0,
    )


def synthetic(config: ModelConfig, world: World, engram_rows: int) -> CausalLM:
    """A rank's model with random weights on its device."""
    with torch.device("meta"):
        model = CausalLM(config, Numerics.trained(), world=world)
    model.to_empty(device=world.device)
    generator = torch.Generator(world.device).manual_seed(1)
    for name, parameter in model.named_parameters():
        fill(name, parameter, generator)
    model.backbone.finalize_mhc_broadcast_weights()
    for layer in model.backbone.layers:
        assert isinstance(layer, Layer)
        if layer.engram is not None:
            shape = engram_rows, config.engram_head_dim
            codes = random_bytes(shape, generator).view(torch.float8_e4m3fn)
            scales = torch.full((engram_rows, shape[1] // 32), 120, dtype=torch.uint8, device=world.device)
            layer.engram.table = Fp8Weight(codes, scales)
    return model.eval()


def random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Finite E4M3 codes of both signs, up to 1.875 in magnitude."""
    codes = torch.randint(0, 64, shape, generator=generator, device=generator.device, dtype=torch.uint8)
    return codes | (torch.randint(0, 2, shape, generator=generator, device=generator.device, dtype=torch.uint8) << 7)


@torch.no_grad()
def fill(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Random values of the right form: codes, scale bytes, norms of one, small other weights."""
    data = parameter.data
    if data.dtype == torch.float8_e4m3fn:
        for part in data.view(torch.uint8).split(4096):
            part.copy_(random_bytes(tuple(part.shape), generator))
    elif data.dtype == torch.uint8 and "scale" in name:
        low, high = FP4_SCALES if "experts" in name else FP8_SCALES
        data.random_(low, high + 1, generator=generator)
    elif data.dtype == torch.uint8:
        for expert in data:
            expert.random_(0, 256, generator=generator)
    elif "norm" in name or name.endswith(("q_weight", "k_weight")):
        data.fill_(1.0)
    else:
        data.normal_(0.0, 0.02, generator=generator)


class Hashed(nn.Module):
    """Row numbers of the real hash, folded into the smaller table."""

    def __init__(self, inner: Any, rows: int) -> None:
        super().__init__()
        self.inner, self.rows = inner, rows

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("inner", "rows", "_modules") else getattr(self.inner, name)

    def forward(self, *args: Any) -> list[Tensor]:
        return [numbers % self.rows for numbers in self.inner(*args)]


@contextmanager
def counted_experts(model: CausalLM) -> Iterator[list[int]]:
    """Distinct experts chosen in each layer of what runs inside."""
    found: list[int] = []

    def count(_: nn.Module, __: Any, routing: Any) -> None:
        found.append(int(routing.experts.unique().numel()))

    hooks = [module.register_forward_hook(count) for module in model.modules() if isinstance(module, Router)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def weight_bytes(model: CausalLM, experts: list[int]) -> int:
    """Bytes of weights that a step reads: everything but the embedding and the experts that nobody chose."""
    total, layer = 0, 0
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            layer = int(name.split("layers.")[1].split(".")[0])
            total += parameter.nbytes // parameter.shape[0] * experts[layer]
        elif not name.startswith("backbone.embed"):
            total += parameter.nbytes
    return total


def cache_bytes(config: ModelConfig, pools: Pools, batch: int, rows: int, context: int) -> int:
    """Bytes of cache rows that a step reads: windows, index keys of every visible group, the selected global rows."""
    total = 0
    for layer in range(config.num_hidden_layers):
        window = pools.specs[f"layers.{layer}.window"].codec.record
        total += batch * min(context, config.sliding_window) * window
        if (ratio := config.ratio(layer)) > 0:
            record = pools.specs[f"layers.{config.kv_source(layer)}.global_kv"].codec.record
            total += batch * rows * min(config.index_topk, context // ratio) * record
        if layer in config.index_source_layer_ids:
            keys = pools.specs[f"layers.{config.kv_source(layer)}.index_k"].codec.record
            total += batch * (context // config.ratio(layer)) * keys
    return total


def graph_us(graph: Graph, count: int) -> list[float]:
    """Sorted microseconds of ``count`` replays that follow one another, from device events between them."""
    times: list[float] = []
    while len(times) < count:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(min(count - len(times), IN_A_ROW) + 3)]
        for event in events:
            graph.replay()
            event.record()
        events[-1].synchronize()
        times += [one.elapsed_time(other) * 1e3 for one, other in pairwise(events[1:-1])]
    return sorted(times)


def host_us(graph: Graph, count: int) -> float:
    """Median microseconds that the host spends on a replay and an event behind it, the GPU idle before."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        graph.replay()
        torch.cuda.Event().record()
        times.append((time.perf_counter() - begun) * 1e6)
    return sorted(times)[count // 2]


@contextmanager
def unchanged(state: SlotState) -> Iterator[None]:
    """What is committed inside is taken back: D's replays would carry requests beyond their caches."""
    values = [value for value in vars(state).values() if isinstance(value, Tensor)]
    tables = [value for value in values if value.device.type == state.device.type]
    kept = [table.clone() for table in tables]
    yield
    for table, before in zip(tables, kept, strict=True):
        table.copy_(before)


@contextmanager
def summed_by_nccl(world: World, active: bool) -> Iterator[None]:
    """Sums over ranks by NCCL's all-reduce inside, if ``active``."""

    def all_reduce(x: Tensor) -> Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total)
        return total

    with patch.object(world, "all_reduce", all_reduce) if active else nullcontext():
        yield


class CountedRecorder(Recorder):
    """Captures graphs whose nodes can be counted."""

    def empty(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph(keep_graph=True)


@dataclass(frozen=True)
class Captured:
    """The graph of a step, and whatever its kernels read and write."""

    graph: Graph
    held: tuple[Any, ...]


@torch.inference_mode()
def measure(model: CausalLM, batch: int, rows: int, context: int, replays: int) -> tuple[dict[str, Any], Captured]:
    """One step of V and, beside it, of D; and the graph of V."""
    config, device = model.config, model.world.device
    pools = Pools(
        config, model.numerics, num_slots=batch + 1, num_blocks=1 + batch * (context // 64 + 2), block_tokens=64,
        max_model_len=context + 128, draft=False, device=device,
    )  # fmt: skip
    generator = torch.Generator(device).manual_seed(2)
    for cache in pools.caches.values():
        if cache.tensor.dtype == torch.uint8:
            cache.tensor.random_(40, 60, generator=generator)
    for slot in range(1, batch + 1):
        first = 1 + (slot - 1) * (context // 64 + 2)
        pools.set_table(slot, 0, list(range(first, first + context // 64 + 2)))
    state = SlotState(config, batch + 1, rows - 1, device)
    state.lengths[1:], state.finished[1:] = context, False
    state.anchors.random_(3, config.vocab_size, generator=generator)
    state.drafts.random_(3, config.vocab_size, generator=generator)
    cycle = Cycle(model, pools, state, drafts=0)
    cycle.drafts = rows - 1
    graphs = CudaGraphs(cycle, [batch], CountedRecorder(device))
    graphs._slots.copy_(torch.arange(1, batch + 1, device=device))
    with counted_experts(model) as experts:
        cycle.verify(graphs._slots, pools.reach, rows - 1)
    graph, step = graphs._captured(lambda: cycle.verify(graphs._slots, pools.reach, rows - 1))
    assert bool(step.logits.isfinite().all()), "the logits are not finite"
    times = graph_us(graph, replays)
    cycle.drafts = 0
    needs = Needs(sampled=False, penalties=False, bias=False, min_tokens=False, masks=False, logprobs=None)
    with unchanged(state):
        decide, _ = graphs._captured(lambda: cycle.decide(step, needs))
        decide_times = graph_us(decide, replays)
    size = weight_bytes(model, experts) + cache_bytes(config, pools, batch, rows, context)
    rate = READ_BYTES / plain_read_us(READ_BYTES)
    floor = size / rate
    return {
        "rows": batch * rows,
        "us": round(times[len(times) // 2], 1),
        "p99_us": round(times[int(len(times) * 0.99)], 1),
        "floor_us": round(floor, 1),
        "over_floor": round(times[len(times) // 2] / floor, 2),
        "bytes": size,
        "read_tb_s": round(rate / 1e6, 2),
        "experts": sum(experts),
        "launches": nodes(graph),
        "decide_us": round(decide_times[replays // 2], 1),
        "host_us": round(host_us(graph, min(replays, IN_A_ROW)), 1),
    }, Captured(graph, (graphs, step, model.backbone.executor))


def shares(bars: list[Bar]) -> dict[str, tuple[int, float]]:
    """By kernel: how many there are, and the microseconds from the end of what was before to their own ends."""
    found: dict[str, tuple[int, float]] = {}
    ordered = sorted(bars, key=lambda bar: bar.start)
    end = ordered[0].start
    for bar in ordered:
        count, total = found.get(bar.name, (0, 0.0))
        found[bar.name] = count + 1, total + max(bar.end - end, 0.0)
        end = max(end, bar.end)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--steps", default="1x1,2x1,4x1,1x6,8x1,16x1,8x6")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--engram-rows", type=int, default=1 << 20)
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--paths", default="stock,specialized")
    parser.add_argument(
        "--off", help=f"paths of the specialized decode to leave out (default with several ranks: {NEEDS_PEERS})"
    )
    parser.add_argument("--gates", default="", help="limits of paths in place of the device's: side_stream=48,...")
    parser.add_argument("--ablation", action="store_true", help="the specialized path without each of its paths too")
    parser.add_argument("--kernels", action="store_true", help="print what each kernel takes of a step")
    parser.add_argument("--timeline", type=Path, help="folder for a picture of a layer of each step")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", action="store_true", help="all ranks, each a process with a GPU of its own")
    args = parser.parse_args()
    if problem := unusable(args):
        parser.error(problem)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here")
    if args.peers:
        spawn(run, args.ranks, args, device="cuda", timeout_s=TIMEOUT_S)
        return
    device = torch.device("cuda", 0)
    run(SoloWorld(device) if args.ranks == 1 else MissingPeers(args.ranks, device), args)


def unusable(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, before a model of minutes is made for them; None: nothing."""
    unknown = set(args.paths.split(",")) - set(STEP_PATHS)
    if unknown:
        return f"--paths {args.paths}: expected {', '.join(STEP_PATHS)}"
    if "stock_nccl" in args.paths.split(",") and not args.peers:
        return "--paths stock_nccl sums over ranks by NCCL: it needs --peers"
    switched = [*(args.off or "").split(","), *(change.split("=")[0] for change in args.gates.split(","))]
    wrong = [path for path in switched if path and path not in PATHS]
    if wrong:
        return f"{', '.join(wrong)} in --off or --gates: expected {', '.join(PATHS)}"
    if args.timeline is not None and not args.timeline.is_dir():
        return f"--timeline {args.timeline}: expected a folder that exists"
    return None


def changed_gates(device: torch.device, changes: str) -> Gates:
    """The gates of the device with the limits in "path=rows,path=rows" in place of its own."""
    limits = dict(change.split("=") for change in changes.split(",") if change)
    return replace(GATES[device_kind(device)], **{path: int(rows) for path, rows in limits.items()})


def run(world: World, args: argparse.Namespace) -> None:
    """Measure what was asked for on this rank."""
    device = world.device
    config = cut(ModelConfig.from_file(CONFIG), args.layers)
    model = synthetic(config, world, args.engram_rows)
    model.set_token_map(torch.arange(config.vocab_size) % config.engram_compressed_vocab_size)
    model.backbone.hashes = Hashed(model.backbone.hashes, args.engram_rows)  # type: ignore[assignment]
    conditions = {
        "device": torch.cuda.get_device_name(device), "ranks": args.ranks, "layers": args.layers,
        "context": args.context, "peers": args.ranks - 1 if args.peers else "none", "torch": torch.__version__,
        "triton": triton.__version__,
        "weights_gb": round(sum(p.nbytes for p in model.parameters()) / 1e9, 1),
    }  # fmt: skip
    without = (NEEDS_PEERS if args.ranks > 1 and not args.peers else "") if args.off is None else args.off
    usual = tuple(name for name in without.split(",") if name)
    runs = [(path, usual) for path in args.paths.split(",")]
    if args.ablation:
        runs += [("specialized", (*usual, path)) for path in PATHS if path not in usual]
    timed: list[tuple[dict[str, Any], Captured]] = []
    for path, off in runs:
        model.backbone.executor = model.head.gather = None
        if path == "specialized":
            fabric = None if args.peers else LoopbackFabric(args.ranks, device)
            executor = SpecializedDecode(
                model.backbone,
                DecodeConfig(off=off),
                model.head,
                gates=changed_gates(device, args.gates),
                fabric=fabric,
            )
            model.backbone.executor = executor
        replays = args.replays if path == "specialized" else min(args.replays, MOST_OF_OTHERS)
        for step in args.steps.split(","):
            batch, rows = (int(part) for part in step.split("x"))
            with summed_by_nccl(world, path == "stock_nccl"):
                line, step_graph = measure(model, batch, rows, args.context, replays)
            line = {
                "path": path,
                "off": off if path == "specialized" else (),
                "gates": args.gates,
                "step": step,
                "replays": replays,
                **line,
            }
            if args.kernels or args.timeline is not None:
                timed.append((line, step_graph))
            if world.rank > 0:
                continue
            print(json.dumps(line), flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line | conditions) + "\n")
    for line, step_graph in timed:
        bars = launched_by(step_graph.graph.replay)
        if world.rank == 0:
            show_kernels(line, bars, args)


def show_kernels(line: dict[str, Any], bars: list[Bar], args: argparse.Namespace) -> None:
    """What single kernels of a step take, in words and as a picture."""
    path, step = line["path"], line["step"]
    if args.kernels:
        print(f"{path}, {step}, without {', '.join(line['off']) or 'nothing'}:")
        for name, (count, total) in shares(bars).items():
            print(f"    {name[:60]:60} {count:4} {total:9.1f} us")
    if args.timeline is not None:
        title = f"{path}, {step}: kernels of about one layer of {args.layers}, {line['us']} us a step"
        drawn = picture(middle(bars, args.layers), title)
        (args.timeline / f"step_{path}_{step}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()

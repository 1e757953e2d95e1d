"""How long each operation takes on this GPU, beside a plain read of as many bytes and PyTorch's own way.

    python benchmarks/ops.py [--only linear,moe] [--rows 1,8] [--sweep] [--out FILE]

A CUDA graph holds one call for each of many copies of the weights, enough that none is found in the L2 cache; the time
of a call is the median replay over the calls of a graph. The plain read is a kernel that sums as many bytes, with as
many copies, in the same run. Prints a table and, with ``--out``, JSON lines. ``--sweep`` times our own way alone at
every number of rows from 1 to 64 (``--rows``: at those), and flags steps of more than 1.5 between neighbours.
"""

import argparse
import importlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))
from op_case import ROWS, SWEPT, Build, Case
from timeline import Bar

COLD_BYTES = 192 << 20
"""Bytes that the copies of a call must exceed together: three times the L2 cache of an H200."""
MOST_COPIES, LEAST_COPIES = 64, 4
REPLAYS = 15


@triton.jit
def _read(source, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One word of ``out`` for each program, so that the loads are not removed."""
    total = tl.zeros((block,), tl.int32)
    for start in range(tl.program_id(0) * block, count, tl.num_programs(0) * block):
        index = start + tl.arange(0, block)
        total += tl.load(source + index, mask=index < count, other=0)
    tl.store(out + tl.program_id(0), tl.sum(total))


def replay_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of one call, from replays of a graph of them all."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        for call in calls:
            kept.append(call())
    times = []
    for _ in range(REPLAYS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def launched_by(call: Callable[[], object]) -> list[Bar]:
    """The kernels and copies of one call, or replay."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if str(event.device_type).endswith("CUDA")]
    return [Bar(event.name, event.time_range.start, event.time_range.end) for event in events]


def launches(call: Callable[[], object]) -> int:
    """Kernels and copies that one call launches; not by the profiler, which slows every graph after its first use."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    return nodes(graph)


def nodes(graph: Any) -> int:
    """Kernels and copies of a graph that was captured with ``keep_graph``."""
    from cuda.bindings import driver

    error, _, count = driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph()))
    assert int(error) == 0, error
    return int(count)


def copies_for(size: int) -> int:
    """Copies of ``size`` bytes that no cache can hold."""
    return max(LEAST_COPIES, min(MOST_COPIES, -(-COLD_BYTES // max(size, 1))))


@cache
def plain_read_us(size: int) -> float:
    """The quickest of a few plain reads of ``size`` bytes, cold."""
    device, words = torch.device("cuda"), max(size // 4, 1)
    sources = [torch.ones(words, dtype=torch.int32, device=device) for _ in range(copies_for(size))]
    out = torch.empty(4096, dtype=torch.int32, device=device)
    best = float("inf")
    for block in (1024, 4096):
        programs = max(1, min(132 * 8, -(-words // block)))

        def read(source: torch.Tensor, programs: int = programs, block: int = block) -> None:
            _read[(programs,)](source, out, words, block, num_warps=8)

        best = min(best, replay_us([lambda source=source: read(source) for source in sources]))  # type: ignore[misc]
    return best


def ours_us(case: Case) -> float:
    """Microseconds of a call of ours."""
    found = replay_us(case.build(torch.device("cuda"), copies_for(case.bytes)))
    torch.cuda.empty_cache()
    return round(found, 2)


def measure(case: Case) -> dict[str, object]:
    """One line of the table."""
    device, copies = torch.device("cuda"), copies_for(case.bytes)
    calls = case.build(device, copies)
    line: dict[str, object] = {
        "op": case.name,
        "rows": case.rows,
        "bytes": case.bytes,
        "copies": len(calls),
        "us": round(replay_us(calls), 2),
        "read_us": round(plain_read_us(case.bytes), 2),
        "launches": launches(calls[0]),
    }
    del calls
    line["over_read"] = round(line["us"] / line["read_us"], 2)  # type: ignore[operator]
    if case.alternative is not None:
        line |= {"torch_us": round(_alternative_us(case.alternative, copies), 2), "beside": case.alternative_name}
    torch.cuda.empty_cache()
    return line


def _alternative_us(build: Build, copies: int) -> float:
    return replay_us(build(torch.device("cuda"), copies))


def show(line: dict[str, object]) -> None:
    torch_us = line.get("torch_us", "")
    print(
        f"{line['op']!s:44}{line['rows']!s:>5}{line['bytes']!s:>11} B{line['us']!s:>9} us"
        f"{line['read_us']!s:>8} read {line['over_read']!s:>6} x {line['launches']!s:>3} launches  torch {torch_us}",
        flush=True,
    )


def steps(times: Mapping[int, float], largest: float = 1.5) -> list[str]:
    """Jumps of more than ``largest`` between neighbouring row counts, from the microseconds of an operation at each."""
    return [
        f"{times[before]} us at {before}, {times[after]} at {after} rows"
        for before, after in itertools.pairwise(sorted(times))
        if times[after] > largest * times[before]
    ]


def sweep(name: str, rows: Sequence[int]) -> Iterator[dict[str, object]]:
    """A line for each operation of a file: its microseconds by rows, and its steps."""
    times: dict[str, dict[int, float]] = {}
    for case in importlib.import_module(f"ops_{name}").cases(rows):
        try:
            times.setdefault(case.name, {})[case.rows] = ours_us(case)
        except Exception as error:  # one operation's fault must not hide the others
            print(f"{case.name}, {case.rows} rows: {type(error).__name__}: {error}", flush=True)
            torch.cuda.synchronize()
    for op, found in times.items():
        print(f"{op}: {', '.join(f'{count} {us}' for count, us in found.items())}")
        print("\n".join(f"    step: {line}" for line in steps(found)) or "    no step above 1.5", flush=True)
        yield {"op": op, "us_by_rows": found, "steps": steps(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="files, separated by commas: linear for ops_linear.py")
    parser.add_argument("--rows", default="", help="row counts, separated by commas")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here")
    names = args.only.split(",") if args.only else sorted(p.stem[4:] for p in Path(__file__).parent.glob("ops_*.py"))
    rows = [int(count) for count in args.rows.split(",") if count]
    conditions = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "replays": REPLAYS,
    }
    for name in names:
        for line in sweep(name, rows or SWEPT) if args.sweep else table(name, rows or ROWS):
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line | conditions) + "\n")


def table(name: str, rows: Sequence[int]) -> Iterator[dict[str, object]]:
    """A line for each operation of a file at each number of rows."""
    for case in importlib.import_module(f"ops_{name}").cases(rows):
        try:
            line = measure(case)
        except Exception as error:  # one operation's fault must not hide the others
            print(f"{case.name}, {case.rows} rows: {type(error).__name__}: {error}", flush=True)
            torch.cuda.synchronize()
            continue
        show(line)
        yield line


if __name__ == "__main__":
    main()

"""How long the host takes to decide a cycle, apart from the model: median and P99 as a JSON line.

    python benchmarks/scheduler.py [--requests 64] [--context 2000] [--drafts 5]

A *tick* is ``schedule``, the lists of slots, lengths and table entries that a batch is made of, and the feedback of
one cycle's results (1 to k + 1 rows a request). Prompts share a prefix, end at different times and are replaced, so
that starts, chunks, hits, snapshots and evictions are part of it. The ``cpu`` figures leave out what other processes
take of the core. Ticks with nine tenths of the requests decoding, or more, count.
"""

import argparse
import gc
import json
import platform
import random
import statistics
import time

from quickseek.engine.blocks import BlockPool
from quickseek.engine.prefix import PrefixCache
from quickseek.engine.request import Request
from quickseek.engine.scheduler import Scheduler, SchedulerLimits
from quickseek.engine.tick import Tick
from quickseek.sampling_params import SamplingParams

ALLOWED_MS = 1.0
"""What the median may take at 64 requests."""


def build_batch(tick: Tick) -> tuple[list[int], list[int], list[tuple[int, int, list[int]]], list[list[int]]]:
    """What the runner copies to the device: slots and known lengths of the batch, table entries, prompt tokens."""
    slots = [request.slot or 0 for request in tick.decodes]
    lengths = [request.num_computed for request in tick.decodes]
    entries = [(update.slot, update.first, list(update.blocks)) for update in tick.table_updates]
    return slots, lengths, entries, [chunk.token_ids for chunk in tick.prefills]


def measure(requests: int, context: int, drafts: int, ticks: int) -> dict[str, object]:
    """Time ``ticks`` cycles with ``requests`` requests running."""
    chance = random.Random(0)
    limits = SchedulerLimits(
        max_num_seqs=requests,
        max_num_batched_tokens=2048,
        max_model_len=2 * context,
        num_speculative_tokens=drafts,
        snapshot_interval=512,
    )
    pool = BlockPool(requests * context * 3 // 64, 16)
    prefix = PrefixCache(pool, range(requests + 1, requests + 33), "benchmark")
    scheduler = Scheduler(limits, pool, prefix)
    stem = [chance.randrange(100_000) for _ in range(context // 2)]

    def arrive() -> None:
        rest = chance.randint(1, context // 2)
        prompt = stem[: chance.randrange(context // 2)] + [chance.randrange(100_000) for _ in range(rest)]
        limit = chance.randint(context // 8, context // 2)
        scheduler.add(Request(prompt, SamplingParams(max_tokens=limit), limit))

    for _ in range(requests + 8):
        arrive()
    times, cpu_times, rows, preempted, hits = [], [], [], 0, 0
    unread: list[Tick] = []
    gc.disable()
    for number in range(ticks):
        began, began_cpu = time.perf_counter(), time.thread_time()
        tick = scheduler.schedule()
        build_batch(tick)
        for chunk in tick.prefills:
            scheduler.prefilled(chunk)
        unread.append(tick)
        finished = _read(scheduler, unread.pop(0), chance) if number else 0
        times.append((time.perf_counter() - began) * 1e3)
        cpu_times.append((time.thread_time() - began_cpu) * 1e3)
        rows.append(len(tick.decodes))
        preempted += len(tick.preempted)
        hits += sum(restore.length > 0 for restore in tick.restores)
        for _ in range(finished):
            arrive()
    gc.enable()
    full = [index for index, count in enumerate(rows) if count >= requests * 0.9]
    busy, busy_cpu = sorted(times[i] for i in full), sorted(cpu_times[i] for i in full)
    return {
        "what": "scheduler",
        "requests": requests,
        "context": context,
        "drafts": drafts,
        "samples": len(busy),
        "median_ms": round(statistics.median(busy), 4),
        "p99_ms": round(busy[int(len(busy) * 0.99)], 4),
        "median_cpu_ms": round(statistics.median(busy_cpu), 4),
        "p99_cpu_ms": round(busy_cpu[int(len(busy_cpu) * 0.99)], 4),
        "worst_cpu_ms": round(busy_cpu[-1], 4),
        "allowed_median_ms": ALLOWED_MS,
        "within": statistics.median(busy) <= ALLOWED_MS,
        "preemptions": preempted,
        "prefix_hits": hits,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _read(scheduler: Scheduler, tick: Tick, chance: random.Random) -> int:
    """Report a cycle's results; how many requests ended."""
    finished = 0
    for chunk in tick.prefills:
        if chunk.last:
            chunk.request.output_ids.append(7)
    for request in tick.decodes:
        if request.finish_reason is not None:
            continue
        most = request.limit - len(request.output_ids)
        count = min(chance.randint(1, scheduler.limits.num_speculative_tokens + 1), most)
        request.output_ids += [7] * count
        scheduler.committed(request, count)
        if len(request.output_ids) >= request.limit:
            request.finish_reason = "length"
            scheduler.finish(request)
            finished += 1
    scheduler.completed(tick.cycle)
    return finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--ticks", type=int, default=5000)
    args = parser.parse_args()
    print(json.dumps(measure(args.requests, args.context, args.drafts, args.ticks)))


if __name__ == "__main__":
    main()

"""Many requests at once against one alone, on a miniature: tokens/s of the whole engine, as a JSON line.

    python benchmarks/serving.py [--config tiny] [--concurrent 32] [--tokens 64] [--speculative 0]

Each figure is the median over ``--repeats`` runs in one process, alone and together alternating.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from quickseek.checkpoint.miniature import write_miniature
from quickseek.llm import LLM
from quickseek.sampling_params import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--concurrent", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--speculative", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        write_miniature(path, args.config)
        llm = LLM(
            path,
            max_num_seqs=args.concurrent,
            num_speculative_tokens=args.speculative,
            enable_prefix_caching=False,
        )
        params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
        generator = torch.Generator().manual_seed(2)
        size = (args.concurrent, args.prompt)
        prompts = torch.randint(3, llm.config.vocab_size, size, generator=generator).tolist()
        rates: dict[int, list[float]] = {1: [], args.concurrent: []}
        for _ in range(args.repeats):
            for count in rates:
                started = time.perf_counter()
                outputs = llm.generate(prompts[:count], params)
                rates[count].append(sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - started))
    alone, together = (statistics.median(values) for values in rates.values())
    figures = {
        "what": "engine throughput, prompts included",
        "config": args.config,
        "mode": "exact float32",
        "prompt": args.prompt,
        "tokens": args.tokens,
        "drafts": args.speculative,
        "concurrent": args.concurrent,
        "alone_tokens_per_s": round(alone, 1),
        "together_tokens_per_s": round(together, 1),
        "ratio": round(together / alone, 2),
        "repeats": args.repeats,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

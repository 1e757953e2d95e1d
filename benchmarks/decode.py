"""How long a decode step of a miniature takes on this CPU: median and P99 of single steps, as a JSON line.

    python benchmarks/decode.py [--config tiny] [--context 200] [--mode exact] [--tokens 200]
"""

import argparse
import itertools
import json
import platform
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
    parser.add_argument("--context", type=int, default=200, help="tokens before the first timed step")
    parser.add_argument("--tokens", type=int, default=200, help="timed steps")
    parser.add_argument("--mode", default="exact")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        write_miniature(path, args.config)
        llm = LLM(path, mode=args.mode)
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(3, llm.config.vocab_size, (args.context,), generator=generator).tolist()
        params = SamplingParams(max_tokens=args.tokens + 1, temperature=0.0, ignore_eos=True)
        stamps = []
        for _ in llm.stream(prompt, params):
            stamps.append(time.perf_counter())
    steps = torch.tensor([b - a for a, b in itertools.pairwise(stamps)]) * 1e3
    print(
        json.dumps(
            {
                "what": "decode step",
                "config": args.config,
                "mode": args.mode,
                "context": f"{args.context}..{args.context + args.tokens}",
                "rows": 1,
                "steps": len(steps),
                "median_ms": round(float(steps.median()), 2),
                "p99_ms": round(float(steps.quantile(0.99)), 2),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "machine": platform.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()

"""Seconds from process start to the first token of the miniature, imports included: median of several processes.

    python benchmarks/first_token.py [--runs 5] [--mode exact]
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quickseek.checkpoint.miniature import write_miniature


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mode", default="exact")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        write_miniature(path, "tiny")
        command = [sys.executable, "-m", "quickseek.cli", "generate", "--model", str(path), "--mode", args.mode]
        command += ["--prompt", "How fast", "--max-tokens", "8", "--temperature", "0", "--ignore-eos"]
        times = []
        for _ in range(args.runs):
            started = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
                assert process.stdout is not None
                if not process.stdout.read(1):
                    raise RuntimeError("no text came")
                times.append(time.perf_counter() - started)
                process.stdout.read()
    figures = {
        "what": "process start to first token",
        "config": "tiny",
        "mode": args.mode,
        "median_s": round(statistics.median(times), 2),
        "max_s": round(max(times), 2),
        "runs": args.runs,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""Text that a model writes, for its drafter to learn from: ``python tools/write_text.py --model DIR --out DIR``.

Prompts are BOS and tokens of the text trained on, half of them from chapter starts (in a fixed order, all before any
comes again) and half from anywhere. Parts are greedy in turn with parts drawn at one temperature from 0.6 to 1. A part
is a file ``own-<number>.npz``: ``ids`` uint16 [answers, prompt + answer], ``prompt`` tokens of each before its answer,
``temperature``. A later call goes on after the parts that are there.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from miniature.corpus import END_ID
from miniature.data import BEGIN
from quickseek import LLM, SamplingParams

LEAST_TEMPERATURE = 0.6


def prompts(text: np.ndarray, number: int, count: int, tokens: int) -> np.ndarray:
    """int64 [count, 1 + tokens] prompts of part ``number``, from ids ``text`` whose chapters end with END_ID."""
    chapters = np.concatenate(([0], np.flatnonzero(text == END_ID) + 1))
    chapters = chapters[chapters + tokens <= len(text)]
    order = np.random.default_rng(0).permutation(chapters)
    # The greedy and the drawn part of a pair begin at the same chapters: a greedy answer is worth writing once.
    first = number // 2 * (count // 2)
    turn = order[np.arange(first, first + count // 2) % len(order)]
    anywhere = np.random.default_rng(number + 1).integers(len(text) - tokens + 1, size=count - count // 2)
    starts = np.concatenate((turn, anywhere))
    windows = text[starts[:, None] + np.arange(tokens)].astype(np.int64)
    return np.pad(windows, ((0, 0), (1, 0)), constant_values=BEGIN)


def sampling(number: int, tokens: int) -> SamplingParams:
    """How part ``number`` is written: greedy if even, else at a temperature of its own; past the end token as well."""
    temperature = 0.0
    if number % 2:
        temperature = float(np.random.default_rng(number).uniform(LEAST_TEMPERATURE, 1.0))
    return SamplingParams(max_tokens=tokens, temperature=temperature, seed=number, ignore_eos=True)


def main() -> None:
    """Write parts until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(".train"), help="where --prepare put the tokens")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=45, help="no part begins later")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=256, help="answers of a part")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with np.load(options.data / "tokens.npz") as arrays:
        text = arrays["train"]
    options.out.mkdir(parents=True, exist_ok=True)
    length = 1 + options.prompt_tokens + options.answer_tokens
    llm = LLM(
        options.model,
        device=options.device,
        max_num_seqs=options.at_once,
        max_model_len=length,
        enable_prefix_caching=False,
    )
    since, number = time.monotonic(), len(list(options.out.glob("own-*.npz")))
    while time.monotonic() - since < options.minutes * 60:
        started = time.monotonic()
        asked = prompts(text, number, options.at_once, options.prompt_tokens)
        params = sampling(number, options.answer_tokens)
        outputs = llm.generate(asked.tolist(), params)
        answers = np.array([output.token_ids for output in outputs])
        whole = np.concatenate((asked, answers), 1).astype(np.uint16)
        name = options.out / f"own-{number:03d}.npz"
        np.savez(name, ids=whole, prompt=asked.shape[1], temperature=params.temperature)
        print(f"{name}: {answers.size / (time.monotonic() - started):.0f} tokens/s", flush=True)
        number += 1


if __name__ == "__main__":
    main()

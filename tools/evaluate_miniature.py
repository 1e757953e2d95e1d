"""Measure a trained miniature on a CPU: ``python tools/evaluate_miniature.py --model DIR``. One JSON line per figure.

Held-out text is what tools/miniature/corpus.py keeps from training, as ``train_miniature.py --prepare`` wrote it.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from miniature import corpus, report
from miniature.data import held_out_windows
from miniature.ngram import ByteModel
from miniature.sizes import CONTEXT
from quickseek.numerics import Numerics
from quickseek.tokenizer.tokenizer import Tokenizer

Figures = Iterator[dict[str, object]]
NGRAM_CONTEXTS = (1, 2, 3, 4)
PROMPT_TOKENS, ANSWER_TOKENS = 64, 96


def bits(options: argparse.Namespace) -> Figures:
    """Bits per byte of held-out text, beside byte n-gram models of the text trained on."""
    windows = held_out_windows(options.text, CONTEXT + 1, options.windows or 10**6)
    losses = report.Scorer(options.model).losses(windows)
    tokenizer = Tokenizer.from_directory(options.model)
    data = tokenizer.decode(windows[:, 1:].flatten().tolist(), skip_special_tokens=True).encode()
    found = float(losses.double().sum()) / np.log(2) / len(data)
    yield {"figure": "bits_per_byte", "value": round(found, 4), "tokens": losses.numel(), "bytes": len(data)}
    text = "\n\n".join(corpus.train_texts(options.data)).encode()
    for context in NGRAM_CONTEXTS:
        value = round(ByteModel(text, context).bits(data), 4)
        yield {"figure": "ngram_bits_per_byte", "bytes_of_context": context, "value": value}


def modes(options: argparse.Namespace) -> Figures:
    """Perplexity of the stock model in both modes on the same windows."""
    windows = held_out_windows(options.text, CONTEXT + 1, options.mode_windows)
    for name, numerics in (("exact", Numerics.exact()), ("trained", Numerics.trained())):
        value = report.perplexity(report.stock_losses(options.model, windows, numerics))
        yield {"figure": "perplexity", "mode": name, "value": round(value, 4), "tokens": windows[:, 1:].numel()}


def mechanisms(options: argparse.Namespace) -> Figures:
    """Perplexity without each mechanism, and what that costs window by window."""
    windows = held_out_windows(options.text, CONTEXT + 1, options.windows or 60)
    for found in report.ablations(report.Scorer(options.model), windows):
        yield {"figure": "ablation", **found}


def drafts(options: argparse.Namespace) -> Figures:
    """Accepted drafts on prompts from held-out chapters, spread over the books."""
    tokenizer = Tokenizer.from_directory(options.model)
    chapters = corpus.held_out_texts(options.data)
    chosen = chapters[:: max(1, len(chapters) // options.prompts)][: options.prompts]
    prompts = [[tokenizer.bos_id, *tokenizer.encode(text)[:PROMPT_TOKENS]] for text in chosen]
    for temperature, method in ((0.0, "greedy"), (1.0, "probabilistic"), (1.0, "greedy")):
        found = report.accepted_lengths(
            options.model,
            prompts,
            temperature=temperature,
            method=method,
            mode=options.mode,
            max_tokens=ANSWER_TOKENS,
        )
        yield {"figure": "accepted", "temperature": temperature, "drafts": method, "mode": options.mode, **found}


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "bits": bits,
    "modes": modes,
    "mechanisms": mechanisms,
    "drafts": drafts,
}


def main() -> None:
    """Print the figures of the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(".train"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--windows", type=int, help="held-out windows of 512 tokens (bits: all, mechanisms: 60)")
    parser.add_argument("--mode-windows", type=int, default=12, help="windows in both modes")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--mode", default="exact", help="of the drafts: exact or trained")
    options = parser.parse_args()
    with np.load(options.data / "tokens.npz") as arrays:
        held_out = torch.from_numpy(arrays["heldout"].astype(np.int64))
    options.text = held_out
    for part in options.parts:
        for figure in PARTS[part](options):
            print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()

"""Token choice over the released vocabulary, from FP32 logits."""

from collections.abc import Callable

import torch

from quickseek.ops.sampling import triton


def launches() -> dict[str, Callable[[], object]]:
    rows, vocabulary = 48, 129280
    logits, chances = torch.zeros(rows, vocabulary), torch.zeros(rows, vocabulary, dtype=torch.float64)
    ones, whole = torch.ones(rows), torch.zeros(rows, dtype=torch.int64)
    few, uniform = torch.zeros(rows, 64, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    chosen, drafts = torch.zeros(8, 6, dtype=torch.int64), torch.zeros(8, 5, dtype=torch.int64)
    return {
        "greedy": lambda: triton.greedy(logits),
        "greedy of BF16": lambda: triton.greedy(logits.to(torch.bfloat16)),
        "probabilities": lambda: triton.probabilities(logits, ones, ones, whole, ones),
        "probabilities by temperature and top_p": lambda: triton.probabilities(logits, ones, ones),
        "probabilities of float64": lambda: triton.probabilities(logits.double(), ones, ones, whole, ones),
        "probabilities of a small vocabulary": lambda: triton.probabilities(logits[:, :150], ones, ones, whole, ones),
        "draw": lambda: triton.draw(chances, uniform),
        "draw of a draft": lambda: triton.draw(few, uniform),
        "the most likely": lambda: triton.most_likely(logits, ones, 64),
        "the most likely of BF16": lambda: triton.most_likely(logits.to(torch.bfloat16), ones, 64),
        "the most likely of float64": lambda: triton.most_likely(logits.double(), ones, 64),
        "log-probabilities": lambda: triton.log_probabilities(logits, whole, 20),
        "log-probability of a token": lambda: triton.log_probabilities(logits, whole, 0),
        "uniform": lambda: triton.uniform(whole, whole, 2),
        "match": lambda: triton.match(chosen, drafts, whole[:8]),
    }

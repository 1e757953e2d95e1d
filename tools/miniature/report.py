"""Figures of a finished miniature, from its packed checkpoint on a CPU: text, mechanisms, drafts."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from miniature.attention import Faults
from miniature.backbone import backbone, logits
from miniature.layers import Hashing
from miniature.rounding import Rounding
from miniature.weights import from_stored, values
from quickseek import LLM, SamplingParams
from quickseek.checkpoint.reader import Checkpoint
from quickseek.config import ModelConfig
from quickseek.model.causal_lm import load_model
from quickseek.model.state import ContiguousState
from quickseek.numerics import Numerics
from quickseek.tokenizer.compressed_ids import compressed_id_table
from quickseek.tokenizer.tokenizer import Tokenizer

ABLATIONS = {
    "without the n-gram memory": Faults(engram=True),
    "without global KV": Faults(global_kv=True),
    "without the candidate filter": Faults(candidates=True),
    "with the first stream for every sublayer": Faults(pre=True),
}
AT_ONCE = 8
REPETITIVE = 0.6
"""Share of different sequences of four tokens, below which an answer repeats itself."""


class Scorer:
    """Losses of token windows under the whole-sequence forward, exact in fp32."""

    def __init__(self, directory: Path) -> None:
        checkpoint = Checkpoint.open(directory)
        self.config: ModelConfig = checkpoint.config
        tokenizer = Tokenizer.from_directory(directory, vocab_size=self.config.vocab_size)
        self.hashing = Hashing.of(self.config, compressed_id_table(tokenizer, self.config.vocab_size))
        weights = from_stored(self.config, checkpoint)
        self.values = values(self.config, weights, torch.float32, Rounding(on=False), draft=False)

    @torch.no_grad()
    def losses(self, windows: Tensor, faults: Faults | None = None) -> Tensor:
        """Nats [windows, T - 1] of each token of ids [windows, T] after the first."""
        return torch.cat([self._losses(ids, faults) for ids in windows.split(AT_ONCE)])

    def _losses(self, ids: Tensor, faults: Faults | None) -> Tensor:
        states = backbone(self.config, self.values, self.hashing, ids[:, :-1], Rounding(on=False), faults=faults)
        scores = logits(self.values, states.hidden)
        return F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(ids.shape[0], -1)


@torch.no_grad()
def stock_losses(directory: Path, windows: Tensor, numerics: Numerics) -> Tensor:
    """Nats [windows, T - 1] under the stock model, one prompt at a time."""
    model, checkpoint = load_model(directory, numerics)
    config = checkpoint.config
    tokenizer = Tokenizer.from_directory(directory, vocab_size=config.vocab_size)
    model.set_token_map(compressed_id_table(tokenizer, config.vocab_size))
    length = windows.shape[1] - 1
    state = ContiguousState(config, numerics, max_requests=1, max_length=length)
    found = []
    for ids in windows:
        slot = state.acquire()
        context = state.context([slot], [length], num_prefills=1)
        hidden = model.backbone(ids[:-1], context.rows.positions, context=context)
        assert isinstance(hidden, Tensor)
        found.append(F.cross_entropy(model.logits(hidden), ids[1:], reduction="none"))
        state.release(slot)
    return torch.stack(found)


def perplexity(losses: Tensor) -> float:
    """Of a mean over tokens."""
    return math.exp(float(losses.double().mean()))


def ablations(scorer: Scorer, windows: Tensor) -> Iterator[dict[str, object]]:
    """Perplexity of the whole model and without each mechanism, and its standard error over windows.

    ``cost``: nats a token above the whole model's, ``cost_error`` from its spread over the same windows.
    """
    whole = scorer.losses(windows).double().mean(1)
    for name, faults in {"whole": None, **ABLATIONS}.items():
        losses = whole if faults is None else scorer.losses(windows, faults).double().mean(1)
        value = perplexity(losses)
        yield {
            "model": name,
            "perplexity": round(value, 3),
            "standard_error": round(value * _error(losses), 3),
            "cost": round(float((losses - whole).mean()), 4),
            "cost_error": round(_error(losses - whole), 4),
        }


def _error(values: Tensor) -> float:
    """Standard error of the mean of independent values [N]."""
    return float(values.std()) / math.sqrt(len(values))


# ---------------------------------------------------------------------------------------------- drafts


def accepted_lengths(
    directory: Path, prompts: list[list[int]], *, temperature: float, method: str, mode: str, max_tokens: int
) -> dict[str, object]:
    """Mean accepted drafts of five and acceptance by position, over what the engine writes after ``prompts``.

    ``standard_error``: of the mean, from its spread over the prompts. ``at``: how often each draft of a block was
    accepted, which needs all before it. ``repetitive``: answers of which few sequences of tokens are different ones.
    """
    llm = LLM(directory, num_speculative_tokens=5, draft_sample_method=method, mode=mode)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    accepted, cycles_of = [output.accepted for output in outputs], [output.drafted / 5 for output in outputs]
    cycles = sum(cycles_of)
    at = [0] * 5
    for output in outputs:
        for position, count in enumerate(output.accepted_at):
            at[position] += count
    return {
        "mean_accepted": round(sum(accepted) / cycles, 3),
        "standard_error": round(ratio_error(accepted, cycles_of), 3),
        "at": [round(count / cycles, 3) for count in at],
        "cycles": round(cycles),
        "tokens": sum(len(output.token_ids) for output in outputs),
        "repetitive": sum(distinct(output.token_ids) < REPETITIVE for output in outputs),
        "text": outputs[0].text,
    }


def distinct(ids: Sequence[int], length: int = 4) -> float:
    """The share of different ones among all sequences of ``length`` tokens of an answer."""
    found = [tuple(ids[start : start + length]) for start in range(len(ids) - length + 1)]
    return len(set(found)) / len(found)


def ratio_error(parts: list[int], wholes: list[float]) -> float:
    """Standard error of sum(parts) / sum(wholes) over independent pairs, to first order; NaN for a single pair."""
    count, ratio = len(parts), sum(parts) / sum(wholes)
    if count < 2:
        return math.nan
    squares = sum((part - ratio * whole) ** 2 for part, whole in zip(parts, wholes, strict=True))
    return math.sqrt(squares * count / (count - 1)) / sum(wholes)

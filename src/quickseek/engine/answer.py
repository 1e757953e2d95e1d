"""The answer of one request as the caller sees it: text, log-probabilities, and why it ended."""

import time
from dataclasses import dataclass, field

from quickseek.engine.grammar import GrammarCompiler, TokenMasks, is_thinking
from quickseek.engine.request import Request
from quickseek.engine.stop_strings import StopStrings
from quickseek.tokenizer.detokenizer import IncrementalDetokenizer
from quickseek.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of one token: its own, its rank (1: the most likely), and the most likely ids with theirs."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass
class RequestOutput:
    """What one prompt has produced so far.

    ``finish_reason``: "stop" (end token, stop id or stop string), "length", "abort", "error" (then ``error`` says
    what), or None while it runs; ``stop_reason``: the stop string or stop id that ended it. ``first_token_s`` and
    ``total_s`` count from the request's arrival, waiting included. ``drafted`` and ``accepted`` count speculative
    tokens, ``accepted_at`` how often each draft of a block was. ``cached_tokens``: prompt tokens that were not run.
    """

    prompt_token_ids: list[int]
    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether no more will come."""
        return self.finish_reason is not None


class Answer:
    """Turns the tokens of a request into text, and watches for what ends it on the host's side."""

    def __init__(self, request: Request, tokenizer: Tokenizer, compiler: GrammarCompiler | None) -> None:
        params = request.params
        self.request, self.tokenizer = request, tokenizer
        self.output = RequestOutput(request.prompt_ids, request.request_id)
        if params.logprobs is not None:
            self.output.logprobs = []
        self.masks: TokenMasks | None = None
        if params.masked:
            thinking = is_thinking(request.prompt_ids, tokenizer)
            self.masks = TokenMasks(params, tokenizer, compiler, thinking=thinking)
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(
            tuple(params.stop), include=params.include_stop_str_in_output, min_tokens=params.min_tokens
        )
        self._arrived = time.perf_counter()

    def take(self, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> tuple[str, int]:
        """New text to show, and how many of ``tokens`` belong to the answer (fewer after a stop string)."""
        released = self._stops.push([self._detokenizer.push(token) for token in tokens])
        kept, output = released.tokens, self.output
        output.token_ids += tokens[:kept]
        if output.logprobs is not None and logprobs is not None:
            output.logprobs += logprobs[:kept]
        if self.masks is not None:
            self.masks.accept(tokens[:kept])
        output.total_s = time.perf_counter() - self._arrived
        output.first_token_s = output.first_token_s or output.total_s
        output.text += released.text
        if released.stop is not None:
            output.stop_reason = released.stop
        return released.text, kept

    def end(self, reason: str, error: str | None = None) -> str:
        """Close the answer; returns the last text to show."""
        output, text = self.output, ""
        if self._stops.found is None:
            text = self._stops.finish(self._detokenizer.flush()).text
        output.text += text
        output.finish_reason, output.error = reason, error
        last = output.token_ids[-1] if output.token_ids else None
        if reason == "stop" and output.stop_reason is None and last in self.request.params.stop_token_ids:
            output.stop_reason = last
        output.total_s = time.perf_counter() - self._arrived
        output.drafted, output.accepted = self.request.drafted, self.request.accepted
        output.cached_tokens = self.request.cached_tokens
        return text

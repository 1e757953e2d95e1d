"""One request: its prompt, how its tokens are chosen, what it has produced, and what it holds while it runs."""

import itertools
import secrets
from dataclasses import dataclass, field
from enum import Enum

from quickseek.config import ModelConfig
from quickseek.errors import PromptError
from quickseek.sampling_params import SamplingParams

_numbers = itertools.count(1)


class Status(Enum):
    """Where a request is: waiting (also when preempted), reading its prompt, producing tokens, or done."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """``prompt_ids`` and ``output_ids`` are token ids; ``limit`` is the most tokens it may produce.

    ``accepted`` and ``drafted`` count drafts over the whole request. ``finish_reason``: "stop", "length", "abort",
    "error", or None.

    Scheduling: the lower ``priority`` number runs first, then the earlier ``arrival`` (set by the scheduler).
    ``cache_salt`` keeps its cached prefixes apart from those of other salts. While it runs it owns ``slot`` and the
    blocks of ``block_table``; ``num_computed`` rows of it are in the caches as far as the host knows, and the rows up
    to ``prefill_target`` are read as a prompt. ``cached_tokens``: prompt tokens that its first start did not have to
    run; ``preemptions`` counts how often it lost its place. ``last_cycle``: the last cycle launched with it.
    ``chain``: names of its full blocks as far as anybody asked. A start by replay (spec/model.md 9) sees no window keys
    before ``oldest`` and writes no global KV before row ``replayed_until``; ``published`` of its blocks can be found.
    """

    prompt_ids: list[int]
    params: SamplingParams
    limit: int
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    output_ids: list[int] = field(default_factory=list)
    slot: int | None = None
    accepted: int = 0
    drafted: int = 0
    finish_reason: str | None = None
    request_id: str = field(default_factory=lambda: f"request-{next(_numbers)}")
    priority: int = 0
    cache_salt: str = ""
    arrival: int = -1
    state: Status = Status.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    prefill_target: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    last_cycle: int = -1
    chain: list[bytes] = field(default_factory=list, repr=False)
    oldest: int = 0
    replayed_until: int = 0
    published: int = 0

    @classmethod
    def create(
        cls, prompt_ids: list[int], params: SamplingParams, config: ModelConfig, max_model_len: int
    ) -> "Request":
        """Check a prompt against the model; PromptError names what is wrong with it."""
        if not prompt_ids:
            raise PromptError("the prompt is empty: expected at least one token")
        for position, token in enumerate(prompt_ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < config.vocab_size:
                raise PromptError(f"prompt token {position} is {token!r}: expected an id below {config.vocab_size}")
            if token == config.image_token_id:
                raise PromptError(f"prompt token {position} is the image token: this model reads text only")
        if len(prompt_ids) >= max_model_len:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens: expected fewer than max_model_len = {max_model_len}"
            )
        request = cls(list(prompt_ids), params, min(params.max_tokens, max_model_len - len(prompt_ids)))
        if params.seed is not None:
            request.seed = params.seed
        return request

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions [start, stop), the prompt's first, then the produced ones."""
        prompt = len(self.prompt_ids)
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:] + self.output_ids[max(start - prompt, 0) : stop - prompt]

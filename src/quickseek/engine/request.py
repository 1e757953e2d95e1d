"""One request: its prompt, how its tokens are chosen, and what it has produced."""

import secrets
from dataclasses import dataclass, field

from quickseek.config import ModelConfig
from quickseek.errors import PromptError
from quickseek.sampling_params import SamplingParams


@dataclass
class Request:
    """``prompt_ids`` and ``output_ids`` are token ids; ``limit`` is the most tokens it may produce.

    ``slot`` is its request slot while it runs. ``drafts`` are the tokens proposed to follow its last one;
    ``accepted`` and ``drafted`` count drafts over the whole request. ``finish_reason``: "stop", "length", or None.
    """

    prompt_ids: list[int]
    params: SamplingParams
    limit: int
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    output_ids: list[int] = field(default_factory=list)
    slot: int | None = None
    drafts: list[int] = field(default_factory=list)
    accepted: int = 0
    drafted: int = 0
    finish_reason: str | None = None

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

    def append(self, token: int, eos_token_id: int) -> None:
        """Take one more token and decide whether it is the last."""
        self.output_ids.append(token)
        ended = token == eos_token_id and not self.params.ignore_eos
        if ended or token in self.params.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.limit:
            self.finish_reason = "length"

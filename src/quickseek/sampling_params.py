"""``SamplingParams``: how the tokens of one request are chosen."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quickseek.errors import ConfigError

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
"""Limits of what one request may list: they size tensors that live by request slot."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request; names follow vLLM. A value out of range is a ConfigError naming its field.

    How a token is chosen:
        ``temperature``: 0 is greedy, which ``top_p``, ``top_k`` and ``min_p`` leave as it is. ``top_p``: keep the
        smallest set of most likely tokens whose probability reaches it. ``top_k``: keep as many most likely ones (0 or
        -1: all). ``min_p``: keep those of at least this part of the largest probability. ``seed`` None draws one from
        the system.
        ``presence_penalty`` and ``frequency_penalty`` [-2, 2] count the answer's tokens, ``repetition_penalty``
        (neutral at 1) the prompt's too. ``logit_bias``: {token id: number in [-100, 100]}.
    When the answer ends:
        at the end token (unless ``ignore_eos``), at one of ``stop_token_ids``, when the text holds one of the strings
        ``stop``, or after ``max_tokens``; none of them but the last before ``min_tokens``. The stop string is not part
        of the text unless ``include_stop_str_in_output``.
    What the answer may say:
        one of ``json_schema`` (a schema or its JSON text), ``regex`` or ``grammar`` (EBNF with a rule ``root``)
        describes the whole answer after the reasoning. ``thinking_token_budget``: tokens of reasoning after
        which its end is forced.
    What is returned:
        ``logprobs``: 0 to 20 most likely tokens beside the chosen one, None for no log-probabilities at all.
        ``skip_special_tokens``: leave control tokens out of the text. ``n`` may only be 1.
    """

    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = field(default=None, hash=False)
    regex: str | None = None
    grammar: str | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_ends()
        self._check_structure()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether the tokens so far change the choice of the next."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def structure(self) -> str | None:
        """The name of the field that describes the answer, if one does."""
        names = ("json_schema", "regex", "grammar")
        return next((name for name in names if getattr(self, name) is not None), None)

    @property
    def masked(self) -> bool:
        """Whether the host fills a mask of allowed tokens for each row (``engine/grammar.py``)."""
        return self.structure is not None or self.thinking_token_budget is not None

    def ends(self, eos_token_id: int) -> tuple[int, ...]:
        """The ids that end an answer: its stop ids, and the end token unless that is ignored."""
        return (*self.stop_token_ids, *(() if self.ignore_eos else (eos_token_id,)))

    def check_vocabulary(self, vocab_size: int) -> None:
        """ConfigError naming the field that holds a token id of ``vocab_size`` or more."""
        for name in ("logit_bias", "stop_token_ids"):
            ids = getattr(self, name)
            if any(number >= vocab_size for number in ids):
                raise ConfigError(name, ids, f"token ids below {vocab_size}")

    # ------------------------------------------------------------------------------------------ checks

    def _check(self, key: str, valid: bool, expected: str) -> None:
        if not valid:
            raise ConfigError(key, getattr(self, key), expected)

    def _check_numbers(self) -> None:
        self._check("n", type(self.n) is int and self.n == 1, "1: each answer is a request of its own")
        self._number("temperature", lambda value: value >= 0, "0 (greedy) or a positive number")
        self._number("top_p", lambda value: 0 < value <= 1, "a number in (0, 1]")
        self._integer("top_k", -1, "0 or -1 (all), or a positive integer below 2^31", below=2**31)
        self._number("min_p", lambda value: 0 <= value <= 1, "a number in [0, 1]")
        for key in ("presence_penalty", "frequency_penalty"):
            self._number(key, lambda value: -2 <= value <= 2, "a number in [-2, 2]")
        self._number("repetition_penalty", lambda value: value > 0, "a positive number")
        if self.seed is not None:
            self._integer("seed", 0, "an integer in [0, 2^63)", below=2**63)
        if self.logprobs is not None:
            self._integer("logprobs", 0, f"None or an integer in [0, {MAX_LOGPROBS}]", below=MAX_LOGPROBS + 1)
        expected = f"at most {MAX_LOGIT_BIAS} token ids, each with a number in [-100, 100]"
        bias = self.logit_bias
        self._check("logit_bias", isinstance(bias, Mapping) and len(bias) <= MAX_LOGIT_BIAS, expected)
        valid = all(_is_id(number) and _is_number(value) and -100 <= value <= 100 for number, value in bias.items())
        self._check("logit_bias", valid, expected)
        object.__setattr__(self, "logit_bias", dict(bias))  # what was checked cannot change any more

    def _check_ends(self) -> None:
        self._integer("max_tokens", 1, "an integer of at least 1")
        self._integer("min_tokens", 0, "an integer of at least 0")
        self._check("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens = {self.max_tokens}")
        for key in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            self._check(key, isinstance(getattr(self, key), bool), "True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        listed = isinstance(stop, Sequence) and all(isinstance(text, str) and text for text in stop)
        self._check("stop", listed, "a string or a list of strings, none of them empty")
        object.__setattr__(self, "stop", tuple(stop))
        ids, most = self.stop_token_ids, MAX_STOP_TOKEN_IDS
        listed = isinstance(ids, Sequence) and len(ids) <= most and all(_is_id(number) for number in ids)
        self._check("stop_token_ids", listed, f"a list of at most {most} token ids")
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    def _check_structure(self) -> None:
        given = [key for key in ("json_schema", "regex", "grammar") if getattr(self, key) is not None]
        if len(given) > 1:
            self._check(given[0], False, f"no {' and no '.join(given[1:])} beside it")
        for key in ("regex", "grammar"):
            text = getattr(self, key)
            self._check(key, text is None or (isinstance(text, str) and text != ""), "a string that is not empty")
        self._check("json_schema", _is_schema(self.json_schema), "a JSON schema: an object or its JSON text")
        if given:
            self._check("ignore_eos", not self.ignore_eos, f"False beside {given[0]}, which says where the answer ends")
        if self.thinking_token_budget is not None:
            self._integer("thinking_token_budget", 0, "None or an integer of at least 0")

    def _number(self, key: str, inside: Callable[[float], bool], expected: str) -> None:
        value = getattr(self, key)
        self._check(key, _is_number(value) and inside(value), expected)

    def _integer(self, key: str, least: int, expected: str, *, below: float = math.inf) -> None:
        value = getattr(self, key)
        self._check(key, type(value) is int and least <= value < below, expected)


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < 2**63  # a larger one may have no float
    return isinstance(value, float) and math.isfinite(value)


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_schema(value: Any) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
        # true and false are schemas too.
        return isinstance(value, dict | bool)
    return value is None or isinstance(value, Mapping)

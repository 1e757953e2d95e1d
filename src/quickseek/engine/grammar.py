"""Masks of allowed tokens: answers that follow a grammar, and reasoning cut by a budget (the host-paced lane)."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quickseek.errors import ConfigError
from quickseek.ops.checks import expect_dtype, expect_shape
from quickseek.sampling_params import SamplingParams
from quickseek.tokenizer import dsml
from quickseek.tokenizer.tokenizer import Tokenizer

_ALL = -1
"""A word of a mask that allows its 32 ids."""
_SOURCE_LINE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""What the library puts before its messages."""
_MOST_WHITESPACE = 16
"""Between two elements of JSON: enough to indent, and a bounded schema has bounded answers."""
_BARE_CHARACTER = re.compile(r'^(\w+ ::= )\(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)
"""The rule that the library (0.2.9, its issue 800) writes for a character of a string with minLength or maxLength."""
_CHARACTER = (
    r'(([ -!#-[\]-\uD7FF\uE000-\U0010FFFF]) | ("\\" [\"\\/bfnrt])'
    r' | ("\\u" ([0-9A-CE-Fa-ce-f] [0-9A-Fa-f] | [Dd] [0-7]) [0-9A-Fa-f] [0-9A-Fa-f])'
    r' | ("\\u" [Dd] [89ABab] [0-9A-Fa-f] [0-9A-Fa-f] "\\u" [Dd] [C-Fc-f] [0-9A-Fa-f] [0-9A-Fa-f]))'
)
"""One character of a JSON string: itself, or an escape, of which a surrogate pair is one.

Surrogates are left out by name: a negated class lets their bytes through, which are no UTF-8.
"""


class GrammarCompiler:
    """Compiles the grammars of requests for one tokenizer; the same grammar is compiled once.

    Control tokens never match a grammar; the end token does where the answer is complete. Raises ImportError naming the
    extra ``serve`` where xgrammar is not installed. ``compile`` may take seconds for a large vocabulary and may run on
    any thread.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._library = _xgrammar()
        size = tokenizer.vocab_size
        # An id without bytes is what the library calls special: it matches nothing.
        texts = [b"" if number in tokenizer.control_ids else tokenizer.token_bytes(number) for number in range(size)]
        info = self._library.TokenizerInfo(
            texts, self._library.VocabType.RAW, vocab_size=size, stop_token_ids=[tokenizer.eos_id]
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=min(8, os.cpu_count() or 1))

    def compile(self, params: SamplingParams) -> Any | None:
        """The compiled grammar of a request, or None if it asks for none.

        ConfigError names the field and says what is wrong with its text.
        """
        field = params.structure
        if field is None:
            return None
        value = getattr(params, field)
        try:
            if field == "json_schema":
                return self._compile_schema(value if isinstance(value, str) else json.dumps(_plain(value)))
            return self._compiler.compile_regex(value) if field == "regex" else self._compiler.compile_grammar(value)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = _SOURCE_LINE.sub("", str(error)).strip() or type(error).__name__
            raise ConfigError(field, value, f"what can be compiled to a grammar ({reason})") from None

    def _compile_schema(self, schema: str) -> Any:
        """A compiled schema whose strings are JSON strings.

        The library lets control characters into a string of bounded length and keeps escapes out.
        """
        written = str(self._library.Grammar.from_json_schema(schema, max_whitespace_cnt=_MOST_WHITESPACE))
        mended, count = _BARE_CHARACTER.subn(lambda rule: rule[1] + _CHARACTER, written)
        if count:
            return self._compiler.compile_grammar(mended)
        return self._compiler.compile_json_schema(schema, max_whitespace_cnt=_MOST_WHITESPACE)

    def matcher(self, grammar: Any) -> Any:
        """A new matcher at the beginning of a compiled grammar."""
        return self._library.GrammarMatcher(grammar)


class TokenMasks:
    """The masks of one request: which ids each of its next rows may choose.

    While the request reasons (``thinking``: its prompt ends inside reasoning, ``is_thinking``) every id is allowed, but
    for the end token if a grammar is to follow; once ``params.thinking_token_budget`` tokens were spent, only
    ``</think>`` is. From the token after ``</think>`` on, the grammar decides. Without a ``compiler`` the params must
    not ask for a grammar.
    """

    def __init__(
        self, params: SamplingParams, tokenizer: Tokenizer, compiler: GrammarCompiler | None, *, thinking: bool
    ) -> None:
        self.words = mask_words(tokenizer.vocab_size)
        self._close = tokenizer.control_token_id(dsml.THINK_END) if thinking else -1
        self._end = tokenizer.eos_id
        grammar = None
        if params.structure is not None:
            if compiler is None:
                raise ValueError(f"{params.structure} needs a GrammarCompiler")
            grammar = compiler.compile(params)
        self._matcher = None if grammar is None or compiler is None else compiler.matcher(grammar)
        self._budget = params.thinking_token_budget
        self._tokens = 0
        self._reasoning: int | None = None if thinking else 0
        """Tokens up to and including ``</think>``, None while the request reasons."""

    def fill(self, drafts: Sequence[int], masks: Tensor) -> None:
        """Fill ``masks`` int32 [rows, words], on the CPU: row r for the token after drafts 1..r.

        There are more rows than drafts. Rows behind the last draft, behind a draft that its row does not allow, and
        behind the end of the answer allow everything: nothing is ever chosen from them. The request does not move.
        """
        expect_dtype("masks", masks, torch.int32)
        expect_shape("masks", masks, [None, self.words])
        if masks.shape[0] <= len(drafts):
            raise ValueError(f"masks has {masks.shape[0]} rows: expected {len(drafts) + 1} or more")
        masks.fill_(_ALL)
        taken = 0
        for row, draft in enumerate([*drafts, None]):
            self._fill_row(masks, row)
            if draft is None or not is_allowed(masks[row], draft) or not self._advance(draft):
                break
            taken += 1
        self.rollback(taken)

    def accept(self, tokens: Sequence[int]) -> None:
        """Move past chosen tokens. RuntimeError if one is not allowed: its row was chosen without its mask."""
        for token in tokens:
            if not self._advance(token):
                raise RuntimeError(f"token {token} was chosen although the grammar does not allow it")

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens."""
        if not 0 <= count <= self._tokens:
            raise ValueError(f"rollback of {count} tokens: expected 0 to the {self._tokens} accepted")
        before = self._tokens - count
        if self._matcher is not None and self._reasoning is not None:
            self._matcher.rollback(self._tokens - max(before, self._reasoning))
        self._tokens = before
        if self._close >= 0 and self._reasoning is not None and before < self._reasoning:
            self._reasoning = None

    @property
    def thinking(self) -> bool:
        """Whether the request still reasons."""
        return self._reasoning is None

    @property
    def complete(self) -> bool:
        """Whether the answer so far fulfils the grammar; always, once reasoning is over, if there is none."""
        return not self.thinking and (self._matcher is None or self._matcher.is_completed())

    def _advance(self, token: int) -> bool:
        if self._reasoning is None:
            self._tokens += 1
            if token == self._close:
                self._reasoning = self._tokens
            return True
        if self._matcher is not None and (self._matcher.is_terminated() or not self._matcher.accept_token(token)):
            return False
        self._tokens += 1
        return True

    def _fill_row(self, masks: Tensor, row: int) -> None:
        if self._reasoning is None:
            if self._budget is not None and self._tokens >= self._budget:
                _only(masks[row], self._close)
            elif self._matcher is not None:
                _without(masks[row], self._end)
        elif self._matcher is not None and not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(masks, row)


def is_thinking(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether a prompt ends inside reasoning: its last ``<think>`` has no ``</think>`` after it."""
    opening, closing = tokenizer.control_token_id(dsml.THINK_START), tokenizer.control_token_id(dsml.THINK_END)
    return next((token == opening for token in reversed(prompt_ids) if token in (opening, closing)), False)


def mask_words(vocab_size: int) -> int:
    """int32 words of a row of a mask."""
    return -(-vocab_size // 32)


def is_allowed(mask: Tensor, token: int) -> bool:
    """Whether a row int32 [words] of a mask, on the CPU, allows an id."""
    return bool((int(mask[token // 32]) >> (token % 32)) & 1)


def _only(mask: Tensor, token: int) -> None:
    mask.zero_()
    mask[token // 32] = _bit(token)


def _without(mask: Tensor, token: int) -> None:
    mask[token // 32] &= ~_bit(token)


def _bit(token: int) -> int:
    """The bit of an id in its word, as a signed 32-bit number."""
    return 1 << token % 32 if token % 32 < 31 else -(2**31)


def _plain(value: Any) -> Any:
    """Mappings of any kind as dicts, which is all that JSON can write."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise ImportError("structured output needs xgrammar: pip install 'quickseek[serve]'") from error
    return xgrammar

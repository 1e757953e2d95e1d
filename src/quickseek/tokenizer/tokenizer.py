"""A checkpoint's ``tokenizer.json`` behind an interface that keeps outside text and control tokens apart."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from quickseek.errors import PromptError, TokenizerError
from quickseek.tokenizer import dsml
from quickseek.tokenizer.byte_level import BYTE_OF, token_bytes
from quickseek.tokenizer.segments import Prompt


class Tokenizer:
    """Byte-level BPE of one checkpoint (spec/model.md 11).

    ``vocab_size`` is the model's number of ids, which may exceed the tokenizer's: ids in between decode to nothing.
    ``bos_id`` and ``eos_id`` begin a prompt and end an answer. ``control_ids`` are the ids of all added tokens, of both
    the kind that ``tokenizers`` calls special and the other (such as ``<think>``): none of them ever comes from text
    that is not trusted.
    """

    def __init__(self, serialized: str, settings: dict[str, Any], source: str, vocab_size: int | None = None) -> None:
        """Of the text of a tokenizer.json and the object in a tokenizer_config.json; errors name ``source``."""
        self._source = source
        try:
            self._full = tokenizers.Tokenizer.from_str(serialized)
        except Exception as error:  # the library raises bare Exception for whatever it cannot read
            raise TokenizerError(f"{source}: not a tokenizer that can be read: {error}") from None
        if not isinstance(self._full.model, tokenizers.models.BPE):
            raise TokenizerError(f"{source}: model is {type(self._full.model).__name__}: expected BPE")
        if not isinstance(self._full.decoder, tokenizers.decoders.ByteLevel):
            raise TokenizerError(f"{source}: decoder is {type(self._full.decoder).__name__}: expected ByteLevel")
        self._plain = _without_added_tokens(json.loads(serialized))
        for instance in (self._full, self._plain):
            instance.no_truncation()
            instance.no_padding()
        added = self._full.get_added_tokens_decoder()
        self.control_ids = frozenset(added)
        self._skipped_ids = frozenset(number for number, token in added.items() if token.special)
        self._control_of = {token.content: number for number, token in added.items()}
        spellings = sorted({*self._control_of, *dsml.CONTROL_TOKENS}, key=len, reverse=True)
        self._control_pattern = re.compile(f"({'|'.join(map(re.escape, spellings))})")
        largest = max(self._full.get_vocab(with_added_tokens=True).values())
        self.vocab_size = largest + 1 if vocab_size is None else vocab_size
        if largest >= self.vocab_size:
            raise TokenizerError(f"{source}: holds id {largest}: expected ids below vocab_size {self.vocab_size}")
        self.bos_id = self.control_token_id(_named_token(settings, "bos_token", dsml.BEGIN_OF_SENTENCE))
        self.eos_id = self.control_token_id(_named_token(settings, "eos_token", dsml.END_OF_SENTENCE))

    @classmethod
    def from_directory(cls, directory: str | Path, *, vocab_size: int | None = None) -> "Tokenizer":
        """Read tokenizer.json, and tokenizer_config.json if there is one; no other file is opened.

        Raises TokenizerError naming the file that is absent or cannot be read, or that holds an id of ``vocab_size`` or
        more.
        """
        path = Path(directory, "tokenizer.json")
        serialized = _read_text(path)
        if serialized is None:
            raise TokenizerError(f"{path}: no such file: a checkpoint needs its tokenizer in this form")
        settings_path = Path(directory, "tokenizer_config.json")
        try:
            settings = json.loads(_read_text(settings_path) or "{}")
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"{settings_path}: not JSON: {error}") from None
        if not isinstance(settings, dict):
            raise TokenizerError(f"{settings_path}: expected a JSON object")
        return cls(serialized, settings, str(path), vocab_size)

    def encode(self, text: str, *, control_tokens: bool = False) -> list[int]:
        """The ids of ``text``, without BOS.

        Unless ``control_tokens``, the spelling of a control token is ordinary text. With it, the text must be trusted.
        """
        _check_text(text)
        instance = self._full if control_tokens else self._plain
        return instance.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """The ids of a rendered prompt: control tokens from its trusted segments only.

        Text between two control tokens is encoded as one piece, whoever wrote it, so the ids are those of ``text`` as a
        whole wherever outside text spells no control token. Raises TokenizerError naming a control token that the
        tokenizer lacks.
        """
        ids: list[int] = []
        pending: list[str] = []
        for segment in prompt.segments:
            # The pattern has one group, so the odd pieces of a split are control tokens.
            pieces = self._control_pattern.split(segment.text) if segment.trusted else [segment.text]
            for number, piece in enumerate(pieces):
                if number % 2 == 0:
                    pending.append(piece)
                else:
                    ids += [*self.encode("".join(pending)), self.control_token_id(piece)]
                    pending = []
        return ids + self.encode("".join(pending))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD. PromptError names an id out of range."""
        self.check_ids(ids)
        return self._full.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """The text of every id on its own, control tokens spelled out."""
        self.check_ids(ids)
        return self._full.decode_batch([[number] for number in ids], skip_special_tokens=False)

    def token_string(self, number: int) -> str | None:
        """The vocabulary's own string of an id (bytes spelled in the byte-level alphabet); None if it has none."""
        self.check_ids([number])
        return self._full.id_to_token(number)

    def token_bytes(self, number: int, skip_special_tokens: bool = False) -> bytes:
        """The bytes an id adds to the text; none for an id the tokenizer lacks."""
        token = self.token_string(number)
        if token is None or (skip_special_tokens and number in self._skipped_ids):
            return b""
        return token_bytes(token)

    def control_token_id(self, text: str) -> int:
        """The id of the control token spelled ``text``; TokenizerError naming it if the tokenizer lacks it."""
        number = self._control_of.get(text)
        if number is None:
            raise TokenizerError(f"{self._source}: has no control token {text}")
        return number

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise PromptError naming the first of ``ids`` that is not in 0..vocab_size-1."""
        for position, number in enumerate(ids):
            if not 0 <= number < self.vocab_size:
                raise PromptError(f"token id {number} at position {position}: expected 0..{self.vocab_size - 1}")


def _without_added_tokens(description: dict[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer that cannot produce any added token, whatever the text.

    The library's ``encode_special_tokens`` only covers tokens marked special, and a token listed in the model's own
    vocabulary could still come out of merging (or whole, with ``ignore_merges``), so both lists lose them.
    """
    # One character is how the vocabulary spells a byte: without it some text could not be encoded.
    removed = {token["content"] for token in description.get("added_tokens", [])} - set(BYTE_OF)
    model = description["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if token not in removed}
    model["merges"] = [merge for merge in model.get("merges", []) if removed.isdisjoint(_merged(merge))]
    return tokenizers.Tokenizer.from_str(json.dumps(description | {"added_tokens": [], "post_processor": None}))


def _merged(merge: str | list[str]) -> tuple[str, str, str]:
    """The two parts of a merge and their result; older files spell a merge as one string."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _named_token(settings: dict[str, Any], key: str, default: str) -> str:
    """A token of tokenizer_config.json, written as a string or as an object with ``content``."""
    token = settings.get(key) or default
    return str(token["content"]) if isinstance(token, dict) and "content" in token else str(token)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from None


def _check_text(text: str) -> None:
    """Half of a surrogate pair, which JSON can smuggle into a string, has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"text: character {error.start} is half of a surrogate pair: expected Unicode text") from None

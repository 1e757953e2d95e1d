"""A byte-level tokenizer for the miniatures: the control tokens of spec/model.md 11, every byte, short English.

All ids below the vocabulary size decode. Many of them are case, accent and whitespace variants of each other,
as in the released vocabulary, so that the compressed ids of spec 8.1 are fewer than the ids.
"""

import json
import unicodedata
from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quickseek.tokenizer import dsml
from quickseek.tokenizer.byte_level import BYTE_OF

CONTROL_TOKENS = (
    *(dsml.BEGIN_OF_SENTENCE, dsml.END_OF_SENTENCE, dsml.PAD, dsml.USER, dsml.ASSISTANT),
    *(dsml.THINK_START, dsml.THINK_END),
    dsml.SYSTEM,  # id 7: the noise token of the draft head, as in the released model
    *(dsml.DSML, dsml.LATEST_REMINDER, dsml.END_OF_TURN, dsml.IMAGE, *dsml.TASKS),
)
"""Ids 0, 1, ... in this order."""

LOWER = "abcdefghijklmnopqrstuvwxyz"
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
WHITESPACE_RUNS = ("  ", "    ", "        ", "\n\n", "\n\n\n\n", "\t\t", "\t\t\t\t", "\r\n")
COMMON_WORDS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "the", "and", "ing", "her")


def tokenizer_files(vocab_size: int) -> dict[str, str]:
    """File name to text of tokenizer.json and tokenizer_config.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": CONTROL_TOKENS[0],
        "eos_token": CONTROL_TOKENS[1],
        "pad_token": CONTROL_TOKENS[2],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
    }
    return {
        "tokenizer.json": build_tokenizer(vocab_size).to_str(pretty=False) + "\n",
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=1) + "\n",
    }


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Control tokens, then the 256 bytes in order, then fillers until the vocabulary is full.

    Raises ValueError if the bytes do not fit, or if the fillers do not reach so far.
    """
    alphabet = sorted(BYTE_OF, key=BYTE_OF.__getitem__)
    vocabulary = [*CONTROL_TOKENS, *alphabet]
    if vocab_size < len(vocabulary):
        raise ValueError(f"vocab_size = {vocab_size}: expected {len(vocabulary)} or more")
    merges: list[tuple[str, str]] = []
    known = set(vocabulary)
    for text in _fillers():
        if len(vocabulary) == vocab_size:
            break
        token = "".join(alphabet[byte] for byte in text.encode())
        if token not in known:
            merges.append(_parts(token, known))
            vocabulary.append(token)
            known.add(token)
    if len(vocabulary) < vocab_size:
        raise ValueError(f"vocab_size = {vocab_size}: expected {len(vocabulary)} or less")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    return tokenizer


def _parts(token: str, known: set[str]) -> tuple[str, str]:
    """The two known tokens that merge into ``token``, the left one as long as possible."""
    cuts = range(len(token) - 1, 0, -1)
    return next((token[:i], token[i:]) for i in cuts if token[:i] in known and token[i:] in known)


def _fillers() -> Iterator[str]:
    """Texts that join two earlier ones, in the order in which a small vocabulary wants them."""
    yield from (" " + letter for letter in LOWER + LOWER.upper())
    for word in COMMON_WORDS:
        yield from _variants(word)
    yield from (" " + character for character in "0123456789" + PUNCTUATION)
    yield from WHITESPACE_RUNS
    yield from (chr(code) for code in range(0xC0, 0x180) if unicodedata.normalize("NFD", chr(code))[0].isascii())
    for first in LOWER:
        for second in LOWER:
            yield from _variants(first + second)


def _variants(word: str) -> tuple[str, ...]:
    """Texts that all have one compressed id."""
    cases = (word, word.capitalize(), word.upper())
    return (*cases, *(" " + case for case in cases))

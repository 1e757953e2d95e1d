"""Tokenizers for tests: the golden checkpoint's, and small ones made here."""

import json
from pathlib import Path
from typing import Any

import pytest

from quickseek.tokenizer import dsml
from quickseek.tokenizer.byte_level import BYTE_OF
from quickseek.tokenizer.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent.parent / "golden"

# What DeepSeek's files mark as special; the others are added tokens of the second kind.
SPECIAL = (dsml.BEGIN_OF_SENTENCE, dsml.END_OF_SENTENCE, dsml.PAD)
THINK = [("t", "h"), ("i", "n"), ("th", "in"), ("thin", "k"), ("<", "think"), ("<think", ">")]
MERGES = [*THINK, ("Ġ", "a"), ("Ã", "©"), (">", "<")]


def describe(*, whole_words: bool = False, listed: bool = False) -> dict[str, Any]:
    """A byte-level tokenizer.json with all control tokens of the format.

    ``listed``: its model vocabulary lists ``<think>`` too, and merges lead there; ``whole_words``: text is not split
    and a piece that is in the vocabulary is taken whole.
    """
    vocab = {token: number for number, token in enumerate(SPECIAL)}
    merged = [left + right for left, right in MERGES if listed or left + right != "<think>"]
    for token in (*BYTE_OF, *merged):
        vocab.setdefault(token, len(vocab))
    added = []
    for token in dsml.CONTROL_TOKENS:
        number = vocab[token] if token in vocab else len(vocab) + sum(t["content"] not in vocab for t in added)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added.append({"id": number, "content": token, **flags, "special": token in SPECIAL})
    merges = [list(merge) for merge in MERGES if "".join(merge) in vocab]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not whole_words}
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": whole_words, "fuse_unk": False}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": model | {"dropout": None, "unk_token": None, "byte_fallback": False},
    }


def make(**options: bool) -> Tokenizer:
    return Tokenizer(json.dumps(describe(**options)), {}, "tokenizer.json of a test")


@pytest.fixture(scope="session")
def golden_checkpoint() -> Path:
    """A directory with tokenizer.json and tokenizer_config.json."""
    return GOLDEN / "base" / "checkpoint"


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """The text of a tokenizer.json with every control token of the format, of both kinds."""
    return json.dumps(describe())


@pytest.fixture(scope="session")
def golden_tokenizer(golden_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_directory(golden_checkpoint)


@pytest.fixture(scope="session")
def chat_tokenizer() -> Tokenizer:
    """Has every control token of the format, of both kinds."""
    return make()


@pytest.fixture(scope="session")
def think_merging_tokenizer() -> Tokenizer:
    """Its merges lead to ``<think>``."""
    return make(listed=True)


@pytest.fixture(scope="session", params=[{}, {"listed": True}, {"listed": True, "whole_words": True}], ids=str)
def hostile_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """In turn: as above, with ``<think>`` reachable by merging, and with it taken whole."""
    return make(**request.param)

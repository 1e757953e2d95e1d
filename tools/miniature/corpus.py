"""The text that the miniature is trained on: two Debian packages, split into chapters, and its tokenizer.

``r-cran-janeaustenr`` 1.0.0-1 (Jane Austen's six novels, published 1811 to 1818; the package is under the MIT licence,
the text is in the public domain) and ``bible-kjv-text`` 4.38 with its reader ``bible-kjv`` (King James Version; the
copyright file says that the text's copyright is expired and that the file may be copied, modified and distributed).

Held out and never trained on: the last two chapters of every novel, and the last chapter of every book of the Bible
that has at least five.
"""

import gzip
import json
import struct
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from quickseek.checkpoint.miniature_tokenizer import CONTROL_TOKENS, tokenizer_files
from quickseek.tokenizer import dsml

AUSTEN = Path("/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
HELD_OUT_CHAPTERS = 2
LEAST_CHAPTERS = 5
EDITOR_NOTE = "A NOTE ON THE TEXT"
"""Where an editor of our time takes over at the end of one novel."""
DOCUMENT_BREAK = "\f"
END_ID = CONTROL_TOKENS.index(dsml.END_OF_SENTENCE)


@dataclass(frozen=True)
class Chapter:
    """One chapter of a book; paragraphs are separated by an empty line."""

    book: str
    text: str


# ---------------------------------------------------------------------------------------------- the novels


def stored_strings(database: bytes) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load database: length-prefixed zlib streams of serialised vectors."""
    offset = 0
    while offset < len(database):
        stream = zlib.decompressobj()
        data = stream.decompress(database[offset + 4 :])
        offset = len(database) - len(stream.unused_data)
        vector = data.index(b"\0\0\0\x10")
        (count,) = struct.unpack(">i", data[vector + 4 : vector + 8])
        position, lines = vector + 8, []
        for _ in range(count):
            (length,) = struct.unpack(">i", data[position + 4 : position + 8])
            lines.append(data[position + 8 : position + 8 + length].decode())
            position += 8 + length
        yield lines


def novel_chapters(lines: list[str]) -> list[Chapter]:
    """The chapters of a novel given by its printed lines; what stands before the first is left out."""
    title = lines[0].strip()
    if EDITOR_NOTE in lines:
        lines = lines[: lines.index(EDITOR_NOTE)]
    starts = [number for number, line in enumerate(lines) if line.strip().lower().startswith("chapter ")]
    chapters = []
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        paragraphs = [""]
        for line in lines[start:stop]:
            text = " ".join(line.replace("_", "").split())
            if not text:
                paragraphs.append("")
            elif not text.startswith("VOLUME "):
                paragraphs[-1] = f"{paragraphs[-1]} {text}".strip()
        chapters.append(Chapter(title, "\n\n".join(paragraph for paragraph in paragraphs if paragraph)))
    return chapters


# ---------------------------------------------------------------------------------------------- the Bible


def bible_chapters(verses: list[str]) -> list[Chapter]:
    """Chapters of lines such as "Ge1:2 And the earth ..."; a verse is a line of the chapter."""
    chapters: dict[str, list[str]] = {}
    for verse in verses:
        reference, _, text = verse.partition(" ")
        chapters.setdefault(reference.partition(":")[0], []).append(" ".join(text.split()))
    return [Chapter(name.rstrip("0123456789"), "\n".join(lines)) for name, lines in chapters.items()]


def read_bible() -> list[str]:
    """Every verse with its reference, from the reader of the package."""
    command = ["bible", "-f", "gen1:1-rev22:21"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


# ---------------------------------------------------------------------------------------------- the split


def split(books: list[list[Chapter]], held_out: int, least: int) -> tuple[list[str], list[str]]:
    """Texts to train on and texts held out: the last ``held_out`` chapters of each book of at least ``least``."""
    train, test = [], []
    for chapters in books:
        cut = len(chapters) - held_out if len(chapters) >= least else len(chapters)
        train += [chapter.text for chapter in chapters[:cut]]
        test += [chapter.text for chapter in chapters[cut:]]
    return train, test


def read_texts() -> tuple[list[str], list[str]]:
    """Chapters to train on and chapters held out."""
    novels = [novel_chapters(lines) for lines in stored_strings(AUSTEN.read_bytes())]
    by_book: dict[str, list[Chapter]] = {}
    for chapter in bible_chapters(read_bible()):
        by_book.setdefault(chapter.book, []).append(chapter)
    novel_train, novel_test = split(novels, HELD_OUT_CHAPTERS, LEAST_CHAPTERS)
    bible_train, bible_test = split(list(by_book.values()), 1, LEAST_CHAPTERS)
    return novel_train + bible_train, novel_test + bible_test


# ---------------------------------------------------------------------------------------------- tokens


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with the control tokens of the miniatures as its first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    control = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """uint16 ids of all texts, each followed by the end token."""
    pieces = [np.array([*encoding.ids, END_ID], dtype=np.uint16) for encoding in tokenizer.encode_batch(texts)]
    return np.concatenate(pieces)


def held_out_texts(directory: Path) -> list[str]:
    """The chapters that were kept from training, as ``prepare`` wrote them."""
    return gzip.decompress((directory / "heldout.txt.gz").read_bytes()).decode().split(DOCUMENT_BREAK)


def train_texts(directory: Path) -> list[str]:
    """The chapters that were trained on, as ``prepare`` wrote them."""
    return gzip.decompress((directory / "train.txt.gz").read_bytes()).decode().split(DOCUMENT_BREAK)


def prepare(directory: Path, vocab_size: int) -> dict[str, int]:
    """Write texts, tokenizer files and token ids into ``directory``; returns their sizes."""
    directory.mkdir(parents=True, exist_ok=True)
    train, test = read_texts()
    tokenizer = train_tokenizer(train, vocab_size)
    files = tokenizer_files(512) | {"tokenizer.json": tokenizer.to_str(pretty=False) + "\n"}
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    for name, texts in (("train", train), ("heldout", test)):
        (directory / f"{name}.txt.gz").write_bytes(gzip.compress(DOCUMENT_BREAK.join(texts).encode(), mtime=0))
    ids = {"train": encode(tokenizer, train), "heldout": encode(tokenizer, test)}
    np.savez_compressed(directory / "tokens.npz", train=ids["train"], heldout=ids["heldout"])
    sizes = {f"{name}_tokens": len(value) for name, value in ids.items()}
    sizes |= {"train_bytes": len("".join(train).encode()), "heldout_bytes": len("".join(test).encode())}
    (directory / "sizes.json").write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")
    return sizes

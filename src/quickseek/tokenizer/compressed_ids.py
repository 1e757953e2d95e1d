"""Token ids folded onto their normalised text, over which Engram hashes n-grams (spec/model.md 8.1)."""

import torch
from tokenizers import Regex, normalizers
from torch import Tensor

from quickseek.errors import TokenizerError
from quickseek.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A character of the private-use area keeps a token that is one space from being stripped to nothing.
_LONE_SPACE = "\ue000"

_NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


def compressed_id_table(tokenizer: Tokenizer, vocab_size: int) -> Tensor:
    """int32 [vocab_size]: the compressed id of every token id, handed out in order of first appearance.

    A pure function of the tokenizer. Ids that the tokenizer lacks (padding of the vocabulary) decode to nothing and so
    share one compressed id, as the definition has it. TokenizerError if the tokenizer has more than ``vocab_size`` ids.
    """
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(f"the tokenizer has {tokenizer.vocab_size} ids: expected at most {vocab_size}")
    texts = tokenizer.decode_each(range(tokenizer.vocab_size)) + [""] * (vocab_size - tokenizer.vocab_size)
    numbers: dict[str, int] = {}
    table = [numbers.setdefault(_key(tokenizer, number, text), len(numbers)) for number, text in enumerate(texts)]
    return torch.tensor(table, dtype=torch.int32)


def check_compressed_count(table: Tensor, engram_compressed_vocab_size: int) -> None:
    """Raise TokenizerError unless ``table`` holds exactly as many distinct ids as the configuration says."""
    count = int(table.max()) + 1
    if count != engram_compressed_vocab_size:
        raise TokenizerError(
            f"the tokenizer has {count} compressed ids, the configuration's engram_compressed_vocab_size is"
            f" {engram_compressed_vocab_size}: the checkpoint was trained with another tokenizer"
        )


def _key(tokenizer: Tokenizer, number: int, text: str) -> str:
    """What ids with the same compressed id have in common."""
    if _REPLACEMENT in text:
        return tokenizer.token_string(number) or text
    return _NORMALIZER.normalize_str(text) or text

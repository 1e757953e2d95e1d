"""Text out of ids that arrive one by one."""

import codecs

from quickseek.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Streams the text of one answer, holding back bytes that do not yet make a character.

    All pieces together, the last from ``flush``, equal ``tokenizer.decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, number: int) -> str:
        """The text that id ``number`` completes, possibly none. PromptError if the id is out of range."""
        return self._decoder.decode(self._tokenizer.token_bytes(number, self._skip_special_tokens))

    def flush(self) -> str:
        """What is left when no more ids come: U+FFFD for an unfinished character. Ready for another answer then."""
        return self._decoder.decode(b"", final=True)

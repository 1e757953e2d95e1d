"""A prompt as a sequence of segments, each either the format's own text or text that came from outside."""

from dataclasses import dataclass
from typing import NamedTuple


class Segment(NamedTuple):
    """A piece of a prompt. Only in ``trusted`` ones does the spelling of a control token mean that token."""

    text: str
    trusted: bool


def trusted(text: str) -> Segment:
    """Text written by the prompt format."""
    return Segment(text, True)


def untrusted(text: str) -> Segment:
    """Text written by a user, a tool or a model: never a control token."""
    return Segment(text, False)


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt; ``Tokenizer.encode_prompt`` turns it into ids."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The prompt as one string, control tokens spelled out."""
        return "".join(segment.text for segment in self.segments)

"""Strings that end an answer: found in text that comes in pieces, and never shown in part."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Released:
    """What follows from the pieces of text just pushed.

    ``text`` may be shown now. ``stop`` is the string that ended the answer, or None. ``tokens`` of the pushed pieces
    belong to the answer: all of them, or those up to the one that completed ``stop``; later ones are to be dropped with
    their log-probabilities and counts. ``dropped`` characters of the answer's text, pushed now or held back before,
    will never be shown.
    """

    text: str
    tokens: int
    dropped: int = 0
    stop: str | None = None


class StopStrings:
    """Watches the text of one answer for ``stop``, one piece a token.

    The string that is completed first wins, of those completed by the same character the longest, so the result does
    not depend on where tokens end. Text is held back only while it may be the beginning of a stop string. With
    ``include`` the stop string is part of the answer and nothing is held back. The text of the first ``min_tokens``
    tokens is not watched.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False, min_tokens: int = 0) -> None:
        if not all(stop):
            raise ValueError(f"stop = {list(stop)!r}: expected strings that are not empty")
        self._stop = tuple(stop)
        self._include = include
        self._unwatched = min_tokens
        self._begun = ""  # the longest end of the text so far that begins a stop string
        self.found: str | None = None

    def push(self, pieces: Sequence[str]) -> Released:
        """Take the text that each of some tokens adds (possibly none). ValueError after a stop string was found."""
        if self.found is not None:
            raise ValueError(f"text after the stop string {self.found!r}")
        shown = []
        for number, piece in enumerate(pieces):
            if self._unwatched > 0:
                self._unwatched -= 1
                shown.append(piece)
                continue
            text = self._begun + piece
            end = self._first_end(text)
            if end is None:
                shown.append(self._advance(text))
                continue
            kept = text[: end if self._include else end - len(self.found or "")]
            shown.append(kept[len(self._begun) :] if self._include else kept)
            late = sum(len(later) for later in pieces[number + 1 :])
            return Released("".join(shown), number + 1, len(text) - len(kept) + late, self.found)
        return Released("".join(shown), len(pieces))

    def finish(self, text: str = "") -> Released:
        """The answer has ended otherwise: take a last ``text`` that belongs to no token, and show all that was held."""
        released = self.push([text])
        held = "" if self._include or released.stop is not None else self._begun
        self._begun = ""
        return Released(released.text + held, 0, released.dropped, released.stop)

    def _first_end(self, text: str) -> int | None:
        """Where the first stop string in ``text`` ends; it is noted as found."""
        starts = ((text.find(stop), stop) for stop in self._stop)
        ends = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not ends:
            return None
        end, _, self.found = min(ends)
        return end

    def _advance(self, text: str) -> str:
        """Note how ``text`` may begin a stop string, and return what may be shown of it."""
        longest = max((len(stop) for stop in self._stop), default=0)
        seen = len(self._begun)
        begins = range(max(0, len(text) - longest + 1), len(text))
        cut = next((at for at in begins if any(stop.startswith(text[at:]) for stop in self._stop)), len(text))
        self._begun = text[cut:]
        return text[seen:] if self._include else text[:cut]

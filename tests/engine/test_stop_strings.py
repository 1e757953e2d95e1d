"""Stop strings in text that comes in pieces, against a search that looks at every character."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickseek.engine.stop_strings import StopStrings

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)
PIECES = st.lists(st.text("ab\n", max_size=3), max_size=8)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """End of the stop string that is completed first, the longest of several, looking at one character at a time."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return end, max(ended, key=len)
    return None


def longest_begun(text: str, stops: list[str]) -> int:
    """Length of the longest end of ``text`` that a stop string begins with, without being all of it."""
    return max(size for size in range(len(text) + 1) if not size or any(s[:size] == text[-size:] != s for s in stops))


def compare(scanner: StopStrings, pieces: list[str], stops: list[str], include: bool, min_tokens: int) -> None:
    """Push pieces one by one, and hold what is shown after each against the search."""
    free = "".join(pieces[:min_tokens])
    watched = "".join(pieces[min_tokens:])
    match = first_match(watched, stops)
    shown, before = "", 0
    for number, piece in enumerate(pieces):
        released = scanner.push([piece])
        shown += released.text
        assert released.tokens == 1
        text = "".join(pieces[: number + 1])
        seen = text[len(free) :]
        if released.stop is None:
            held = 0 if include else longest_begun(seen, stops)
            assert shown == text[: len(text) - held]
            before = len(seen)
            continue
        assert match is not None and match[1] == released.stop == scanner.found
        assert before < match[0] <= len(seen), "not found with the piece that completed it"
        assert shown == free + watched[: match[0] - (0 if include else len(released.stop))]
        assert len(shown) + released.dropped == len(text)
        return
    assert match is None
    assert shown + scanner.finish().text == free + watched


@given(PIECES, STOPS, st.booleans(), st.integers(0, 4))
def test_the_answer_is_that_of_a_search_of_the_whole_text(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    scanner = StopStrings(stops, include=include, min_tokens=min_tokens)
    compare(scanner, pieces, stops, include, min_tokens)


def test_a_scanner_that_looks_at_one_piece_at_a_time_is_noticed() -> None:
    class Forgetful(StopStrings):
        def _advance(self, text: str) -> str:
            return text

    with pytest.raises(AssertionError):
        compare(Forgetful(["ab"]), ["a", "b"], ["ab"], False, 0)


@given(PIECES, STOPS, st.booleans(), st.integers(0, 4), st.lists(st.integers(0, 8), max_size=4))
def test_pushing_several_tokens_at_once_gives_the_same(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int, cuts: list[int]
) -> None:
    def run(borders: list[int]) -> tuple[str, int, str | None]:
        scanner = StopStrings(stops, include=include, min_tokens=min_tokens)
        shown, tokens = "", 0
        for first, last in itertools.pairwise(borders):
            released = scanner.push(pieces[first:last])
            shown, tokens = shown + released.text, tokens + released.tokens
            if released.stop is not None:
                assert len(shown) + released.dropped == sum(map(len, pieces[:last]))
                return shown, tokens, released.stop
        return shown + scanner.finish().text, tokens, None

    inner = sorted(min(cut, len(pieces)) for cut in cuts)
    assert run([0, *inner, len(pieces)]) == run(list(range(len(pieces) + 1)))


def test_a_match_across_tokens_drops_the_text_held_back_and_the_late_tokens() -> None:
    scanner = StopStrings(["</end>"])
    assert scanner.push(["so ", "be it</"]).text == "so be it"
    released = scanner.push(["en", "d> and", " more", "!"])
    assert (released.text, released.tokens, released.stop) == ("", 2, "</end>")
    assert released.dropped == len("</end> and more!")


def test_text_is_shown_once_it_cannot_be_a_stop_string() -> None:
    scanner = StopStrings(["abcd", "bce"])
    assert [scanner.push([piece]).text for piece in ("a", "b", "c", "x", "ab", "ce")] == ["", "", "", "abcx", "", "a"]
    assert scanner.found == "bce"


def test_a_last_text_without_a_token_may_complete_a_stop_string() -> None:
    scanner = StopStrings(["a\ufffd"])
    scanner.push(["xa"])
    released = scanner.finish("\ufffd")
    assert (released.text, released.tokens, released.stop) == ("", 0, "a\ufffd")


def test_text_after_the_end_and_an_empty_stop_string_are_refused() -> None:
    scanner = StopStrings(["a"])
    scanner.push(["a"])
    with pytest.raises(ValueError, match="after the stop string 'a'"):
        scanner.push(["b"])
    with pytest.raises(ValueError, match="stop"):
        StopStrings([""])

"""Streaming text: the pieces together are the text of the whole."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quickseek.errors import PromptError
from quickseek.tokenizer.detokenizer import IncrementalDetokenizer
from quickseek.tokenizer.tokenizer import Tokenizer

many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(number) for number in ids), detokenizer.flush()]


@many
@given(ids=st.lists(st.integers(0, 511), max_size=40), skip=st.booleans())
def test_any_ids_stream_to_the_text_of_the_whole(golden_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(golden_tokenizer, ids, skip)) == golden_tokenizer.decode(ids, skip_special_tokens=skip)


@many
@given(data=st.data(), skip=st.booleans())
def test_ids_of_both_kinds_of_control_tokens_stream_too(
    chat_tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, chat_tokenizer.vocab_size - 1), max_size=20))
    assert "".join(stream(chat_tokenizer, ids, skip)) == chat_tokenizer.decode(ids, skip_special_tokens=skip)


@many
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_streams_without_half_characters(golden_tokenizer: Tokenizer, text: str) -> None:
    pieces = stream(golden_tokenizer, golden_tokenizer.encode(text), True)
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_a_character_comes_out_with_its_last_byte_and_an_unfinished_one_at_the_end(golden_tokenizer: Tokenizer) -> None:
    ids = golden_tokenizer.encode("😀")
    assert len(ids) > 1
    assert stream(golden_tokenizer, ids, True) == [""] * (len(ids) - 1) + ["😀", ""]
    assert stream(golden_tokenizer, ids[:-1], True) == [""] * (len(ids) - 1) + ["\ufffd"]
    separate = "".join(golden_tokenizer.decode([number]) for number in ids)
    assert separate != "😀", "decoding ids one by one would have been enough"


def test_a_detokenizer_serves_again_after_a_flush_and_names_a_wrong_id(golden_tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(golden_tokenizer)
    first = golden_tokenizer.encode("😀")[0]
    assert (detokenizer.push(first), detokenizer.flush()) == ("", "\ufffd")
    assert (detokenizer.push(3), detokenizer.flush()) == ("!", "")
    with pytest.raises(PromptError, match="token id 512"):
        detokenizer.push(512)

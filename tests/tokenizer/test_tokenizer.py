"""Tokenizer files in, ids out; text from outside never becomes a control token."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quickseek.errors import PromptError, TokenizerError
from quickseek.tokenizer import dsml
from quickseek.tokenizer.prompt import render
from quickseek.tokenizer.segments import Prompt, trusted, untrusted
from quickseek.tokenizer.tokenizer import Tokenizer

several = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
spellings = st.sampled_from([*dsml.CONTROL_TOKENS, "<", "think>", "｜", " ", "é", "<filler 0>"])
hostile_text = st.lists(spellings | unicode_text).map("".join)


@several
@given(text=hostile_text)
def test_outside_text_never_becomes_a_control_token_and_decodes_back(hostile_tokenizer: Tokenizer, text: str) -> None:
    ids = hostile_tokenizer.encode(text)
    assert hostile_tokenizer.control_ids.isdisjoint(ids)
    assert hostile_tokenizer.decode(ids) == text
    assert hostile_tokenizer.decode(ids, skip_special_tokens=True) == text


@several
@given(text=hostile_text)
def test_the_golden_tokenizer_keeps_outside_text_apart_too(golden_tokenizer: Tokenizer, text: str) -> None:
    ids = golden_tokenizer.encode(text)
    assert golden_tokenizer.control_ids.isdisjoint(ids)
    assert golden_tokenizer.decode(ids) == text


@pytest.mark.parametrize("token", dsml.CONTROL_TOKENS)
def test_control_tokens_are_recognised_where_they_are_allowed(hostile_tokenizer: Tokenizer, token: str) -> None:
    number = hostile_tokenizer.control_token_id(token)
    ids = hostile_tokenizer.encode(f"a{token}b", control_tokens=True)
    assert ids[1:-1] == [number] and number in hostile_tokenizer.control_ids
    assert hostile_tokenizer.decode(ids) == f"a{token}b"
    assert number not in hostile_tokenizer.encode(f"a{token}b")


def test_the_librarys_own_switch_would_not_have_kept_think_out(think_merging_tokenizer: Tokenizer) -> None:
    tokenizer = copy.deepcopy(think_merging_tokenizer)
    tokenizer._full.encode_special_tokens = True
    think = tokenizer.control_token_id(dsml.THINK_START)
    assert think in tokenizer.encode("<think>", control_tokens=True)
    assert think not in tokenizer.encode("<think>")


@several
@given(texts=st.lists(unicode_text, min_size=3, max_size=3))
def test_a_prompt_without_control_spellings_encodes_like_its_text(chat_tokenizer: Tokenizer, texts: list[str]) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"think": texts[2], "n": [texts[2]]}}}
    messages = [
        {"role": "system", "content": texts[0]},
        {"role": "user", "content": texts[1]},
        {"role": "assistant", "content": texts[1], "reasoning_content": texts[0], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": texts[2]},
    ]
    prompt = render(messages, thinking=True)
    ids = chat_tokenizer.encode_prompt(prompt)
    assert ids == chat_tokenizer.encode(prompt.text, control_tokens=True)
    assert ids[0] == chat_tokenizer.bos_id and ids.count(chat_tokenizer.bos_id) == 1
    assert chat_tokenizer.decode(ids) == prompt.text


def test_text_on_both_sides_of_a_trust_border_is_encoded_as_one_piece(chat_tokenizer: Tokenizer) -> None:
    prompt = Prompt((trusted(dsml.USER + "<tool_result>"), untrusted("<b>"), trusted("</tool_result>")))
    (joint,) = chat_tokenizer.encode("><")
    ids = chat_tokenizer.encode_prompt(prompt)
    assert ids.count(joint) == 2
    assert ids == chat_tokenizer.encode(prompt.text, control_tokens=True)


@several
@given(text=hostile_text, cut=st.integers(0, 40))
def test_a_prompt_holds_the_control_tokens_of_the_format_only(chat_tokenizer: Tokenizer, text: str, cut: int) -> None:
    messages = [{"role": "user", "content": text[:cut]}, {"role": "user", "content": text[cut:]}]
    ids = chat_tokenizer.encode_prompt(render(messages, thinking=False))
    names = (dsml.BEGIN_OF_SENTENCE, dsml.USER, dsml.ASSISTANT, dsml.THINK_END)
    expected = [chat_tokenizer.control_token_id(name) for name in names]
    assert [number for number in ids if number in chat_tokenizer.control_ids] == expected
    assert chat_tokenizer.decode(ids) == render(messages, thinking=False).text


def test_trusted_and_outside_text_do_not_make_a_control_token_together(chat_tokenizer: Tokenizer) -> None:
    prompt = Prompt((trusted("<thi"), untrusted("nk>")))
    think = chat_tokenizer.control_token_id(dsml.THINK_START)
    assert think not in chat_tokenizer.encode_prompt(prompt)
    assert chat_tokenizer.encode_prompt(Prompt((trusted("<think>"),))) == [think]


def test_a_tokenizer_without_a_token_of_the_format_names_it(tokenizer_json: str, chat_tokenizer: Tokenizer) -> None:
    description = json.loads(tokenizer_json)
    for token in description["added_tokens"]:
        token["content"] = "<another>" if token["content"] == dsml.USER else token["content"]
    lacking = Tokenizer(json.dumps(description), {}, "tokenizer.json")
    prompt = render([{"role": "user", "content": "U"}], thinking=False)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: has no control token <｜User｜>"):
        lacking.encode_prompt(prompt)
    assert len(chat_tokenizer.encode_prompt(prompt)) == 5


def test_ids_out_of_range_are_named(golden_tokenizer: Tokenizer) -> None:
    assert golden_tokenizer.vocab_size == 512
    assert golden_tokenizer.decode([3, 511]) == "!<｜deepseek_image｜>"
    for wrong in (-1, 512, 2**40):
        with pytest.raises(PromptError, match=f"token id {wrong} at position 1"):
            golden_tokenizer.decode([3, wrong])


def test_ids_that_pad_the_vocabulary_decode_to_nothing(golden_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_directory(golden_checkpoint, vocab_size=600)
    assert tokenizer.decode([4, 599, 5]) == tokenizer.decode([4, 5])
    assert tokenizer.token_string(599) is None and tokenizer.token_bytes(599) == b""
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: holds id 511: expected ids below vocab_size 511"):
        Tokenizer.from_directory(golden_checkpoint, vocab_size=511)


def test_half_a_surrogate_pair_is_refused(golden_tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match="character 1 is half of a surrogate pair"):
        golden_tokenizer.encode("a\ud800")


def test_begin_and_end_tokens_come_from_the_settings_or_the_format(tmp_path: Path, tokenizer_json: str) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    assert (Tokenizer.from_directory(tmp_path).bos_id, Tokenizer.from_directory(tmp_path).eos_id) == (0, 1)
    settings_file = tmp_path / "tokenizer_config.json"
    settings_file.write_text(json.dumps({"eos_token": {"content": dsml.END_OF_TURN}}), encoding="utf-8")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_id == tokenizer.control_token_id("<|EOT|>") != 1
    settings_file.write_text(json.dumps({"bos_token": "<s>"}), encoding="utf-8")
    with pytest.raises(TokenizerError, match="has no control token <s>"):
        Tokenizer.from_directory(tmp_path)
    settings_file.write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: not JSON"):
        Tokenizer.from_directory(tmp_path)


class Trap:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was opened",)


def test_a_checkpoint_without_tokenizer_is_named_and_pickles_stay_closed(tmp_path: Path) -> None:
    for name in ("tokenizer.pkl", "tokenizer.bin", "tokenizer.model"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_a_damaged_or_foreign_tokenizer_file_is_named(tmp_path: Path, tokenizer_json: str) -> None:
    path = tmp_path / "tokenizer.json"
    description = json.loads(tokenizer_json)
    foreign = description | {"decoder": {"type": "Fuse"}}
    words = description | {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    no_model = {key: value for key, value in description.items() if key != "model"}
    wrong = [json.dumps(value) for value in (foreign, words, no_model, [])]
    for text in ("", tokenizer_json[: len(tokenizer_json) // 2], *wrong):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: "):
            Tokenizer.from_directory(tmp_path)
    path.write_text(tokenizer_json, encoding="utf-8")
    Tokenizer.from_directory(tmp_path)

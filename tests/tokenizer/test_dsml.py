"""Answers read back into reasoning, content and calls."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quickseek.tokenizer.dsml import ASSISTANT, THINK_END, THINK_START, MalformedToolCall, ToolCall, parse_answer
from quickseek.tokenizer.prompt import render

prose = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>｜"), max_size=20)
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters='<>｜"\n'), min_size=1, max_size=8)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | prose,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(prose, inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3)


def answer_text(message: dict[str, Any], *, thinking: bool) -> str:
    """What a model would have generated for ``message`` after the assistant header."""
    rendered = render([{"role": "user", "content": "U"}, {"role": "assistant", **message}], thinking=thinking).text
    return rendered.split(ASSISTANT + (THINK_START if thinking else THINK_END), 1)[1]


@settings(max_examples=150, deadline=None)
@given(reasoning=prose, content=prose, calls=calls, thinking=st.booleans())
def test_an_answer_reads_back_as_it_was_rendered(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], thinking: bool
) -> None:
    given_calls = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in calls]
    message = {"content": content, "reasoning_content": reasoning, "tool_calls": given_calls}
    answer = parse_answer(answer_text(message, thinking=thinking), thinking=thinking)
    assert answer.reasoning == (reasoning if thinking else None)
    assert answer.content == content
    assert answer.tool_calls == tuple(ToolCall(name, arguments) for name, arguments in calls)


def test_the_round_trip_notices_an_argument_of_another_type() -> None:
    for value, other in ((1, "1"), (True, "true"), ([1], "[1]"), (None, "null")):
        message = {"tool_calls": [{"function": {"name": "f", "arguments": {"a": value}}}]}
        (call,) = parse_answer(answer_text(message, thinking=False), thinking=False).tool_calls
        assert call == ToolCall("f", {"a": value}) != ToolCall("f", {"a": other})


def test_an_answer_cut_off_while_reasoning_is_all_reasoning() -> None:
    answer = parse_answer("so far", thinking=True)
    assert (answer.reasoning, answer.content, answer.tool_calls) == ("so far", "", ())


GOOD = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="b" string="true"> x\n</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)


def test_a_well_formed_block_is_read_with_or_without_spaces_around_its_tags() -> None:
    expected = (ToolCall("f", {"a": 1, "b": " x\n"}),)
    assert parse_answer(f"text{GOOD}", thinking=False).tool_calls == expected
    assert parse_answer(f"text{GOOD}\n", thinking=False).content == "text"
    assert parse_answer(GOOD.replace(">\n<", "><"), thinking=False).tool_calls == expected


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("\n</｜DSML｜ calls>", "", r"call 1: expected .*, found the end of the text"),
        ("</｜DSML｜ calls>", "</｜DSML｜ calls> more", r"expected nothing after </｜DSML｜ calls>, found 'more'"),
        ("</｜DSML｜ invoke>\n", "", r"call 0 \(f\): expected .*, found '</｜DSML｜ calls>'"),
        ('invoke name="f">', "invoke>", r"call 0: expected .*invoke name="),
        (' string="false"', "", r"call 0 \(f\): expected .*string="),
        ('string="false"', 'string="no"', r"call 0 \(f\): expected .*string="),
        ('string="false">1', 'string="false">one', r"call 0 \(f\), parameter a: expected JSON, found 'one'"),
        ('string="false">1', 'string="false">NaN', r"parameter a: expected JSON, found 'NaN'"),
        ('string="false">1', 'string="false">' + "[" * 100_000, r"parameter a: expected JSON"),
        ('name="b"', 'name="a"', r"call 0 \(f\): parameter a is given twice"),
        (" x\n</｜DSML｜ parameter>", " x", r"call 0 \(f\), parameter b: no </｜DSML｜ parameter>"),
        ("<｜DSML｜ invoke", "word <｜DSML｜ invoke", r"call 0: expected .*, found 'word "),
        (GOOD, "<｜DSML｜ calls>\n</｜DSML｜ calls>", r"<｜DSML｜ calls> holds no call"),
    ],
)
def test_a_malformed_block_says_what_is_wrong(old: str, new: str, problem: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(MalformedToolCall, match=problem):
        parse_answer(GOOD.replace(old, new), thinking=False)

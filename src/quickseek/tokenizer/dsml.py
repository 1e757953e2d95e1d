"""The control tokens of the prompt format, and finished answers read back into their parts (spec/model.md 11)."""

import json
import re
from dataclasses import dataclass
from typing import Any

from quickseek.errors import PromptError

BEGIN_OF_SENTENCE = "<｜begin▁of▁sentence｜>"
END_OF_SENTENCE = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
END_OF_TURN = "<|EOT|>"
THINK_START = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"
IMAGE = "<｜deepseek_image｜>"
TASKS = ("<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>")

CONTROL_TOKENS = (
    *(BEGIN_OF_SENTENCE, END_OF_SENTENCE, PAD, SYSTEM, USER, ASSISTANT, END_OF_TURN),
    *(THINK_START, THINK_END, DSML, LATEST_REMINDER, IMAGE, *TASKS),
)

CALLS = "calls"
INVOKE = "invoke"
PARAMETER = "parameter"

RESULT_OPEN = "<tool_result>"
RESULT_CLOSE = "</tool_result>"


def opening(tag: str) -> str:
    """The start of an opening tag, up to its attributes: ``<｜DSML｜ calls``."""
    return f"<{DSML} {tag}"


def closing(tag: str) -> str:
    """A whole closing tag: ``</｜DSML｜ calls>``."""
    return f"</{DSML} {tag}>"


_CALLS_OPEN = opening(CALLS) + ">"
_INVOKE = re.compile(re.escape(opening(INVOKE)) + r' name="([^"]*)">')
_PARAMETER = re.compile(re.escape(opening(PARAMETER)) + r' name="([^"]*)" string="(true|false)">')
_SPACE = re.compile(r"\s*")


class MalformedToolCall(PromptError):
    """The tool calls of an answer do not follow the format; the message says what and where."""


@dataclass(frozen=True)
class ToolCall:
    """A function call: its name, its arguments as a JSON object, and the id a client gave it (None if none)."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Answer:
    """The parts of a finished answer. ``reasoning`` is None when the answer was not to contain any."""

    reasoning: str | None
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


def parse_answer(text: str, *, thinking: bool) -> Answer:
    """Split ``text``, generated after an assistant header, into reasoning, content and tool calls.

    ``thinking`` says whether the header ended in ``<think>``; an answer cut off before ``</think>`` is all reasoning.
    One closing end-of-sentence token is dropped. This reads text, so a string argument that itself contains
    ``</｜DSML｜ parameter>`` ends there. Raises MalformedToolCall when the block of calls is not well formed.
    """
    text = text.removesuffix(END_OF_SENTENCE)
    reasoning = None
    if thinking:
        reasoning, _, text = text.partition(THINK_END)
    content, opened, block = text.partition(_CALLS_OPEN)
    if not opened:
        return Answer(reasoning, content)
    return Answer(reasoning, content.removesuffix("\n\n"), _parse_calls(block))


def _parse_calls(block: str) -> tuple[ToolCall, ...]:
    """The calls of ``block``, which starts after ``<｜DSML｜ calls>`` and must end with its closing tag."""
    calls: list[ToolCall] = []
    at = _skip_space(block, 0)
    while not block.startswith(closing(CALLS), at):
        head = _INVOKE.match(block, at)
        if head is None:
            expected = f'{opening(INVOKE)} name="..."> or {closing(CALLS)}'
            raise _malformed(block, at, f"call {len(calls)}: expected {expected}")
        arguments, at = _parse_parameters(block, head.end(), f"call {len(calls)} ({head[1]})")
        calls.append(ToolCall(head[1], arguments))
        at = _skip_space(block, at)
    end = _skip_space(block, at + len(closing(CALLS)))
    if end != len(block):
        raise _malformed(block, end, f"expected nothing after {closing(CALLS)}")
    if not calls:
        raise MalformedToolCall(f"tool calls: {_CALLS_OPEN} holds no call")
    return tuple(calls)


def _parse_parameters(block: str, at: int, call: str) -> tuple[dict[str, Any], int]:
    """The arguments of one call, and where the text after its closing tag starts."""
    arguments: dict[str, Any] = {}
    at = _skip_space(block, at)
    while not block.startswith(closing(INVOKE), at):
        head = _PARAMETER.match(block, at)
        if head is None:
            expected = f'{opening(PARAMETER)} name="..." string="true|false"> or {closing(INVOKE)}'
            raise _malformed(block, at, f"{call}: expected {expected}")
        name, is_string = head[1], head[2] == "true"
        end = block.find(closing(PARAMETER), head.end())
        if end < 0:
            raise _malformed(block, head.end(), f"{call}, parameter {name}: no {closing(PARAMETER)}")
        if name in arguments:
            raise MalformedToolCall(f"tool calls: {call}: parameter {name} is given twice")
        value = block[head.end() : end]
        arguments[name] = value if is_string else _parse_json(value, f"{call}, parameter {name}")
        at = _skip_space(block, end + len(closing(PARAMETER)))
    return arguments, at + len(closing(INVOKE))


def _parse_json(value: str, where: str) -> Any:
    try:
        return load_json(value)
    except ValueError as error:
        raise MalformedToolCall(f"tool calls: {where}: expected JSON, found {value[:40]!r} ({error})") from None


def load_json(text: str) -> Any:
    """Parse strict JSON; NaN and Infinity, which Python's parser lets through, and too deep nesting are ValueErrors."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dump_json(value: Any) -> str:
    """``value`` in the spelling prompts use: non-ASCII characters as they are. Raises ValueError or TypeError."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _malformed(block: str, at: int, problem: str) -> MalformedToolCall:
    found = repr(block[at : at + 40]) if at < len(block) else "the end of the text"
    return MalformedToolCall(f"tool calls: {problem}, found {found}")

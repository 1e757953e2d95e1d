"""The prompt encoder: messages to the text, and the trust in each piece of it, that the model was trained on.

Source: spec/model.md 11. Where it is silent: an assistant message always gets its header, also when it follows a
leading system message or another assistant message, and a call without arguments holds one empty line.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quickseek.errors import PromptError
from quickseek.tokenizer import dsml
from quickseek.tokenizer.dsml import ToolCall
from quickseek.tokenizer.instructions import ToolsInstructions
from quickseek.tokenizer.messages import (
    AssistantTurn,
    SystemTurn,
    Turn,
    UserTurn,
    gather_turns,
    response_schema,
    tool_schemas,
)
from quickseek.tokenizer.segments import Prompt, Segment, trusted, untrusted

EFFORT_LEVELS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
DEFAULT_EFFORT = "high"


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool,
    reasoning_effort: int | str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    instructions: ToolsInstructions | None = None,
) -> Prompt:
    """Render OpenAI-style ``messages`` as a prompt.

    ``tools`` and ``response_format`` (a JSON schema, or an OpenAI-style wrapper of one) are added to the leading system
    message, which is made if there is none; system messages may carry their own instead. ``reasoning_effort`` (1..100,
    a name of EFFORT_LEVELS, or None for high) only shows when ``thinking``. With ``add_generation_prompt`` a prompt
    that ends in a user turn, or in a system message that is not the only one, ends with the header of the answer.
    ``instructions`` (our own wording if None) surround tool schemas.

    Raises PromptError naming the message's index and field.
    """
    effort = effort_value(reasoning_effort)
    turns = gather_turns(messages)
    turns = _with_extras(turns, tool_schemas(tools, "tools"), response_schema(response_format, "response_format"))
    instructions = instructions or ToolsInstructions.own()
    preamble = (
        f"Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
        if thinking
        else ""
    )
    return Prompt(tuple(_segments(turns, preamble, thinking, add_generation_prompt, instructions)))


def effort_value(effort: int | str | None) -> int:
    """The number 1..100 that ``effort`` stands for; PromptError if it stands for none."""
    if effort is None:
        return EFFORT_LEVELS[DEFAULT_EFFORT]
    if isinstance(effort, str) and effort in EFFORT_LEVELS:
        return EFFORT_LEVELS[effort]
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    raise PromptError(f"reasoning_effort: {effort!r}: expected an integer 1..100 or one of {', '.join(EFFORT_LEVELS)}")


def _with_extras(turns: list[Turn], schemas: tuple[str, ...], schema: str | None) -> list[Turn]:
    """``turns`` with the tools and the response schema of the whole request in the leading system turn."""
    if not schemas and schema is None:
        return turns
    first = turns[0]
    if not isinstance(first, SystemTurn):
        return [SystemTurn("", schemas, schema), *turns]
    if schemas and first.schemas:
        raise PromptError("tools: given both with the request and in messages[0].tools")
    if schema is not None and first.response_schema is not None:
        raise PromptError("response_format: given both with the request and in messages[0].response_format")
    leading = replace(first, schemas=schemas or first.schemas, response_schema=schema or first.response_schema)
    return [leading, *turns[1:]]


def _segments(
    turns: list[Turn], preamble: str, thinking: bool, add_generation_prompt: bool, instructions: ToolsInstructions
) -> Iterator[Segment]:
    yield trusted(dsml.BEGIN_OF_SENTENCE)
    if preamble and not isinstance(turns[0], SystemTurn):
        yield trusted(dsml.SYSTEM + preamble)
    has_tools = any(isinstance(turn, SystemTurn) and turn.schemas for turn in turns)
    last_user = max((index for index, turn in enumerate(turns) if isinstance(turn, UserTurn)), default=-1)
    for index, turn in enumerate(turns):
        if isinstance(turn, SystemTurn):
            yield trusted(dsml.SYSTEM + (preamble if index == 0 else ""))
            yield from _system(turn, instructions)
        elif isinstance(turn, UserTurn):
            yield from _user(turn)
        else:
            yield from _assistant(turn, keep_reasoning=thinking and (has_tools or index > last_user))
    waiting = isinstance(turns[-1], UserTurn) or (isinstance(turns[-1], SystemTurn) and len(turns) > 1)
    if add_generation_prompt and waiting:
        yield trusted(dsml.ASSISTANT + (dsml.THINK_START if thinking else dsml.THINK_END))


def _system(turn: SystemTurn, instructions: ToolsInstructions) -> Iterator[Segment]:
    yield untrusted(turn.text)
    if turn.schemas:
        yield trusted("\n\n")
        yield from instructions.segments("\n".join(turn.schemas))
    if turn.response_schema is not None:
        yield trusted("\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n")
        yield untrusted(turn.response_schema)


def _user(turn: UserTurn) -> Iterator[Segment]:
    separator = dsml.USER
    for part in turn.parts:
        yield trusted(separator + (dsml.RESULT_OPEN if part.is_tool_result else ""))
        yield untrusted(part.text)
        separator = (dsml.RESULT_CLOSE if part.is_tool_result else "") + "\n\n"
    yield trusted(separator.removesuffix("\n\n"))


def _assistant(turn: AssistantTurn, *, keep_reasoning: bool) -> Iterator[Segment]:
    yield trusted(dsml.ASSISTANT)
    if keep_reasoning:
        yield trusted(dsml.THINK_START)
        yield untrusted(turn.reasoning)
    yield trusted(dsml.THINK_END)
    yield untrusted(turn.content)
    if turn.tool_calls:
        yield trusted(f"\n\n{dsml.opening(dsml.CALLS)}>\n")
        for call in turn.tool_calls:
            yield from _call(call)
        yield trusted(dsml.closing(dsml.CALLS))
    yield trusted(dsml.END_OF_SENTENCE)


def _call(call: ToolCall) -> Iterator[Segment]:
    yield trusted(f'{dsml.opening(dsml.INVOKE)} name="')
    yield untrusted(call.name)
    yield trusted('">\n')
    for number, (name, value) in enumerate(call.arguments.items()):
        is_string = isinstance(value, str)
        separator = "\n" if number else ""
        yield trusted(f'{separator}{dsml.opening(dsml.PARAMETER)} name="')
        yield untrusted(name)
        yield trusted(f'" string="{"true" if is_string else "false"}">')
        yield untrusted(value if is_string else dsml.dump_json(value))
        yield trusted(dsml.closing(dsml.PARAMETER))
    yield trusted(f"\n{dsml.closing(dsml.INVOKE)}\n")

"""OpenAI-style messages, checked and gathered into the turns that the prompt format knows (spec/model.md 11)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from quickseek.errors import PromptError
from quickseek.tokenizer.dsml import ToolCall, dump_json, load_json

_IMAGE_PARTS = ("image", "image_url", "input_image", "image_file")


@dataclass(frozen=True)
class SystemTurn:
    """A system message; ``schemas`` holds one JSON text per tool, ``response_schema`` one or None."""

    text: str
    schemas: tuple[str, ...] = ()
    response_schema: str | None = None


@dataclass(frozen=True)
class UserPart:
    """A user's text or a tool's result."""

    text: str
    is_tool_result: bool


@dataclass(frozen=True)
class UserTurn:
    """Consecutive user messages and tool results, the results in the order of their calls."""

    parts: tuple[UserPart, ...]


@dataclass(frozen=True)
class AssistantTurn:
    """An assistant message; absent reasoning or content is empty."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]


Turn = SystemTurn | UserTurn | AssistantTurn


def gather_turns(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Check ``messages`` and merge each run of user and tool messages into one turn.

    Raises PromptError naming the message's index and field.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise PromptError("messages: expected a list of at least one message")
    turns: list[Turn] = []
    user_parts: list[tuple[int | None, UserPart]] = []
    unanswered: dict[str, int] = {}
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            _fail(where, f"expected an object with role and content, found {type(message).__name__}")
        role = message.get("role")
        if role == "user":
            user_parts.append((None, UserPart(_content(message, where), False)))
        elif role == "tool":
            call = message.get("tool_call_id")
            if not isinstance(call, str) or call not in unanswered:
                _fail(f"{where}.tool_call_id", f"{call!r}: expected the id of a preceding call that has no result yet")
            user_parts.append((unanswered.pop(call), UserPart(_content(message, where), True)))
        elif role in ("system", "developer", "assistant"):
            if user_parts:
                turns.append(_user_turn(user_parts))
                user_parts = []
            if role == "assistant":
                turn = _assistant_turn(message, where)
                unanswered = {call.id: rank for rank, call in enumerate(turn.tool_calls) if call.id is not None}
                turns.append(turn)
            else:
                turns.append(_system_turn(message, where))
        else:
            _fail(f"{where}.role", f"{role!r}: expected system, developer, user, assistant or tool")
        if role not in ("system", "developer"):
            _refuse_fields(message, where)
    if user_parts:
        turns.append(_user_turn(user_parts))
    return turns


def tool_schemas(tools: Any, where: str) -> tuple[str, ...]:
    """The JSON text of each function in an OpenAI-style list of tools; None is an empty one."""
    if tools is None:
        return ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        _fail(where, "expected a list of tools")
    schemas = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            _fail(f"{where}[{number}]", "expected an object of type 'function'")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            _fail(f"{where}[{number}].function", "expected an object")
        _function_name(function, f"{where}[{number}].function")
        schemas.append(_json_text(function, f"{where}[{number}].function"))
    return tuple(schemas)


def response_schema(response_format: Any, where: str) -> str | None:
    """The JSON text of a schema, given as it is or in an OpenAI-style wrapper; None when any text will do."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        _fail(where, "expected an object")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _json_text({"type": "object"}, where)
    if kind == "json_schema":
        wrapper = response_format.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
        if not isinstance(schema, Mapping):
            _fail(f"{where}.json_schema.schema", "expected an object")
        return _json_text(schema, f"{where}.json_schema.schema")
    return _json_text(response_format, where)


def _system_turn(message: Mapping[str, Any], where: str) -> SystemTurn:
    schemas = tool_schemas(message.get("tools"), f"{where}.tools")
    schema = response_schema(message.get("response_format"), f"{where}.response_format")
    optional = bool(schemas) or schema is not None
    return SystemTurn(_content(message, where, optional=optional), schemas, schema)


def _assistant_turn(message: Mapping[str, Any], where: str) -> AssistantTurn:
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        reasoning = ""
    if not isinstance(reasoning, str):
        _fail(f"{where}.reasoning_content", f"expected a string, found {type(reasoning).__name__}")
    given = message.get("tool_calls")
    if given is None:
        given = ()
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        _fail(f"{where}.tool_calls", "expected a list of calls")
    calls = tuple(_tool_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(given))
    ids = [call.id for call in calls if call.id is not None]
    if len(set(ids)) != len(ids):
        _fail(f"{where}.tool_calls", "expected each call to have an id of its own")
    return AssistantTurn(reasoning, _content(message, where, optional=True), calls)


def _user_turn(parts: Sequence[tuple[int | None, UserPart]]) -> UserTurn:
    """The turn of ``parts``, each a call's rank (None for a user's text) and what to say."""
    results = iter(sorted(((rank, part) for rank, part in parts if rank is not None), key=lambda pair: pair[0]))
    return UserTurn(tuple(part if rank is None else next(results)[1] for rank, part in parts))


def _tool_call(call: Any, where: str) -> ToolCall:
    if not isinstance(call, Mapping) or call.get("type", "function") != "function":
        _fail(where, "expected an object of type 'function'")
    identifier = call.get("id")
    if identifier is not None and not isinstance(identifier, str):
        _fail(f"{where}.id", f"expected a string, found {type(identifier).__name__}")
    function = call.get("function")
    if not isinstance(function, Mapping):
        _fail(f"{where}.function", "expected an object")
    name = _function_name(function, f"{where}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments)
        except ValueError as error:
            _fail(f"{where}.function.arguments", f"not JSON: {error}")
    if not isinstance(arguments, Mapping):
        _fail(f"{where}.function.arguments", "expected a JSON object")
    for key, value in arguments.items():
        _attribute(key, f"{where}.function.arguments")
        _json_text(value, f"{where}.function.arguments")
    return ToolCall(name, dict(arguments), identifier)


def _function_name(function: Mapping[str, Any], where: str) -> str:
    return _attribute(function.get("name"), f"{where}.name")


def _attribute(name: Any, where: str) -> str:
    """``name``, if it can stand between the quotes of a tag."""
    if not isinstance(name, str) or not name or '"' in name or "\n" in name:
        _fail(where, f"{name!r}: expected a name without quotes and line breaks")
    return name


def _content(message: Mapping[str, Any], where: str, *, optional: bool = False) -> str:
    """The text of a message's content: a string, or text parts joined by a blank line."""
    content = message.get("content")
    if content is None and optional:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        _fail(f"{where}.content", f"expected a string or a list of parts, found {type(content).__name__}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in _IMAGE_PARTS:
            _fail(f"{where}.content[{number}]", "images are not supported: the vision weights are not loaded")
        if kind != "text":
            _fail(f"{where}.content[{number}].type", f"{kind!r}: expected 'text'")
        text = part.get("text")
        if not isinstance(text, str):
            _fail(f"{where}.content[{number}].text", f"expected a string, found {type(text).__name__}")
        texts.append(text)
    return "\n\n".join(texts)


def _refuse_fields(message: Mapping[str, Any], where: str) -> None:
    for field in ("tools", "response_format"):
        if message.get(field):
            _fail(f"{where}.{field}", "belongs in a system message")


def _json_text(value: Any, where: str) -> str:
    try:
        return dump_json(value)
    except (TypeError, ValueError) as error:
        _fail(where, f"cannot be written as JSON: {error}")


def _fail(where: str, problem: str) -> NoReturn:
    raise PromptError(f"{where}: {problem}")

"""The text that tells the model how to call tools: the checkpoint's own, or ours (spec/model.md 11)."""

import ast
import string
import warnings
from collections.abc import Iterator
from pathlib import Path

from quickseek.errors import TokenizerError
from quickseek.tokenizer import dsml
from quickseek.tokenizer.segments import Segment, trusted, untrusted

TEMPLATE_NAME = "TOOLS_TEMPLATE"

_SCHEMAS_FIELD = "tool_schemas"
_TAG_FIELDS = {
    "tc_block_name": dsml.CALLS,
    "tool_call_tag_name": dsml.INVOKE,
    "tool_parameter_tag_name": dsml.PARAMETER,
}
_TOKEN_FIELDS = {
    "dsml_token": dsml.DSML,
    "thinking_start_token": dsml.THINK_START,
    "thinking_end_token": dsml.THINK_END,
}
_FIELDS = (*_TOKEN_FIELDS, *_TAG_FIELDS, _SCHEMAS_FIELD)

_OWN_TEMPLATE = """\
## Tools

The functions below are yours to call. To call one or several, close your reply with a single block of this form:

<{dsml_token} {tc_block_name}>
<{dsml_token} {tool_call_tag_name} name="FUNCTION">
<{dsml_token} {tool_parameter_tag_name} name="PARAMETER" string="true|false">VALUE\
</{dsml_token} {tool_parameter_tag_name}>
</{dsml_token} {tool_call_tag_name}>
</{dsml_token} {tc_block_name}>

Repeat the inner parts for further parameters and calls. Text values stand as they are, with string="true"; \
all other values are written as JSON, with string="false". \
Reasoning that {thinking_start_token} opened must be closed by {thinking_end_token} before the block. \
What the functions return is given to you between <tool_result> and </tool_result>.

One JSON description per function:

{tool_schemas}
"""


class ToolsInstructions:
    """A template with the fields of spec/model.md 11, checked once and filled with schemas per prompt.

    Raises TokenizerError naming ``source`` when the template has a field it should not have, or no place for schemas.
    """

    def __init__(self, template: str, source: str) -> None:
        self.source = source
        self._pieces = _split_template(template, source)
        self._warn_on_use = False

    @classmethod
    def own(cls) -> "ToolsInstructions":
        """Wording of quickseek's own, for checkpoints that bring none; its first use warns."""
        instructions = cls(_OWN_TEMPLATE, "quickseek")
        instructions._warn_on_use = True
        return instructions

    @classmethod
    def from_directory(cls, directory: str | Path) -> "ToolsInstructions":
        """The string constant TOOLS_TEMPLATE of a Python file in ``directory``/encoding, else our own wording.

        The files are parsed, never run. TokenizerError names the file that cannot be parsed, or whose constant is not a
        plain string, or that contradicts another one.
        """
        found: tuple[str, str] | None = None
        for path in sorted(Path(directory, "encoding").glob("*.py")):
            template = _read_template(path)
            if template is None:
                continue
            if found is not None and found[0] != template:
                raise TokenizerError(f"{path}: {TEMPLATE_NAME} differs from the one in {found[1]}: expected one")
            found = found or (template, str(path))
        return cls.own() if found is None else cls(*found)

    def segments(self, schemas: str) -> Iterator[Segment]:
        """The instructions around ``schemas`` (one JSON schema a line); only the schemas are untrusted."""
        if self._warn_on_use:
            self._warn_on_use = False
            warnings.warn(
                f"the checkpoint has no encoding/*.py with {TEMPLATE_NAME}: tools are described in words of quickseek's"
                " own, which the model was not trained on",
                stacklevel=2,
            )
        after_dsml = False
        for literal, field in self._pieces:
            if literal:
                yield trusted(literal)
                after_dsml = False
            if field == _SCHEMAS_FIELD:
                yield untrusted(schemas)
            elif field in _TAG_FIELDS:
                # Tags are spelled with one space after the DSML token; a template may leave it to the tag's name.
                yield trusted(" " * after_dsml + _TAG_FIELDS[field])
            elif field is not None:
                yield trusted(_TOKEN_FIELDS[field])
            after_dsml = field == "dsml_token"


def _split_template(template: str, source: str) -> list[tuple[str, str | None]]:
    """``template`` as pairs of literal text and the field after it (None after the last)."""
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise TokenizerError(f"{source}: {TEMPLATE_NAME} is not a format string: {error}") from None
    for _, field, spec, conversion in parsed:
        if field is not None and (field not in _FIELDS or spec or conversion):
            raise TokenizerError(f"{source}: {TEMPLATE_NAME} has field {field!r}: expected only {', '.join(_FIELDS)}")
    pieces = [(literal, field) for literal, field, _, _ in parsed]
    if all(field != _SCHEMAS_FIELD for _, field in pieces):
        raise TokenizerError(f"{source}: {TEMPLATE_NAME} has no field {_SCHEMAS_FIELD!r}")
    return pieces


def _read_template(path: Path) -> str | None:
    """The value of the last module-level assignment to TOOLS_TEMPLATE in ``path``; None if there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            module = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TokenizerError(f"{path}: cannot be parsed as Python: {error}") from None
    template = None
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        if not any(isinstance(target, ast.Name) and target.id == TEMPLATE_NAME for target in targets):
            continue
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            raise TokenizerError(f"{path}: line {statement.lineno}: expected {TEMPLATE_NAME} to be a string constant")
        template = value.value
    return template

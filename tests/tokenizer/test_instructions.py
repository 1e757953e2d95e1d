"""The checkpoint's own text about tools is read, never run."""

import warnings
from pathlib import Path

import pytest

from quickseek.errors import TokenizerError
from quickseek.tokenizer.instructions import ToolsInstructions

TAGS = "{dsml_token}{tc_block_name}|{tool_call_tag_name}|{tool_parameter_tag_name}"
FIELDS = TAGS + "|{thinking_start_token}{thinking_end_token} {{x}} {tool_schemas}"


def write(directory: Path, text: str, name: str = "encoding.py") -> Path:
    path = directory / "encoding" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def fill(instructions: ToolsInstructions, schemas: str = "SCHEMAS") -> str:
    return "".join(segment.text for segment in instructions.segments(schemas))


def test_the_constant_of_the_checkpoint_is_used_without_running_its_file(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    write(tmp_path, f"open({str(marker)!r}, 'w')\nTOOLS_TEMPLATE = {FIELDS!r}\nimport nothing_known")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        instructions = ToolsInstructions.from_directory(tmp_path)
        assert fill(instructions) == "｜DSML｜ calls|invoke|parameter|<think></think> {x} SCHEMAS"
    assert not marker.exists()


def test_a_tag_is_one_space_from_the_dsml_token_whoever_writes_the_space() -> None:
    texts = []
    for space in ("", " "):
        template = "<{dsml_token}_{tool_call_tag_name} a></{dsml_token}_{tc_block_name}>{tool_schemas}"
        texts.append(fill(ToolsInstructions(template.replace("}_", "}" + space), "a test")))
    assert texts == ["<｜DSML｜ invoke a></｜DSML｜ calls>SCHEMAS"] * 2


def test_schemas_are_the_only_part_that_is_not_trusted() -> None:
    segments = list(ToolsInstructions("a {tool_schemas} {dsml_token}", "a test").segments("{dsml_token}"))
    assert [segment.text for segment in segments if not segment.trusted] == ["{dsml_token}"]


@pytest.mark.parametrize("files", [{}, {"other.py": "X = 1\ndef TOOLS_TEMPLATE(): pass\n"}])
def test_without_the_constant_our_own_words_are_used_with_one_warning(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        write(tmp_path, text, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        instructions = ToolsInstructions.from_directory(tmp_path)
    with pytest.warns(UserWarning, match="TOOLS_TEMPLATE") as caught:
        first, second = fill(instructions), fill(instructions)
    assert len(caught) == 1
    assert first == second
    assert first.startswith("## Tools\n") and "\nSCHEMAS\n" in first and '\n<｜DSML｜ invoke name="' in first


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("TOOLS_TEMPLATE = (", "cannot be parsed as Python"),
        ("TOOLS_TEMPLATE = 'x\0'", "cannot be parsed as Python"),
        ("TOOLS_TEMPLATE = open('x').read()", "line 1: expected TOOLS_TEMPLATE to be a string constant"),
        ("TOOLS_TEMPLATE: bytes = b'x'", "line 1: expected TOOLS_TEMPLATE to be a string constant"),
        ("TOOLS_TEMPLATE = '{tool_schemas} {secret}'", "has field 'secret'"),
        ("TOOLS_TEMPLATE = '{tool_schemas} {}'", "has field ''"),
        ("TOOLS_TEMPLATE = '{tool_schemas.__class__}'", "has field 'tool_schemas.__class__'"),
        ("TOOLS_TEMPLATE = '{tool_schemas!r}'", "has field 'tool_schemas'"),
        ("TOOLS_TEMPLATE = '{tool_schemas:>9}'", "has field 'tool_schemas'"),
        ("TOOLS_TEMPLATE = '{tool_schemas} {'", "is not a format string"),
        ("TOOLS_TEMPLATE = 'no place'", "has no field 'tool_schemas'"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    write(tmp_path, text)
    with pytest.raises(TokenizerError, match=r"encoding\.py: .*" + problem.replace(".", r"\.")):
        ToolsInstructions.from_directory(tmp_path)


def test_two_files_must_agree(tmp_path: Path) -> None:
    write(tmp_path, "TOOLS_TEMPLATE: str = 'a{tool_schemas}'", "a.py")
    write(tmp_path, "TOOLS_TEMPLATE = 'a{tool_schemas}'", "b.py")
    assert fill(ToolsInstructions.from_directory(tmp_path)) == "aSCHEMAS"
    write(tmp_path, "TOOLS_TEMPLATE = 'b{tool_schemas}'", "b.py")
    with pytest.raises(TokenizerError, match=r"b\.py: TOOLS_TEMPLATE differs from the one in .*a\.py"):
        ToolsInstructions.from_directory(tmp_path)

"""Answers follow their grammar and reasoning its budget, with drafts right and wrong and the border inside a block."""

import builtins
import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from quickseek.checkpoint.miniature_tokenizer import tokenizer_files
from quickseek.engine.grammar import GrammarCompiler, TokenMasks, is_allowed, is_thinking, mask_words
from quickseek.errors import ConfigError
from quickseek.ops import sampling
from quickseek.sampling_params import SamplingParams
from quickseek.tokenizer.tokenizer import Tokenizer

VOCABULARY = 520
"""Eight ids more than the tokenizer knows, and no multiple of 32."""

SCHEMAS: tuple[dict[str, Any], ...] = (
    {"enum": ["red", "green", 3, None, "grün"]},
    {"type": "string", "maxLength": 6},
    {"type": "array", "items": {"enum": [1, 2, "three"]}, "maxItems": 3},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 2},
            "sure": {"type": "boolean"},
        },
        "required": ["name", "colours", "sure"],
        "additionalProperties": False,
    },
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    files = tokenizer_files(VOCABULARY - 8)
    return Tokenizer(files["tokenizer.json"], json.loads(files["tokenizer_config.json"]), "miniature", VOCABULARY)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a JSON value is one that a schema of ``SCHEMAS`` describes."""
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "boolean":
        return isinstance(value, bool)
    if schema["type"] == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if schema["type"] == "array":
        sized = isinstance(value, list) and schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
        return sized and all(fits(item, schema["items"]) for item in value)
    properties = schema["properties"]
    return set(value) == set(properties) and all(fits(value[key], properties[key]) for key in properties)


def allowed(mask: Tensor) -> set[int]:
    return {token for token in range(VOCABULARY) if is_allowed(mask, token)}


def masks_of(request: TokenMasks, drafts: list[int]) -> Tensor:
    masks = torch.zeros(len(drafts) + 1, request.words, dtype=torch.int32)
    request.fill(drafts, masks)
    return masks


def run(request: TokenMasks, tokenizer: Tokenizer, seed: int, most: int, *, honest: bool = True) -> list[list[int]]:
    """The tokens of each cycle with random logits and up to five drafts, some of them what the target is going to say.

    ``honest`` False leaves the drafts out when the masks are filled: the planted fault.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cycles: list[list[int]] = []
    while sum(map(len, cycles)) < most and (not cycles or cycles[-1][-1] != tokenizer.eos_id):
        # The chain of rows is fixed before the drafts, so that a draft can be right.
        count = draw.randrange(6)
        logits = torch.randn(count + 1, VOCABULARY, generator=generator) * 3
        logits[:, tokenizer.control_token_id("</think>")] += draw.choice((0.0, 4.0))
        probe, drafts = [], []
        for row in range(count):
            mask = masks_of(request, probe)[row : row + 1]
            best = int(sampling.greedy(sampling.adjust(logits[row : row + 1], bitmask=mask)))
            probe.append(best)
            drafts.append(best if draw.random() < 0.7 else draw.randrange(VOCABULARY))
        masks = masks_of(request, drafts if honest else []).expand(count + 1, -1)
        chosen = sampling.greedy(sampling.adjust(logits, bitmask=masks)).unsqueeze(0)
        found = sampling.match(chosen, torch.tensor([drafts], dtype=torch.int64), torch.tensor([count]))
        tokens = [token for token in found.tokens[0].tolist() if token >= 0]
        if tokenizer.eos_id in tokens:
            tokens = tokens[: tokens.index(tokenizer.eos_id) + 1]
        request.accept(tokens)
        cycles.append(tokens)
    return cycles


def answer(output: list[int], tokenizer: Tokenizer, thinking: bool) -> str:
    """The text after reasoning, which ends with the end token."""
    close = tokenizer.control_token_id("</think>")
    rest = output[output.index(close) + 1 :] if thinking else output
    assert rest[-1] == tokenizer.eos_id and tokenizer.control_ids.isdisjoint(rest[:-1])
    return tokenizer.decode(rest[:-1])


@pytest.mark.parametrize("thinking", [True, False])
def test_100_random_runs_of_bounded_schemas_are_valid_json(
    tokenizer: Tokenizer, compiler: GrammarCompiler, thinking: bool
) -> None:
    inside = early = 0
    close = tokenizer.control_token_id("</think>")
    for seed in range(100):
        schema = SCHEMAS[seed % len(SCHEMAS)]
        params = SamplingParams(json_schema=schema, thinking_token_budget=12)
        request = TokenMasks(params, tokenizer, compiler, thinking=thinking)
        cycles = run(request, tokenizer, seed, 2000)
        output = [token for tokens in cycles for token in tokens]
        assert fits(json.loads(answer(output, tokenizer, thinking)), schema), output
        assert request.complete
        if thinking:
            assert output.index(close) <= 12
            early += output.index(close) < 12
            inside += any(close in tokens[:-1] for tokens in cycles)
    if thinking:
        assert min(inside, early, 100 - early) > 10, "not every kind of border was met"


def test_masks_that_ignore_the_drafts_are_noticed(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    failures = 0
    for seed in range(8):
        schema = SCHEMAS[3]
        request = TokenMasks(SamplingParams(json_schema=schema), tokenizer, compiler, thinking=False)
        try:
            output = [token for tokens in run(request, tokenizer, seed, 500, honest=False) for token in tokens]
            assert fits(json.loads(answer(output, tokenizer, False)), schema)
        except (AssertionError, ValueError, RuntimeError):
            failures += 1
    assert failures > 0


def test_the_border_of_reasoning_may_lie_inside_a_verify_block(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    close, end = tokenizer.control_token_id("</think>"), tokenizer.eos_id
    request = TokenMasks(SamplingParams(regex="[ab]c"), tokenizer, compiler, thinking=True)
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    everything = set(range(VOCABULARY))
    rows = [allowed(mask) for mask in masks_of(request, [c, close, b, c, end])]
    assert rows == [everything - {end}, everything - {end}, {a, b}, {c}, {end}, everything]
    assert request.thinking
    request.accept([c, close, b])
    assert not request.thinking and not request.complete
    assert [allowed(mask) for mask in masks_of(request, [c])] == [{c}, {end}]
    request.rollback(2)
    assert request.thinking
    request.accept([close, a, c])
    assert request.complete
    request.rollback(1)
    assert [allowed(mask) for mask in masks_of(request, [])] == [{c}]
    request.rollback(3)
    assert [allowed(mask) for mask in masks_of(request, [close])] == [everything - {end}, {a, b}]


def test_rows_behind_a_draft_that_is_not_allowed_allow_everything(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    request = TokenMasks(SamplingParams(regex="ab"), tokenizer, compiler, thinking=False)
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    everything = set(range(VOCABULARY))
    masks = torch.zeros(5, request.words, dtype=torch.int32)
    for wrong in (b, tokenizer.eos_id, tokenizer.control_token_id("<think>"), VOCABULARY - 1):
        request.fill([wrong, b], masks)
        assert [allowed(mask) for mask in masks] == [{a}, *[everything] * 4]


def test_a_budget_forces_the_end_of_reasoning_without_any_grammar(tokenizer: Tokenizer) -> None:
    close = tokenizer.control_token_id("</think>")
    request = TokenMasks(SamplingParams(thinking_token_budget=2), tokenizer, None, thinking=True)
    everything = set(range(VOCABULARY))
    assert [allowed(mask) for mask in masks_of(request, [50, 51, close, 52])] == [
        everything, everything, {close}, everything, everything,
    ]  # fmt: skip
    request.accept([50, 51])
    assert [allowed(mask) for mask in masks_of(request, [])] == [{close}]
    idle = TokenMasks(SamplingParams(thinking_token_budget=0), tokenizer, None, thinking=False)
    assert [allowed(mask) for mask in masks_of(idle, [close])] == [everything, everything]


def test_a_budget_of_none_cuts_reasoning_at_once(tokenizer: Tokenizer) -> None:
    request = TokenMasks(SamplingParams(thinking_token_budget=0), tokenizer, None, thinking=True)
    assert allowed(masks_of(request, [])[0]) == {tokenizer.control_token_id("</think>")}


def test_the_end_stays_open_where_min_tokens_would_forbid_it_but_the_answer_is_complete(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    request = TokenMasks(SamplingParams(regex="a", min_tokens=9), tokenizer, compiler, thinking=False)
    request.accept(tokenizer.encode("a"))
    ends = sampling.Ends(torch.tensor([[tokenizer.eos_id]]), torch.tensor([True]))
    adjusted = sampling.adjust(torch.zeros(1, VOCABULARY), bitmask=masks_of(request, []), ends=ends)
    assert sampling.greedy(adjusted).tolist() == [tokenizer.eos_id]


def test_a_token_chosen_against_the_grammar_is_an_error(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    request = TokenMasks(SamplingParams(regex="a"), tokenizer, compiler, thinking=False)
    wrong = tokenizer.encode("b")[0]
    with pytest.raises(RuntimeError, match=f"token {wrong}"):
        request.accept([wrong])
    with pytest.raises(ValueError, match="rollback of 1"):
        request.rollback(1)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("json_schema", {"type": "bogus"}, "bogus"),
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("json_schema", {"enum": [object()]}, "serializable"),
        ("regex", "((", "position"),
        ("grammar", "root ::= absent", "absent"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_names_its_field(
    compiler: GrammarCompiler, field: str, value: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        compiler.compile(SamplingParams(**{field: value}))
    assert raised.value.key == field
    assert ".cc:" not in str(raised.value)


def test_any_form_of_a_schema_gives_the_same_masks(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    schema = SCHEMAS[3]
    forms = (schema, json.dumps(schema))
    rows = [
        allowed(masks_of(TokenMasks(SamplingParams(json_schema=form), tokenizer, compiler, thinking=False), [])[0])
        for form in forms
    ]
    assert rows[0] == rows[1] == {tokenizer.encode("{")[0]}


STRINGS = (
    ('""', True),
    ('"abc"', True),
    ('"abcd"', False),
    ('"a\tb"', False),
    ('"\x18"', False),
    ('"\\n\\"\\\\"', True),
    ('"\\u00e9\\ud83d\\ude00c"', True),
    ('"\\ud83d"', False),
    ('"\\q"', False),
    ('"é漢c"', True),
)


@pytest.mark.parametrize(("text", "valid"), STRINGS)
def test_a_string_of_bounded_length_is_a_json_string(
    tokenizer: Tokenizer, compiler: GrammarCompiler, text: str, valid: bool
) -> None:
    schema = {"type": "string", "maxLength": 3}
    request = TokenMasks(SamplingParams(json_schema=schema), tokenizer, compiler, thinking=False)
    try:
        request.accept(tokenizer.encode(text))
    except RuntimeError:
        assert not valid
    else:
        assert request.complete == valid
    assert fits(json.loads(text), schema) if valid else True


def test_bytes_that_are_no_unicode_never_stand_in_a_string_of_bounded_length(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    first = len(tokenizer.control_ids)
    for sequence in (b"\xed\xa0\x80", b"\xe0\x80\x80", b"\xf4\x90\x80\x80", b"\xff"):
        schema = {"type": "string", "maxLength": 9}
        request = TokenMasks(SamplingParams(json_schema=schema), tokenizer, compiler, thinking=False)
        request.accept(tokenizer.encode('"'))
        with pytest.raises(RuntimeError, match="grammar"):
            request.accept([first + byte for byte in sequence])


def test_an_enumeration_that_spells_a_rule_of_the_grammar_is_left_alone(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    odd = 'x ::= (([^\\"\\\\\\r\\n]))\nx ::= (([^\\"\\\\\\r\\n]))'
    request = TokenMasks(SamplingParams(json_schema={"enum": [odd]}), tokenizer, compiler, thinking=False)
    request.accept(tokenizer.encode(json.dumps(odd)))
    assert request.complete


def test_whether_a_prompt_ends_inside_reasoning_is_read_from_its_last_mark(tokenizer: Tokenizer) -> None:
    opening, closing = tokenizer.control_token_id("<think>"), tokenizer.control_token_id("</think>")
    assert is_thinking([0, 50, opening], tokenizer)
    assert is_thinking([0, opening, 50, closing, 51, opening, 52], tokenizer)
    assert not is_thinking([0, opening, 50, closing, 51], tokenizer)
    assert not is_thinking([0, 50], tokenizer)


@pytest.mark.parametrize("token", [0, 30, 31, 32, 63, 511, 519])
def test_one_bit_of_a_mask_is_one_id(tokenizer: Tokenizer, token: int) -> None:
    masks = torch.zeros(1, mask_words(VOCABULARY), dtype=torch.int32)
    masks[0, token // 32] = torch.tensor(1, dtype=torch.int32) << (token % 32)
    assert allowed(masks[0]) == {token}
    adjusted = sampling.adjust(torch.zeros(1, VOCABULARY), bitmask=masks)
    assert torch.nonzero(adjusted[0] == 0).flatten().tolist() == [token]


def test_masks_of_another_form_are_refused(tokenizer: Tokenizer) -> None:
    request = TokenMasks(SamplingParams(), tokenizer, None, thinking=False)
    with pytest.raises(ValueError, match="masks has 1 rows: expected 2"):
        request.fill([5], torch.zeros(1, request.words, dtype=torch.int32))
    with pytest.raises(ValueError, match="masks"):
        request.fill([], torch.zeros(1, request.words))
    with pytest.raises(ValueError, match="regex needs"):
        TokenMasks(SamplingParams(regex="a"), tokenizer, None, thinking=False)


def test_without_the_library_the_error_names_the_extra(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "xgrammar":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match="serve"):
        GrammarCompiler(tokenizer)

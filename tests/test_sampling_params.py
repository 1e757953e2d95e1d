"""Every option of a request is checked, and the error names its field."""

from dataclasses import replace
from typing import Any

import pytest

from quickseek.errors import ConfigError
from quickseek.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

NAN, INF = float("nan"), float("inf")
WRONG: dict[str, tuple[Any, ...]] = {
    "n": (0, 2, True),
    "max_tokens": (0, -1, 1.0, True, "5", None),
    "min_tokens": (-1, 1.5, None),
    "temperature": (-0.1, NAN, INF, 10**400, "hot", True, None),
    "top_p": (0.0, 1.01, NAN, None),
    "top_k": (-2, 2**31, 1.0, None, True),
    "min_p": (-0.1, 1.1, NAN),
    "seed": (-1, 2**63, 1.0, True),
    "presence_penalty": (-2.1, 2.1, NAN, "1"),
    "frequency_penalty": (-2.1, 2.1, NAN),
    "repetition_penalty": (0.0, -1.0, INF),
    "logit_bias": ({1: 101}, {1: NAN}, {-1: 0.0}, {"1": 0.0}, [1], None, dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
    "ignore_eos": (1, None),
    "stop": ("", [""], [1], 5, None),
    "stop_token_ids": ([-1], ["1"], 5, "12", [True], range(MAX_STOP_TOKEN_IDS + 1)),
    "include_stop_str_in_output": (1,),
    "skip_special_tokens": ("yes",),
    "logprobs": (-1, 21, True, 1.0),
    "json_schema": ("{", "[]", "3", 5, ["object"]),
    "regex": ("", 5),
    "grammar": ("", 5),
    "thinking_token_budget": (-1, 1.5, True),
}
RIGHT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "max_tokens": (1, 10**6),
    "min_tokens": (0, 256),
    "temperature": (0, 0.0, 5),
    "top_p": (1, 1e-6),
    "top_k": (-1, 0, 1, 10**6),
    "min_p": (0, 1),
    "seed": (None, 0, 2**63 - 1),
    "presence_penalty": (-2, 2.0),
    "frequency_penalty": (-2, 2.0),
    "repetition_penalty": (0.1, 3),
    "logit_bias": ({}, {0: -100, 5: 100.0}),
    "ignore_eos": (True,),
    "stop": ("end", ["a", "b"], ()),
    "stop_token_ids": ([], [0, 7], range(MAX_STOP_TOKEN_IDS)),
    "include_stop_str_in_output": (True,),
    "skip_special_tokens": (False,),
    "logprobs": (None, 0, 20),
    "json_schema": ({"type": "object"}, '{"type": "object"}', {}),
    "regex": ("a+",),
    "grammar": ('root ::= "a"',),
    "thinking_token_budget": (0, 4096),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_value_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        SamplingParams(**{field: value})
    assert raised.value.key == field


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in RIGHT.items() for value in values])
def test_a_value_in_range_is_taken(field: str, value: Any) -> None:
    SamplingParams(**{field: value})


def test_the_tables_of_this_test_hold_every_field() -> None:
    fields = set(SamplingParams.__dataclass_fields__)
    assert set(WRONG) == set(RIGHT) == fields


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, ("min_tokens", "max_tokens")),
        ({"json_schema": {}, "regex": "a"}, ("json_schema", "regex")),
        ({"regex": "a", "grammar": 'root ::= "a"'}, ("regex", "grammar")),
        ({"json_schema": {}, "regex": "a", "grammar": 'root ::= "a"'}, ("json_schema", "regex", "grammar")),
        ({"json_schema": {}, "ignore_eos": True}, ("ignore_eos", "json_schema")),
    ],
)
def test_options_that_exclude_each_other_name_each_other(options: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        SamplingParams(**options)
    assert all(name in str(raised.value) for name in names)


def test_lists_become_tuples_and_one_stop_string_a_tuple_of_one() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4])
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert replace(params, temperature=0.0) == SamplingParams(stop=["end"], stop_token_ids=(3, 4), temperature=0.0)


def test_what_was_checked_cannot_be_changed_from_outside() -> None:
    bias, ids, stop = {3: 1.0}, [4], ["x"]
    params = SamplingParams(logit_bias=bias, stop_token_ids=ids, stop=stop)
    bias[-1], stop[0] = 1e9, ""
    ids.append(-5)
    assert (params.logit_bias, params.stop_token_ids, params.stop) == ({3: 1.0}, (4,), ("x",))


def test_what_a_request_needs_is_told() -> None:
    plain = SamplingParams()
    assert not (plain.greedy or plain.penalised or plain.masked) and plain.structure is None
    assert SamplingParams(temperature=0, top_k=5, top_p=0.5).greedy
    for penalty in ({"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}):
        assert SamplingParams(**penalty).penalised
    for field in ("json_schema", "regex", "grammar"):
        params = SamplingParams(**{field: '{"type": "null"}'})
        assert params.structure == field and params.masked
    assert SamplingParams(thinking_token_budget=0).masked


def test_a_token_id_beyond_the_vocabulary_is_named() -> None:
    SamplingParams(logit_bias={9: 1}, stop_token_ids=[9]).check_vocabulary(10)
    with pytest.raises(ConfigError, match="logit_bias"):
        SamplingParams(logit_bias={10: 1}).check_vocabulary(10)
    with pytest.raises(ConfigError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[10]).check_vocabulary(10)


def test_the_end_token_is_among_the_ends_unless_it_is_ignored() -> None:
    assert SamplingParams(stop_token_ids=[5, 6]).ends(1) == (5, 6, 1)
    assert SamplingParams(stop_token_ids=[5], ignore_eos=True).ends(1) == (5,)

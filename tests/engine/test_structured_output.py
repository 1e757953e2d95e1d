"""JSON by schema through the whole engine: speculation and thinking on, and valid every time."""

import json
from dataclasses import replace

import pytest
from micro import GREEDY, assert_nothing_leaks, make_request, make_runner, micro_tokenizer

from quickseek.sampling_params import SamplingParams
from quickseek.tokenizer import dsml

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bc"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
    },
    "required": ["kind", "tags"],
    "additionalProperties": False,
}

LONG = 400
"""Random weights use every space that a grammar allows."""


def valid(text: str) -> bool:
    value = json.loads(text)
    tags = value["tags"]
    return value["kind"] in ("a", "bc") and len(tags) <= 2 and all(isinstance(t, str) and len(t) <= 2 for t in tags)


def answers(drafts: int, count: int, **options: object) -> list[str]:
    tokenizer = micro_tokenizer()
    think = tokenizer.control_token_id(dsml.THINK_START)
    runner = make_runner(drafts=drafts, max_num_seqs=min(count, 50), snapshots=0, max_model_len=LONG, **options)
    finished = {}
    order = []
    for seed in range(count):
        params = SamplingParams(
            max_tokens=LONG - 8, temperature=1.5, seed=seed, json_schema=SCHEMA, thinking_token_budget=seed % 7
        )
        request = make_request([50 + seed, think], params, max_model_len=LONG)
        order.append(request.request_id)
        runner.add(request)
    while not runner.idle:
        for update in runner.step():
            if update.output.finished:
                finished[update.output.request_id] = update.output
    assert_nothing_leaks(runner)
    assert all(output.finish_reason == "stop" for output in finished.values()), [
        (o.finish_reason, o.error, o.text) for o in finished.values() if o.finish_reason != "stop"
    ]
    close = tokenizer.control_token_id(dsml.THINK_END)
    spoken = []
    for number, request_id in enumerate(order):
        ids = finished[request_id].token_ids
        assert ids.index(close) <= number % 7, "more reasoning than the budget"
        spoken.append(tokenizer.decode(ids[ids.index(close) + 1 :], skip_special_tokens=True))
    return spoken


@pytest.mark.parametrize(
    "options", [{}, {"sampled_drafts": True}, {"confidence": 0.4}], ids=["greedy drafts", "sampled", "confidence"]
)
def test_a_hundred_answers_follow_their_schema_with_drafts_and_thinking(options: dict[str, object]) -> None:
    count = 100 if not options else 12
    texts = answers(5, count, **options)
    assert all(valid(text) for text in texts)
    assert len({json.dumps(json.loads(text)) for text in texts}) > 5, "all answers are alike: this shows nothing"


def test_drafts_change_no_answer() -> None:
    assert answers(0, 8) == answers(5, 8)


def test_without_the_schema_answers_are_not_json() -> None:
    """Negative control."""
    runner = make_runner()
    runner.add(make_request([50, 60], replace(GREEDY, max_tokens=20)))
    text = ""
    while not runner.idle:
        text = "".join([text, *(update.text for update in runner.step())])
    with pytest.raises(ValueError):
        valid(text)

"""The training loop: the loss falls, a resumed run gives the same bits, and each phase changes its own weights only."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miniature import data, measure, objectives
from miniature.backbone import turns
from miniature.bank import Material, taught
from miniature.data import Text
from miniature.layers import Hashing
from miniature.objectives import Outcome, Setting
from miniature.rounding import Rounding
from miniature.training import Limit, Log, Phase, Schedule, balance, is_buffer, optimizer, parts
from miniature.weights import initial, values
from model_helpers import config_of, token_map
from quickseek.config import ModelConfig

CONTEXT, BATCH, ANCHORS = 40, 4, 6
SMALL: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "dspark_n_routed_experts": 2,
    "dspark_num_experts_per_tok": 1,
}


def text() -> Text:
    """A text that can be learned: words of four tokens in an order that one rule gives."""
    words = torch.randint(20, 60, (16, 4), generator=torch.Generator().manual_seed(0))
    order = torch.tensor([(7 * i * i + 3 * i) % 16 for i in range(600)])
    ids = words[order].flatten()
    return Text(ids[:2000], ids[2000:], 3 * (len(ids) - 2000))


def setting(config: ModelConfig) -> Setting:
    return Setting(
        config=config,
        hashing=Hashing.of(config, token_map(config)),
        rotation=turns(config, CONTEXT + 8, torch.float32, torch.device("cpu")),
        dtype=torch.float32,
        dropout=0.1,
        taught=1,
    )


def new_weights(config: ModelConfig, trained: str) -> dict[str, Tensor]:
    weights = initial(config, 2)
    for name, weight in weights.items():
        weight.requires_grad_(name.startswith("mtp.") is (trained == "draft") and not is_buffer(name))
    return weights


def phase(name: str, steps: int = 30) -> Phase:
    """A phase on the learnable text; half of its steps round."""
    config = replace(config_of(), **SMALL)
    of, weights, sample = setting(config), new_weights(config, name), text()
    frozen = values(config, weights, torch.float32, Rounding(on=True), draft=False)
    rows = 60 if name == "draft" else 1
    material = Material(taught(of, frozen, data.draw(sample, rows, CONTEXT, 3, 0)), None)
    kept = taught(of, frozen, data.held_out_windows(sample.held_out, CONTEXT, min(rows, 4)))

    def objective(rounding: Rounding) -> Callable[..., Outcome]:
        if name == "draft":
            return lambda *rows: objectives.acceptance(of, frozen, weights, *rows, rounding)
        return lambda ids: objectives.next_token(of, weights, ids, rounding)

    def inputs(step: int) -> tuple[Tensor, ...]:
        if name == "draft":
            return material.draw(BATCH, 0.5, ANCHORS, config.dspark_block_size, 4, step)
        return (data.draw(sample, BATCH, CONTEXT + 1, 3, step),)

    def held_out() -> dict[str, float]:
        if name == "draft":
            return measure.draft_lengths(of, frozen, weights, kept, ANCHORS, "held_out")
        return measure.held_out(of, weights, sample, CONTEXT, 4)

    schedule = Schedule(peak=3e-3, warmup_steps=3, round_from=0.5)
    return Phase(name, weights, optimizer(weights, 0.1), schedule, objective, inputs, held_out, seed=1, measurements=1)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log.jsonl", 0.0, echo=False)


@pytest.mark.parametrize("name", ["backbone", "draft"])
def test_thirty_steps_lower_the_held_out_loss(name: str, log: Log) -> None:
    run = phase(name)
    before = run.measure()
    run.run(Limit(30), log)
    after = run.measure()
    key = "held_out_loss" if name == "draft" else "held_out_rounded_bits_per_byte"
    assert after[key] < 0.9 * before[key]


@pytest.mark.parametrize("name", ["backbone", "draft"])
def test_two_steps_resumed_for_two_give_the_bits_of_four(name: str, log: Log) -> None:
    whole, first, second = phase(name), phase(name), phase(name)
    whole.run(Limit(4), log)
    first.run(Limit(4), log, stop_at=2)
    second.restore(first.state())
    second.run(Limit(4), log)
    for key, weight in whole.weights.items():
        assert torch.equal(weight, second.weights[key]), key
    assert not torch.equal(
        whole.weights["mtp.0.attn.wkv.weight" if name == "draft" else "embed.weight"],
        phase(name).weights["mtp.0.attn.wkv.weight" if name == "draft" else "embed.weight"],
    )


def test_a_state_of_another_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="state is of phase 'draft': expected 'backbone'"):
        phase("backbone").restore(phase("draft").state())


@pytest.mark.parametrize("name", ["backbone", "draft"])
def test_a_phase_changes_every_weight_of_its_own_and_none_of_the_others(name: str, log: Log) -> None:
    run, start = phase(name), new_weights(config_of(**SMALL), name)
    run.run(Limit(4), log)
    for key, weight in run.weights.items():
        mine = key.startswith("mtp.") is (name == "draft")
        assert torch.equal(weight, start[key]) is not mine, key


def test_the_indexers_learn_from_their_lesson_alone() -> None:
    config = config_of(**SMALL)
    of, weights = setting(config), new_weights(config, "backbone")
    ids = data.draw(text(), BATCH, CONTEXT + 1, 3, 0)
    for count in (0, 2):
        for weight in weights.values():
            weight.grad = None
        outcome = objectives.next_token(replace(of, taught=count), weights, ids, Rounding(on=False))
        torch.manual_seed(0)
        outcome.loss.backward()
        touched = {key for key, w in weights.items() if w.grad is not None and ".indexer." in key}
        assert len(touched) == (0 if count == 0 else sum(".indexer." in key for key in weights))


def test_a_selection_bias_moves_towards_equal_loads() -> None:
    weights = {"gate.bias": torch.zeros(3), "gate.bias_vl": torch.ones(3)}
    balance(weights, {"gate.bias": torch.tensor([9.0, 3.0, 0.0])})
    assert weights["gate.bias"].sign().tolist() == [-1.0, 1.0, 1.0]
    assert torch.equal(weights["gate.bias"], weights["gate.bias_vl"])


def test_a_sequence_is_a_window_of_the_text_or_a_message_and_its_continuation() -> None:
    tokens = torch.arange(100, 160)
    ids = data.lay_out(tokens, torch.tensor([5, 7]), torch.tensor([0, 3]), 12)
    assert ids[0].tolist() == [data.BEGIN, *range(105, 116)]
    chat = [data.BEGIN, data.USER, 107, 108, 109, data.ASSISTANT, data.THINK_END, 110, 111, 112, 113, 114]
    assert ids[1].tolist() == chat
    ignored = [i for i, target in enumerate(data.targets(ids)[1].tolist()) if target == data.IGNORED]
    assert ignored == [0, 4, 5]


def test_weights_are_cut_into_files_of_a_bounded_size() -> None:
    weights = {str(n): torch.full((4,), float(n)) for n in range(5)}
    found = list(parts(weights, 40))
    assert [list(part) for part in found] == [["0", "1"], ["2", "3"], ["4"]]

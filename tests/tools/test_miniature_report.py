"""Figures of a miniature come from the same model that users run, and a missing mechanism shows in them."""

import math
from pathlib import Path

import pytest
import torch

from compare import relative_error
from miniature import report
from miniature.data import held_out_windows
from model_helpers import prompt
from quickseek.checkpoint.miniature import write_miniature
from quickseek.numerics import Numerics


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_miniature(path, "tiny")
    return path


def test_the_whole_sequence_losses_are_the_stock_models(directory: Path) -> None:
    windows = torch.stack([prompt(41), prompt(41, 2), prompt(41, 3)])
    ours = report.Scorer(directory).losses(windows)
    stock = report.stock_losses(directory, windows, Numerics.exact())
    assert relative_error(ours, stock) < 1e-4
    assert relative_error(ours, stock.roll(1, 0)) > 1e-2
    trained = report.stock_losses(directory, windows, Numerics.trained())
    assert 1e-4 < relative_error(trained, stock) < 0.3


def test_every_ablation_differs_from_the_whole_model(directory: Path) -> None:
    windows = torch.stack([prompt(60), prompt(60, 2)])
    whole, *others = report.ablations(report.Scorer(directory), windows)
    assert len(others) == 4 and len({found["perplexity"] for found in (whole, *others)}) == 5
    assert whole["cost"] == whole["cost_error"] == 0
    for found in others:
        perplexity, cost = found["perplexity"], found["cost"]
        assert isinstance(perplexity, float) and isinstance(cost, float)
        assert isinstance(whole["perplexity"], float)
        assert math.log(perplexity / whole["perplexity"]) == pytest.approx(cost, abs=1e-4)


def test_accepted_lengths_count_what_the_engine_accepted(directory: Path) -> None:
    found = report.accepted_lengths(
        directory, [prompt(9).tolist()], temperature=0.0, method="greedy", mode="exact", max_tokens=12
    )
    at = found["at"]
    assert isinstance(at, list) and len(at) == 5 and at == sorted(at, reverse=True)
    assert found["mean_accepted"] == pytest.approx(sum(at), abs=2e-3)
    assert found["tokens"] == 12


def test_an_answer_that_repeats_itself_has_few_different_sequences() -> None:
    assert report.distinct([1, 2, 3, 4, 5, 6], 4) == 1.0
    assert report.distinct([1, 2] * 6, 4) == pytest.approx(2 / 9)


def test_the_error_of_a_mean_is_that_of_its_prompts() -> None:
    # Wholes of one size: the error of a plain mean, 2 / sqrt(3) of parts 1, 3 and 5 a whole of one.
    assert report.ratio_error([1, 3, 5], [1.0] * 3) == pytest.approx(2 / 3**0.5)
    assert report.ratio_error([2, 6, 10], [2.0] * 3) == pytest.approx(2 / 3**0.5)
    assert report.ratio_error([3, 6, 30], [1.0, 2.0, 10.0]) == 0.0
    assert math.isnan(report.ratio_error([3], [1.0]))


def test_windows_are_spread_over_the_held_out_text() -> None:
    windows = held_out_windows(torch.arange(10, 110), 11, 3)
    assert windows[:, 0].tolist() == [0, 0, 0] and windows[:, 1].tolist() == [10, 40, 70]
    assert held_out_windows(torch.arange(10, 110), 11, 99).shape == (10, 11)

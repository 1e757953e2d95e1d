"""What the drafter learns from: cut rows teach the same, and anchors keep out of prompts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from compare import relative_error
from miniature import data, objectives
from miniature.backbone import turns
from miniature.bank import KEPT, Answers, Bank, Material, taught
from miniature.layers import Hashing
from miniature.objectives import Setting
from miniature.rounding import Rounding
from miniature.weights import initial, values
from model_helpers import config_of, token_map
from write_text import prompts, sampling

CONFIG = config_of()
BLOCK, WINDOW = CONFIG.dspark_block_size, CONFIG.sliding_window
LENGTH, WIDTH, PROMPT = 60, 24, 9


def setting() -> Setting:
    rotation = turns(CONFIG, LENGTH + 8, torch.float32, torch.device("cpu"))
    return Setting(CONFIG, Hashing.of(CONFIG, token_map(CONFIG)), rotation, torch.float32)


def blank(rows: int, width: int, first: int) -> Bank:
    """Rows of ids that tell row and place; no states."""
    ids = torch.arange(rows * width).view(rows, width)
    return Bank(ids, torch.zeros(rows, width, 1), torch.zeros(rows, width, 1), torch.full((rows,), first))


# ---------------------------------------------------------------------------------------------- rows


def test_drafts_after_an_anchor_are_the_same_in_a_cut_row() -> None:
    of, weights = setting(), initial(CONFIG, 2)
    frozen = values(CONFIG, weights, torch.float32, Rounding(on=True), draft=False)
    ids = torch.randint(20, CONFIG.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    whole = taught(of, frozen, ids)
    cut = whole.cut(WIDTH, WINDOW)
    start = LENGTH - WIDTH
    assert torch.equal(cut.ids[-2:], ids[:, start:]) and cut.first[-2:].tolist() == [WINDOW - 1] * 2
    assert cut.first[:2].tolist() == [0, 0]

    def losses(rows: Bank, anchor: int) -> Tensor:
        anchors = torch.full((len(rows.ids), 1), anchor)
        unrounded = Rounding(on=False)
        return objectives.acceptance(of, frozen, weights, rows.ids, rows.aux, rows.hidden, anchors, unrounded).loss

    last = cut.rows(torch.arange(len(cut.ids) - 2, len(cut.ids)))
    there, here = losses(whole, start + WINDOW - 1), losses(last, WINDOW - 1)
    assert relative_error(here, there) < 1e-5
    # One place earlier the window of the cut row is a row short.
    assert relative_error(losses(last, WINDOW - 2), losses(whole, start + WINDOW - 2)) > 1e-5


def test_rows_that_are_too_short_for_the_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 12 tokens: expected at least the 13 of the answers"):
        blank(1, 12, 0).cut(13, 4)


@pytest.mark.parametrize("first", [0, PROMPT])
def test_anchors_lie_from_the_first_to_the_last_that_has_its_tokens(first: int) -> None:
    anchors = blank(3, WIDTH, first).anchors(2000, BLOCK, torch.Generator().manual_seed(1))
    assert sorted(set(anchors.flatten().tolist())) == list(range(first, WIDTH - BLOCK - 1))


# ---------------------------------------------------------------------------------------------- draws


def test_a_share_of_a_step_is_the_models_own_text_with_anchors_after_the_prompt() -> None:
    text, own = blank(5, WIDTH, 0), blank(7, WIDTH, PROMPT)
    material = Material(text, replace(own, ids=own.ids + 1000))
    ids, _, _, anchors = material.draw(8, 0.75, 400, BLOCK, 3, 0)
    written = ids[:, 0] >= 1000
    assert written.tolist() == [False] * 2 + [True] * 6
    assert int(anchors[written].min()) == PROMPT and int(anchors[~written].min()) == 0
    again, other = (material.draw(8, 0.75, 400, BLOCK, 3, step) for step in (0, 1))
    assert torch.equal(again[3], anchors) and not torch.equal(other[3], anchors)
    assert torch.equal(again[0], ids) and not torch.equal(other[0], ids)


def test_without_own_text_all_rows_are_of_the_text() -> None:
    ids = Material(blank(5, WIDTH, 0), None).draw(8, 0.75, 4, BLOCK, 3, 0)[0]
    assert ids.shape == (8, WIDTH) and int(ids.max()) < 5 * WIDTH


def test_answers_are_read_from_parts_and_one_of_every_few_is_kept(tmp_path: Path) -> None:
    files = [tmp_path / f"own-{number}.npz" for number in range(2)]
    for number, file in enumerate(files):
        ids = np.arange(KEPT * WIDTH, dtype=np.uint16).reshape(KEPT, WIDTH) + number
        np.savez(file, ids=ids, prompt=PROMPT, temperature=0.0)
    answers = Answers.load(files, torch.device("cpu"))
    assert answers.ids.shape == (2 * KEPT, WIDTH) and answers.prompt == PROMPT
    some, kept = answers.split()
    assert torch.equal(kept.ids, answers.ids[[KEPT - 1, 2 * KEPT - 1]]) and len(some.ids) == 2 * KEPT - 2
    np.savez(files[1], ids=ids, prompt=PROMPT + 1, temperature=0.0)
    with pytest.raises(ValueError, match=r"answers are \[\(9, 24\), \(10, 24\)\]: expected one pair"):
        Answers.load(files, torch.device("cpu"))


# ---------------------------------------------------------------------------------------------- target


def test_a_share_of_the_target_is_on_the_likeliest_token() -> None:
    wanted = torch.tensor([[0.2, 0.5, 0.3]])
    sharpened = objectives._sharpened(wanted, 0.5)
    assert torch.allclose(sharpened, torch.tensor([[0.1, 0.75, 0.15]]))
    assert objectives._sharpened(wanted, 0.0) is wanted


# ---------------------------------------------------------------------------------------------- prompts


def test_prompts_are_chapter_starts_and_places_of_the_text() -> None:
    text = np.arange(3, 203, dtype=np.uint16)
    text[49::50] = 1
    starts = {int(text[place]) for place in (0, 50, 100, 150)}
    greedy, drawn, later = (prompts(text, number, 4, 10) for number in (0, 1, 2))
    for found in (greedy, drawn, later):
        assert found.shape == (4, 11) and (found[:, 0] == data.BEGIN).all()
        assert set(found[:2, 1].tolist()) <= starts
        for row in found:
            place = int(np.flatnonzero(text == row[2])[0]) - 1
            assert row[1:].tolist() == text[place : place + 10].tolist()
    assert np.array_equal(greedy[:2], drawn[:2]) and not np.array_equal(greedy[2:], drawn[2:])
    assert {*greedy[:2, 1].tolist(), *later[:2, 1].tolist()} == starts
    assert np.array_equal(prompts(text, 1, 4, 10), drawn)


def test_parts_are_greedy_in_turn_with_parts_drawn_at_a_temperature() -> None:
    temperatures = [sampling(number, 5).temperature for number in range(8)]
    assert temperatures[::2] == [0.0] * 4
    assert all(0.6 <= t <= 1.0 for t in temperatures[1::2]) and len(set(temperatures[1::2])) == 4

"""The command that trains: a given backbone comes out as it went in, and the drafter does not."""

import argparse
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train_miniature
from miniature.training import Limit, Log
from miniature.weights import from_stored
from quickseek.checkpoint.hub import resolve
from quickseek.checkpoint.reader import Checkpoint

WIDTH, PROMPT = 48, 12


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as --prepare leaves it, of random tokens, and a part that a model may have written."""
    folder = tmp_path_factory.mktemp("texts")
    for name in train_miniature.FILES:
        (folder / name).write_bytes((resolve("miniature") / name).read_bytes())
    generator = np.random.default_rng(0)
    train, held_out = (generator.integers(20, 1000, size=size, dtype=np.uint16) for size in (900, 200))
    np.savez(folder / "tokens.npz", train=train, heldout=held_out)
    (folder / "sizes.json").write_text(json.dumps({"heldout_bytes": 600}))
    own = generator.integers(20, 1000, size=(16, WIDTH), dtype=np.uint16)
    np.savez(folder / "own-000.npz", ids=own, prompt=PROMPT, temperature=0.0)
    return folder


SIZES = "--context 64 --sequences 2 --batch 2 --draft-batch 2 --anchors 2 --windows 1 --warmup 1 --draft-steps 2"


def options(monkeypatch: pytest.MonkeyPatch, texts: Path, out: Path, *more: str) -> argparse.Namespace:
    """Those of two steps of the drafter."""
    paths = f"--data {texts} --out {out} --backbone {resolve('miniature')} --own-text {texts / 'own-000.npz'}"
    monkeypatch.setattr(sys, "argv", ["train_miniature.py", "--device", "cpu", *SIZES.split(), *paths.split(), *more])
    return train_miniature.arguments()


def written(out: Path) -> Checkpoint:
    """The checkpoint that a run left in ``out``."""
    with tarfile.open(out / "miniature.tar") as archive:
        archive.extractall(out, filter="data")
    return Checkpoint.open(out / "miniature")


def test_every_tensor_of_the_backbone_keeps_its_bits_and_the_drafter_learns(
    monkeypatch: pytest.MonkeyPatch, texts: Path, tmp_path: Path
) -> None:
    train_miniature.train(options(monkeypatch, texts, tmp_path))
    given, made = Checkpoint.open(resolve("miniature")), written(tmp_path)
    names = {name for name in given.names if not name.startswith("mtp.")}
    assert names and set(made.names) == set(given.names)
    for name in names:
        assert torch.equal(made.read(name).view(torch.uint8), given.read(name).view(torch.uint8)), name
    before, after = (from_stored(given.config, checkpoint) for checkpoint in (given, made))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "mtp.0.attn.wkv.weight" in changed and all(name.startswith("mtp.") for name in changed)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {line["phase"] for line in lines} == {"start", "draft", "written"}
    measured = [line for line in lines if "held_out_own_greedy_length" in line]
    assert measured and measured[-1]["step"] == 2 and "held_out_greedy_length" in measured[-1]


def test_a_resumed_drafter_has_the_bits_of_one_that_ran_through(
    monkeypatch: pytest.MonkeyPatch, texts: Path, tmp_path: Path
) -> None:
    whole, halves, state = tmp_path / "whole", tmp_path / "halves", tmp_path / "state.pt"
    train_miniature.train(options(monkeypatch, texts, whole))
    of = options(monkeypatch, texts, halves, "--state", str(state))
    phase = train_miniature.Run(of).draft_phase()
    phase.run(Limit(2), Log(tmp_path / "log.jsonl", 0.0, echo=False), stop_at=1, state=state)
    train_miniature.train(of)
    first, second = written(whole), written(halves)
    for name in first.names:
        assert torch.equal(first.read(name).view(torch.uint8), second.read(name).view(torch.uint8)), name
    assert torch.load(state)["step"] == 2
    assert not torch.equal(
        phase.weights["mtp.0.attn.wkv.weight"], torch.load(state)["weights"]["mtp.0.attn.wkv.weight"]
    )


@pytest.mark.parametrize("place", ["backbone", "drafter"])
def test_a_run_that_was_interrupted_goes_on_to_the_same_bits(
    place: str, monkeypatch: pytest.MonkeyPatch, texts: Path, tmp_path: Path
) -> None:
    def train(out: Path) -> None:
        words = f"--data {texts} --out {out} --steps 2 --state {out}.state"
        monkeypatch.setattr(sys, "argv", ["train_miniature.py", "--device", "cpu", *SIZES.split(), *words.split()])
        train_miniature.train(train_miniature.arguments())

    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(whole)
    source: Any = train_miniature.data if place == "backbone" else train_miniature.Material
    draw = source.draw

    def interrupted(*arguments: Any) -> Any:
        step = arguments[-1]
        if step == 1:
            raise KeyboardInterrupt
        return draw(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(source, "draw", interrupted)
        train(halves)
    assert torch.load(f"{halves}.state")["step"] == 1
    train(halves)
    first, second = written(whole), written(halves)
    for tensor in first.names:
        assert torch.equal(first.read(tensor).view(torch.uint8), second.read(tensor).view(torch.uint8)), tensor


def test_another_tokenizer_than_the_checkpoints_is_refused(
    monkeypatch: pytest.MonkeyPatch, texts: Path, tmp_path: Path
) -> None:
    for file in texts.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json of .* is not that of"):
        train_miniature.Run(options(monkeypatch, tmp_path, tmp_path / "out"))

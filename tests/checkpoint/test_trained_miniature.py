"""The miniature in the package: found by name, loads in both modes, writes words, its drafts are accepted."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from quickseek.checkpoint.hub import resolve
from quickseek.llm import LLM
from quickseek.model.state import ContiguousState
from quickseek.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
MOST_BYTES = 8_000_000
PROMPTS = ("It is a truth universally acknowledged, that", "And the LORD said unto Moses,", "Emma was very")
LETTER = (
    "My dear sister, I am very sorry to hear that you have been so ill. The weather has been cold, and we have "
    "not walked out since Sunday. Mr. Knightley came to us in the evening, and was so kind as to read to my father."
)
"""Written for this test in the manner of the texts: none of them holds it."""
WORDS = (
    "the and of to a in that he she it was her his i not be had for with as you they have is at my but him all said "
    "were on so by which me them who this from no could very what an are would been if when one there or their more "
    "do did will any mr mrs miss shall thou thee thy unto lord god king people house son man men came went up out "
    "into upon make know great good much such must then than your we our us now being should how well only other"
)
COMMON = set(WORDS.split())


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("miniature", num_speculative_tokens=5, kv_cache_memory_bytes=64 << 20)


def test_the_name_means_the_packages_own_files_unless_a_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = resolve("miniature")
    assert (directory / "config.json").exists() and "quickseek" in directory.parts
    assert sum(path.stat().st_size for path in directory.iterdir()) < MOST_BYTES
    monkeypatch.chdir(tmp_path)
    (tmp_path / "miniature").mkdir()
    assert resolve("miniature") == Path("miniature")


def test_a_wheel_contains_every_file_of_it() -> None:
    package = ROOT / "src/quickseek"
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["quickseek"]
    packed = {path for pattern in globs for path in package.glob(pattern)}
    assert set(resolve("miniature").iterdir()) <= packed
    assert package / "checkpoint/hub.py" not in packed


def test_it_writes_words_and_its_drafts_are_accepted(llm: LLM) -> None:
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(list(PROMPTS), params)
    words = [word for output in outputs for word in re.findall(r"[a-z]+", output.text.lower())]
    assert len(words) > 100 and sum(word in COMMON for word in words) / len(words) > 0.5
    drafted, accepted = sum(o.drafted for o in outputs), sum(o.accepted for o in outputs)
    # 2.44 drafts a step on held-out prompts; random drafts are accepted once in a thousand.
    assert accepted / (drafted / 5) > 1.2
    assert llm.runner.cycle.specialized == llm.runner.cycle.steps > 0


def bits_per_byte(llm: LLM, text: str) -> float:
    ids = torch.tensor(llm.encode_text(text))
    outputs = llm.generate([ids[:1].tolist()], SamplingParams(max_tokens=1, temperature=0.0))
    assert outputs[0].error is None
    with torch.inference_mode():
        state = ContiguousState(llm.config, llm.model.numerics, max_requests=1, max_length=len(ids), draft=True)
        slot = state.acquire()
        context = state.context([slot], [len(ids) - 1], num_prefills=1)
        hidden = llm.model.backbone(ids[:-1], context.rows.positions, context=context)
        logits = llm.model.logits(hidden[0] if isinstance(hidden, tuple) else hidden)
    nats = F.cross_entropy(logits.double(), ids[1:], reduction="sum")
    return float(nats) / 0.6931471805599453 / len(text.encode())


def test_it_predicts_unseen_prose_in_both_modes_and_no_gibberish(llm: LLM) -> None:
    trained = LLM("miniature", mode="trained", num_speculative_tokens=5, kv_cache_memory_bytes=64 << 20)
    exact, rounded = bits_per_byte(llm, LETTER), bits_per_byte(trained, LETTER)
    print(f"bits per byte of a letter: exact {exact:.3f}, trained {rounded:.3f}")
    # Byte n-grams of the training text, with 3 bytes of context, need 2.04 on this letter.
    assert exact < 1.9 and 0 < abs(rounded / exact - 1) < 0.03
    assert bits_per_byte(llm, LETTER[::-1]) > 3.0

"""The offline door and the command line, on a miniature written to disk."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quickseek import LLM, SamplingParams
from quickseek.checkpoint.miniature import write_miniature
from quickseek.cli import app
from quickseek.errors import CheckpointError, ConfigError, PromptError, QuickseekError, TokenizerError

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_miniature(path, "tiny")
    return path


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(directory)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["one", [0, 50, 60, 70], "three and a longer prompt"]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt_token_ids for output in outputs][1] == [0, 50, 60, 70]
    for prompt, output in zip(prompts, outputs, strict=True):
        again = llm.generate(prompt, GREEDY)[0]
        assert (again.token_ids, again.text) == (output.token_ids, output.text)
        assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_streaming_gives_the_same_text_piece_by_piece(llm: LLM) -> None:
    ids = llm.encode_text("stream me")
    pieces, last = [], None
    for text, last in llm.stream(ids, GREEDY):  # noqa: B007  the last output is compared below
        pieces.append(text)
    assert last is not None and "".join(pieces) == last.text == llm.generate("stream me", GREEDY)[0].text
    assert len(pieces) == 12


def test_a_chat_starts_with_the_trained_format(llm: LLM) -> None:
    ids = llm.encode_chat([{"role": "user", "content": "hi <｜User｜>"}])
    text = llm.tokenizer.decode(ids)
    assert text == "<｜begin▁of▁sentence｜><｜User｜>hi <｜User｜><｜Assistant｜></think>"
    user = llm.tokenizer.control_token_id("<｜User｜>")
    assert ids.count(user) == 1, "text of a user became a control token"
    assert llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0].finish_reason == "length"


def test_plain_text_never_becomes_control_tokens(llm: LLM) -> None:
    ids = llm.encode_text("<｜end▁of▁sentence｜><think>")
    assert llm.config.eos_token_id not in ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([512], "token 0 is 512"),
        ([3, -1], "token 1 is -1"),
        ([3] * 512, "max_model_len = 512"),
    ],
)
def test_a_prompt_that_cannot_run_is_one_clear_error(llm: LLM, prompt: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        llm.generate([prompt] if prompt == [] else prompt, GREEDY)  # type: ignore[arg-type]


def test_one_bad_prompt_stops_the_batch_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(PromptError, match="empty"):
        llm.generate(["fine", ""], GREEDY)


def test_an_image_in_a_message_is_refused(llm: LLM) -> None:
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(PromptError, match="image"):
        llm.chat([{"role": "user", "content": content}], GREEDY)


def test_the_memory_plan_is_logged_before_anything_runs(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quickseek"):
        llm = LLM(directory, max_num_seqs=3)
    assert str(llm.runner.plan) in caplog.messages and "3 request" in caplog.text
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes = 1000"):
        LLM(directory, kv_cache_memory_bytes=1000)


def test_options_are_checked_and_unknown_ones_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len = 1000.*512"):
        LLM(directory, max_model_len=1000)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens = 6.*5"):
        LLM(directory, num_speculative_tokens=6)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 2.*launched"):
        LLM(directory, tensor_parallel_size=2)
    with pytest.raises(TypeError, match="speculate"):
        LLM(directory, speculate=3)
    with pytest.raises(NotImplementedError, match="cuda"):
        LLM(directory, device="cuda")
    with pytest.raises(ConfigError, match="dtype"):
        LLM(directory, mode="trained", dtype="float64")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("max_tokens", 0),
        ("seed", -1),
    ],
)
def test_sampling_parameters_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: value})


def test_a_damaged_directory_is_one_clear_error(directory: Path, tmp_path: Path) -> None:
    def copy() -> Path:
        path = tmp_path / "copy"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(directory, path)
        return path

    path = copy()
    (path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        LLM(path)
    path = copy()
    (path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        LLM(path)
    path = copy()
    config = json.loads((path / "config.json").read_text())
    config["model_type"] = "llama"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="llama"):
        LLM(path)
    path = copy()
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=shard.name):
        LLM(path)
    with pytest.raises(QuickseekError, match="absent"):
        LLM(tmp_path / "absent")


def test_the_command_line_generates_and_reports_figures(directory: Path) -> None:
    arguments = [
        "generate",
        "--model",
        str(directory),
        "--prompt",
        "hello",
        "--max-tokens",
        "9",
        "--seed",
        "3",
        "--ignore-eos",
    ]
    first, second = CliRunner().invoke(app, arguments), CliRunner().invoke(app, arguments)
    assert first.exit_code == 0 and first.stdout == second.stdout and first.stdout.strip()
    assert "9 generated" in first.stderr and "tokens/s" in first.stderr
    other = CliRunner().invoke(app, [*arguments[:-2], "4", "--ignore-eos"])
    assert other.stdout != first.stdout


def test_the_command_line_ends_with_one_line_for_a_users_error(directory: Path, tmp_path: Path) -> None:
    def quickseek(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "quickseek.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    missing = quickseek("generate", "--model", str(tmp_path / "nowhere"), "--prompt", "x")
    assert missing.returncode == 2 and missing.stderr.startswith("error: ") and "nowhere" in missing.stderr
    assert "Traceback" not in missing.stderr
    both = quickseek("generate", "--model", str(directory), "--prompt", "x", "--chat", "y")
    assert both.returncode == 2 and "--prompt or --chat" in both.stderr
    taken = quickseek("tiny", str(directory))
    assert taken.returncode == 2 and str(directory) in taken.stderr

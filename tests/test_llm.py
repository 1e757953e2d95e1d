"""The offline door and the command line, on a miniature written to disk."""

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from quickseek import LLM, SamplingParams
from quickseek.checkpoint.miniature import write_miniature
from quickseek.cli import app, figures, main
from quickseek.compilation import COMPILATION
from quickseek.config import EngineConfig
from quickseek.engine.answer import RequestOutput
from quickseek.engine.async_engine import AsyncEngine, EngineDead
from quickseek.engine.runner import EngineClosed
from quickseek.errors import (
    CheckpointError,
    CollectiveTimeout,
    ConfigError,
    DecodeUnsupported,
    PromptError,
    QuickseekError,
    TokenizerError,
)
from quickseek.model.causal_lm import CausalLM

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
    assert [text for text, _ in llm.stream("stream me", GREEDY)] == pieces
    with pytest.raises(PromptError, match="prompt is a bytes"):
        next(llm.stream(b"stream me", GREEDY))  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    "prompts",
    [None, 5, True, b"bytes", {"prompt": "x"}, ["fine", 1], [1.5], [None], iter([3, 4]), [[3], b"x"], [["x"]]],
)
def test_what_is_no_prompt_is_one_clear_error(llm: LLM, prompts: Any) -> None:
    with pytest.raises(PromptError, match="expected"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("messages", [None, "hi", {"role": "user", "content": "x"}, [None], [5], [[]], [{}], [["x"]]])
def test_what_is_no_conversation_is_one_clear_error(llm: LLM, messages: Any) -> None:
    with pytest.raises(PromptError, match="expected"):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [GREEDY], 7, SamplingParams])
def test_sampling_parameters_of_another_kind_are_named(llm: LLM, params: Any) -> None:
    with pytest.raises(TypeError, match="sampling_params"):
        llm.generate("x", params)


def test_an_empty_batch_has_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == [] == llm.chat([], GREEDY)


def test_streams_may_be_left_resumed_and_interleaved(llm: LLM) -> None:
    prompts = [[20 + number] * (4 + number) for number in range(4)]
    plain = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    for _ in llm.stream(prompts[0], GREEDY):
        break
    assert llm.runner.idle
    held = llm.stream(prompts[0], GREEDY)
    text = next(held)[0]
    assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == plain
    for piece, output in held:  # noqa: B007  the last output is compared below
        text += piece
    assert (output.token_ids, output.text) == (plain[0], text)
    streams = {number: llm.stream(prompt, GREEDY) for number, prompt in enumerate(prompts)}
    seen: dict[int, list[int]] = {}
    while streams:
        for number in list(streams):
            update = next(streams[number], None)
            if update is None:
                del streams[number]
            else:
                seen[number] = update[1].token_ids
    assert [seen[number] for number in range(4)] == plain
    assert llm.runner.idle and not llm._inboxes


def test_threads_may_share_one_model(llm: LLM) -> None:
    prompts = [[30 + number] * (4 + number) for number in range(4)]
    plain = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    with ThreadPoolExecutor(4) as threads:
        answers = list(
            threads.map(lambda prompt: [llm.generate(prompt, GREEDY)[0].token_ids for _ in range(2)], prompts)
        )
    assert answers == [[tokens, tokens] for tokens in plain]


@pytest.mark.parametrize("part", ["schedule", "prefill", "verify", "decide", "prefilled", "completed"])
def test_an_interrupt_anywhere_leaves_a_model_that_works(directory: Path, part: str) -> None:
    llm = LLM(directory, max_model_len=64)
    plain = llm.generate("go on", GREEDY)[0].token_ids
    held = llm.stream([3, 4, 5], GREEDY)
    next(held)
    owner = llm.runner.cycle if hasattr(llm.runner.cycle, part) else llm.runner.scheduler
    real, calls = getattr(owner, part), []

    def interrupt(*arguments: Any, **named: Any) -> Any:
        result = real(*arguments, **named)
        calls.append(part)
        if len(calls) == 2 or part.startswith("prefill"):
            raise KeyboardInterrupt
        return result

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, part, interrupt)
        llm.generate(["go on", "and another"], GREEDY)
    with pytest.raises(RuntimeError, match="interrupted"):
        list(held)
    assert llm.generate("go on", GREEDY)[0].token_ids == plain
    assert llm.runner.idle and not llm._inboxes


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
    with pytest.raises(ConfigError, match=r"device = 'cuda:9'.*GPUs that this machine has"):
        LLM(directory, device="cuda:9")
    with pytest.raises(ConfigError, match="dtype"):
        LLM(directory, mode="trained", dtype="float64")


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_pytorch_without_cuda_is_named_where_a_gpu_is_asked_for(
    cuda: str | None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError) as refused:
        LLM(directory, device="cuda:9")
    assert ("built without CUDA" in str(refused.value)) == (cuda is None)


def test_small_files_are_checked_before_any_weight_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("quickseek.llm.load_model", read)
    for options in ({"max_model_len": 1000}, {"num_speculative_tokens": 6}, {"kv_cache_memory_bytes": 1}):
        with pytest.raises(ConfigError):
            LLM(directory, **options)
    # So is what the specialized decode needs.
    with pytest.raises(ConfigError, match="decode_paths_off"):
        LLM(directory, decode_paths_off="sidestream")
    adaptive = {"num_speculative_tokens": 3, "draft_confidence_threshold": 0.2}
    with pytest.raises(DecodeUnsupported, match="a fixed number of drafts"):
        LLM(directory, decode_backend="latency_specialized", **adaptive)
    with pytest.raises(AssertionError, match="weights were read"):
        LLM(directory)


@pytest.mark.parametrize("backend", ["stock", "latency_specialized"])
def test_weights_that_changed_in_place_are_taken_over_by_refresh(directory: Path, backend: str) -> None:
    changed, built = LLM(directory, decode_backend=backend), LLM(directory, decode_backend=backend)
    prompt = list(range(20, 50))
    before = changed.generate(prompt, GREEDY)[0].token_ids
    # Of the second the weights change before anything is derived from them or kept.
    for one in (changed, built):
        with torch.no_grad():
            one.model.backbone.layers[0].hc_attn.fn.mul_(-3.0)
            one.model.head.weight.copy_(one.model.head.weight.roll(5, 0))
    built.model.backbone.finalize_mhc_broadcast_weights()
    wanted = built.generate(prompt, GREEDY)[0]
    stale = changed.generate(prompt, GREEDY)[0]
    assert stale.cached_tokens > 0 and stale.token_ids != wanted.token_ids
    stream = changed.stream(prompt, GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="while requests are under way"):
        changed.refresh()
    stream.close()
    changed.refresh()
    fresh = changed.generate(prompt, GREEDY)[0]
    assert fresh.cached_tokens == 0 and fresh.token_ids == wanted.token_ids != before


@pytest.mark.parametrize("backend", ["stock", "latency_specialized"])
def test_weights_that_have_moved_are_refused_by_name(directory: Path, backend: str) -> None:
    llm = LLM(directory, decode_backend=backend)
    head, prompt = llm.model.head, list(range(20, 50))
    expected = llm.generate(prompt, GREEDY)[0].token_ids
    shipped = head.weight.data
    head.weight.data = shipped.clone()
    with pytest.raises(RuntimeError, match=r"changed in place.*head\.weight moved"):
        llm.refresh()
    head.weight.data = shipped
    llm.refresh()
    assert llm.generate(prompt, GREEDY)[0].token_ids == expected


# ------------------------------------------------------------------------------------------ its end


@pytest.mark.parametrize("backend", ["stock", "latency_specialized"])
def test_a_closed_model_is_freed_and_says_so(directory: Path, backend: str) -> None:
    with LLM(directory, decode_backend=backend, num_speculative_tokens=2) as llm:
        stream = llm.stream([5, 6, 7], GREEDY)
        next(stream)
        held = [llm.model.head.weight, llm.runner.pools.tables, llm.runner.state.anchors, llm.runner.cycle]
        held += [] if llm.executor is None else [llm.executor, llm.executor.draft]
        there = [weakref.ref(one) for one in held]
        runner = llm.runner
        del held
        assert all(one() is not None for one in there)
    assert not any(one() is not None for one in there)
    llm.close()
    calls: list[Callable[[], object]] = [
        *(
            lambda: llm.generate("a", GREEDY),
            lambda: llm.chat([{"role": "user", "content": "a"}]),
            lambda: next(stream),
        ),
        *(llm.reset, llm.refresh, llm.__enter__, lambda: llm.model, lambda: llm.executor, runner.step, runner.renewed),
        lambda: runner.add(None),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(EngineClosed, match="closed"):
            call()
    assert llm.tokenizer.decode([5]), "what needs no model is still there"
    with pytest.raises(AttributeError, match="unheard_of"):
        llm.unheard_of  # noqa: B018


@pytest.mark.parametrize("renew", ["refresh", "reset"])
def test_closing_closes_the_runners_from_before(directory: Path, renew: str) -> None:
    llm = LLM(directory)
    old, engine = llm.runner, AsyncEngine(llm.runner)
    there = [weakref.ref(one) for one in (llm.model.head.weight, old.pools.tables, old.cycle, old._readbacks)]
    getattr(llm, renew)()
    assert llm.runner is not old and not old.closed and all(one() is not None for one in there)
    llm.close()
    assert old.closed and not engine._thread.is_alive() and not any(one() is not None for one in there)
    old.close()
    for call in (old.step, old.renewed, lambda: old.model, lambda: old.graphs):
        with pytest.raises(EngineClosed, match="closed"):
            call()
    with pytest.raises(EngineDead, match="closed"):
        AsyncEngine(old)


def test_closing_ends_what_serves_from_a_model(directory: Path) -> None:
    llm = LLM(directory)
    engine = AsyncEngine(llm.runner)

    async def ask() -> None:
        async for _ in engine.stream(llm._requests([[5, 6, 7]], replace(GREEDY, max_tokens=200))[0]):
            await asyncio.to_thread(llm.close)

    with pytest.raises(EngineDead, match="closed"):
        asyncio.run(asyncio.wait_for(ask(), 60))
    assert not engine._thread.is_alive()
    with pytest.raises(EngineDead, match="closed"):
        AsyncEngine(llm.runner)


@pytest.mark.parametrize("fault", ["none", "raises", "lost"])
def test_ranks_wait_for_each_other_before_they_free_anything_unless_one_is_lost(
    directory: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    llm, waits = LLM(directory), list[bool]()
    monkeypatch.setattr(llm.world, "barrier", lambda: waits.append(hasattr(llm, "model")))
    if fault == "lost":
        llm.runner.peers.error = lambda: CollectiveTimeout("all_reduce", 0, 1, 2, [1])  # type: ignore[method-assign]
    try:
        with llm:
            if fault == "raises":
                raise ValueError("planted")
    except ValueError:
        assert fault == "raises"
    llm.close()
    assert waits == ([True] if fault == "none" else [])
    assert llm.runner.closed


def test_a_process_ends_although_nothing_was_closed(directory: Path) -> None:
    script = (
        "import sys\nfrom quickseek import LLM\nfrom quickseek.engine.async_engine import AsyncEngine\n"
        "llm = LLM(sys.argv[1], decode_backend='latency_specialized')\nengine = AsyncEngine(llm.runner)\n"
        "llm.stream([5, 6, 7]).__next__()\ndel llm\nprint('end')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(directory)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_a_start_warms_up_and_logs_what_it_compiled(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = COMPILATION.kernels
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 2, "max_model_len": 16}
    with LLM(directory, jit_warmup=True, **options) as llm:
        assert llm.compilation.kernels == before, "a CPU compiles nothing"
        assert llm.runner.options.warm_up and len(llm.generate([5, 6], replace(GREEDY, max_tokens=3))[0].token_ids) == 3
    assert "ready: 0 kernels were compiled, which took 0.0 s" in caplog.text


def test_the_command_generates_without_a_warm_up_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU too, where an LLM and servers warm up as it is."""
    asked: list[bool] = []

    def build(model: str, *, jit_warmup: bool | None, device: str, **options: Any) -> LLM:
        asked.append(EngineConfig(device=device, jit_warmup=jit_warmup).warms_up)
        raise ConfigError("model", model, "planted")

    monkeypatch.setattr("quickseek.llm.LLM", build)
    command = ["generate", "--model", "miniature", "--prompt", "a", "--device", "cuda"]
    for option in ([], ["--jit-warmup"], ["--no-jit-warmup"]):
        assert isinstance(CliRunner().invoke(app, [*command, *option]).exception, ConfigError)
    assert asked == [False, True, False] and EngineConfig(device="cuda").warms_up


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
    for key in ("bos_token_id", "eos_token_id"):
        (path / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v41", key: 5}))
        with pytest.raises(ConfigError, match=f"{key} = 5: expected [01], the tokenizer's"):
            LLM(path)
    for name, error in (("config.json", ConfigError), ("model.safetensors.index.json", CheckpointError)):
        for text in ("[" * 100_000, '{"x": ' + "9" * 5000 + "}", ""):
            path = copy()
            (path / name).write_text(text)
            with pytest.raises(error, match=name):
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


def test_figures_of_drafts_that_were_cut_short_count_their_step(directory: Path) -> None:
    llm = LLM(directory, max_model_len=32, num_speculative_tokens=5)
    for drafted, shares in ((2, "100%/0%"), (10, "50%/0%"), (11, "33%/0%")):
        output = RequestOutput([3], token_ids=[5, 6], drafted=drafted, accepted=1, accepted_at=[1, 0])
        assert f"1 of {drafted} drafts accepted ({shares} by position)" in figures(llm, output)


def test_the_command_line_ends_with_one_line_for_a_users_error(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)

    def quickseek(*arguments: str) -> tuple[int | str | None, str]:
        """Exit code and stderr."""
        monkeypatch.setattr(sys, "argv", ["quickseek", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    nowhere = ["generate", "--model", str(tmp_path / "nowhere"), "--prompt", "x"]
    code, said = quickseek(*nowhere)
    assert code == 2 and said.startswith("error: ") and "nowhere" in said and "Traceback" not in said
    command = [sys.executable, "-m", "quickseek.cli", *nowhere]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (process.returncode, process.stderr) == (code, said)
    code, said = quickseek("generate", "--model", str(directory), "--prompt", "x", "--chat", "y")
    assert code == 2 and "--prompt or --chat" in said
    code, said = quickseek("generate", "--model", str(directory), "--chat", "y", "--effort", "high")
    assert code == 2 and "--effort goes with --thinking" in said
    code, said = quickseek("tiny", str(directory))
    assert code == 2 and str(directory) in said
    for arguments, words in (
        (("tiny", str(tmp_path / "new"), "--config", "huge"), "config = 'huge': expected one of tiny"),
        (("tiny", "/proc/nowhere"), "/proc"),
        (("generate", "--model", str(directory), "--chat", "x", "--thinking", "--effort", "\u00b2"), "reasoning"),
    ):
        code, said = quickseek(*arguments)
        assert code == 2 and said.startswith("error: ") and words in said
    assert not list(tmp_path.iterdir())


def test_an_answer_that_fails_is_an_error_of_the_command(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CausalLM, "logits", lambda self, hidden: self.head(hidden) * float("nan"))
    result = CliRunner().invoke(app, ["generate", "--model", str(directory), "--prompt", "x"])
    assert isinstance(result.exception, QuickseekError) and "logits" in str(result.exception)


def test_a_terminal_that_knows_few_characters_shows_others(directory: Path) -> None:
    command = [sys.executable, "-m", "quickseek.cli", "generate", "--model", str(directory), "--prompt", "a"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(
        [*command, "--seed", "7", "--max-tokens", "30", "--ignore-eos"],
        capture_output=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0 and b"?" in shown.stdout and shown.stdout.isascii()


def test_an_interrupted_miniature_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quickseek.cli", "tiny", str(tmp_path / "mid"), "--config", "mid"]
    # A shell that runs the tests in the background makes its children ignore interrupts.
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    try:
        while process.poll() is None and not list(tmp_path.iterdir()):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    finally:
        process.kill()
    assert not list(tmp_path.iterdir())

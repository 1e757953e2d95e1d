"""``quickseek generate`` on several ranks: one answer, written once, and one end for all of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine_cases import written
from launched_ranks import places
from quickseek.cli import app, main
from quickseek.errors import QuickseekError, RankFailure
from quickseek.parallel import launch

COMMAND = ["-m", "quickseek.cli"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("checkpoint"), "tiny-tp")


def question(directory: Path, max_tokens: int = 6) -> list[str]:
    options = ["--prompt", "Once", "--temperature", "0", "--ignore-eos", "--max-model-len", "512"]
    return ["generate", "--model", str(directory), "--max-tokens", str(max_tokens), *options]


@pytest.mark.parametrize(
    ("start", "options"),
    [(COMMAND, ["--tensor-parallel-size", "2"]), ([*TORCHRUN, *COMMAND], [])],
    ids=["spawned", "torchrun"],
)
def test_two_ranks_write_the_answer_of_one_once(directory: Path, start: list[str], options: list[str]) -> None:
    alone = CliRunner().invoke(app, question(directory))
    assert alone.exit_code == 0 and alone.stdout.strip() and "TP" not in alone.stderr
    command = [sys.executable, *start, *question(directory), *options]
    both = subprocess.run(command, env=ENVIRONMENT, timeout=200, capture_output=True, text=True, check=False)
    assert both.returncode == 0, both.stderr
    assert both.stdout == alone.stdout
    assert both.stderr.count("6 generated") == 1 and "TP 2, cpu" in both.stderr


@pytest.mark.parametrize(("launched", "asked"), [("2", "4"), ("2", "1"), ("1", "2")])
def test_another_number_of_ranks_than_torchrun_started_is_refused(
    monkeypatch: pytest.MonkeyPatch, directory: Path, launched: str, asked: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", launched)
    result = CliRunner().invoke(app, [*question(directory), "--tensor-parallel-size", asked])
    assert result.exit_code == 2 and f"torchrun started {launched} ranks" in " ".join(result.stderr.split())


def test_ranks_cannot_share_the_gpu_that_an_option_names(directory: Path) -> None:
    options = ["--tensor-parallel-size", "2", "--device", "cuda:0"]
    result = CliRunner().invoke(app, [*question(directory), *options])
    assert result.exit_code == 2 and "cuda:0 with 2 ranks" in result.stderr


def test_what_is_wrong_with_a_model_is_said_once_by_all_ranks_together(tmp_path: Path) -> None:
    arguments = [*question(tmp_path / "nowhere"), "--tensor-parallel-size", "2"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, QuickseekError) and not isinstance(result.exception, RankFailure)
    assert str(result.exception).count("no such directory") == 1 and "Traceback" not in str(result.exception)


@pytest.mark.parametrize(
    ("cause", "said"),
    [(QuickseekError("torn shard"), "error: torn shard\n"), (None, "error: rank 1 raised:\nTraceback ...\n")],
)
def test_the_error_of_a_rank_ends_the_command(
    directory: Path,
    cause: Exception | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RankFailure(1, "rank 1 raised:\nTraceback ...") from cause

    monkeypatch.setattr(launch, "spawn", fail)
    monkeypatch.setattr(sys, "argv", ["quickseek", *question(directory), "--tensor-parallel-size", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and capsys.readouterr().err == said


FAILING = """
import os, signal
from quickseek import cli
from quickseek.engine.cycle import Cycle

verify, calls = Cycle.verify, []

def failing(*arguments, **named):
    calls.append(0)
    if len(calls) == 3:
        {end}
    return verify(*arguments, **named)

if os.environ["RANK"] == "1":
    Cycle.verify = failing
cli.main()
"""
"""The command, whose rank 1 ends in the third step after a prompt."""


@pytest.mark.parametrize(
    ("end", "codes", "told"),
    [
        (
            'raise ArithmeticError("torn\\nin two")',
            [1, 1],
            "rank 1 failed in a step of the engine: ArithmeticError: torn in two",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", [1, -9], "rank 1 ended; rank 0 waited in "),
        ("pass", [0, 0], ""),
    ],
    ids=["raises", "killed", "control"],
)
def test_a_rank_under_torchrun_that_lost_its_peers_ends_with_one_line(
    directory: Path, end: str, codes: list[int], told: str
) -> None:
    """As torchrun starts ranks, which would end the others by itself."""
    command = [sys.executable, "-c", FAILING.format(end=end), *question(directory, 24)]
    ranks = [
        subprocess.Popen(command, env={**ENVIRONMENT, **place}, stdout=-1, stderr=-1, text=True) for place in places(2)
    ]
    try:
        found = [one.communicate(timeout=200) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert [one.returncode for one in ranks] == codes, found
    assert found[0][0].strip(), "the answer had begun"
    for (_, error), code in zip(found, codes, strict=True):
        assert "Traceback" not in error
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        assert len(lines) == (code == 1) and all(line.startswith(f"error: {told}") for line in lines), error
        assert code != 1 or error.splitlines() == lines


def members(group: int) -> list[int]:
    """Processes of a group that still run: those that have ended and wait to be noticed do not count."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = path.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(of) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupt_ends_all_ranks_without_a_traceback(directory: Path) -> None:
    command = [sys.executable, *COMMAND, *question(directory, 400), "--tensor-parallel-size", "2"]
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell that runs the tests in the background makes its children ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1), process.stderr.read().decode()
        assert len(members(process.pid)) >= 3
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) != 0
        deadline = time.monotonic() + 30
        while (left := members(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left
        assert b"Traceback" not in process.stderr.read()
    finally:
        for one in members(process.pid):
            os.kill(one, signal.SIGKILL)
        process.wait()

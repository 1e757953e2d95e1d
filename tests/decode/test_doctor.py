"""``quickseek doctor``: every probe is a line, a missing thing comes with advice, needs are those of the engine."""

from pathlib import Path

import torch
from typer.testing import CliRunner

from quickseek.checkpoint.miniature import write_miniature
from quickseek.cli import app
from quickseek.decode import probes
from quickseek.decode.probes import Probe


def doctor(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_machine_without_a_gpu_gets_a_whole_report_and_can_run_it_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = doctor()
    for name in ("python:", "torch:", "triton:", "host memory:", "locked memory limit:", "GPU:", "NVLink multicast:"):
        assert name in output
    assert "GiB available" in output
    assert "-> quickseek runs on the CPU (device='cpu')" in output
    assert output.rstrip().endswith("specialized decode on cpu, TP 1: available, for decode steps of 1 to 384 rows")


def test_every_unmet_need_of_a_gpu_that_is_not_there_is_listed(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_miniature(tmp_path / "tiny", "tiny")
    output = doctor("--device", "cuda", "--mode", "exact", "--model", str(tmp_path / "tiny"))
    assert "specialized decode on cuda, TP 1: not available, it needs" in output
    assert "(found no usable GPU)" in output and "mode='trained'" in output and "Engram tables in device" in output
    assert "GiB on disk" in output and "blocks of 16 tokens" in output
    # Without a model its own needs are unknown.
    assert "Engram tables" not in doctor("--device", "cuda").split("specialized decode")[1]


def test_more_ranks_than_gpus_are_an_unmet_need(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "  - 4 GPUs, one for each rank (found 0)" in doctor("--device", "cuda", "--tensor-parallel-size", "4")
    assert "one for each rank" not in doctor("--device", "cpu", "--tensor-parallel-size", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert probes.too_few_gpus(4) == ["4 GPUs, one for each rank (found 2)"] and probes.too_few_gpus(2) == []


def test_a_probe_with_advice_shows_it_below_and_one_without_is_a_single_line():
    assert str(Probe("driver", "570")).splitlines() == ["driver:                 570"]
    assert str(Probe("driver", "none", "install one")).splitlines()[1].strip() == "-> install one"


def test_a_package_that_is_absent_is_said_to_be_needed_for_something(monkeypatch):
    monkeypatch.setattr(probes, "installed", lambda name: None)
    found = {probe.name: probe for probe in probes._libraries()}
    assert found["xgrammar"].found == "not installed"
    assert found["xgrammar"].advice == "needed for structured output: pip install 'quickseek[serve]'"
    monkeypatch.setattr(probes, "installed", lambda name: "1.0")
    assert {probe.advice for probe in probes._libraries()} == {None}


def test_a_command_that_is_not_there_is_an_unknown_finding_and_no_error():
    assert probes._command("quickseek-has-no-such-command").startswith("unknown (")
    assert probes._command("echo", "there") == "there"


def test_the_model_may_be_the_miniature_by_name():
    assert "weights:                0.01 GiB on disk" in doctor("--model", "miniature")

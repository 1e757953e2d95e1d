"""Runs scripts that compile, each in a process of its own that begins with PyTorch loaded, as ranks of tests do.

To load it takes longer than many of the scripts run.
"""

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 500.0


def lines_of(script: Path, *arguments: str, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """What a script prints in lines of JSON, run in an empty folder with ``environment`` beside what is set.

    AssertionError with the end of what it says on stderr, if it fails or is not done after ``LIMIT_S``.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = (script, arguments, environment, folder)
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=job)
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        said, complaint = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    assert process.exitcode == 0, complaint[-3000:]
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def _run(script: Path, arguments: tuple[str, ...], environment: Mapping[str, str], folder: str) -> None:
    os.chdir(folder)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), descriptor)
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(Path(__file__).parent))
    runpy.run_path(str(script), run_name="__main__")

"""A model is a directory or a hub repository; nothing else is asked of the network."""

from pathlib import Path

import huggingface_hub
import pytest

from quickseek.checkpoint.hub import FILES, resolve
from quickseek.errors import CheckpointError


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve(tmp_path) == tmp_path and resolve(str(tmp_path)) == tmp_path


def test_a_repository_is_fetched_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("owner/name-1.0") == tmp_path and asked == [("owner/name-1.0", FILES)]
    assert not any(pattern.endswith((".bin", ".pt", ".pkl")) or pattern == "*" for pattern in FILES)


@pytest.mark.parametrize("model", ["", "absent", "/absent/dir", "a/b/c", "../up/one", Path("owner/name")])
def test_what_is_neither_is_named_and_never_fetched(model: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(CheckpointError, match="no such directory, nor a hub repository"):
        resolve(model)


def test_a_failed_fetch_names_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"owner/name: .*offline"):
        resolve("owner/name")

"""Checkpoints of the engine's tests on GPUs."""

from pathlib import Path

import pytest

from engine_cases import written


@pytest.fixture(scope="module", params=["tiny", "tiny-tp", "mid"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One miniature after the other, on disk."""
    return written(tmp_path_factory.mktemp("checkpoint"), request.param)

"""Two ranks as torchrun starts them, on a CPU: one ends in the middle of an answer, and the other says so and ends."""

from pathlib import Path
from typing import Any

import pytest

from engine_cases import written
from launched_ranks import Orders, run_ranks

LIMIT_S = 30.0
"""Far less than the 600 s that collectives of torchrun's ranks wait."""
OPTIONS: dict[str, Any] = {"decode_backend": "latency_specialized", "tensor_parallel_size": 2, "dtype": "float32"}
OPTIONS |= {"max_model_len": 256, "max_num_seqs": 1, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(written(tmp_path_factory.mktemp("checkpoint"), "tiny-tp"))


@pytest.mark.parametrize(
    ("dead", "how", "drafts"), [(1, "killed", 0), (0, "killed", 3), (1, "raised", 3), (1, "in a step", 3)]
)
def test_a_rank_whose_peer_ends_raises_an_error_that_names_it_and_ends(
    tmp_path: Path, directory: str, dead: int, how: str, drafts: int
) -> None:
    """Rank 0 keeps the store by which ranks met: its end is told without it."""
    options = OPTIONS | {"num_speculative_tokens": drafts}
    ranks = run_ranks(tmp_path, 2, Orders(directory, dead, how, options=options), LIMIT_S)
    gone, survivor = ranks[dead], ranks[1 - dead]
    assert gone.tokens >= 20 and gone.code == (-9 if how == "killed" else 1), gone.error
    assert survivor.code == 1, survivor.error
    assert survivor.after_s < LIMIT_S and not survivor.done
    assert 20 <= survivor.tokens <= gone.tokens + 2 * (drafts + 1) and survivor.tokens < 120
    told = f"rank {dead} ended; rank {1 - dead} waited in "
    told = told if how != "raised" else f"rank {dead} failed: ValueError: a caller's own fault"
    told = told if how != "in a step" else f"rank {dead} failed in a step of the engine: ValueError: a step's own fault"
    assert survivor.last_words.startswith(f"quickseek.parallel.faults.PeersLost: {told}")


def test_ranks_of_which_none_ends_early_answer_in_full(tmp_path: Path, directory: str) -> None:
    """Negative control: what ends a rank is the end of its peer."""
    for one in run_ranks(tmp_path, 2, Orders(directory, None, options=OPTIONS), LIMIT_S):
        assert (one.code, one.tokens, one.done) == (0, 120, True), one.error

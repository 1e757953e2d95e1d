"""The list of unmet needs, the decision that ranks take together, and features bound to library versions."""

import logging

import pytest

from quickseek.checkpoint.miniature import miniature_config
from quickseek.config import DecodeConfig, EngineConfig
from quickseek.decode import requirements
from quickseek.decode.requirements import CheckedFeature, Facts, specialized_decode_config, unsupported
from quickseek.errors import ConfigError, DecodeUnsupported, RankFailure
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import SoloWorld, World

MODEL = miniature_config("tiny-tp")
OLD_GPU = Facts("cuda", "NVIDIA A100", (8, 0), peer_access=False, kernels=False)
GOOD_GPU = Facts("cuda", "NVIDIA H200", (9, 0), engram_memory="pinned")


def test_a_cpu_lacks_nothing_in_either_mode():
    assert unsupported(EngineConfig(), MODEL) == []
    assert unsupported(EngineConfig(mode="trained", tensor_parallel_size=8), MODEL) == []


def test_a_new_gpu_with_pinned_tables_lacks_nothing_and_an_old_one_is_told_all_at_once():
    assert unsupported(EngineConfig(device="cuda", tensor_parallel_size=2), MODEL, GOOD_GPU) == []
    config = EngineConfig(device="cuda", mode="exact", tensor_parallel_size=4)
    missing = unsupported(config, MODEL, OLD_GPU)
    assert len(missing) == 5
    for line, words in zip(missing, ("A100, 8.0", "pip install", "'exact'", "peer access", "pinned"), strict=True):
        assert words in line


@pytest.mark.parametrize(
    ("options", "words"),
    [({"draft_confidence_threshold": 0.5, "num_speculative_tokens": 5}, "draft_confidence_threshold=0 (found 0.5)")],
)
def test_options_that_forbid_it_are_named_with_their_value(options, words):
    (line,) = unsupported(EngineConfig(**options), MODEL)
    assert words in line


def test_auto_says_in_one_line_why_it_is_off_and_with_which_rows_it_is_on(caplog):
    config = EngineConfig(num_speculative_tokens=5, draft_confidence_threshold=0.5)
    with caplog.at_level(logging.INFO, logger="quickseek"):
        assert specialized_decode_config(config, MODEL, world=SoloWorld()) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("stock decode: the specialized one needs a fixed number of drafts")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="quickseek"):
        assert specialized_decode_config(EngineConfig(), MODEL, world=SoloWorld()) == DecodeConfig()
    (record,) = caplog.records
    assert "1 to 384 rows" in record.getMessage()


def test_asking_for_it_where_something_is_missing_raises_the_whole_list():
    config = EngineConfig(device="cuda", mode="exact", decode_backend="latency_specialized")
    with pytest.raises(DecodeUnsupported) as raised:
        specialized_decode_config(config, MODEL, world=SoloWorld(), facts=OLD_GPU)
    text = str(raised.value)
    assert text.startswith("decode_backend=latency_specialized needs a GPU of compute capability 9.0 or newer")
    assert text.count("; ") == 3 and text.endswith(".")


class Silent(SoloWorld):
    """A world in which any collective fails."""

    def all_reduce_min(self, value: int) -> int:
        raise AssertionError("a collective was called")


def test_stock_asks_nobody():
    config = EngineConfig(decode_backend="stock")
    assert specialized_decode_config(config, MODEL, world=Silent(), facts=OLD_GPU) is None
    with pytest.raises(AssertionError, match="a collective"):
        specialized_decode_config(EngineConfig(), MODEL, world=Silent())


def test_a_backend_or_a_path_that_does_not_exist_is_refused_with_the_ones_that_do():
    with pytest.raises(ConfigError, match="auto, stock, latency_specialized"):
        EngineConfig(decode_backend="fast")
    for backend in ("auto", "stock", "latency_specialized"):
        config = EngineConfig(decode_paths_off="draft, sidestream", decode_backend=backend)
        with pytest.raises(ConfigError, match=r"decode_paths_off.*sidestream.*side_stream"):
            specialized_decode_config(config, MODEL, world=SoloWorld())
    config = EngineConfig(decode_paths_off="draft, side_stream")
    assert specialized_decode_config(config, MODEL, world=SoloWorld()) == DecodeConfig(off=("draft", "side_stream"))


def decide(world: World, backend: str, lacking: int | None) -> str:
    """The decision of a rank; rank ``lacking`` has an old GPU, the others are fine."""
    config = EngineConfig(device="cuda", tensor_parallel_size=2, decode_backend=backend)
    facts = OLD_GPU if world.rank == lacking else GOOD_GPU
    try:
        return str(specialized_decode_config(config, MODEL, world=world, facts=facts))
    except DecodeUnsupported as error:
        return f"raised {error}"


def decide_all(world: World) -> list[str]:
    """Three decisions in turn: asked for and lacking on rank 1, auto and lacking, auto and lacking nothing."""
    return [decide(world, "latency_specialized", 1), decide(world, "auto", 1), decide(world, "auto", None)]


def test_one_rank_that_lacks_something_makes_all_raise_one_error_or_all_run_stock():
    first, second = spawn(decide_all, 2)
    assert first == second
    assert first[0].startswith("raised") and "8.0) (rank 1); " in first[0]
    assert first[1] == "None"
    # Negative control: without that rank both take it.
    assert first[2] == str(DecodeConfig())


def decide_alone(world: World) -> str:
    """A decision of rank 0 that the others do not take part in."""
    return decide(world, "latency_specialized", 1) if world.rank == 0 else "elsewhere"


def test_a_rank_that_decides_alone_is_noticed():
    """Negative control: the verdict is taken with every rank, not from one's own facts."""
    with pytest.raises(RankFailure):
        spawn(decide_alone, 2, timeout_s=5)


def test_a_feature_is_used_with_the_versions_it_was_checked_with_and_warns_once_otherwise(monkeypatch, caplog):
    features = {"a": CheckedFeature("library", ("2.11",), "doing without"), "b": CheckedFeature("absent", (), "no b")}
    monkeypatch.setattr(requirements, "CHECKED_FEATURES", features)
    monkeypatch.setattr(requirements, "installed", lambda name: "2.11.3" if name == "library" else None)
    requirements.uses_checked_library.cache_clear()
    assert requirements.uses_checked_library("a")
    assert not caplog.records
    assert not requirements.uses_checked_library("b") and not requirements.uses_checked_library("b")
    (record,) = caplog.records
    assert record.getMessage() == "b needs absent (no version has been checked yet) (found None); no b"
    requirements.uses_checked_library.cache_clear()
    monkeypatch.setattr(requirements, "installed", lambda name: "2.12.0")
    assert not requirements.uses_checked_library("a")
    requirements.uses_checked_library.cache_clear()

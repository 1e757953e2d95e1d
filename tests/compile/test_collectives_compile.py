"""The collective kernels compile for Hopper and Blackwell on a machine without a GPU."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prepared_process import lines_of

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"),
]

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")


@cache
def compile_all(architecture: str) -> dict[str, dict[str, Any]]:
    """What each compiled kernel's PTX holds."""
    script = Path(__file__).with_name("collectives_variants.py")
    return {line["name"]: line for line in lines_of(script, environment={"CUTE_DSL_ARCH": architecture})}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_variant_compiles_for_the_architecture(architecture: str) -> None:
    found = compile_all(architecture)
    assert len(found) == 20
    for name, kernel in found.items():
        assert kernel["target"] == architecture, name
        assert kernel["grid_wait"] == kernel["trigger"] == 1, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_the_multicast_forms_hold_multicast_stores(architecture: str) -> None:
    for name, kernel in compile_all(architecture).items():
        assert (kernel["multimem"] > 0) == ("multicast" in name), name
        sends = name.startswith(("fused", "publish", "owner", "all-gather")) and name != "fused, one rank"
        assert (kernel["push"] > 0) == (sends and "multicast" not in name), name


def test_every_loop_that_polls_looks_at_the_timer_and_none_reads_a_cache() -> None:
    for name, kernel in compile_all("sm_90a").items():
        waits = name.startswith(("fused", "collect", "reduced", "owner", "all-gather")) and name != "fused, one rank"
        assert (kernel["poll"] > 0) == waits, name
        if waits:
            assert kernel["timer"] > 0, name
        assert kernel["cached_poll"] == 0, name


def test_an_unknown_architecture_does_not_pass() -> None:
    with pytest.raises(AssertionError):
        compile_all("sm_1a")


def test_a_group_of_arguments_holds_typed_numbers_only(tmp_path: Path) -> None:
    """Launchers drop plain numbers within a tuple, so each member must carry its type."""
    script = tmp_path / "typed_numbers.py"
    script.write_text(
        "import json\n"
        "from quickseek.ops.compiled import typed\n"
        "from quickseek.ops.collectives.push import Exchange\n"
        "groups = {'full': typed(Exchange, *range(8)), 'plain': Exchange(*range(8))}\n"
        "typed_of = lambda group: sum(hasattr(one, '__c_pointers__') for one in group)\n"
        "print(json.dumps({name: typed_of(group) for name, group in groups.items()}))\n"
    )
    assert lines_of(script, environment={}) == [{"full": 8, "plain": 0}]

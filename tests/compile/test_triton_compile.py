"""The Triton kernels compile for Hopper and Blackwell, in released shapes, on a machine without a GPU."""

from pathlib import Path
from typing import Any

import pytest
from prepared_process import lines_of
from triton_launches import cached_before_the_wait

HERE = Path(__file__).parent
LAUNCHES = sorted(HERE.glob("launches_*.py"))
UNCHAINED = {HERE / "launches_triton_math.py"}
"""Kernels of tests alone, which run beside no others."""
LARGEST_SHARED = 227 * 1024
CAPABILITIES = ("90", "100", "103")
"""Hopper in every shape, then Blackwell: every kernel in every combination of dtypes, in its largest shape."""

LOOKS_AHEAD = {"down", "_project", "_mix", "_held", "_attend"}
"""Kernels that read before their wait what the kernel before does not write, or weights; all others read nothing."""
READS_WHAT_A_STEP_WROTE = {"_attend"}
"""Of these, those that read before their wait what older kernels of the step wrote: past the L1 cache."""
LETS_GO_FIRST = {"_add_up"}
"""Kernels that let the next one start before their wait; it may read weights alone before its own."""

pytestmark = pytest.mark.compiler


def breaks_the_chain(kernel: dict[str, Any]) -> bool:
    """Whether a kernel touches what others write before it has waited, or lets the next start before that."""
    before, waited, after = kernel["order"].partition("w")
    if kernel["kernel"] in LETS_GO_FIRST:
        return not kernel["chained"] or not waited or before != "n"
    allowed = "l" if kernel["kernel"] in LOOKS_AHEAD else ""
    return not kernel["chained"] or not waited or before not in ("", allowed) or "n" not in after


@pytest.mark.parametrize("file", LAUNCHES, ids=lambda file: file.stem)
def test_every_launch_compiles(file: Path) -> None:
    # Line numbers, which nobody reads here, take a fifth of the compiler's time.
    environment = {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
    calls = lines_of(HERE / "triton_launches.py", str(file), *CAPABILITIES, environment=environment)
    assert calls, "the file launches nothing"
    compiled: dict[int, set[str]] = {int(capability): set() for capability in CAPABILITIES}
    for call in calls:
        compiled[call["capability"]] |= {kernel["kernel"] for kernel in call["kernels"]}
    assert compiled[90] and compiled[90] == compiled[100] == compiled[103]
    for call in calls:
        assert call["launched"], f"{call['name']} launched no kernel"
        assert len(call["kernels"]) == call["launched"] or call["capability"] > 90, call
        for kernel in call["kernels"]:
            assert kernel["shared"] <= LARGEST_SHARED, f"{call['name']}: {kernel}"
            assert file in UNCHAINED or not breaks_the_chain(kernel), f"{call['name']}: {kernel}"
            stale = kernel["kernel"] in READS_WHAT_A_STEP_WROTE and kernel["cached_early"]
            assert not stale, f"{call['name']}: {kernel}"
            assert not call["name"].endswith("waits first") or kernel["order"][0] in "wn", f"{call['name']}: {kernel}"


def test_a_kernel_that_cannot_be_compiled_is_found(tmp_path: Path) -> None:
    file = tmp_path / "launches_wrong.py"
    file.write_text(
        "import torch, triton, triton.language as tl\n"
        "@triton.jit\n"
        "def wrong(x):\n"
        "    tl.store(x, tl.no_such_thing())\n"
        "def launches():\n"
        "    return {'wrong': lambda: wrong[(1,)](torch.zeros(1))}\n"
    )
    with pytest.raises(AssertionError, match="no_such_thing"):
        test_every_launch_compiles(file)


@pytest.mark.parametrize(
    ("load", "cached"),
    [("ld.global.b32", 1), ("ld.global.cg.v4.b32", 0), ("ld.global.L1::evict_first.b32", 1), ("cp.async.cg", 0)],
)
def test_a_load_by_way_of_the_l1_cache_is_noticed(load: str, cached: int) -> None:
    assert cached_before_the_wait(f"{load} %r1, [%rd1];\ngriddepcontrol.wait;\nld.global.b32 %r2, [%rd2];") == cached


@pytest.mark.parametrize(
    ("order", "name", "chained", "broken"),
    [
        ("wnls", "any", True, False),
        ("wls", "any", True, True),  # the next kernel is never let go
        ("nwls", "any", True, True),
        ("lwnls", "any", True, True),
        ("lwnls", "down", True, False),
        ("swnls", "down", True, True),
        ("nwls", "_add_up", True, False),
        ("wnls", "_add_up", True, True),
        ("lnwls", "_add_up", True, True),
        ("lswns", "down", True, True),
        ("ls", "any", True, True),
        ("wnls", "any", False, True),
    ],
)
def test_a_kernel_out_of_order_is_noticed(order: str, name: str, chained: bool, broken: bool) -> None:
    assert breaks_the_chain({"kernel": name, "order": order, "chained": chained}) is broken

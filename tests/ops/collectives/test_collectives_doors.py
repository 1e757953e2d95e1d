"""The doors of the collectives name what does not fit, and take what the contract allows."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from quickseek.ops.collectives import AllReduceMHC, LamportAllGather
from quickseek.ops.collectives.spec import AllReduceShape, Boundary, check_boundary
from quickseek.parallel.fabric import VirtualFabric

ROWS, HIDDEN, STREAMS, TOP_K = 8, 128, 4, 3
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "hc_mult": STREAMS, "max_num_tokens": 16, "top_k": TOP_K}


def arguments() -> dict[str, Any]:
    """Those of a call on a CPU that is accepted."""
    return {
        "x": torch.ones(ROWS, HIDDEN),
        "residual": torch.ones(ROWS, STREAMS, HIDDEN),
        "post": torch.ones(ROWS, STREAMS),
        "comb": torch.ones(ROWS, STREAMS, STREAMS),
        "pre": torch.ones(ROWS, STREAMS),
        "norm_weight": torch.ones(HIDDEN),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("post", torch.ones(STREAMS, ROWS)),
        ("post", torch.ones(ROWS * STREAMS)),
        ("comb", torch.ones(ROWS, STREAMS * STREAMS)),
        ("pre", torch.ones(STREAMS, ROWS)),
        ("norm_eps", float("nan")),
        ("norm_eps", -1.0),
    ],
)
def test_a_mix_of_the_right_size_but_another_shape_and_an_odd_epsilon_are_refused(name: str, value: Any) -> None:
    door = AllReduceMHC(**SIZES, device="cpu")
    door(**arguments())
    with pytest.raises(ValueError, match=name):
        door(**arguments() | {name: value})


def test_a_trailing_dimension_of_one_changes_nothing() -> None:
    door, given = AllReduceMHC(**SIZES, device="cpu"), arguments()
    plain = door(**given)
    other = door(**given | {"post": given["post"][..., None]})
    assert torch.equal(plain[0], other[0]) and not torch.equal(plain[0], door(**given | {"post": given["post"] * 2})[0])


@pytest.mark.parametrize("name", ["expert_weights", "expanded_idx_to_permuted_idx"])
def test_routes_with_tokens_along_the_wrong_dimension_are_refused(name: str) -> None:
    door, boundary = AllReduceMHC(**SIZES, device="cpu"), arguments()
    routed = {
        "gemm2_permuted": torch.ones(ROWS * TOP_K, HIDDEN),
        "expert_weights": torch.ones(ROWS, TOP_K),
        "expanded_idx_to_permuted_idx": torch.zeros(ROWS, TOP_K, dtype=torch.int32),
        "shared_output": boundary.pop("x"),
    }
    door.finalize(**routed, **boundary)
    with pytest.raises(ValueError, match=name):
        door.finalize(**routed | {name: routed[name].T.contiguous()}, **boundary)


def on_a_gpu(tensor: torch.Tensor, address: int) -> Any:
    """What the checks look at of a tensor at an address of a GPU."""
    stand_in = SimpleNamespace(
        shape=tensor.shape, ndim=tensor.ndim, dtype=tensor.dtype, device=torch.device("cuda", 0), is_cuda=True,
        numel=tensor.numel, stride=tensor.stride, is_contiguous=tensor.is_contiguous, data_ptr=lambda: address,
    )  # fmt: skip
    return cast(torch.Tensor, stand_in)


@pytest.mark.parametrize(("streams", "refused"), [(4, {"post", "comb", "pre"}), (2, {"comb"}), (3, set()), (1, set())])
def test_mixes_that_kernels_load_16_bytes_at_a_time_must_start_at_16(streams: int, refused: set[str]) -> None:
    shape = AllReduceShape(HIDDEN, streams, 16, TOP_K, torch.device("cuda", 0), False, False, 1.0)
    mixes = {"post": [ROWS, streams], "comb": [ROWS, streams, streams], "pre": [ROWS, streams]}
    found = set()
    for moved in (None, *mixes):
        given = {name: on_a_gpu(torch.ones(size), 0x1004 if name == moved else 0x1000) for name, size in mixes.items()}
        half = {"residual": [ROWS, streams, HIDDEN], "norm_weight": [HIDDEN]}
        given |= {name: on_a_gpu(torch.ones(size).bfloat16(), 0x1000) for name, size in half.items()}
        try:
            check_boundary(shape, ROWS, torch.bfloat16, Boundary(**given, norm_eps=1e-6, mxfp8_out=None))
        except ValueError as error:
            assert "16-byte alignment" in str(error)
            found.add(str(error).split()[0])
    assert found == refused


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_a_kernel_cannot_count_down_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        AllReduceMHC(**SIZES, device="cpu", timeout_s=timeout_s)
    with pytest.raises(ValueError, match="timeout_s"):
        LamportAllGather(rank_capacity_bytes=64, device="cpu", timeout_s=timeout_s)


@pytest.mark.parametrize("hidden", [8, 64, 128, 248, 264, 384, 640, 5120 + 128])
def test_an_mxfp8_copy_of_rows_that_leave_a_warp_half_empty_is_refused(hidden: int) -> None:
    sizes = SIZES | {"hidden_size": hidden, "device": "cpu"}
    AllReduceMHC(**sizes)
    with pytest.raises(ValueError, match=f"hidden_size {hidden}: quantize_layer_input needs a multiple of 256"):
        AllReduceMHC(**sizes, quantize_layer_input=True)
    for fits in (256, 512, 768, 5120):
        AllReduceMHC(**sizes | {"hidden_size": fits}, quantize_layer_input=True)


@pytest.mark.parametrize("name", ["hidden_size", "hc_mult", "max_num_tokens", "top_k", "two_shot_rows"])
@pytest.mark.parametrize("kind", [float, str, bool, torch.tensor])
def test_a_size_that_is_no_integer_is_refused(name: str, kind: Any) -> None:
    sizes = SIZES | {"two_shot_rows": 4, "device": "cpu"}
    AllReduceMHC(**sizes)
    with pytest.raises(ValueError, match=f"{name} .*an integer"):
        AllReduceMHC(**sizes | {name: kind(sizes[name])})


@pytest.mark.parametrize("size", [64.0, "64", True, 0, -16, 24])
def test_a_gather_of_an_odd_capacity_is_refused(size: Any) -> None:
    LamportAllGather(rank_capacity_bytes=64, device="cpu")
    with pytest.raises(ValueError, match="rank_capacity_bytes"):
        LamportAllGather(rank_capacity_bytes=size, device="cpu")


def test_a_cpu_with_an_index_is_the_cpu() -> None:
    for device in ("cpu:0", torch.device("cpu", 0), "cpu"):
        door, gather = AllReduceMHC(**SIZES, device=device), LamportAllGather(rank_capacity_bytes=64, device=device)
        assert door(**arguments())[0].shape == (ROWS, STREAMS, HIDDEN) and gather(torch.ones(4)).shape == (4,)
        moved = torch.ones(4, device="cpu:0")
        assert torch.equal(gather(moved), moved)
        door(**{name: value.to(device) for name, value in arguments().items()})


def test_a_gather_takes_data_that_starts_between_two_words() -> None:
    gather = LamportAllGather(rank_capacity_bytes=64, device="cpu")
    for data in (torch.arange(40, dtype=torch.uint8)[1:17], torch.arange(40, dtype=torch.bfloat16)[1:9]):
        assert torch.equal(gather(data), data) and not torch.equal(gather(data), data + 1)


def test_a_gather_on_a_cpu_refuses_a_fabric_whose_ranks_it_could_not_reach() -> None:
    fabric = VirtualFabric.ranks(2, "cpu")[0]
    with pytest.raises(ValueError, match="fabric must be None"):
        LamportAllGather(rank_capacity_bytes=64, device="cpu", fabric=fabric)

"""The CPU reference of the fused collectives: its roundings, equal bits on all ranks, plain formulas in float64."""

import pytest
import torch

from quickseek.formats import dequantize_a8, quantize_a8
from quickseek.ops.collectives import AllReduceMHC, LamportAllGather
from quickseek.ops.collectives.reference import finalize_routed, mhc_boundary, sanitise, sum_ranks
from quickseek.ops.collectives.spec import Routed
from quickseek.ops.quantize import mxfp8_scale_bytes
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import SoloWorld, World

HIDDEN, STREAMS, TOP_K = 256, 4, 3


def case(rows: int, ranks: int, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """A boundary's inputs; ``x`` holds every rank's partial [ranks, rows, H]."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": normal(ranks, rows, HIDDEN).to(dtype),
        "residual": normal(rows, STREAMS, HIDDEN).to(dtype),
        "post": normal(rows, STREAMS).to(wide),
        "comb": normal(rows, STREAMS, STREAMS).softmax(-1).to(wide),
        "pre": normal(rows, STREAMS).sigmoid().to(wide),
        "norm_weight": normal(HIDDEN).to(dtype),
    }


def routed_case(rows: int, dtype: torch.dtype, seed: int) -> Routed:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    index = torch.randint(-1, rows * TOP_K, (rows, TOP_K), generator=generator, dtype=torch.int32)
    return Routed(
        torch.randn(rows * TOP_K, HIDDEN, generator=generator).to(dtype),
        torch.rand(rows, TOP_K, generator=generator).to(wide),
        index,
        torch.randn(rows, HIDDEN, generator=generator).to(dtype),
    )


def by_einsum(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same boundary in float64 without any rounding, by other operations."""
    wide = {name: value.double() for name, value in inputs.items()}
    total = wide["x"].sum(0)
    streams = torch.einsum("mh,mt->mth", total, wide["post"])
    streams = streams + torch.einsum("msh,mst->mth", wide["residual"], wide["comb"])
    collapsed = torch.einsum("mth,mt->mh", streams, wide["pre"])
    normed = torch.nn.functional.rms_norm(collapsed, [HIDDEN], wide["norm_weight"], 1e-6)
    return streams, normed


def boundary(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    rest = {name: value for name, value in inputs.items() if name != "x"}
    return mhc_boundary(sum_ranks(inputs["x"]), **rest)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((found.double() - wanted).abs() <= 1e-10 * wanted.abs().max()).all())


def test_in_float64_the_boundary_is_the_plain_formula():
    inputs = case(5, 4, torch.float64)
    found, wanted = boundary(inputs), by_einsum(inputs)
    assert close(found[0], wanted[0]) and close(found[1], wanted[1])
    # Negative controls: a transposed comb, and the pre-mix of another row.
    assert not close(boundary({**inputs, "comb": inputs["comb"].mT})[0], wanted[0])
    assert not close(boundary({**inputs, "pre": inputs["pre"].roll(1, 0)})[1], wanted[1])


def test_in_bf16_streams_stay_within_their_bound_and_the_input_follows_the_rounded_streams():
    inputs = case(6, 4, torch.bfloat16)
    streams, layer_input = boundary(inputs)
    wide = {name: value.double() for name, value in inputs.items()}
    total = sum_ranks(inputs["x"]).double()
    wanted = by_einsum({**wide, "x": total[None]})[0]
    terms = torch.einsum("mh,mt->mth", total.abs(), wide["post"].abs())
    terms += torch.einsum("msh,mst->mth", wide["residual"].abs(), wide["comb"].abs())

    def within(found: torch.Tensor) -> bool:
        return bool(((found.double() - wanted).abs() <= 2**-8 * wanted.abs() + 2**-21 * terms).all())

    assert within(streams)
    assert not within(streams + streams * 2**-6)
    collapsed = torch.einsum("mth,mt->mh", streams.double(), wide["pre"]).to(torch.bfloat16).double()
    normed = torch.nn.functional.rms_norm(collapsed, [HIDDEN], wide["norm_weight"], 1e-6)
    assert (layer_input.double() - normed).abs().le(2**-7 * normed.abs() + 1e-30).all()


def test_each_rounding_point_of_trained_mode_is_there():
    # The rank sum: 256 + 1 + 1 rounds once to 258; the sum 257 is rounded to 256 before mHC takes 256 away.
    parts = torch.tensor([256.0, 1.0, 1.0]).bfloat16()[:, None, None].expand(3, 1, 8)
    assert sum_ranks(parts).unique().item() == 258
    ordered = torch.tensor([1e8, -1e8, 1.0])[:, None, None]
    assert sum_ranks(ordered).item() == 1 and sum_ranks(ordered.flip(0)).item() == 0
    one, taken = torch.ones(1, 1), torch.full((1, 1, 8), -256.0)
    left, _ = mhc_boundary(sum_ranks(parts[:2]), taken.bfloat16(), one, one[:, None])
    unrounded, _ = mhc_boundary(sum_ranks(parts[:2].float()), taken, one, one[:, None])
    assert left.unique().item() == 0 and unrounded.unique().item() == 1
    # The collapse reads the rounded streams: bf16(1 + 2^-9) is 1, so that subtracting 1 leaves nothing.
    two = {"residual": torch.ones(1, 2, 8).bfloat16(), "norm_weight": torch.ones(8).bfloat16()}
    comb = torch.tensor([[[1.0 + 2**-9, 0.0], [0.0, 1.0]]])
    zero, pre = torch.zeros(1, 8).bfloat16(), torch.tensor([[1.0, -1.0]])
    _, layer_input = mhc_boundary(zero, post=torch.zeros(1, 2), comb=comb, pre=pre, **two)
    assert layer_input.count_nonzero() == 0
    exact = {name: value.float() for name, value in two.items()}
    _, unrounded = mhc_boundary(zero.float(), post=torch.zeros(1, 2), comb=comb, pre=pre, **exact)
    assert unrounded.count_nonzero() == 8


def test_the_sum_over_k_is_wide_ascending_and_skips_absent_experts():
    rows = torch.tensor([256.0, 1.0, 1.0, float("nan")]).bfloat16()[:, None].expand(4, 8).contiguous()
    index = torch.tensor([[0, 1, -1]], dtype=torch.int32)
    shared = torch.ones(1, 8).bfloat16()
    weights = torch.ones(1, 3)
    assert finalize_routed(Routed(rows, weights, index, shared)).unique().item() == 258
    assert finalize_routed(Routed(rows, weights, torch.full_like(index, -1), shared)).unique().item() == 1
    assert finalize_routed(Routed(rows[:0], weights, torch.full_like(index, -1), shared)).unique().item() == 1
    # Negative control: reading index -1 as the last row lets its NaN in.
    assert (rows[index.long()] * weights[..., None]).sum(1).isnan().all()
    negative = Routed(torch.full((1, 8), -1e-38).bfloat16(), torch.full((1, 1), 1e-20), index[:, :1], shared * -0.0)
    assert not torch.signbit(finalize_routed(negative)).any()


def test_a_mailbox_carries_no_negative_zero_and_leaves_all_else():
    odd = torch.tensor([-0.0, 0.0, float("inf"), -float("inf"), 2.0**-133, -(2.0**-133)]).bfloat16()
    assert sanitise(odd).view(torch.int16).tolist() == [0, 0, 0x7F80, -128, 1, -32767]
    assert sanitise(torch.tensor([float("nan")])).isnan().all()
    assert not torch.signbit(sum_ranks(torch.full((2, 1, 8), -0.0))).any()
    assert torch.signbit(torch.tensor(-0.0) + torch.tensor(-0.0)), "without the rule the sign would stay"


def test_the_boundary_is_differentiable():
    inputs = case(2, 2, torch.float64)
    names = ("residual", "post", "comb", "pre", "norm_weight")
    values = [inputs[name].requires_grad_() for name in names]
    x = sum_ranks(inputs["x"]).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, *rest: mhc_boundary(x, **dict(zip(names, rest, strict=True))), (x, *values)
    )


def test_one_stream_with_mixes_of_one_is_residual_add_and_norm():
    inputs = case(3, 1, torch.bfloat16)
    residual, one = inputs["residual"][:, :1].contiguous(), torch.ones(3, 1)
    streams, layer_input = mhc_boundary(inputs["x"][0], residual, one, one[:, None], one, inputs["norm_weight"])
    added = inputs["x"][0] + residual[:, 0]
    assert torch.equal(streams[:, 0], added)
    wanted = torch.nn.functional.rms_norm(added.float(), [HIDDEN], inputs["norm_weight"].float(), 1e-6)
    assert (layer_input.float() - wanted).abs().le(2**-7 * wanted.abs()).all()


def door(world: World, **options: bool) -> AllReduceMHC:
    sizes = {"hidden_size": HIDDEN, "hc_mult": STREAMS, "max_num_tokens": 8, "top_k": TOP_K}
    return AllReduceMHC(**sizes, device="cpu", world=world, **options)


def arguments(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [inputs[name] for name in ("residual", "post", "comb", "pre", "norm_weight")]


def calls(world: World, dtype: torch.dtype) -> list[torch.Tensor]:
    """What one rank gets from every kind of call."""
    reduce, results = door(world, quantize_layer_input=True, residual_only=True), []
    for seed, rows in enumerate((1, 3, 8)):
        inputs = case(rows, world.size, dtype, seed)
        out = torch.empty(rows, HIDDEN, dtype=torch.float8_e4m3fn), torch.empty(mxfp8_scale_bytes(rows, HIDDEN)).byte()
        results += reduce(inputs["x"][world.rank], *arguments(inputs), mxfp8_out=out)
        results += [out[0].view(torch.uint8), out[1]]
        results.append(reduce(inputs["x"][world.rank], *arguments(inputs)[:3])[0])
        routed = routed_case(rows, dtype, 10 * seed + world.rank)
        parts = [
            routed.gemm2_permuted,
            routed.expert_weights,
            routed.expanded_idx_to_permuted_idx,
            routed.shared_output,
        ]
        results += reduce.finalize(*parts, *arguments(inputs))
    words = torch.tensor([-0.0, 1.0, float(world.rank), -2.0])
    results.append(LamportAllGather(rank_capacity_bytes=64, device="cpu", world=world)(words))
    reduce.reset()
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_get_equal_bits_and_the_bits_of_one_process(ranks):
    found = spawn(calls, ranks, torch.bfloat16)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    for seed, rows in enumerate((1, 3, 8)):
        streams, layer_input, codes, scales, only, routed_streams, routed_input = found[0][7 * seed : 7 * seed + 7]
        inputs = case(rows, ranks, torch.bfloat16, seed)
        alone = boundary(inputs)
        assert torch.equal(streams, alone[0]) and torch.equal(layer_input, alone[1]) and torch.equal(only, streams)
        assert torch.equal(codes, quantize_a8(layer_input)[0].view(torch.uint8))
        assert scales.view(-1, 128 * 4).count_nonzero() == rows * HIDDEN // 32
        parts = [finalize_routed(routed_case(rows, torch.bfloat16, 10 * seed + rank)) for rank in range(ranks)]
        alone = boundary({**inputs, "x": torch.stack(parts)})
        assert torch.equal(routed_streams, alone[0]) and torch.equal(routed_input, alone[1])
        # Negative control: one rank's part taken twice.
        assert not torch.equal(boundary({**inputs, "x": inputs["x"][[0, *range(ranks - 1)]]})[0], streams)
    assert (
        found[0][-1].view(torch.int32).tolist()
        == torch.cat([torch.tensor([0.0, 1.0, float(rank), -2.0]) for rank in range(ranks)]).view(torch.int32).tolist()
    )


def test_the_mxfp8_copy_reads_the_rounded_input():
    inputs = case(2, 1, torch.bfloat16)
    codes, scales = (
        torch.empty(2, HIDDEN, dtype=torch.float8_e4m3fn),
        torch.full((mxfp8_scale_bytes(2, HIDDEN),), 9).byte(),
    )
    reduce = door(SoloWorld(), quantize_layer_input=True)
    _, layer_input = reduce(inputs["x"][0], *arguments(inputs), mxfp8_out=(codes, scales))
    tiles = scales.view(HIDDEN // 128, 32, 4, 4)
    row = tiles[:, :, 0].transpose(0, 1).reshape(32, HIDDEN // 32)  # row r < 32 stands at 16 r of each tile
    assert row[2:].count_nonzero() == 0 and tiles[:, :, 1:].count_nonzero() == 0
    plain = quantize_a8(layer_input)
    assert torch.equal(row[:2], plain[1])
    assert (dequantize_a8(codes, row[:2]) - layer_input).abs().max() <= layer_input.abs().max() / 8


def test_a_fabric_on_a_cpu_is_refused():
    from quickseek.parallel.host_fabric import HostFabric

    with pytest.raises(ValueError, match="fabric must be None"):
        sizes = {"hidden_size": HIDDEN, "hc_mult": STREAMS, "max_num_tokens": 8, "top_k": TOP_K}
        AllReduceMHC(**sizes, device="cpu", world=SoloWorld(), fabric=HostFabric(SoloWorld()))

"""The expert kernels in CuTe DSL: they compile for Hopper and Blackwell, and what they compile to is right."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from prepared_process import lines_of
from torch import Tensor

from compare import assert_bits, assert_op
from moe_cases import drawn, packed_experts, routing_of, rows_of
from ptx_machine import Memory, launch
from quickseek import formats
from quickseek.ops.linear import Fp4Weight
from quickseek.ops.moe import reference
from quickseek.ops.moe.cute_fragments import GROUP, LINES, MOST_ROWS, code_place

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"),
]

EXPERTS, LIMIT = 7, 1.5
ORDER = code_place(torch.arange(GROUP))


@cache
def compile_all(architecture: str, *arguments: str, script: str = "experts_variants.py") -> dict[str, dict[str, Any]]:
    """What a script beside this file prints, by name."""
    beside = Path(__file__).with_name(script)
    lines = lines_of(beside, *arguments, environment={"CUTE_DSL_ARCH": architecture})
    return {line["name"]: line for line in lines}


def broken(order: str) -> bool:
    """Whether a kernel stores before its last wait in the text, or lets the next start but right after a wait."""
    before, wait, after = order.rpartition("w")
    return not wait or "s" in before or "n" in order.replace("wn", "") or not after.startswith("n")


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a", "sm_103a"])
def test_the_expert_kernels_compile_for_the_architecture(architecture: str) -> None:
    found = compile_all(architecture)
    assert len(found) == (11 if architecture == "sm_90a" else 5)
    for name, kernel in found.items():
        assert kernel["target"] == architecture, name
        assert not broken(kernel["order"]), f"{name}: {kernel['order']}"
        assert kernel["constant"] == 0, f"{name}: the assembler moves such loads behind the wait"
    assert found["gate_up of a record"]["order"].startswith("wn"), "the record is no older than the kernel before"


@pytest.mark.parametrize("order", ["lwls", "slwn", "lnwls", "wnlswns", "wlns", "ls"])
def test_an_expert_kernel_out_of_order_is_noticed(order: str) -> None:
    assert broken(order)
    assert not broken("lwnlwnls") and not broken("wnls")


# ---------------------------------------------------------------------------------------------- what they compute


def stored(x: Tensor) -> tuple[Tensor, Tensor]:
    """A8 of rows as the kernels read it: codes in the order of ``code_place``, FP32 scales."""
    codes, scales = formats.quantize_a8(x)
    placed = torch.empty_like(codes.view(torch.uint8).unflatten(-1, (-1, GROUP)))
    placed[..., ORDER] = codes.view(torch.uint8).unflatten(-1, (-1, GROUP))
    return placed.flatten(-2), formats.e8m0_to_float32(scales)


def values_of(codes: Tensor, factors: Tensor) -> Tensor:
    """The FP32 values of ``stored`` rows."""
    placed = codes.unflatten(-1, (-1, GROUP))[..., ORDER].contiguous().view(torch.float8_e4m3fn)
    return (placed.float() * factors.unsqueeze(-1)).flatten(-2)


def recorded(chosen: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """``tokens`` and ``tiles`` of a routing, one tile of up to ``rows`` rows for each slot."""
    slots = chosen.flatten().tolist()
    tokens, tiles = torch.full((len(slots),), -1, dtype=torch.int32), []
    for slot, expert in enumerate(slots):
        before, rank = sum(0 <= other < expert for other in slots), slots[:slot].count(expert)
        exists = 0 <= expert < EXPERTS
        if exists:
            tokens[before + rank] = slot // chosen.shape[1]
        begins = exists and rank % rows == 0
        tiles.append([expert if begins else -1, before + rank, min(slots.count(expert) - rank, rows)])
    return tokens, torch.tensor(tiles, dtype=torch.int32)


def gate_up(
    x: Tensor, chosen: Tensor, weight: Fp4Weight, kernel: dict[str, Any] | None = None, rows: int = MOST_ROWS
) -> tuple[Tensor, Tensor]:
    """Codes and factors of every sorted row, by the kernel compiled for tiles of ``rows`` rows."""
    hidden, inner = x.shape[1], weight.codes.shape[1] // 2
    kernel = kernel or compile_all("sm_90a", "ptx")[f"gate_up {hidden} {inner} {rows} {chosen.shape[1]}"]
    out = torch.full((chosen.numel(), inner), 0x55, dtype=torch.uint8)
    factors = torch.full((chosen.numel(), inner // GROUP), torch.nan)
    memory = Memory()
    tensors = (*stored(x), chosen, *recorded(chosen, rows), weight.codes, weight.scales, out, factors)
    arguments = [*(memory.place(tensor) for tensor in tensors), chosen.numel(), LIMIT]
    launch(kernel["ptx"], memory, arguments, (inner // GROUP, chosen.numel()), kernel["shared"])
    memory.write_back()
    return out, factors


def down(codes: Tensor, factors: Tensor, chosen: Tensor, weight: Fp4Weight, rows: int = MOST_ROWS) -> Tensor:
    """Rows by the kernel compiled for tiles of ``rows`` rows; rows of no expert stay NaN."""
    hidden, inner = weight.codes.shape[1], codes.shape[1]
    warps, each = {(480, 64): (2, 2), (32, 32): (4, 1), (224, 672): (2, 3)}[hidden, inner]
    out = torch.full((chosen.numel(), hidden), torch.nan, dtype=torch.bfloat16)
    memory = Memory()
    tensors = (codes, factors, recorded(chosen, rows)[1], weight.codes, weight.scales, out)
    kernel = compile_all("sm_90a", "ptx")[f"down {hidden} {inner} {rows}"]
    grid = (-(-hidden // (LINES * warps * each)), chosen.numel())
    launch(kernel["ptx"], memory, [memory.place(tensor) for tensor in tensors], grid, kernel["shared"])
    memory.write_back()
    return out


def fp4(weight: Any) -> Fp4Weight:
    assert isinstance(weight, Fp4Weight)
    return weight


def between(x: Tensor, chosen: Tensor, weight: Fp4Weight) -> Tensor:
    """The values that ``gate_up`` should give, by the reference; NaN for rows of no expert."""
    slots = chosen.flatten()
    kept = [slot for slot in slots.argsort(stable=True).tolist() if 0 <= slots[slot] < EXPERTS]
    out = torch.full((len(slots), weight.codes.shape[1] // 2), torch.nan)
    for row, slot in enumerate(kept):
        token = slot // chosen.shape[1]
        one = reference.of_expert(weight, int(slots[slot]))
        hidden = reference.swiglu(reference.linear_op.linear(x[token : token + 1], one), LIMIT)
        out[row] = formats.fake_quantize_a8(hidden.bfloat16())[0].float()
    return out


CHOSEN = {
    "different experts": drawn(3, EXPERTS, 2),
    "eight rows of one": torch.full((8, 1), 3),
    "nine rows of one, and others": torch.tensor([[2, 0]] * 5 + [[6, 2]] * 4),
    "absent slots": torch.tensor([[5, -1], [7, 5], [5, 1], [5, 0]]),
}


@pytest.mark.parametrize("shape", [(480, 64), (1024, 32), (32, 32)])
@pytest.mark.parametrize("name", CHOSEN)
def test_gate_up_is_the_reference(name: str, shape: tuple[int, int]) -> None:
    chosen, x = CHOSEN[name], rows_of(CHOSEN[name].shape[0], shape[0])
    weight = fp4(packed_experts(EXPERTS, *shape).w13)
    codes, factors = gate_up(x, chosen, weight)
    expected = between(x, chosen, weight)
    there = ~expected.isnan().any(1)
    found = values_of(codes, factors)
    assert_op(found[there], expected[there])
    assert (codes[~there] == 0x55).all(), "rows of none stay as they were"
    with pytest.raises(AssertionError, match="outside"):
        assert_op(found[there].roll(1, 1), expected[there])


@pytest.mark.parametrize("shape", [(64, 1), (17, 2)])
def test_the_rows_of_a_tile_are_found_among_all_slots(shape: tuple[int, int]) -> None:
    """More slots than a warp has lanes, of experts that exist or not."""
    chosen = torch.randint(-1, EXPERTS + 1, shape, generator=torch.Generator().manual_seed(1))
    # A tile whose first slot is among the first and whose other rows are the last.
    chosen[chosen == 2] = 4
    chosen[0, 0] = chosen[-3, 0] = chosen[-1, 0] = 2
    x, weight = rows_of(shape[0], 32), fp4(packed_experts(EXPERTS, 32, 32).w13)
    codes, factors = gate_up(x, chosen, weight)
    expected = between(x, chosen, weight)
    there = ~expected.isnan().any(1)
    assert 0 < int((~there).sum()) < chosen.numel()
    assert_op(values_of(codes, factors)[there], expected[there])
    assert (codes[~there] == 0x55).all(), "rows of none stay as they were"
    with pytest.raises(AssertionError, match="outside"):
        assert_op(values_of(codes, factors)[there], between(x.roll(1, 0), chosen, weight)[there])


@pytest.mark.parametrize("shape", [(480, 64), (32, 32), (224, 672)])
@pytest.mark.parametrize("name", CHOSEN)
def test_down_is_the_reference(name: str, shape: tuple[int, int]) -> None:
    chosen = CHOSEN[name]
    weight = fp4(packed_experts(EXPERTS, *shape).w2)
    hidden = rows_of(chosen.numel(), shape[1])
    found = down(*stored(hidden), chosen, weight)
    for expert, first, count in recorded(chosen, MOST_ROWS)[1].tolist():
        if expert >= 0:
            rows = slice(first, first + count)
            expected = reference.linear_op.linear(hidden[rows], reference.of_expert(weight, expert))
            assert_op(found[rows], expected)
            with pytest.raises(AssertionError, match="outside"):
                assert_op(found[rows].roll(1, 1), expected)
    absent = int(((chosen < 0) | (chosen >= EXPERTS)).sum())
    assert int(found.isnan().any(1).sum()) == absent


def test_both_kernels_together_are_the_reference() -> None:
    x, chosen, weights = rows_of(6, 480), drawn(6, EXPERTS, 2), packed_experts(EXPERTS, 480, 64)
    found = down(*gate_up(x, chosen, fp4(weights.w13)), chosen, fp4(weights.w2))
    assert_op(found, reference.routed_experts(x, routing_of(chosen), weights, LIMIT, "after").rows)


def test_tiles_of_two_rows_are_the_reference() -> None:
    weights = packed_experts(EXPERTS, 480, 64)
    w13, w2 = fp4(weights.w13), fp4(weights.w2)
    for chosen in (
        torch.tensor([[4, 1]]),
        torch.tensor([[5, 3], [3, 5]]),
        torch.tensor([[6, -1], [7, 6]]),
        torch.tensor([[3, 3], [3, 5]]),
    ):
        x = rows_of(chosen.shape[0], 480)
        few = gate_up(x, chosen, w13, rows=2)
        assert_bits(torch.cat(few, 1), torch.cat(gate_up(x, chosen, w13), 1))
        there = (chosen.sort().values >= 0).sum()
        found = down(*few, chosen, w2, rows=2)
        assert_bits(found, down(*few, chosen, w2))
        assert int((~found.isnan().any(1)).sum()) == int(((chosen >= 0) & (chosen < EXPERTS)).sum()) <= there


@pytest.mark.parametrize("chosen", [[4, 1], [3, 3], [6, -1], [7, 6], [-1, 7]])
def test_weights_that_a_row_alone_asks_for_early_are_those_of_its_tiles(chosen: list[int]) -> None:
    x, slots, weight = rows_of(1, 480), torch.tensor([chosen]), fp4(packed_experts(EXPERTS, 480, 64).w13)
    early = gate_up(x, slots, weight, compile_all("sm_90a", "ptx")["gate_up 480 64 alone 2"], rows=2)
    found = torch.cat(early, 1)
    assert_bits(found, torch.cat(gate_up(x, slots, weight, rows=2), 1))
    if 0 <= chosen[0] < EXPERTS:
        with pytest.raises(AssertionError, match="differ in bits"):
            assert_bits(found, torch.cat(gate_up(x.roll(1, 1), slots, weight, rows=2), 1))


def test_tiles_of_many_rows_are_the_reference() -> None:
    weights = packed_experts(EXPERTS, 480, 64)
    w13, w2 = fp4(weights.w13), fp4(weights.w2)
    for chosen in (CHOSEN["nine rows of one, and others"], torch.tensor([[5, 3]] * 3 + [[3, 6]] * 4)):
        x = rows_of(chosen.shape[0], 480)
        many = gate_up(x, chosen, w13, rows=8)
        assert_bits(torch.cat(many, 1), torch.cat(gate_up(x, chosen, w13), 1))
        assert_bits(down(*many, chosen, w2, rows=8), down(*many, chosen, w2))


def test_a_row_has_the_same_bits_whoever_shares_its_tile() -> None:
    x, weight = rows_of(8, 480), fp4(packed_experts(EXPERTS, 480, 64).w13)
    together = gate_up(x, torch.full((8, 1), 3), weight)
    for row in (0, 3, 7):
        alone = gate_up(x[row : row + 1], torch.full((1, 1), 3), weight)
        assert_bits(alone[0][0], together[0][row])
        assert_bits(alone[1][0], together[1][row])
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(together[0][0], together[0][1])


def test_a_nan_spoils_its_own_row_of_a_tile() -> None:
    x, weights, chosen = rows_of(6, 480), packed_experts(EXPERTS, 480, 64), torch.full((6, 1), 3)
    w13, w2 = fp4(weights.w13), fp4(weights.w2)
    clean = down(*gate_up(x, chosen, w13), chosen, w2)
    x[2, 300] = torch.nan
    spoilt = down(*gate_up(x, chosen, w13), chosen, w2)
    others = [0, 1, 3, 4, 5]
    assert_bits(spoilt[others], clean[others])
    assert spoilt[2].isnan().all() and not clean.isnan().any()


def test_a_nan_scale_spoils_its_own_output() -> None:
    weight, chosen = fp4(packed_experts(EXPERTS, 224, 672).w2), torch.full((3, 1), 3)
    rows = stored(rows_of(3, 672))
    clean = down(*rows, chosen, weight)
    weight.scales[3, 37, 20] = formats.E8M0_NAN
    spoilt = down(*rows, chosen, weight)
    assert spoilt[:, 37].isnan().all()
    spoilt[:, 37] = clean[:, 37]
    assert_bits(spoilt, clean)


def test_every_code_has_its_value_at_scales_of_many_sizes_in_registers() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)
    weight = Fp4Weight(codes.view(1, 32, 16).repeat(EXPERTS, 1, 1), torch.zeros(EXPERTS, 32, 1, dtype=torch.uint8))
    for expert, byte in enumerate((30, 66, 90, 120, 127, 180, 235)):
        weight.scales[expert] = byte
    x = torch.zeros(32, 32, dtype=torch.bfloat16)
    x.fill_diagonal_(1.0)
    chosen = torch.arange(EXPERTS).unsqueeze(0)
    for element in range(32):
        rows = x[element : element + 1].expand(EXPERTS, -1)
        found = down(*stored(rows), chosen, weight)
        exact = formats.dequantize_fp4_rows(weight.codes, weight.scales, torch.float32)[:, :, element]
        assert_bits(found, exact.bfloat16(), sign_of_zero=False)
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(found, exact.bfloat16().roll(1, 1))


@pytest.mark.parametrize("rows", [1, 2, 3, 48])
@pytest.mark.parametrize("inner", [2304, 1152, 576, 288])
def test_a_block_of_any_rank_has_room_in_shared_memory(inner: int, rows: int) -> None:
    from quickseek.ops.moe import cute

    assert cute.fits(5120, inner)
    up = cute.GateUpKernel(5120, inner, 384, 6, **cute.gate_up_settings(rows, 6 * rows))
    down = cute.DownKernel(5120, inner, **cute.down_settings(rows, inner))
    for kernel in (up, down):
        assert kernel.shared <= cute.SHARED_BYTES
        assert all(part % 16 == 0 for part in (kernel.zeros, kernel.factors, kernel.scales, kernel.ring, kernel.stage))


def test_what_a_block_has_no_room_for_is_left_to_other_kernels() -> None:
    from quickseek.ops.moe import cute

    assert not cute.fits(5120, 8192) and not cute.fits(65536, 576)
    assert not cute.fits(5120, 576, torch.zeros(32, dtype=torch.uint8)[1:])


def test_a_kernel_that_reads_past_its_tensors_is_noticed() -> None:
    x, weight = rows_of(2, 480), fp4(packed_experts(EXPERTS, 480, 64).w13)
    kernel = compile_all("sm_90a", "ptx")["gate_up 1024 32 4 1"]
    with pytest.raises(AssertionError, match="leave their tensors"):
        gate_up(x, torch.full((2, 1), EXPERTS - 1), weight, kernel)

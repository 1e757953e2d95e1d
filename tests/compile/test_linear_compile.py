"""The few-row products in CuTe DSL: they compile for Hopper and Blackwell, and what they compile to is right."""

import importlib.util

import pytest
import torch
from test_experts_compile import broken, compile_all
from torch import Tensor

from compare import assert_bits, assert_op
from ptx_machine import Memory, launch
from quickseek import formats
from quickseek.ops.linear import Fp8Weight, QuantizedRows, reference

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"),
]

VARIANTS = "linear_variants.py"


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a", "sm_103a"])
def test_the_products_compile_for_the_architecture(architecture: str) -> None:
    found = compile_all(architecture, script=VARIANTS)
    assert len(found) == 10
    for name, kernel in found.items():
        assert kernel["target"] == architecture, name
        assert not broken(kernel["order"]), f"{name}: {kernel['order']}"
        assert kernel["order"].startswith("lw"), f"{name}: its weights are asked for before it waits"
        assert kernel["constant"] == 0, f"{name}: the assembler moves such loads behind the wait"


# ---------------------------------------------------------------------------------------------- what they compute


def weight_of(outputs: int, inputs: int, seed: int = 1) -> Fp8Weight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(outputs, inputs, generator=generator).mul(3).to(torch.float8_e4m3fn)
    scales = torch.randint(116, 128, (-(-outputs // 32), inputs // 32), generator=generator, dtype=torch.uint8)
    return Fp8Weight(codes, scales)


def rows_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(torch.bfloat16)


def multiplied(x: Tensor | QuantizedRows, weight: Fp8Weight, given: str, columns: int) -> Tensor:
    """By the compiled kernel; ``x`` [rows, inputs] or [rows, groups, inputs]."""
    values = x if isinstance(x, Tensor) else x.codes
    rows, inputs, groups = values.shape[0], values.shape[-1], values.shape[1] if values.dim() == 3 else 1
    outputs = weight.codes.shape[0] // groups
    out = torch.full((rows, weight.codes.shape[0]), torch.nan, dtype=torch.bfloat16)
    memory = Memory()
    scales = None if isinstance(x, Tensor) else x.scales
    arguments = [
        memory.place(values), 0 if scales is None else memory.place(scales), memory.place(weight.codes),
        memory.place(weight.scales), memory.place(out), rows, values.stride(0),
        0 if scales is None else scales.stride(0), values.stride(1) if groups > 1 else 0, inputs,
        weight.scales.stride(0), out.stride(0), outputs,
    ]  # fmt: skip
    text = compile_all("sm_90a", "ptx", script=VARIANTS)[f"{inputs} {given} {columns}"]["ptx"]
    launch(text, memory, arguments, (outputs // 16, groups))
    memory.write_back()
    return out


def given_as(x: Tensor, given: str) -> Tensor | QuantizedRows:
    return QuantizedRows(*formats.quantize_a8(x)) if given == "codes" else x


@pytest.mark.parametrize("given", ["a8", "plain", "codes"])
@pytest.mark.parametrize("inputs", [64, 320])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 2), (1, 2), (5, 6), (6, 6), (3, 8), (8, 8)])
def test_products_are_the_reference(rows: int, columns: int, inputs: int, given: str) -> None:
    x, weight = given_as(rows_of(rows, inputs), given), weight_of(48, inputs)
    found = multiplied(x, weight, given, columns)
    assert_op(found, reference.linear(x, weight, quantize_input=given == "a8"))
    with pytest.raises(AssertionError, match="outside"):
        assert_op(found.roll(1, 1), reference.linear(x, weight, quantize_input=given == "a8"))


def test_many_pieces_are_taken_in_passes() -> None:
    from quickseek.ops.linear import cute

    assert cute.FewRows(5120, "a8", 8, 8, 1).passes > 1 and cute.FewRows(320, "a8", 8, 2, 1).passes == 1
    x, weight = rows_of(7, 5120), weight_of(16, 5120)
    found = multiplied(x, weight, "a8", 8)
    assert_op(found, reference.linear(x, weight))


@pytest.mark.parametrize("inputs", [64, 576, 1280, 2048, 4096, 5120, 8192])
def test_every_number_of_rows_has_settings(inputs: int) -> None:
    from quickseek.ops.linear import cute

    for rows in range(1, 9):
        kernel = cute.FewRows(inputs, "a8", **cute.settings(rows, inputs))
        assert rows <= kernel.columns <= 8 and kernel.mine <= cute.MOST_PIECES and kernel.shared <= cute.SHARED_BYTES
        assert kernel.mine * kernel.warps * cute.PIECE >= inputs and kernel.taken * kernel.passes >= kernel.mine


def test_groups_read_their_own_part_of_a_row() -> None:
    x, weight = rows_of(2, 2, 320), weight_of(64, 320)
    found = multiplied(x, weight, "plain", 2)
    assert_op(found, reference.grouped_linear(x, weight))
    with pytest.raises(AssertionError, match="outside"):
        assert_op(found, reference.grouped_linear(x.flip(1), weight))


def test_a_row_has_the_same_bits_whoever_is_beside_it() -> None:
    x, weight = rows_of(8, 320), weight_of(32, 320)
    together = multiplied(x, weight, "a8", 8)
    for row in (0, 5, 7):
        assert_bits(multiplied(x[row : row + 1], weight, "a8", 1)[0], together[row])
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bits(together[0], together[1])


@pytest.mark.parametrize("given", ["a8", "plain", "codes"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_spoils_none_but_itself(value: float, given: str) -> None:
    x, weight = rows_of(8, 320), weight_of(32, 320)
    clean = multiplied(given_as(x, given), weight, given, 8)
    x[2, 70] = value
    spoilt, expected = multiplied(given_as(x, given), weight, given, 8), reference.linear(
        given_as(x, given), weight, quantize_input=given == "a8"
    )  # fmt: skip
    others = [0, 1, 3, 4, 5, 6, 7]
    assert_bits(spoilt[others], clean[others])
    if value != value or given == "plain":
        assert_bits(spoilt[2].isfinite(), expected[2].isfinite())
    # A8 of infinity is its largest code with the largest scale: whether sums of that overflow depends on their order.
    assert not clean[2].eq(spoilt[2]).all()


def test_a_nan_scale_spoils_its_own_outputs() -> None:
    x, weight = rows_of(3, 320), weight_of(96, 320)
    clean = multiplied(x, weight, "a8", 8)
    weight.scales[1, 4] = formats.E8M0_NAN
    spoilt = multiplied(x, weight, "a8", 8)
    assert spoilt[:, 32:64].isnan().all()
    kept = [*range(32), *range(64, 96)]
    assert_bits(spoilt[:, kept], clean[:, kept])


@pytest.mark.parametrize("given", ["a8", "plain", "codes"])
def test_values_of_many_sizes_are_multiplied(given: str) -> None:
    """Groups and blocks far apart in size, zeros, values below A8's floor, scales at both ends."""
    x, weight = rows_of(8, 320), weight_of(32, 320)
    for row, size in enumerate((1e-30, 1e-6, 1.0, 1e4, 1e30, 0.0)):
        x[row] *= size
    x[6, 32:64] *= 2.0**20
    x[7, 64:] *= 2.0**-30
    weight.scales[0, ::3] = 90
    weight.scales[0, 1] = 140
    found = multiplied(given_as(x, given), weight, given, 8)
    expected = reference.linear(given_as(x, given), weight, quantize_input=given == "a8")
    for row in range(8):
        assert_op(found[row], expected[row])
    assert not found[5].any() and found[4].abs().max() > 1e20


def test_every_pair_of_codes_is_multiplied_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()]
    weight = Fp8Weight(
        torch.zeros(16, 64, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.full((1, 2), 127, dtype=torch.uint8)
    )
    x = torch.zeros(8, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for start in range(0, len(finite), 16):
        part = finite[start : start + 16]
        weight.codes.view(torch.uint8)[: len(part), 33] = part.view(torch.uint8)
        for first in range(0, 127, 16):
            x.view(torch.uint8)[:, 33] = torch.arange(first, min(first + 16, 127), 2, dtype=torch.uint8)[:8].repeat(2)[
                :8
            ]
            found = multiplied(QuantizedRows(x, torch.full((8, 2), 127, dtype=torch.uint8)), weight, "codes", 8)
            exact = x.float() @ weight.codes.float().T
            assert_bits(found, exact.to(torch.bfloat16), sign_of_zero=False)

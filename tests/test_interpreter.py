"""The interpreter that kernels are tested in on a CPU converts and multiplies as a GPU does."""

import pytest
import torch

import interpreter

pytestmark = pytest.mark.skipif(not interpreter.INTERPRETED, reason="a GPU runs kernels itself")


def kernels():  # type: ignore[no-untyped-def]
    import interpreted_kernels

    return interpreted_kernels


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_conversions_round_to_nearest_even(source: torch.dtype, target: torch.dtype) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 100
    values = torch.cat((values, torch.arange(-448, 448).float(), torch.tensor([float("nan"), 0.0, -0.0, 2.0**-9])))
    x = values.clamp(-448, 448).to(source)
    out = torch.empty(x.shape, dtype=target)
    kernels().convert[(1,)](x, out, x.numel(), 8192)
    torch.testing.assert_close(out.float(), x.float().to(target).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("most", [1, 3, 10_000])
def test_what_is_kept_between_operations_may_be_forgotten_at_any_of_them(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter.Kept, "MOST", most)
    for dtype in (torch.float32, torch.bfloat16):
        test_products_are_those_of_the_values(dtype)
        test_conversions_round_to_nearest_even(torch.float32, dtype)


def test_blocks_of_one_shape_and_type_have_one_type_and_others_another() -> None:
    import triton.language as tl

    block = tl.block_type(tl.float32, [4, 8])
    assert tl.block_type(tl.float32, (4, tl.constexpr(8))) is block
    others = tl.block_type(tl.float32, [8, 4]), tl.block_type(tl.int32, [4, 8]), tl.float32
    assert all(other is not block and other != block for other in others)
    assert others[0].scalar is tl.float32 and others[0].numel == 32 and others[1].scalar is tl.int32
    # What cannot be a block is refused each time.
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_values(dtype: torch.dtype) -> None:
    a, b = (torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    out = torch.empty(32, 32)
    kernels().product[(1,)](a, b, out, 32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)

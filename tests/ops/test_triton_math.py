"""The device functions that kernels share give the codes of ``quickseek.formats``, bit for bit."""

import pytest
import torch
from torch import Tensor

from quickseek import formats

kernels = pytest.importorskip("triton_math_kernels")

ROWS = 64


def adversarial(group: int) -> Tensor:
    """FP32 [ROWS, 4 * group] of every size, with zeros of both signs, ties, infinities and one group with a NaN."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 4 * group, generator=generator)
    x *= torch.logspace(-30, 30, ROWS).unsqueeze(1)
    x[0] = 0.0
    x[1, ::2] = -0.0
    x[2, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[2, 8:] = 0.0
    x[3, 5], x[4, 7], x[5, group + 2] = torch.inf, -torch.inf, torch.nan
    x[6] *= 1e-12 / x[6].abs().amax()
    return x


def test_a8_codes_and_scales_are_those_of_the_format(device: torch.device) -> None:
    x = adversarial(32)
    codes, scales = torch.empty(x.shape, dtype=torch.uint8), torch.empty(ROWS, 4, dtype=torch.uint8)
    codes, scales = codes.to(device), scales.to(device)
    kernels.a8[(ROWS,)](x.to(device), codes, scales)
    expected, expected_scales = formats.quantize_a8(x)
    assert torch.equal(scales.cpu(), expected_scales)
    nan = expected.float().isnan()
    assert torch.equal(codes.cpu()[~nan], expected.view(torch.uint8)[~nan])
    assert codes.cpu().view(torch.float8_e4m3fn).float()[nan].isnan().all()


@pytest.mark.parametrize(("name", "group"), [("q4i", 32), ("q4k", 16)])
def test_four_bit_codes_and_scales_are_those_of_the_format(name: str, group: int, device: torch.device) -> None:
    x = adversarial(group)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=device)
    scales = torch.empty(ROWS, 4, dtype=torch.uint8, device=device)
    getattr(kernels, name)[(ROWS,)](x.to(device), codes, scales)
    packed, expected_scales = getattr(formats, f"quantize_{name}")(x)
    assert torch.equal(scales.cpu(), expected_scales)
    # A NaN's code has no meaning: its scale says it.
    number = ~x.isnan()
    assert torch.equal(codes.cpu()[number], formats.unpack_nibbles(packed)[number])


def test_every_code_has_its_value(device: torch.device) -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.empty(3, 256, device=device)
    kernels.values[(1,)](bytes_, out)
    expected = (
        formats.e8m0_to_float32(bytes_.cpu()), formats.e4m3_to_float32(bytes_.cpu()),
        formats.e2m1_to_float32(bytes_.cpu() & 15),
    )  # fmt: skip
    for found, wanted in zip(out.cpu(), expected, strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found[~wanted.isnan()].view(torch.int32), wanted[~wanted.isnan()].view(torch.int32))

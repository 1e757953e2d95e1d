"""Chains of Triton kernels: each is launched while the one before still runs (spec/fetch_first.md).

A ``chained`` kernel calls ``begin``, every program of it before it returns: it waits until everything before it is
done and visible and, but for NEXT_FIRST, only then lets the next kernel start. Nothing is ever written before it. What
may be read before it depends on the kernel before:

* whatever that is, not what it writes: a weight that PyTorch makes right before the call may be read too early;
* behind a ``chained`` kernel without NEXT_FIRST, what any earlier one wrote, unless work of another CUDA stream was
  joined in between; but not by way of the L1 cache (``cache_modifier=".cg"``), which may keep older bytes until the
  wait;
* behind a collective, or a kernel that begins with NEXT_FIRST, both of which let the next one start before they have
  waited themselves, weights and tables alone. The kernels of ``ops/moe/cute.py`` and ``ops/linear/cute.py`` wait
  first, as other chained ones do.

NEXT_FIRST pays for a small kernel between a long one and a product, whose weights then come during the long one.

Other kernels and copies neither start early nor let others: the chain is only broken there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quickseek.ops import triton_math as math

LINE = tl.constexpr(128)
"""Bytes that one request brings into the L2 cache."""
MOST_FETCHED = 11 << 19
"""Bytes of a weight up to which asking ahead pays (one H200): with more, the requests delay the loads themselves."""


def fetched_bytes(weight: Tensor) -> int:
    """How much of each row of a weight [O, ...] to ask for ahead: all of it, or nothing of a large one."""
    size = weight.numel() * weight.element_size()
    return size // weight.shape[0] if size <= MOST_FETCHED else 0


class Chained:
    """A kernel whose launches may overlap with the end of what is before them: ``kernel[grid](...)`` as usual."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.__name__, self.__doc__ = kernel, kernel.__name__, kernel.__doc__

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self.kernel[grid], launch_pdl=True)


def chained(kernel: Any) -> Chained:
    """Decorator above ``triton.jit`` for kernels that call ``begin`` before they touch what others write."""
    return Chained(kernel)


@triton.jit
def begin(NEXT_FIRST: tl.constexpr = False):
    """Wait for all earlier kernels, then allow the next one to start; NEXT_FIRST: the other way round."""
    if not math.INTERPRETED:
        if NEXT_FIRST:
            gdc_launch_dependents()
        gdc_wait()
        if not NEXT_FIRST:
            gdc_launch_dependents()


@triton.jit
def fetch(addresses, size, LINES: tl.constexpr):
    """Ask for ``size`` bytes from each of ``addresses`` (int64 [n]) on to be brought into the L2 cache; none if 0.

    LINES: a power of two, n * LINES about the threads of the program. Only for what no kernel of a step writes: it is
    called before ``begin``.
    """
    if not math.INTERPRETED:
        for start in range(0, size, LINES * LINE):
            # Beyond the end the last byte is asked for again: no request may leave the tensor.
            place = tl.minimum(start + tl.arange(0, LINES) * LINE, size - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses[:, None] + place[None, :]],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip

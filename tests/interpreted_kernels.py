"""Small kernels that show what the interpreter does."""

import triton
import triton.language as tl


@triton.jit
def convert(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """target[i] = source[i], in the target's dtype."""
    index = tl.arange(0, block)
    values = tl.load(source + index, mask=index < count)
    tl.store(target + index, values.to(target.dtype.element_ty), mask=index < count)


@triton.jit
def product(a, b, out, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = a @ b of [size, size] matrices, FP32."""
    index = tl.arange(0, size)
    place = index[:, None] * size + index[None, :]
    tl.store(out + place, tl.dot(tl.load(a + place), tl.load(b + place)))

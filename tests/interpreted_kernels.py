"""Small kernels that show what the interpreter does, and what a chain of kernels does."""

import triton
import triton.language as tl

from quickseek.ops.triton_chain import begin, chained


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


@chained
@triton.jit
def add_one(source, target):  # type: ignore[no-untyped-def]
    """target[i] = source[i] + 1 of 1,024 numbers a program, after what is before."""
    begin()
    index = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(target + index, tl.load(source + index) + 1)


@chained
@triton.jit
def read_at_once(source, target):  # type: ignore[no-untyped-def]
    """``add_one``, wrongly before what is before."""
    index = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(target + index, tl.load(source + index) + 1)


@chained
@triton.jit
def read_ahead(source, target):  # type: ignore[no-untyped-def]
    """target[i] = source[0] + 1 for program i, read before what is before, past the L1 cache."""
    value = tl.load(source, cache_modifier=".cg")
    begin()
    tl.store(target + tl.program_id(0), value + 1)


@chained
@triton.jit
def late_answer(target, turns, count):  # type: ignore[no-untyped-def]
    """Let the next kernel start, and write sevens after ``turns`` dependent additions."""
    begin()
    value = tl.load(target)
    for turn in range(turns):
        value = value * 3 + turn
    seven = tl.where(value == 123456789, 8, 7)
    for start in range(0, count, 1024):
        tl.store(target + start + tl.arange(0, 1024), tl.zeros((1024,), tl.int32) + seven)

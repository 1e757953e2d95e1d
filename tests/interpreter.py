"""Triton kernels on a CPU: its interpreter made quicker, and put right in the conversions and products it gets wrong.

Importing this module before any kernel switches the interpreter on where there is no GPU. As shipped, the interpreter
cuts FP32 to BF16 instead of rounding, rounds E4M3 half up, reads its NaN as 480 and multiplies BF16 matrices by
their bits. Arithmetic on BF16 values outside ``tl.dot`` is still wrong there: kernels convert to FP32 first.
"""

import dataclasses
import importlib.util
import os
from typing import Any

import numpy as np
import torch

INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
TORCH_DTYPES |= {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def convert(values: np.ndarray, source: torch.dtype, target: torch.dtype) -> np.ndarray:
    """Bits of values held in their bits, rounded to nearest even; beyond the largest E4M3 they saturate."""
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    flat = torch.from_numpy(np.frombuffer(values.tobytes(), dtype=f"u{source.itemsize}").copy())
    numbers = flat.view(source).to(torch.float32 if source != torch.float64 else torch.float64)
    if target in (torch.float8_e4m3fn, torch.float8_e5m2):
        largest = torch.finfo(target).max
        numbers = numbers.clamp(-largest, largest)
    converted: np.ndarray = numbers.to(target).view(bits[target.itemsize]).numpy().reshape(values.shape)
    return converted


def install() -> None:
    """Put right what the interpreter of this process gets wrong."""
    from triton.runtime import interpreter

    shipped_convert, shipped_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    shipped_call, prepared = interpreter.InterpretedFunction.__call__, set()

    def convert_float(values, source, target, rounding):  # type: ignore[no-untyped-def]
        if source.name in TORCH_DTYPES and target.name in TORCH_DTYPES:
            return convert(values, TORCH_DTYPES[source.name], TORCH_DTYPES[target.name])
        return shipped_convert(values, source, target, rounding)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        def wide(handle):  # type: ignore[no-untyped-def]
            if handle.dtype.scalar.name != "bf16":
                return handle
            data = convert(handle.data, torch.bfloat16, torch.float32).view(np.float32)
            return interpreter.TensorHandle(data, interpreter.tl.float32)

        return shipped_dot(self, wide(a), wide(b), d, input_precision, max_num_imprecise_acc)

    def call(self, *args, **options):  # type: ignore[no-untyped-def]
        # A launch prepares the language for what its kernel calls, and undoes it. To do so again at each call of a
        # device function takes half the time: only the first of each module does, which stays in Triton's own.
        if self.fn.__module__ in prepared:
            return self.rewrite()(*args, **options)
        prepared.add(self.fn.__module__)
        return shipped_call(self, *args, **options)

    interpreter.InterpretedFunction.__call__ = call
    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot


def quicken() -> None:
    """Keep what the interpreter of this process would find out again at every operation, most of its time: the types
    of blocks, what a tensor knows by its type, and the type of a result.
    """
    from triton.runtime import interpreter

    language, semantic = interpreter.tl, interpreter.interpreter_semantic
    # Sums and products of integers are else computed again in 64 bits, for an assertion that only ``debug`` makes.
    assert not semantic.builder.options.debug
    semantic.builder.options = dataclasses.replace(semantic.builder.options, sanitize_overflow=False)

    blocks, shapes, numpy_types, results = Kept(), Kept(), Kept(), Kept()
    shipped_block, shipped_tensor = language.block_type.__init__, language.tensor.__init__
    shipped_numpy_type, shipped_result = interpreter._get_np_dtype, semantic.computation_type_impl
    shipped_broadcast = semantic.broadcast_impl_value

    # What is kept by the identity of a type holds the type, so no other takes its place.
    def new_block(cls, element, shape):  # type: ignore[no-untyped-def]
        key = id(element), *(getattr(size, "value", size) for size in shape)
        return blocks.get(key) or blocks.keep(key, object.__new__(cls))

    def init_block(self, element, shape):  # type: ignore[no-untyped-def]
        if "name" not in vars(self):  # which comes last
            shipped_block(self, element, shape)

    def init_tensor(self, handle, type):  # type: ignore[no-untyped-def]
        known = shapes.get(id(type))
        if known is None:
            shipped_tensor(self, handle, type)
            shapes.keep(id(type), {name: value for name, value in vars(self).items() if name != "handle"})
        else:
            vars(self).update(known, handle=handle)

    def numpy_type(type):  # type: ignore[no-untyped-def]
        return numpy_types.get(type.name) or numpy_types.keep(type.name, shipped_numpy_type(type))

    def result(a, a_is_scalar, b, b_is_scalar, div_or_mod):  # type: ignore[no-untyped-def]
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        return results.get(key) or results.keep(key, shipped_result(a, a_is_scalar, b, b_is_scalar, div_or_mod))

    def broadcast(lhs, rhs):  # type: ignore[no-untyped-def]
        return (lhs, rhs) if lhs.type is rhs.type else shipped_broadcast(lhs, rhs)

    def identical_or(shipped):  # type: ignore[no-untyped-def]
        return lambda self, other: self is other or shipped(self, other)

    language.block_type.__new__, language.block_type.__init__ = new_block, init_block
    language.tensor.__init__ = init_tensor
    interpreter._get_np_dtype, semantic.computation_type_impl = numpy_type, result
    semantic.broadcast_impl_value = broadcast
    for kind in (language.dtype, language.pointer_type, language.block_type):
        kind.__eq__ = identical_or(kind.__eq__)


class Kept(dict[Any, Any]):
    """Values by key, all forgotten when there are many: launches bring types of their own."""

    MOST = 10_000

    def keep(self, key: Any, value: Any) -> Any:
        if len(self) >= self.MOST:
            self.clear()
        self[key] = value
        return value


if INTERPRETED and os.environ["TRITON_INTERPRET"] == "1":
    install()
    quicken()

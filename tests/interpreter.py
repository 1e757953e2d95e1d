"""Triton kernels on a CPU: its interpreter made quicker, and put right in the conversions and products it gets wrong.

Importing this module before any kernel switches the interpreter on where there is no GPU. As shipped, the interpreter
cuts FP32 to BF16 instead of rounding, rounds E4M3 half up, reads its NaN as 480 and multiplies BF16 matrices by
their bits. Arithmetic on BF16 values outside ``tl.dot`` is still wrong there: kernels convert to FP32 first.
"""

import importlib.util
import os

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


if INTERPRETED and os.environ["TRITON_INTERPRET"] == "1":
    install()

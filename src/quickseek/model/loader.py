"""Filling a model's parameters from a checkpoint, one rank's slices at a time (spec/model.md 3.7)."""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from quickseek.errors import CheckpointError
from quickseek.formats import BLOCK
from quickseek.numerics import Numerics
from quickseek.ops.linear import Fp4Weight, Fp8Weight, Weight, dequantize

WHOLE = slice(None)
PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes of unquantised tensors; each converts into the parameter's own."""


class WeightSource(Protocol):
    """Where weights come from: ``checkpoint.reader.Checkpoint``, or ``TensorSource`` for tensors in memory."""

    @property
    def names(self) -> Iterable[str]:
        """Every tensor there is."""

    def read(self, name: str, *slices: slice) -> Tensor:
        """The stored tensor, or a slice of it, as stored; E8M0 scales and packed FP4 as uint8."""

    def mapped(self, name: str) -> Tensor:
        """The whole tensor without reading it."""


class TensorSource:
    """Weights that are already in memory: stored forms, or logical values without scales."""

    def __init__(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        self.tensors = dict(tensors)

    @property
    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def read(self, name: str, *slices: slice) -> Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name} is missing")
        tensor = self.tensors[name]
        if tensor.dtype in (torch.int8, torch.float8_e8m0fnu):
            tensor = tensor.view(torch.uint8)
        return tensor[slices] if slices else tensor

    def mapped(self, name: str) -> Tensor:
        return self.read(name)


class WeightLoader:
    """Copies tensors of a source into parameters, packed or dequantised as the numerics ask, and notes their names."""

    def __init__(self, source: WeightSource, numerics: Numerics, prefix: str = "") -> None:
        self.source, self.numerics, self.prefix = source, numerics, prefix
        self.available = {name[len(prefix) :] for name in source.names if name.startswith(prefix)}
        self.loaded: set[str] = set()

    def read(self, name: str, *slices: slice) -> Tensor:
        """A slice of a stored tensor, noted as loaded."""
        name = self.prefix + name
        self.loaded.add(name)
        return self.source.read(name, *slices)

    def tensor(self, target: Tensor, name: str, *slices: slice) -> None:
        """Fill ``target`` with a tensor that is stored unquantised."""
        _fill(target, _expect(self.read(name, *slices), name, *PLAIN_DTYPES), name)

    def linear(
        self,
        target: nn.Module,
        name: str,
        rows: slice = WHOLE,
        columns: slice = WHOLE,
        at: int = 0,
        size: int | None = None,
    ) -> None:
        """Fill ``size`` output rows (None: all) from ``at`` on of a ``Linear`` with a part of the weight ``name``."""
        weight, scale = target.weight, target.scale
        assert isinstance(weight, Tensor)
        value = self._fp8(name, rows, columns)
        stop = weight.shape[0] if size is None else at + size
        part = weight[at:stop]
        if isinstance(scale, Tensor):
            if not isinstance(value, Fp8Weight):
                raise CheckpointError(
                    f"tensor {name}.weight is not FP8 with scales: packed weights need the stored form"
                )
            _fill(part, value.codes, f"{name}.weight")
            _fill(scale[at // BLOCK : -(-stop // BLOCK)], value.scales, f"{name}.scale")
        else:
            _fill(part, _dequantised(value, weight.dtype, BLOCK, name), f"{name}.weight")

    def _fp8(self, name: str, rows: slice, columns: slice) -> Weight:
        codes = self.read(f"{name}.weight", rows, columns)
        if f"{name}.scale" not in self.available:
            return _expect(codes, f"{name}.weight", *PLAIN_DTYPES)
        scales = self.read(f"{name}.scale", _blocks(rows), _blocks(columns))
        return Fp8Weight(
            _expect(codes, f"{name}.weight", torch.float8_e4m3fn), _expect(scales, f"{name}.scale", torch.uint8)
        )

    def expert(
        self, target: nn.Module, matrix: str, number: int, name: str, rows: slice, columns: slice, at: int
    ) -> None:
        """Fill rows ``at`` and on of expert ``number`` of the stacked weight ``matrix`` ("w13" or "w2")."""
        weight, scale = getattr(target, matrix), getattr(target, f"{matrix}_scale")
        size = weight.shape[1] // 2 if matrix == "w13" else weight.shape[1]
        part = slice(at, at + size)
        if f"{name}.scale" not in self.available:
            if scale is not None:
                raise CheckpointError(
                    f"tensor {name}.weight is not FP4 with scales: packed weights need the stored form"
                )
            self.tensor(weight[number, part], f"{name}.weight", rows, columns)
            return
        codes = _expect(self.read(f"{name}.weight", rows, _halves(columns)), f"{name}.weight", torch.uint8)
        scales = _expect(self.read(f"{name}.scale", rows, _blocks(columns)), f"{name}.scale", torch.uint8)
        if scale is None:
            value = _dequantised(Fp4Weight(codes, scales), weight.dtype, 1, name)
            _fill(weight[number, part], value, f"{name}.weight")
        else:
            _fill(weight[number, part], codes, f"{name}.weight")
            _fill(scale[number, part], scales, f"{name}.scale")

    def table(self, name: str, rows: int, width: int) -> Weight:
        """An Engram table [rows, width], left where it is (spec 3.5)."""
        packed = f"{name}.scale" in self.available
        codes = self._mapped(f"{name}.weight", (rows, width))
        if not packed:
            return _expect(codes, f"{name}.weight", *PLAIN_DTYPES).to(self.numerics.dtype)
        scales = self._mapped(f"{name}.scale", (rows, width // BLOCK))
        return Fp8Weight(
            _expect(codes, f"{name}.weight", torch.float8_e4m3fn), _expect(scales, f"{name}.scale", torch.uint8)
        )

    def _mapped(self, name: str, shape: tuple[int, int]) -> Tensor:
        self.loaded.add(self.prefix + name)
        tensor = self.source.mapped(self.prefix + name)
        _expect_shape(tensor, torch.Size(shape), name)
        return tensor


def _blocks(part: slice) -> slice:
    """The scale blocks of a range of elements that begins and ends at multiples of 32."""
    return WHOLE if part == WHOLE else slice(part.start // BLOCK, part.stop // BLOCK)


def _halves(part: slice) -> slice:
    """The bytes of a range of packed FP4 elements."""
    return WHOLE if part == WHOLE else slice(part.start // 2, part.stop // 2)


def _dequantised(value: Weight, dtype: torch.dtype, block_rows: int, name: str) -> Tensor:
    """Values of a weight whose scales cover ``block_rows`` rows and 32 columns each."""
    if not isinstance(value, Tensor):
        blocks = (-(-value.shape[0] // block_rows), -(-value.shape[1] // BLOCK))
        _expect_shape(value.scales, torch.Size(blocks), f"{name}.scale")
    return dequantize(value, dtype)


def _expect(value: Tensor, name: str, *dtypes: torch.dtype) -> Tensor:
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise CheckpointError(f"tensor {name} is stored as {value.dtype}: expected {expected}")
    return value


def _expect_shape(value: Tensor, shape: torch.Size, name: str) -> None:
    if value.shape != shape:
        raise CheckpointError(f"tensor {name} has shape {list(value.shape)}: expected {list(shape)}")


def _fill(target: Tensor, value: Tensor, name: str) -> None:
    _expect_shape(value, target.shape, name)
    with torch.no_grad():
        target.copy_(value)

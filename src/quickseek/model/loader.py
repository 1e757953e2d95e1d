"""Filling a model's parameters from a checkpoint, one rank's slices at a time (spec/model.md 3.7)."""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from quickseek.errors import CheckpointError
from quickseek.formats import BLOCK
from quickseek.numerics import Numerics
from quickseek.ops.linear import Fp4Weight, Fp8Weight, Weight
from quickseek.ops.linear.reference import dequantize

WHOLE = slice(None)


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
        value = self.read(name, *slices)
        _fill(target, value, name)

    def linear(self, target: nn.Module, name: str, rows: slice = WHOLE, columns: slice = WHOLE, at: int = 0) -> None:
        """Fill output rows ``at`` and on of a ``Linear`` with rows and columns of the weight called ``name``."""
        weight, scale = target.weight, target.scale
        assert isinstance(weight, Tensor)
        value = self._fp8(name, rows, columns)
        part = weight[at : at + value.shape[0]]
        if isinstance(scale, Tensor):
            if not isinstance(value, Fp8Weight):
                raise CheckpointError(
                    f"tensor {name}.weight is not FP8 with scales: packed weights need the stored form"
                )
            _fill(part, value.codes, f"{name}.weight")
            _fill(scale[at // BLOCK : -(-(at + value.shape[0]) // BLOCK)], value.scales, f"{name}.scale")
        else:
            _fill(part, dequantize(value, weight.dtype), f"{name}.weight")

    def _fp8(self, name: str, rows: slice, columns: slice) -> Weight:
        codes = self.read(f"{name}.weight", rows, columns)
        if f"{name}.scale" not in self.available:
            return codes
        return Fp8Weight(codes, self.read(f"{name}.scale", _blocks(rows), _blocks(columns)))

    def expert(
        self, target: nn.Module, matrix: str, number: int, name: str, rows: slice, columns: slice, at: int
    ) -> None:
        """Fill rows ``at`` and on of expert ``number`` of the stacked weight ``matrix`` ("w13" or "w2")."""
        weight, scale = getattr(target, matrix), getattr(target, f"{matrix}_scale")
        packed = f"{name}.scale" in self.available
        codes = self.read(f"{name}.weight", rows, _halves(columns) if packed else columns)
        if not packed:
            if scale is not None:
                raise CheckpointError(
                    f"tensor {name}.weight is not FP4 with scales: packed weights need the stored form"
                )
            _fill(weight[number, at : at + codes.shape[0]], codes, f"{name}.weight")
            return
        scales = self.read(f"{name}.scale", rows, _blocks(columns))
        part = slice(at, at + codes.shape[0])
        if scale is None:
            _fill(weight[number, part], dequantize(Fp4Weight(codes, scales), weight.dtype), f"{name}.weight")
        else:
            _fill(weight[number, part], codes, f"{name}.weight")
            _fill(scale[number, part], scales, f"{name}.scale")

    def table(self, name: str) -> Weight:
        """An Engram table, left where it is (spec 3.5)."""
        names = [self.prefix + f"{name}.weight"]
        if f"{name}.scale" in self.available:
            names.append(self.prefix + f"{name}.scale")
        self.loaded.update(names)
        parts = [self.source.mapped(part) for part in names]
        return Fp8Weight(*parts) if len(parts) == 2 else parts[0].to(self.numerics.dtype)


def _blocks(part: slice) -> slice:
    """The scale blocks of a range of elements that begins and ends at multiples of 32."""
    return WHOLE if part == WHOLE else slice(part.start // BLOCK, part.stop // BLOCK)


def _halves(part: slice) -> slice:
    """The bytes of a range of packed FP4 elements."""
    return WHOLE if part == WHOLE else slice(part.start // 2, part.stop // 2)


def _fill(target: Tensor, value: Tensor, name: str) -> None:
    if target.shape != value.shape:
        raise CheckpointError(f"tensor {name} has shape {list(value.shape)}: expected {list(target.shape)}")
    if value.dtype in (torch.uint8, torch.float8_e4m3fn) and value.dtype != target.dtype:
        raise CheckpointError(f"tensor {name} is stored as {value.dtype}: expected {target.dtype}")
    with torch.no_grad():
        target.copy_(value)

"""Random tests of kernels behind their doors: drawn numbers, layouts in poisoned memory, and both forms of a call.

A door either gives what the reference gives, whatever the strides of its arguments, or refuses them by a ValueError;
it reads and writes nothing beside them.
"""

import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor

import interpreter
from compare import assert_bits, assert_op
from op_cases import poisoned_outputs
from quickseek.ops import forms
from quickseek.ops.rows import StepRows

FEW = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    # Tensors shrink too slowly to wait for.
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
by_interpreter = pytest.mark.skipif(not interpreter.INTERPRETED, reason="each example would be compiled for a GPU")

LAYOUTS = ("between", "columns", "spread", "rows", "turned")
"""Contiguous between other memory; columns of a wider tensor; every other column; every other row; transposed."""
SPECIAL = (0.0, -0.0, torch.nan, torch.inf, -torch.inf, 2.0**-120, -(2.0**-30), 3e38, -448.0)
FINITE = (0.0, -0.0, 2.0**-120, -(2.0**-30), 1000.0, -448.0)


# ---------------------------------------------------------------------------------------------- numbers


@st.composite
def numbers(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    special: tuple[float, ...] = FINITE,
    largest: int = 6,
) -> Tensor:
    """Normal numbers times 2^-largest to 2^largest, some of whose elements, rows or columns are ``special``."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(*shape, generator=generator, dtype=torch.float64) * 2.0 ** draw(st.integers(-largest, largest))
    if draw(st.booleans()):
        x = x.round()  # equal numbers
    for value in draw(st.lists(st.sampled_from(special), max_size=3)) if special and x.numel() else ():
        place = [draw(st.one_of(st.integers(0, size - 1), st.just(slice(None)))) for size in shape]
        if not torch.tensor(value).isfinite():
            place = [draw(st.integers(0, size - 1)) for size in shape]
        x[tuple(place)] = value
    return x.to(dtype)


def indices(shape: tuple[int, ...], low: int, high: int) -> st.SearchStrategy[Tensor]:
    """int64 in low..high."""
    count = int(torch.tensor(shape).prod())
    return st.lists(st.integers(low, high), min_size=count, max_size=count).map(
        lambda values: torch.tensor(values, dtype=torch.int64).view(shape)
    )


# ---------------------------------------------------------------------------------------------- layouts


@dataclass
class Region:
    """A tensor inside poisoned memory."""

    base: Tensor
    view: Tensor
    before: Tensor
    inside: Tensor

    @classmethod
    def place(cls, x: Tensor, layout: str) -> "Region":
        code = torch.uint8 if x.dtype == torch.float8_e4m3fn else x.dtype
        turned = layout == "turned" and x.dim() > 1
        values = x.view(code).transpose(0, -1) if turned else x.view(code)
        cut: tuple[slice, ...] = (slice(48, 48 + x.numel()),)
        if layout == "between" or x.dim() == 0:
            size = [x.numel() + 80]
            values = values.reshape(-1)
        else:
            size, cuts = list(values.shape), [slice(None)] * values.dim()
            axis = 0 if layout == "rows" else -1
            step = 1 if layout in ("columns", "turned") else 2
            size[axis] = values.shape[axis] * step + 8
            cuts[axis] = slice(3, 3 + values.shape[axis] * step, step)
            cut = tuple(cuts)
        base = torch.full(size, _poison(code), dtype=code)
        inside = torch.zeros(size, dtype=torch.bool)
        base[cut], inside[cut] = values, True
        view = base[cut].view(x.shape) if layout == "between" or x.dim() == 0 else base[cut]
        view = (view.transpose(0, -1) if turned else view).view(x.dtype)
        return cls(base, view, base.clone(), inside)

    def assert_untouched(self, everywhere: bool) -> None:
        outside = ~self.inside | everywhere
        assert_bits(self.base[outside], self.before[outside], "memory that is not to be written")


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return torch.nan
    return {torch.bool: True, torch.uint8: 255}.get(dtype, 3)


class Arena:
    """Every tensor of a call in memory of its own, number ``odd`` of them in ``layout``, the others contiguous."""

    def __init__(self, odd: int, layout: str) -> None:
        self.odd, self.layout, self.regions = odd, layout, list[Region]()

    def placed(self, value: Any) -> Any:
        """``value`` with all its tensors placed: tensors, tuples, lists, records of them."""
        return _mapped(value, self._place)

    def _place(self, x: Tensor, ordinary: bool) -> Tensor:
        odd = len(self.regions) == self.odd and not ordinary
        self.odd += ordinary and len(self.regions) <= self.odd
        self.regions.append(Region.place(x, self.layout if odd else "between"))
        return self.regions[-1].view

    @property
    def ordinary(self) -> bool:
        """Whether every tensor is contiguous."""
        return all(region.view.is_contiguous() for region in self.regions)


def _mapped(value: Any, of: Callable[[Tensor, bool], Tensor], ordinary: bool = False) -> Any:
    if isinstance(value, Tensor):
        return of(value, ordinary)
    if isinstance(value, dict):
        return {name: _mapped(one, of) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(one, of) for one in value))
    if isinstance(value, tuple | list):
        return type(value)(_mapped(one, of) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        # Those of a step are always contiguous.
        ordinary = isinstance(value, StepRows)
        parts = {field.name: _mapped(getattr(value, field.name), of, ordinary) for field in fields(value)}
        return replace(value, **parts)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in tuples, lists and records, in order, but those of a step, which are always contiguous."""
    found: list[Tensor] = []

    def take(x: Tensor, ordinary: bool) -> Tensor:
        if not ordinary:
            found.append(x)
        return x

    _mapped(value, take)
    return found


layouts = st.tuples(st.integers(0, 12), st.sampled_from(LAYOUTS))
"""Which argument lies in an unusual way, and how."""


# ---------------------------------------------------------------------------------------------- both forms


@contextmanager
def through_kernels() -> Iterator[set[str]]:
    """Within, doors compute on CPU tensors by their kernels (in the interpreter) where they have some.

    Gives the names of the operations whose kernels were asked for.
    """
    shipped, asked = forms._module, set[str]()

    def kernels(door: str, on_cuda: bool) -> Any:
        if importlib.util.find_spec(f"{door}.triton") is None:
            return shipped(door, on_cuda)
        asked.add(door.rpartition(".")[2])
        return importlib.import_module(f"{door}.triton")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "_module", kernels)
        yield asked


@dataclass
class Both:
    """Results of a call by kernels and by references, and its arguments afterwards."""

    found: Any
    expected: Any
    arguments: tuple[Any, ...]
    expected_arguments: tuple[Any, ...]


def both(call: Callable[..., Any], arguments: tuple[Any, ...], layout: tuple[int, str], writes: int = 0) -> Both | None:
    """``call`` of the arguments in both forms; None if kernels refused an unusual layout.

    The first ``writes`` arguments are written to. Nothing else may change, nor may memory beside any argument.
    """
    expected_arguments = copy.deepcopy(arguments)
    expected = call(*expected_arguments)
    arena = Arena(*layout)
    placed = tuple(arena.placed(one) for one in arguments[:writes])
    written = len(arena.regions)
    placed += tuple(arena.placed(one) for one in arguments[writes:])
    found = None
    with through_kernels(), poisoned_outputs():
        try:
            found = call(*placed)
        except ValueError:
            assert not arena.ordinary, "kernels refused what the reference takes"
            return None
    for number, region in enumerate(arena.regions):
        region.assert_untouched(number >= written)
    return Both(found, expected, placed, expected_arguments)


# ---------------------------------------------------------------------------------------------- comparisons


def assert_numbers(actual: Tensor, expected: Tensor, what: str = "output", *, terms: Tensor | None = None) -> None:
    """*op* of each row [..., C] by itself, with NaN and infinity where the reference has them."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (
        f"{what} is {actual.dtype} {tuple(actual.shape)}: expected {expected.dtype} {tuple(expected.shape)}"
    )
    if not expected.numel():
        return
    rows = [x.reshape(-1, x.shape[-1]) for x in (actual, expected)]
    limits = torch.full_like(rows[1], torch.inf) if terms is None else terms.reshape(rows[1].shape)
    for number, (ours, theirs, limit) in enumerate(zip(*rows, limits, strict=True)):
        finite = theirs.isfinite()
        assert torch.equal(ours.isnan(), theirs.isnan()), f"{what}: row {number} has NaN in other places"
        infinite = theirs.isinf()
        assert torch.equal(ours[infinite], theirs[infinite]), f"{what}: row {number} has other infinities"
        if finite.any():
            bound = None if terms is None else limit[finite]
            assert_op(ours[finite], theirs[finite], f"{what}, row {number}", terms=bound)


def assert_same(actual: Tensor, expected: Tensor, what: str = "output") -> None:
    """Same bits, but any NaN for a NaN."""
    if expected.dtype.is_floating_point:
        nan = [x.float().isnan() for x in (actual, expected)]
        assert torch.equal(*nan), f"{what}: NaN in other places"
        actual, expected = actual[~nan[1]], expected[~nan[1]]
    assert_bits(actual, expected, what)

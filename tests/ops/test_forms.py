"""The two forms of an operation can stand for each other."""

import importlib
import inspect
from pathlib import Path

import pytest

import quickseek.ops
from quickseek.ops import forms

FOLDER = Path(quickseek.ops.__file__).parent
WITH_KERNELS = sorted(path.parent.name for path in FOLDER.glob("*/triton.py"))


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_what_a_door_asks_of_the_reference_is_there_in_kernels_with_the_same_arguments(name: str) -> None:
    door = (FOLDER / name / "__init__.py").read_text(encoding="utf-8")
    reference = importlib.import_module(f"quickseek.ops.{name}.reference")
    kernels = importlib.import_module(f"quickseek.ops.{name}.triton")
    asked = [word for word, value in vars(reference).items() if inspect.isfunction(value) and f").{word}(" in door]
    for word in asked:
        ours, theirs = (list(inspect.signature(getattr(form, word)).parameters) for form in (kernels, reference))
        assert ours == theirs, f"{name}.{word}"


def test_a_cpu_gets_the_reference() -> None:
    import torch

    from quickseek.ops.mhc import reference

    assert forms.form("quickseek.ops.mhc", torch.zeros(1)) is reference

"""What kernels read before they wait has been written by then: the order in which a model launches them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from drawn_memory import through_kernels
from quickseek.decode.streams import SideStream
from quickseek.ops import triton_chain

PRODUCTS = {"_few", "_held"}
"""Kernels of linear operations of up to 16 rows; their fifth argument is the result."""
READS_EARLY = {"down", "_attend early", "_attend of others"}
"""Kernels that read before their wait what other kernels of a step have written."""
LETS_GO_FIRST = {"_add_up"}
"""Kernels that let the next one start before they have waited."""


class Computations(TorchDispatchMode):
    """Notes the operations of PyTorch that launch something, beside kernels."""

    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self.launched, self.inside = launched, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if not self.inside and not func.is_view and "empty" not in name and "detach" not in name:
            self.launched.append(name)
        return out


@contextmanager
def launches() -> Iterator[list[str]]:
    """Names of what is launched within, in order, and "join" where a CUDA stream is joined.

    ``_attend`` that reads early is "_attend early", and "_attend of others" if its queries are not what the latest
    product gave.
    """
    launched: list[str] = []
    mode = Computations(launched)
    begin: Callable[..., Any] = triton_chain.Chained.__getitem__
    shipped = SideStream.join
    products = [0]

    def join(self: SideStream) -> None:
        if self.open:
            launched.append("join")
        shipped(self)

    def noted(self: triton_chain.Chained, grid: Any) -> Callable[..., Any]:
        launch = begin(self, grid)

        def call(*arguments: Any, **options: Any) -> Any:
            name = self.__name__
            if name in PRODUCTS:
                products.append(arguments[4].data_ptr())
            if options.get("queries_last"):
                name += " early" if arguments[0].data_ptr() == products[-1] else " of others"
            launched.append(name)
            mode.inside = True
            try:
                return launch(*arguments, **options)
            finally:
                mode.inside = False

        return call

    with pytest.MonkeyPatch.context() as patch, through_kernels(), mode:
        patch.setattr(triton_chain.Chained, "__getitem__", noted)
        patch.setattr(SideStream, "join", join)
        yield launched


def breaches(launched: list[str]) -> list[str]:
    """Neighbours of which the second may read before its wait what is not written by then."""
    return [
        f"{one}, {other}"
        for one, other in pairwise(launched)
        if (other == "_attend early" and one not in PRODUCTS)
        or other == "_attend of others"
        or (one in LETS_GO_FIRST and other in READS_EARLY)
    ]

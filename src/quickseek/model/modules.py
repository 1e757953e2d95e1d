"""Building blocks that hold weights: linear layers as stored, norms, and how a rank's shard is cut."""

import torch
from torch import Tensor, nn

from quickseek.errors import ConfigError
from quickseek.formats import BLOCK
from quickseek.numerics import Numerics
from quickseek.ops import linear as linear_op
from quickseek.ops import norm_rope
from quickseek.ops.linear import Fp8Weight, Weight
from quickseek.parallel.world import World


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter without gradient; training turns gradients on for float ones."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def shard(name: str, size: int, world: World, multiple: int = 1) -> slice:
    """This rank's part of ``size`` things; ConfigError unless every rank gets a whole multiple of ``multiple``."""
    if size % (world.size * multiple):
        raise ConfigError(
            "tensor_parallel_size", world.size, f"a degree that divides {name} = {size} into multiples of {multiple}"
        )
    part = size // world.size
    return slice(world.rank * part, (world.rank + 1) * part)


class Linear(nn.Module):
    """A weight [outputs, inputs]: packed FP8 if ``packed`` and the numerics keep weights packed, else plain values."""

    def __init__(self, outputs: int, inputs: int, numerics: Numerics, *, packed: bool = True) -> None:
        super().__init__()
        self.scale: nn.Parameter | None = None
        if packed and numerics.packed_weights:
            self.weight = parameter(outputs, inputs, dtype=torch.float8_e4m3fn)
            self.scale = parameter(-(-outputs // BLOCK), -(-inputs // BLOCK), dtype=torch.uint8)
        else:
            self.weight = parameter(outputs, inputs, dtype=numerics.dtype)

    @property
    def value(self) -> Weight:
        """The weight as ops take it."""
        return self.weight if self.scale is None else Fp8Weight(self.weight, self.scale)

    def rows(self, part: slice) -> Weight:
        """Some of the output rows, which begin and end at multiples of 32."""
        if self.scale is None:
            return self.weight[part]
        return Fp8Weight(self.weight[part], self.scale[part.start // BLOCK : part.stop // BLOCK])

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] to [..., outputs] in x's dtype."""
        return linear_op.linear(x, self.value)


class RMSNorm(nn.Module):
    """RMSNorm with a weight [width] (spec/model.md 3.6)."""

    def __init__(self, width: int, eps: float, numerics: Numerics) -> None:
        super().__init__()
        self.weight = parameter(width, dtype=numerics.dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] normalised, in its dtype."""
        return norm_rope.rms_norm(x, self.weight, self.eps)

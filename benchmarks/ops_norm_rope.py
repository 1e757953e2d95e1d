"""Cases of ``norm_rope``: a rank of TP 4 in the released model. Small tensors: what counts is the launch."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from op_case import ROWS, Build, Case
from quickseek.ops import norm_rope
from quickseek.ops.norm_rope import Rotation

HIDDEN, Q_RANK, HEAD, ROPE, HEADS, INDEX_HEADS, INDEX_HEAD = 5120, 1280, 512, 64, 16, 32, 128
EPS = 1e-20


def bf16(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).to(torch.bfloat16)


def turn(rows: int, device: torch.device) -> Rotation:
    frequencies = norm_rope.rotary_frequencies(ROPE, 1e4).to(device)
    return norm_rope.rotation(torch.arange(rows, device=device) + 900_000, frequencies)


def each(make: Callable[[torch.device], Callable[[], object]]) -> Build:
    """Copies of what a call reads: ``make`` builds one with its call."""
    return lambda device, copies: [make(device) for _ in range(copies)]


def norm(rows: int, width: int, *, alternative: bool) -> Build:
    def make(device: torch.device) -> Callable[[], object]:
        x, weight = bf16(rows, width, device=device), bf16(width, device=device)
        if alternative:
            return lambda: F.rms_norm(x, (width,), weight, EPS)
        return lambda: norm_rope.rms_norm(x, weight, EPS)

    return each(make)


def latents(rows: int) -> Build:
    def make(device: torch.device) -> Callable[[], object]:
        x, angle = bf16(rows, Q_RANK + HEAD, device=device), turn(rows, device)
        weights = bf16(Q_RANK, device=device), bf16(HEAD, device=device)
        return lambda: norm_rope.normalised_latents(x, *weights, EPS, angle, quantise=True)

    return each(make)


def latents_by_torch(rows: int) -> Build:
    """Both norms and the rotation; PyTorch has no A8."""

    def make(device: torch.device) -> Callable[[], object]:
        x, angle = bf16(rows, Q_RANK + HEAD, device=device), turn(rows, device)
        weights = bf16(Q_RANK, device=device), bf16(HEAD, device=device)

        def call() -> object:
            latent, kv = x.split((Q_RANK, HEAD), 1)
            return F.rms_norm(latent, (Q_RANK,), weights[0], EPS), rotate(
                F.rms_norm(kv, (HEAD,), weights[1], EPS), angle
            )

        return call

    return each(make)


def rotate(x: Tensor, angle: Rotation) -> Tensor:
    """The last channels times complex numbers, in place."""
    tail = torch.view_as_complex(x[..., -ROPE:].float().unflatten(-1, (-1, 2)))
    turned = tail * torch.complex(angle.cos, angle.sin).view(x.shape[0], *[1] * (x.dim() - 2), -1)
    x[..., -ROPE:] = torch.view_as_real(turned).flatten(-2)
    return x


def rope(rows: int, heads: int, head: int, *, alternative: bool) -> Build:
    def make(device: torch.device) -> Callable[[], object]:
        x, angle = bf16(rows, heads, head, device=device), turn(rows, device)
        if alternative:
            return lambda: rotate(x, angle)
        return lambda: norm_rope.apply_rope(x, angle, overwrite=True)

    return each(make)


def angles(rows: int, *, alternative: bool) -> Build:
    def make(device: torch.device) -> Callable[[], object]:
        positions = torch.arange(rows, device=device) + 900_000
        frequencies = norm_rope.rotary_frequencies(ROPE, 1e4).to(device)

        def by_torch() -> object:
            product = positions.float().unsqueeze(1) * frequencies
            return product.cos(), product.sin()

        return by_torch if alternative else lambda: norm_rope.rotation(positions, frequencies)

    return each(make)


def cases(counts: Sequence[int] = ROWS) -> list[Case]:
    """Norms of a layer, latents, rotations of queries (attention's and the indexer's), and the angles of a step."""
    found = []
    for rows in counts:
        for name, width in (("hidden", HIDDEN), ("index key", INDEX_HEAD)):
            found.append(Case(
                name=f"rms_norm {name}", rows=rows, bytes=2 * width * (2 * rows + 1), alternative_name="F.rms_norm",
                build=norm(rows, width, alternative=False), alternative=norm(rows, width, alternative=True),
            ))  # fmt: skip
        found.append(Case(
            name="latents", rows=rows, bytes=2 * (Q_RANK + HEAD) * (2 * rows + 1) + 4 * ROPE * rows,
            build=latents(rows), alternative=latents_by_torch(rows), alternative_name="norms and rotation, no A8",
        ))  # fmt: skip
        for name, heads, head in (("queries", HEADS, HEAD), ("index queries", INDEX_HEADS, INDEX_HEAD)):
            found.append(Case(
                name=f"rotation of {name}", rows=rows, bytes=4 * rows * heads * ROPE + 4 * ROPE * rows,
                build=rope(rows, heads, head, alternative=False), alternative_name="complex product",
                alternative=rope(rows, heads, head, alternative=True),
            ))  # fmt: skip
        found.append(Case(
            name="angles of a step", rows=rows, bytes=rows * (8 + 4 * ROPE) + 2 * ROPE,
            build=angles(rows, alternative=False), alternative=angles(rows, alternative=True),
            alternative_name="product, cos, sin",
        ))  # fmt: skip
    return found

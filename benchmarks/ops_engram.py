"""Engram in the released shape: table rows (device memory), and the gated injection of one layer."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from op_case import ROWS, Calls, Case
from quickseek.ops import engram
from quickseek.ops.engram import reference
from quickseek.ops.linear import Fp8Weight

N, HIDDEN, WIDTH, COLUMNS = 4, 5120, 256, 24
TABLE_ROWS = 1 << 18


def _rows(rows: int, call: Callable[..., object]) -> Callable[[torch.device, int], Calls]:
    def build(device: torch.device, copies: int) -> Calls:
        codes = torch.zeros(TABLE_ROWS, WIDTH, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        scales = torch.full((TABLE_ROWS, WIDTH // 32), 127, dtype=torch.uint8, device=device)
        table = Fp8Weight(codes, scales)
        numbers = [torch.randint(0, TABLE_ROWS, (rows, COLUMNS), device=device) for _ in range(copies)]
        return [lambda one=one: call(table, one, torch.bfloat16) for one in numbers]  # type: ignore[misc]

    return build


def _inject(rows: int, call: Callable[..., object]) -> Callable[[torch.device, int], Calls]:
    def build(device: torch.device, copies: int) -> Calls:
        def number(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(torch.bfloat16)

        dead = torch.zeros(rows, dtype=torch.bool, device=device)
        inputs = [
            (number(rows, N, HIDDEN), number(rows, (N + 1) * HIDDEN), number(N, HIDDEN), number(N, HIDDEN))
            for _ in range(copies)
        ]
        return [lambda one=one: call(*one, dead, 1e-20) for one in inputs]  # type: ignore[misc]

    return build


def cases(counts: Sequence[int] = ROWS) -> list[Case]:
    found = []
    for rows in counts:
        found += [
            Case(
                name="engram rows",
                rows=rows,
                bytes=rows * COLUMNS * (WIDTH + WIDTH // 32 + 8 + 2 * WIDTH),
                build=_rows(rows, engram.gather_rows),
                alternative=_rows(rows, reference.gather_rows),
                alternative_name="indexing and elementwise kernels",
            ),
            Case(
                name="engram injection",
                rows=rows,
                bytes=2 * HIDDEN * (2 * N + rows * (3 * N + 1)),
                build=_inject(rows, engram.inject),
                alternative=_inject(rows, reference.inject),
                alternative_name="elementwise kernels and sums",
            ),
        ]
    return found

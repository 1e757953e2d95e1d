"""``StepRows``: which request and position each row of a step belongs to."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepRows:
    """The rows of one step: each request's rows are consecutive, at consecutive positions.

    ``positions``: int64 [T], absolute. ``requests``: int64 [T], batch index of each row. ``first_rows``: int64 [B],
    the first row of each request. ``starts``: int64 [B], the position of that row, which is also how many
    positions the request's caches held before the step. ``ends``: int64 [B], one past its last position.
    ``max_rows`` and ``max_length`` bound the rows of a request and its positions, on the host. Tensors without gaps:
    kernels read them so, and others are a ValueError.
    """

    positions: Tensor
    requests: Tensor
    first_rows: Tensor
    starts: Tensor
    ends: Tensor
    max_rows: int
    max_length: int

    def __post_init__(self) -> None:
        for name in ("positions", "requests", "first_rows", "starts", "ends"):
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"{name} has strides {getattr(self, name).stride()}: expected values without gaps")

    @classmethod
    def build(cls, starts: list[int], counts: list[int], device: torch.device | str = "cpu") -> "StepRows":
        """Rows of a batch in which request i runs ``counts[i]`` rows from position ``starts[i]``."""
        if not counts or min(counts) < 1:
            raise ValueError(f"counts = {counts}: expected at least one row for each request")
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        first_rows = [0, *itertools.accumulate(counts)][:-1]
        positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        return cls(
            positions=positions.to(device),
            requests=torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device),
            first_rows=torch.tensor(first_rows, device=device),
            starts=torch.tensor(starts, device=device),
            ends=torch.tensor(ends, device=device),
            max_rows=max(counts),
            max_length=max(ends),
        )

    @classmethod
    def uniform(cls, starts: Tensor, count: int, max_length: int) -> "StepRows":
        """``count`` rows of each request from positions ``starts`` int64 [B], known to the device alone.

        ``max_length`` is the host's bound on the positions that the rows reach.
        """
        requests = torch.arange(starts.shape[0], device=starts.device)
        steps = torch.arange(count, device=starts.device)
        return cls(
            positions=(starts.unsqueeze(1) + steps).flatten(),
            # Not repeat_interleave: it may wait for the device to learn how long its result is.
            requests=requests.unsqueeze(1).expand(-1, count).contiguous().flatten(),
            first_rows=requests * count,
            starts=starts.contiguous(),
            ends=starts.contiguous() + count,
            max_rows=count,
            max_length=max_length,
        )

    def select(self, kept: Tensor, starts: Tensor) -> "StepRows":
        """The step of rows ``kept`` (int64, ascending) only, whose first position in request i is ``starts[i]``."""
        dropped = torch.cumsum(starts - self.starts, 0)
        before = torch.cat((dropped.new_zeros(1), dropped[:-1]))
        return StepRows(
            positions=self.positions[kept],
            requests=self.requests[kept],
            first_rows=self.first_rows - before,
            starts=starts,
            ends=self.ends,
            max_rows=self.max_rows,
            max_length=self.max_length,
        )

"""The rows of a prefill step, as the device needs them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from quickseek.engine.staging import Staging
from quickseek.engine.tick import PrefillChunk
from quickseek.ops.rows import StepRows


@dataclass(frozen=True)
class PrefillBatch:
    """Chunks of B prompts, T rows in all; int64 on the device.

    ``slots`` [B], ``ids`` [T], ``lookback`` [B, depth]: the tokens before each chunk, nearest first, -1 before the
    start. ``last``: numbers of the chunks that end their prompts. ``oldest``, ``keep_from`` [B]: see
    ``ForwardContext``; None when no chunk replays a cached prefix.
    """

    slots: Tensor
    ids: Tensor
    rows: StepRows
    lookback: Tensor
    last: Tensor
    oldest: Tensor | None
    keep_from: Tensor | None

    @classmethod
    def build(cls, chunks: Sequence[PrefillChunk], depth: int, staging: Staging) -> "PrefillBatch":
        """The step of ``chunks``, in one copy; ``depth`` tokens before each may be looked back at."""
        rows = StepRows.build([chunk.start for chunk in chunks], [chunk.count for chunk in chunks])
        values = {field.name: getattr(rows, field.name) for field in fields(rows)}
        described = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        parts = described | {
            "slots": _integers([chunk.request.slot for chunk in chunks]),
            "ids": _integers([token for chunk in chunks for token in chunk.token_ids]),
            "lookback": _integers([_lookback(chunk, depth) for chunk in chunks]),
            "last": _integers([number for number, chunk in enumerate(chunks) if chunk.last]),
        }
        if any(chunk.oldest or chunk.replayed for chunk in chunks):
            parts["oldest"] = _integers([chunk.oldest for chunk in chunks])
            parts["keep_from"] = _integers([chunk.start + chunk.replayed for chunk in chunks])
        there = dict(zip(parts, staging.copy(*parts.values()), strict=True))
        return cls(
            slots=there["slots"],
            ids=there["ids"],
            rows=replace(rows, **{name: there[name] for name in described}),  # type: ignore[arg-type]
            lookback=there["lookback"],
            last=there["last"],
            oldest=there.get("oldest"),
            keep_from=there.get("keep_from"),
        )


def _lookback(chunk: PrefillChunk, depth: int) -> list[int]:
    before = chunk.request.tokens(max(chunk.start - depth, 0), chunk.start)[::-1]
    return before + [-1] * (depth - len(before))


def _integers(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)

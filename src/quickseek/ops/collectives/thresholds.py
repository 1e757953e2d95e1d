"""Where one protocol or geometry takes over from another: measured data, with the conditions they were measured in."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FRAGMENT = 8


@dataclass(frozen=True)
class Thresholds:
    """One entry of thresholds.json. ``None`` rows: the protocol is never chosen.

    ``threads`` of a block, at most ``cluster_limit`` blocks a row; the fused form up to ``fused_rows`` rows; two-shot
    from ``two_shot_rows`` (``two_shot_finalize_rows``) rows. ``conditions`` says what the numbers come from.
    """

    capability: int
    ranks: int
    threads: int
    cluster_limit: int
    fused_rows: int
    two_shot_rows: int | None
    two_shot_finalize_rows: int | None
    conditions: str

    def geometry(self, hidden: int) -> tuple[int, int]:
        """(threads a block, blocks a row) for a row of ``hidden`` elements, 8 a thread (spec/decode.md L.1.4).

        As many blocks as cover the row, all full where the row allows; beyond the limit a thread takes several
        fragments.
        """
        fragments = hidden // FRAGMENT
        if self.cluster_limit == 1:
            return min(1024, -(-fragments // 32) * 32), 1
        threads = min(self.threads, -(-fragments // 32) * 32)
        return threads, min(self.cluster_limit, -(-fragments // threads))


@cache
def load() -> tuple[Thresholds, ...]:
    """All entries of thresholds.json."""
    entries = json.loads((Path(__file__).parent / "thresholds.json").read_text(encoding="utf-8"))
    return tuple(Thresholds(**entry) for entry in entries)


def thresholds(capability: int, ranks: int) -> Thresholds:
    """The entry for a compute capability's major number and a group size; the nearest where none was measured."""
    return min(
        load(), key=lambda entry: (entry.ranks != ranks, abs(entry.ranks - ranks), abs(entry.capability - capability))
    )

"""Whether ranks decide alike: a running hash of what each schedules, compared every so many ticks (for debugging)."""

import hashlib

from quickseek.engine.tick import Tick
from quickseek.parallel.world import World, require_agreement


class Decisions:
    """``interval``: ticks between two comparisons; 0 compares and hashes nothing."""

    def __init__(self, world: World, interval: int) -> None:
        self.world, self.interval, self.ticks = world, interval, 0
        self._hash = hashlib.blake2b(digest_size=16)

    def saw(self, tick: Tick) -> None:
        """Take in a tick before it runs. Every ``interval`` of them collective: RankDisagreement on all ranks.

        The tokens that a request has so far are part of what it is scheduled with, so that ranks that choose different
        tokens are found too, a comparison later at most.
        """
        if not self.interval:
            return
        self._hash.update(repr(facts(tick)).encode())
        self.ticks += 1
        if self.ticks % self.interval == 0:
            found = {"engine ticks": self.ticks, "what was scheduled in them (hash)": self._hash.hexdigest()}
            require_agreement(self.world, found)


def facts(tick: Tick) -> tuple[object, ...]:
    """What a tick does, as plain values that are equal on all ranks."""
    return (
        [request.request_id for request in tick.preempted],
        [(save.request_slot, save.snapshot_slot, save.length) for save in tick.saves],
        [
            (one.request.request_id, one.request_slot, one.length, one.snapshot_slot, list(one.copies))
            for one in tick.restores
        ],
        [(update.slot, update.first, list(update.blocks)) for update in tick.table_updates],
        [(chunk.request.request_id, chunk.start, chunk.token_ids) for chunk in tick.prefills],
        [(request.request_id, len(request.output_ids), request.output_ids[-8:]) for request in tick.decodes],
    )

"""The n-gram memory ahead of the layers: only the injection waits for the streams (spec/decode.md H)."""

from collections.abc import Sequence

from torch import Tensor

from quickseek.decode.streams import SideStream
from quickseek.model.engram import Engram


class EngramPrefetch:
    """Looks up table rows at the start of a step and projects them beside the layers before they are needed.

    One step at a time: ``lookup``, ``start`` where the gate allows, ``forward`` at each Engram layer, ``join``.
    """

    def __init__(self, engrams: Sequence[Engram], side: SideStream) -> None:
        self.engrams, self.side = engrams, side
        self._heads: dict[int, Tensor] = {}
        self._projected: dict[int, Tensor] = {}

    def lookup(self, hashes: Tensor) -> None:
        """Begin a step: gather the rows numbered ``hashes`` int64 [m, Engram layers, columns] of every table."""
        self._projected = {}
        self._heads = {engram.index: engram.gather(hashes[:, engram.index]) for engram in self.engrams}

    def start(self, rows: int) -> None:
        """Project the first ``rows`` rows of what was looked up, for every Engram layer, on the side stream."""
        with self.side.fork(bool(self._heads)):
            for engram in self.engrams:
                heads = self._heads[engram.index][:rows]
                self.side.share(heads)
                self._projected[engram.index] = engram.wkv(heads)

    def forward(self, engram: Engram, streams: Tensor, mask: Tensor) -> Tensor:
        """Streams [m, hc, H] with the gated memory of this layer added; ``mask`` bool [m] sets the gate to 0."""
        heads = self._heads.pop(engram.index)
        key_value = self._projected.pop(engram.index, None)
        if key_value is None:
            out: Tensor = engram(streams, heads, mask)
            return out
        self.side.join()
        return engram.inject(streams, key_value, mask)

    def join(self) -> None:
        """End a step, however it ends: wait for projections that nobody used."""
        self.side.join()
        self._heads, self._projected = {}, {}

"""What a forward is told besides its tensors: caches, which rows belong to whom, and the executor's protocol."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from quickseek.ops.cache import CacheView, Codec
from quickseek.ops.indexer import Selection
from quickseek.ops.norm_rope import Rotation
from quickseek.ops.rows import StepRows
from quickseek.parallel.fabric import Fabric

if TYPE_CHECKING:
    from quickseek.model.backbone import IntermediateTensors

SLOT_GROUP = "slots"
"""Cache group of everything that lives by request slot: window rings, open groups, token history, draft rings."""
PAGED_GROUP = "paged"
"""Cache group of global KV and index keys, which share one block table."""


class GraphMode(Enum):
    """How the engine runs this forward; ``FULL`` is one graph for the whole step."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


@dataclass(frozen=True)
class CacheStorage:
    """One cache of all requests: ``tensor`` [blocks, block_rows, record], its codec and its cache group."""

    tensor: Tensor
    codec: Codec
    group: str


@dataclass(frozen=True)
class GroupMetadata:
    """A step as one cache group sees it: its rows, the blocks of each request int64 [B, blocks], how many prefills."""

    rows: StepRows
    table: Tensor
    num_prefills: int


@dataclass(frozen=True)
class ForwardContext:
    """Metadata per cache group, the caches, and the graph under way; passed as ``context=``, never global.

    ``capturing``: this forward is recorded into (or, on a CPU, stands for) a graph. ``oldest`` int64 [B]: window keys
    before it do not exist (None: all do). ``keep_from`` int64 [B]: rows before it write no global KV or index key,
    which are there already (None: all write). Both serve the replay of a cached prefix (spec/model.md 9).
    """

    metadata: Mapping[str, GroupMetadata]
    caches: Mapping[str, CacheStorage]
    graph_mode: GraphMode = GraphMode.NONE
    capturing: bool = False
    oldest: Tensor | None = None
    keep_from: Tensor | None = None

    @property
    def rows(self) -> StepRows:
        """The rows of the step."""
        return self.metadata[SLOT_GROUP].rows

    @property
    def num_prefills(self) -> int:
        """Requests of the step that are still reading their prompt."""
        return self.metadata[SLOT_GROUP].num_prefills

    def view(self, name: str) -> CacheView:
        """The cache ``name`` as the requests of this step see it."""
        cache = self.caches[name]
        return CacheView(cache.tensor, self.metadata[cache.group].table, cache.codec)


@dataclass
class StepShared:
    """Values that the layers of one forward hand to each other (spec/model.md 6.12, "sh").

    ``turns``: rotation of the step's rows, by whether the layer reads global KV. ``group_turns``: by ratio, rotation of
    the first position of the group that each row closes. ``image_rows`` bool [T] or None.
    ``oldest`` int64 [B]: window keys before it do not exist for this forward. ``lists``, ``candidates``: what the
    last indexer published for these rows.
    """

    rows: StepRows
    turns: Mapping[bool, Rotation]
    group_turns: Mapping[int, Rotation]
    oldest: Tensor
    image_rows: Tensor | None = None
    lists: Tensor | None = None
    candidates: Tensor | None = None

    def publish(self, selection: Selection) -> None:
        """What an indexer selected, for the layers that follow."""
        self.lists = selection.lists
        if selection.candidates is not None:
            self.candidates = selection.candidates

    def select(self, kept: Tensor, starts: Tensor, oldest: Tensor) -> "StepShared":
        """The values of the rows numbered ``kept``, which begin at positions ``starts`` [B]; ``oldest`` [B]."""
        return replace(
            self,
            rows=self.rows.select(kept, starts),
            turns={key: turn[kept] for key, turn in self.turns.items()},
            group_turns={ratio: turn[kept] for ratio, turn in self.group_turns.items()},
            oldest=oldest,
            image_rows=None if self.image_rows is None else self.image_rows[kept],
            lists=None if self.lists is None else self.lists[kept],
            candidates=None if self.candidates is None else self.candidates[kept],
        )


class ExecutorStep(Protocol):
    """The gates of one step of an executor; ``run`` takes the place of the layers and the final norm."""

    def run(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        input_ids: Tensor,
        engram_hashes: Tensor | None,
        engram_mask: Tensor | None,
        streams: Tensor | None = None,
    ) -> Any:
        """The backbone's output, from its embedding [n, H] on."""


class StepExecutor(Protocol):
    """What the backbone asks before it runs its own layers (design.md section 2).

    ``runs`` counts steps it ran. ``fabric``: what its collectives, and those of its drafter, reach their peers by;
    None where they run over the world.
    """

    runs: int
    fabric: Fabric | None

    def embed(self, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """(embedding [n, H], streams [n, hc, H]) of ids [n], or None: the backbone embeds."""

    def plan(
        self, positions: Tensor, intermediate_tensors: "IntermediateTensors | None", *, context: ForwardContext
    ) -> ExecutorStep | None:
        """The step that runs this forward, or None for the stock layers."""


class DraftExecutorStep(Protocol):
    """The gates of one pass over the drafter's stages."""

    def run(self, x: Tensor, shared: Any) -> Tensor:
        """Collapsed states [n, H] of the embeddings x [n, H]; ``shared``: the ``BlockShared`` of the pass."""


class DraftExecutor(Protocol):
    """What the drafter asks before it runs its own stages."""

    def plan(self, rows: int, *, context: ForwardContext) -> DraftExecutorStep | None:
        """The pass that runs ``rows`` block rows, or None for the stock stages."""

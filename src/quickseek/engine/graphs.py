"""Graphs of the cycle: how a decode step is recorded and replayed (design.md 4.5).

A CPU records none: its decode forwards run eagerly, told that they stand for a graph, so that the specialized decode
is taken there too. On CUDA, V is one graph for each padded batch size, and D one for each size and kind of choice.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from quickseek.model.context import ForwardContext, GraphMode
from quickseek.ops.cache import SCRATCH
from quickseek.parallel.launch import captured
from quickseek.parallel.virtual import VirtualWorld
from quickseek.parallel.world import World

if TYPE_CHECKING:
    from quickseek.engine.cycle import Cycle, Decision, Needs, VerifyStep

T = TypeVar("T")


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Enqueue it on the current CUDA stream."""


_free_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""CUDA streams of recorders that are no more: PyTorch keeps a workspace of cuBLAS (32 MiB on an H200) for each stream,
for good, since graphs that were captured there may use it."""


class Recorder:
    """Captures graphs on one CUDA stream, which no other that lives has, in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        free = _free_streams[device]
        self.stream = free.pop() if free else torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        weakref.finalize(self, free.append, self.stream).atexit = False

    @classmethod
    def of(cls, world: World) -> "Recorder":
        """The recorder of a rank. Collective where ranks share one."""
        return VirtualRecorder(world) if isinstance(world, VirtualWorld) else cls(world.device)

    def empty(self) -> torch.cuda.CUDAGraph:
        """A graph to capture into."""
        return torch.cuda.CUDAGraph()

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Capture what runs inside; the graph can be replayed afterwards."""
        graph = self.empty()
        captured.add(graph)
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            yield graph


class VirtualRecorder(Recorder):
    """That of virtual ranks: one graph holds the work of all, in the order of their turns. All of it is collective."""

    def __init__(self, world: VirtualWorld) -> None:
        self.world = world
        self.stream, self.pool = world.once(
            "CUDA stream and pool of graphs", lambda: (torch.cuda.Stream(world.device), torch.cuda.graph_pool_handle())
        )

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """As of one rank. Rank 0 begins and ends the capture; "relaxed", so that the threads of all may launch."""
        graph = self.world.once("capture", torch.cuda.CUDAGraph)
        recording = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="relaxed")
        with recording if self.world.rank == 0 else nullcontext():
            self.world.barrier()
            with torch.cuda.stream(self.stream):
                yield _CommonGraph(graph, self.world)
            self.world.barrier()
        self.world.barrier()


@dataclass(frozen=True)
class _CommonGraph:
    """The graph of all virtual ranks, as one of them replays it: once for all, when all have come to that."""

    graph: torch.cuda.CUDAGraph
    world: VirtualWorld

    def replay(self) -> None:
        self.world.once("replay", self.graph.replay)


class EagerGraphs:
    """The graph runner of a CPU."""

    def record(self, context: ForwardContext) -> ForwardContext:
        """The context of a step as its graph would see it: FULL and recorded if the step is pure decode."""
        if context.num_prefills:
            return context
        return replace(context, graph_mode=GraphMode.FULL, capturing=True)


class CudaGraphs(EagerGraphs):
    """Graphs of V and D for batches padded to ``sizes``, captured by ``capture``; other steps run eagerly.

    Each step runs once before its capture and stands for it: its context says ``capturing`` although PyTorch does not
    yet. In the capture itself, and in eager steps, both say the same, which is asserted.
    ``recorder``: how they are captured; None: as those of one rank alone on its device.
    A padded row belongs to the scratch slot, which is always finished. What ``run`` returns is overwritten by the next
    replay: it is read back first (``Readback``). ``replays`` counts steps whose V was replayed.
    """

    def __init__(self, cycle: "Cycle", sizes: Sequence[int], recorder: Recorder | None = None) -> None:
        self.cycle, self.sizes, self.replays = cycle, tuple(sorted(set(sizes))), 0
        device = cycle.pools.device
        self._slots = torch.full((self.sizes[-1],), SCRATCH, dtype=torch.int64, device=device)
        self._filled: tuple[int, Tensor] | None = None
        self._recording = self._capturing = False
        self._recorder = Recorder(device) if recorder is None else recorder
        self._verify: dict[int, tuple[Graph, VerifyStep]] = {}
        self._decide: dict[tuple[int, Needs], tuple[Graph, Decision]] = {}
        self._specialized: dict[int, bool] = {}
        cycle.graphs = self

    def record(self, context: ForwardContext) -> ForwardContext:
        """FULL and recorded while a pure decode step is captured, or run just before to stand for that capture."""
        self._check()
        return super().record(context) if self._recording else context

    def _check(self) -> None:
        found = torch.cuda.is_current_stream_capturing()
        assert found == self._capturing, f"PyTorch captures: {found}, the engine: {self._capturing}"

    @property
    def decisions(self) -> list["Decision"]:
        """What the graphs of D write."""
        return [decision for _, decision in self._decide.values()]

    @torch.inference_mode()
    def capture(self, needs: Sequence["Needs"]) -> None:
        """Capture V of every size and D of every size and each of ``needs``: the largest first, in one memory pool.

        Each runs once before its capture, on scratch, so that the capture finds everything compiled and allocated.
        What goes wrong in one is raised with a note that says for which size.
        """
        cycle, reach = self.cycle, self.cycle.pools.reach
        for size in reversed(self.sizes):
            slots, before = self._slots[:size], cycle.specialized
            try:
                graph, step = self._captured(lambda slots=slots: cycle.verify(slots, reach))  # type: ignore[misc]
                self._verify[size] = graph, step
                self._specialized[size] = cycle.specialized > before
                graph.replay()  # D runs once before its capture too, and a capture alone leaves V's results unwritten
                for kind in needs:
                    self._decide[size, kind] = self._captured(
                        lambda step=step, kind=kind: cycle.decide(step, kind)  # type: ignore[misc]
                    )
            except Exception as error:
                error.add_note(f"while the decode graphs for {size} requests were captured")
                raise
        cycle.steps = cycle.specialized = 0

    def _captured(self, run: Callable[[], T]) -> tuple[Graph, T]:
        self._recording, stream = True, self._recorder.stream
        try:
            current = torch.cuda.current_stream(self._slots.device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                run()
            current.wait_stream(stream)
            with self._recorder.capture() as graph:
                self._capturing = True
                self._check()
                out = run()
        finally:
            self._recording = self._capturing = False
        return graph, out

    def run(self, slots: Tensor, max_length: int, needs: "Needs") -> "Decision":
        """V and D of the requests in ``slots`` [B], all their drafts verified; the decision may be padded.

        ``max_length``: see ``Cycle.verify``; graphs know the bound of the block tables instead.
        """
        size = next((size for size in self.sizes if size >= slots.shape[0]), None)
        if size not in self._verify:
            return self.cycle.decide(self.cycle.verify(slots, max_length), needs)
        assert size is not None
        if self._filled is None or self._filled[0] != size or self._filled[1] is not slots:
            self._slots[: slots.shape[0]] = slots
            self._slots[slots.shape[0] : size] = SCRATCH
            self._filled = size, slots
        graph, step = self._verify[size]
        # A graph's collectives are launched all at once.
        self.cycle.model.world.launches += 1
        graph.replay()
        self.replays += 1
        self.cycle.count(self._specialized[size])
        if (size, needs) not in self._decide:
            return self.cycle.decide(step, needs)
        graph, decision = self._decide[size, needs]
        self.cycle.model.world.launches += 1
        graph.replay()
        return decision


def padded_sizes(most: int) -> list[int]:
    """Batch sizes that graphs are captured for: powers of two up to ``most``, and ``most``."""
    sizes, size = [most], 1
    while size < most:
        sizes.append(size)
        size *= 2
    return sorted(sizes)

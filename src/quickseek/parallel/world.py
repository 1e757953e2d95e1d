"""``World``: the tensor parallel ranks of one model replica.

Passed explicitly to everything that talks to peers; ``None`` anywhere means ``default_world()``. The host side of
every decision that ranks share goes through ``all_reduce_min`` and ``gather_object``; ``require_agreement`` and
``together`` turn what goes wrong on one rank into the same error on all, ``World.as_one`` what goes wrong between
collectives. ``parallel/launch.py`` makes worlds.
"""

import pickle
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from quickseek.errors import CollectiveTimeout, RankDisagreement, WorldError
from quickseek.parallel.faults import FaultBoard, PeersLost

T = TypeVar("T")

LOOK_S = 0.2
"""Between two looks of a rank that waits in a collective at whether its peers have failed."""

_default: "World | None" = None


class Peers(Protocol):
    """Ranks that can compare host values: a ``World``, or a ``Fabric``."""

    def gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable host value, ranks ascending. Collective."""


class World(ABC):
    """Rank, size and device of this participant, and the collectives that the stock model uses.

    Tensors are on ``device``. Every rank calls every collective, in the same order.
    """

    rank: int
    size: int
    device: torch.device
    launches: int = 0
    """Collectives in mailboxes, and graphs of them, that this rank has launched since all ranks last emptied them."""
    impaired: bool = False
    """Whether a collective in mailboxes gave up inside ``as_one`` and they have not been emptied since."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Every rank's x (equal shapes) concatenated along ``dim``, ranks ascending."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """x of rank ``source``, on every rank; written into x, which is returned. WorldError without such a rank."""

    @abstractmethod
    def all_reduce_min(self, value: int) -> int:
        """The least of all ranks' host integers: how rank-local facts become common decisions."""

    @abstractmethod
    def gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable host value, ranks ascending."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    @contextmanager
    def as_one(self, what: str) -> Iterator[None]:
        """Inside, ranks fail as one: an Exception that all raise alike, after as many collectives (those in mailboxes,
        too), is each rank's own; of any other all raise PeersLost, which names ranks and causes (virtual ranks: their
        run ends).

        Costs nothing without an exception. A CollectiveTimeout passes, since peers hear of it by the watchdog; of one
        that waited for a rank that failed becomes PeersLost, which says what it failed with.
        """
        try:
            yield
        except CollectiveTimeout as error:
            self.impaired = True
            self._missed(error)
            raise
        except Exception as error:
            self._failed(what, error)
            raise

    def give_up(self, error: BaseException) -> None:
        """This rank ends with ``error``: peers that wait for it need not wait longer. Not collective."""
        return

    @property
    def lost(self) -> PeersLost | None:
        """What every later collective raises, as far as this rank knows."""
        return None

    def _failed(self, what: str, error: Exception) -> None:
        """Return if all ranks failed alike."""
        return

    def _missed(self, error: CollectiveTimeout) -> None:
        """Return if no rank is known to have failed."""
        return

    def check_source(self, source: int) -> None:
        """WorldError unless ``source`` is one of the ranks."""
        if not 0 <= source < self.size:
            raise WorldError(f"broadcast from rank {source}: there are ranks 0 to {self.size - 1}")

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x: FP32 (float64 if x is), ranks ascending from 0, one rounding (equality.md 1.5).

        Integers are summed in int64 and come back in x's dtype.

        An ordered sum of gathered parts, never the backend's own reduction: all ranks get the same bits. The sign of a
        zero is the sum's own; that mailboxes carry no -0 is a rule of the fused collectives (ops/collectives).
        """
        if self.size == 1:
            return x
        if x.dtype.is_floating_point:
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        else:
            wide = torch.int64
        parts = self.all_gather(x.unsqueeze(0)).to(wide)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)


class SoloWorld(World):
    """One rank: every collective is the identity."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = 0, 1, torch.device(device)

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        self.check_source(source)
        return x

    def all_reduce_min(self, value: int) -> int:
        return value

    def gather_object(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return


distributed_worlds: "weakref.WeakSet[DistributedWorld]" = weakref.WeakSet()
"""Those of this process."""


class DistributedWorld(World):
    """A torch.distributed group: gloo for CPU tensors and host values, NCCL for CUDA tensors.

    ``group`` carries tensors, ``host_group`` (gloo) host values; both hold the same ranks, and None means the
    whole process group. Several worlds can live in one process group. Whoever waits over gloo for a rank that failed
    (``as_one``, ``give_up``) or ended gets PeersLost, and from then on all do.
    """

    def __init__(
        self,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("DistributedWorld needs torch.distributed.init_process_group first")
        self.group = group
        self.host_group = host_group if host_group is not None else group
        self.device = torch.device(device)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.calls = 0
        self._polled = dist.get_backend(group) == "gloo"
        self.faults = FaultBoard(_own_keys(group), self.rank, self.size)
        distributed_worlds.add(self)

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        parts = self._gathered(_bytes(x), self.group, self._polled)
        return torch.cat([part.view(x.dtype).view(x.shape) for part in parts], dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        self.check_source(source)
        sent = _bytes(x)

        def start(async_op: bool) -> Any:
            return dist.broadcast(sent, group=self.group, group_src=source, async_op=async_op)

        self._carry("a broadcast", start, self._polled)
        if sent.data_ptr() != x.data_ptr():
            x.copy_(sent.view(x.dtype).view(x.shape))
        return x

    def all_reduce_min(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64)

        def start(async_op: bool) -> Any:
            return dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.host_group, async_op=async_op)

        self._carry("a minimum over host values", start, True)
        return int(tensor.item())

    def gather_object(self, value: Any) -> list[Any]:
        sent = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [int(one) for one in self._gathered(torch.tensor([sent.numel()]), self.host_group, True)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: sent.numel()] = sent
        parts = self._gathered(padded, self.host_group, True)
        return [pickle.loads(part[:length].numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)]

    def barrier(self) -> None:
        self.all_reduce_min(0)

    def give_up(self, error: BaseException) -> None:
        self.faults.give_up(f"{type(error).__name__}: {error}")

    @property
    def lost(self) -> PeersLost | None:
        return self.faults.lost

    def _failed(self, what: str, error: Exception) -> None:
        try:
            self.faults.agree(self.calls, f"in {what}: {type(error).__name__}: {error}", self.launches)
        except PeersLost as lost:
            raise lost from error

    def _missed(self, error: CollectiveTimeout) -> None:
        try:
            self.faults.look()
        except PeersLost as lost:
            raise lost from error

    def _gathered(self, sent: Tensor, group: dist.ProcessGroup | None, polled: bool) -> list[Tensor]:
        """Every rank's ``sent``."""
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        self._carry("an all-gather", lambda a: dist.all_gather(parts, sent, group=group, async_op=a), polled)
        return parts

    def _carry(self, what: str, start: Callable[[bool], Any], polled: bool) -> None:
        """Run a collective. ``polled``: over gloo, on the host, with an eye on the peers."""
        self.faults.check()
        self.calls += 1
        if not polled:
            start(False)
            return
        work = start(True)
        while not self._arrived(work, what):
            self.faults.look(self.calls)
        self.faults.met()

    def _arrived(self, work: Any, what: str) -> bool:
        """Wait for a moment; PeersLost if the connections to peers have failed."""
        with suppress(RuntimeError):
            return bool(work.wait(timedelta(seconds=LOOK_S)))
        if not work.is_completed():
            return False
        try:
            return bool(work.wait())
        except RuntimeError as error:
            raise self.faults.broken(what, error) from error


_boards: Counter[str] = Counter()


def _own_keys(group: dist.ProcessGroup | None) -> Any:
    """Keys of the ranks' store for the next world of a group: ranks make their worlds in the same order."""
    name = f"quickseek {dist.get_process_group_ranks(group)}"
    _boards[name] += 1
    store = dist.distributed_c10d._get_default_store()
    return dist.distributed_c10d.PrefixStore(f"{name} {_boards[name]}", store)


def _bytes(x: Tensor) -> Tensor:
    """x as flat bytes, copied only if it is not contiguous: backends move bytes of any dtype, float8 included."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def split(world: World, group_size: int) -> World:
    """The group of ``group_size`` consecutive ranks that this rank belongs to, as a world of its own. Collective.

    ``world`` must span the whole process group. Raises WorldError when ``group_size`` does not divide its size.
    """
    if group_size < 1 or world.size % group_size:
        raise WorldError(f"{world.size} ranks cannot be split into groups of {group_size}")
    if group_size == world.size:
        return world
    if not isinstance(world, DistributedWorld) or world.size != dist.get_world_size():
        raise WorldError("split needs the world of the whole process group")
    # Every rank takes part in making every group, also of those it is not in.
    chosen: DistributedWorld | None = None
    for first in range(0, world.size, group_size):
        ranks = list(range(first, first + group_size))
        group = dist.new_group(ranks)
        host_group = group if world.device.type == "cpu" else dist.new_group(ranks, backend="gloo")
        if world.rank in ranks:
            chosen = DistributedWorld(world.device, group, host_group)
    assert chosen is not None
    return chosen


def require_agreement(world: Peers, facts: Mapping[str, Any]) -> None:
    """Return if every rank holds equal ``facts`` (picklable); else raise RankDisagreement, one text on all ranks.

    The error names each fact that differs and what each rank holds. Collective: what ranks must decide alike
    (spec/decode.md A.7) is compared once, at start.
    """
    everyone = world.gather_object(dict(facts))
    names = sorted({name for held in everyone for name in held})
    told = []
    for name in names:
        values = [held.get(name, "(absent)") for held in everyone]
        if not all(same(value, values[0]) for value in values[1:]):
            told.append(f"{name} ({'; '.join(f'rank {rank}: {value!r}' for rank, value in enumerate(values))})")
    if told:
        raise RankDisagreement(f"ranks disagree on {', '.join(told)}")


def same(one: Any, other: Any) -> bool:
    """Whether two host values are equal of one type, whatever they hold: a NaN equals a NaN, and tensors are equal in
    dtype, shape and every element."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return bool(one == other) or bool(one != one and other != other)


def together(world: Peers, what: str, function: Callable[[], T]) -> T:
    """``function()``; if it raises an Exception on some rank, every rank raises. Collective.

    Where all ranks failed with the same text each raises its own error, else all raise RankDisagreement with one
    text. For the rank-local parts of a start-up, so that no rank waits in the next collective for one that gave up.
    ``function`` itself must not use the world.
    """
    failure: Exception | None = None
    result: list[T] = []
    try:
        result.append(function())
    except Exception as error:
        failure = error
    reports = world.gather_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None and all(report == reports[0] for report in reports):
        raise failure
    if any(report is not None for report in reports):
        told = "; ".join(f"rank {rank}: {report}" for rank, report in enumerate(reports) if report is not None)
        raise RankDisagreement(f"{what} failed: {told}") from failure
    return result[0]


def default_world() -> World:
    """The world of the process: what ``set_default_world`` was given, else one CPU rank."""
    global _default
    if _default is None:
        _default = SoloWorld()
    return _default


def set_default_world(world: World | None) -> None:
    """Choose what ``world=None`` means from now on in this process."""
    global _default
    _default = world

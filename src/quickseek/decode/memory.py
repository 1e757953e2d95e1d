"""What an executor keeps on its device as long as the weights: mailboxes, and the embedding's replica."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quickseek.parallel.fabric import Mailbox
from quickseek.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    from quickseek.decode.executor import SpecializedDecode
    from quickseek.ops.collectives import AllReduceMHC, LamportAllGather


@dataclass(frozen=True)
class DecodeMemory:
    """Bytes of one rank. ``mailboxes``: what peers store into. ``embedding``: the replica of the table."""

    mailboxes: int = 0
    embedding: int = 0

    @classmethod
    def of(cls, executor: "SpecializedDecode | None") -> "DecodeMemory":
        """That of a built executor; nothing for None."""
        if executor is None:
            return cls()
        replica = executor.embedding
        return cls(
            mailboxes=sum(mailbox.local.nbytes for mailbox in _mailboxes(executor)),
            embedding=0 if replica is None else replica.table.nbytes,
        )


def _mailboxes(executor: "SpecializedDecode") -> Iterator[Mailbox]:
    if executor.fabric is None:
        return
    yield Watchdog.of(executor.fabric).mailbox
    yield from _of_boundary(executor.boundaries.all_reduce.collective)
    if executor.draft is not None:
        yield from _of_boundary(executor.draft.boundaries.all_reduce.collective)
    if executor.row_shard is not None:
        yield from _of_gather(executor.row_shard.lamport)
    if executor.gather is not None:
        yield from _of_gather(executor.gather.gather)


def _of_boundary(collective: "AllReduceMHC") -> list[Mailbox]:
    found: list[Mailbox] = getattr(collective.implementation, "mailboxes", [])
    return found


def _of_gather(collective: "LamportAllGather") -> list[Mailbox]:
    kernels = collective._gather
    return [kernels.mailbox] if kernels is not None and kernels.launches else []

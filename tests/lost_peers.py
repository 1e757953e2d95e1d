"""What kernels store when a wait of theirs gives up, for tests without kernels."""

import ctypes

import torch

from quickseek.parallel.watchdog import ABORT, MAGIC, PEERS, Watchdog


def leave_record(watchdog: Watchdog, kind: int, mask: int) -> None:
    """What ``BoundedWait.report`` stores: instance, kind, rank, generation, token, fragment, mask; the magic last."""
    words = [MAGIC, 1, kind, watchdog.fabric.rank, 2, 17, 5, mask]
    watchdog.record[1:8] = torch.tensor(words[1:], dtype=torch.int32)
    watchdog.record[0] = MAGIC


def raise_flags(watchdog: Watchdog) -> None:
    """What ``BoundedWait.abort_peers`` stores: the flag of every rank, by the addresses in the control block."""
    first = PEERS // 8
    for address in watchdog.mailbox.local[first : first + watchdog.fabric.size].tolist():
        ctypes.c_int32.from_address(address + ABORT).value = 1


def give_up(watchdog: Watchdog, missing: int) -> None:
    """An all-reduce of this rank has waited in vain for rank ``missing``."""
    raise_flags(watchdog)
    leave_record(watchdog, 0, 1 << missing)

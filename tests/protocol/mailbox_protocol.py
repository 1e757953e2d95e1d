"""The mailbox protocol on numpy arrays (spec/decode.md L.3 a).

A rank's part of a call is a generator that yields after every small step: True when it did something, False when it
waits for a peer. ``run`` interleaves the ranks of one process at random; ``drive`` runs one rank in a process of its
own. Payloads are BF16 bits; a fragment is eight of them. ``fault`` plants one error, by the names of FAULTS.
"""

import ctypes
import random
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from mailbox_arithmetic import SENTINEL, Bits, round_bf16, sanitise, widen
from numpy.typing import NDArray

from quickseek.parallel.fabric import Fabric

Steps = Generator[bool, None, Bits]
FRAGMENT = 8
FAULTS = (
    "no sanitise",
    "sanitise before rounding",
    "float compare",
    "flush to zero",
    "first half",
    "first word",
    "blocked owner",
)


class Stuck(Exception):
    """Every rank that is left waits for another."""


@dataclass(frozen=True)
class Sizes:
    """Ranks, rows a mailbox holds, hidden size, generations."""

    ranks: int
    capacity: int
    hidden: int
    generations: int = 3

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the one-shot mailbox, the contributions of an owner, and the reduced rows (B.2, B.8)."""
        owned = -(-self.capacity // self.ranks)
        g, r, h = self.generations, self.ranks, self.hidden
        return (g, r, self.capacity, h), (g, r, owned, h), (g, self.capacity, h)


Boxes = list[list[Bits]]
"""[kind][rank]: every rank's mailboxes, as one rank sees them."""


def private_boxes(sizes: Sizes) -> Boxes:
    """Mailboxes of ranks that live in one process."""
    return [[np.full(shape, SENTINEL) for _ in range(sizes.ranks)] for shape in sizes.shapes()]


def shared_boxes(sizes: Sizes, fabric: Fabric) -> Boxes:
    """Mailboxes of ranks in processes of their own, filled; returns once all ranks' are. Collective."""
    boxes: Boxes = []
    for shape in sizes.shapes():
        mailbox = fabric.allocate(shape, torch.int16)
        mailbox.local.fill_(-(2**15))
        views = [
            np.ctypeslib.as_array((ctypes.c_uint16 * mailbox.local.numel()).from_address(address)).reshape(shape)
            for address in mailbox.peer_pointers.tolist()
        ]
        boxes.append(views)
    fabric.barrier()
    return boxes


class Participant:
    """One rank's side of the protocol: state words, mailboxes, and the randomness of its memory system."""

    def __init__(self, rank: int, sizes: Sizes, boxes: Boxes, seed: int, fault: str = "") -> None:
        self.rank, self.sizes, self.fault = rank, sizes, fault
        self.one_shot, self.contributions, self.reduced = boxes
        self.next = {False: 0, True: 0}
        self.active = {False: 0, True: 0}
        self.chance = random.Random(f"{seed} {rank}")

    def call(self, x: Bits, *, two_shot: bool = False) -> Steps:
        """All kernels of one call with partial x [m, H]; returns the rank sum [m, H]."""
        yield from self.publish(x, two_shot)
        if two_shot:
            yield from self.reduce(len(x))
        return (yield from self.collect(len(x), two_shot))

    def publish(self, x: Bits, two_shot: bool) -> Generator[bool, None, None]:
        """Store x [m, H] at every rank, or each token at its owner."""
        if self.fault not in ("no sanitise", "sanitise before rounding"):
            x = sanitise(x)
        generation = self.active[two_shot] = self.next[two_shot]
        if two_shot:
            targets = []
            for token in range(len(x)):
                owner, row = self._owner(token, len(x))
                targets.append((self.contributions[owner][generation, self.rank, row], x[token]))
            yield from self._store(targets)
        else:
            yield from self._store(
                [(box[generation, self.rank, : len(x)], x) for box in self._from_next(self.one_shot)]
            )

    def reduce(self, rows: int) -> Generator[bool, None, None]:
        """The owner's part of a two-shot call: sum the contributions to the own tokens and send them to all."""
        generation, owned = self.active[True], range(self.rank, rows, self.sizes.ranks)
        box = self.contributions[self.rank][generation, :, : len(owned)]
        parts = yield from self._poll(box)
        total = sanitise(self._sum(parts))
        targets = [
            (reduced[generation, token], total[row])
            for reduced in self._from_next(self.reduced)
            for row, token in enumerate(owned)
        ]
        yield from self._store(targets)
        self.next[True] = (generation + 1) % self.sizes.generations
        yield from self._clear(box)

    def collect(self, rows: int, two_shot: bool) -> Steps:
        """Poll the own mailbox; the rank sum [m, H]."""
        generation = self.active[two_shot]
        if two_shot:
            box = self.reduced[self.rank][generation, None, :rows]
            total = (yield from self._poll(box))[0]
        else:
            box = self.one_shot[self.rank][generation, :, :rows]
            total = self._sum((yield from self._poll(box)))
            self.next[False] = (generation + 1) % self.sizes.generations
        yield from self._clear(box)
        return total

    def _owner(self, token: int, rows: int) -> tuple[int, int]:
        if self.fault == "blocked owner":
            share = -(-rows // self.sizes.ranks)
            return token // share, token % share
        return token % self.sizes.ranks, token // self.sizes.ranks

    def _from_next(self, boxes: Sequence[Bits]) -> list[Bits]:
        """Every rank's box, the next rank's first and the own last."""
        return [boxes[(self.rank + 1 + d) % self.sizes.ranks] for d in range(self.sizes.ranks)]

    def _store(self, targets: Sequence[tuple[Bits, Bits]]) -> Generator[bool, None, None]:
        """Store values in atoms of two or four bytes, all in random order, with a pause after every few."""
        atom = self.chance.choice((np.uint16, np.uint32))
        pieces = []
        for box, values in targets:
            flat, atoms = box.reshape(-1).view(atom), np.ascontiguousarray(values).reshape(-1).view(atom)
            assert np.shares_memory(flat, box)
            order = np.array(self.chance.sample(range(len(atoms)), len(atoms)), np.int64)
            for piece in np.array_split(order, self.chance.randint(1, 4)):
                pieces.append((flat, piece, atoms[piece]))
        self.chance.shuffle(pieces)
        for flat, places, values in pieces:
            flat[places] = values
            yield True

    def _clear(self, box: Bits) -> Generator[bool, None, None]:
        for row in self.chance.sample(range(box.shape[1]), box.shape[1]):
            box[:, row] = SENTINEL
            if self.chance.random() < 0.2:
                yield True

    def _poll(self, box: Bits) -> Steps:
        """Own copies [sources, m, H] of a box; each fragment is taken in the round in which all its sources are in."""
        sources, rows, hidden = box.shape
        taken = np.zeros((rows, hidden // FRAGMENT), bool)
        registers = np.zeros((sources, rows, hidden // FRAGMENT, FRAGMENT), np.uint16)
        while not taken.all():
            copy = box.copy().reshape(registers.shape)
            clean = ~self._at_rest(copy).any((0, 3)) & ~taken
            registers[:, clean] = copy[:, clean]
            taken |= clean
            yield bool(clean.any())
        return registers.reshape(box.shape)

    def _at_rest(self, copy: Bits) -> NDArray[np.bool_]:
        """Which halves still wait for a payload."""
        if self.fault == "float compare":
            return widen(copy) == 0
        if self.fault == "flush to zero":
            return (copy & 0x7F80) == 0
        looked_at = {"first half": slice(None, None, 2), "first word": slice(2)}.get(self.fault, slice(None))
        return copy[..., looked_at] == SENTINEL

    def _sum(self, parts: Bits) -> Bits:
        total = np.zeros(parts.shape[1:], np.float32)
        for part in parts:
            total = total + widen(part)
        return round_bf16(total)


def run(ranks: Sequence[Generator[bool, None, object]], seed: int) -> list[object]:
    """Results of all ranks, interleaved at random, each with a speed of its own; Stuck if all that are left wait."""
    chance = random.Random(seed)
    speed = [chance.choice((0.05, 0.5, 1.0)) for _ in ranks]
    results: list[object] = [None] * len(ranks)
    left, waiting = set(range(len(ranks))), set[int]()
    while left:
        rank = chance.choices(sorted(left), [speed[one] for one in sorted(left)])[0]
        try:
            if next(ranks[rank]):
                waiting.clear()
            else:
                waiting.add(rank)
        except StopIteration as end:
            results[rank] = end.value
            left.discard(rank)
            waiting.clear()
        if left and waiting >= left:
            raise Stuck(f"ranks {sorted(left)} wait for ever")
    return results


def drive(rank: Generator[bool, None, object], limit_s: float, pause: random.Random) -> object:
    """The result of one rank that runs beside its peers; TimeoutError if it waits longer than ``limit_s`` at once."""
    since = time.monotonic()
    try:
        while True:
            if next(rank):
                since = time.monotonic()
                time.sleep(0 if pause.random() < 0.9 else 0.001 * pause.random())
            elif time.monotonic() - since > limit_s:
                raise TimeoutError(f"nothing arrived in {limit_s} s")
            else:
                time.sleep(0.0002)
    except StopIteration as end:
        return end.value

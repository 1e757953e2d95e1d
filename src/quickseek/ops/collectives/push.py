"""What a rank contributes and where it stores it: shared by the publishing and the fused kernels (spec/decode.md B.4).

Mailboxes: one-shot BF16 [3 generations][source][capacity][H] on every rank; two-shot contributions
[3][source][owner capacity][H] on the owner of a token (rank token % ranks, row token // ranks) and reduced rows
[3][capacity][H] on every rank. Every half rests at 0x8000.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from quickseek.ops import ptx
from quickseek.parallel.fabric import Mailbox
from quickseek.parallel.watchdog import ABORT

GENERATIONS = 3
FRAGMENT = 8
"""BF16 elements that one thread moves at a time: 16 bytes."""
SENTINEL = 0x80008000

NEXT, ACTIVE, ARRIVED = 0, 4, 8
"""Byte offsets of the state words: generation of the next publish, of the publish in flight, blocks that have read
NEXT."""


class Contribution(NamedTuple):
    """What a rank adds to a sum: x [M, H]; with routes (else 0) a MoE output, of which x is the shared part."""

    x: Int64
    gemm2: Int64
    weights: Int64
    indices: Int64


class Exchange(NamedTuple):
    """A rank's end of an exchange.

    Addresses: the mailbox that it reads, the table of every rank's mailbox that it stores into, one for all of them
    (multicast, or 0), the state words, the control block (parallel/watchdog.py). Then the budget of a wait in
    nanoseconds, and the numbers that a time-out's record carries.
    """

    mailbox: Int64
    table: Int64
    multicast: Int64
    state: Int64
    control: Int64
    budget: Int64
    instance: Int32
    rank: Int32


class Turn(NamedTuple):
    """What a call finds when it starts: its generation, and not 0 where a wait of this rank's peers has given up."""

    generation: Any
    aborted: Any


def current_turn(exchange: Exchange, word: int) -> Turn:
    """The turn by state word ``word``; for after the grid wait."""
    generation = ptx.load_volatile_word(exchange.state + word).bitcast(Int32)
    return Turn(generation, ptx.load_volatile_word(exchange.control + ABORT))


def next_turn(exchange: Exchange, turn: Turn) -> None:
    """Let the next call have the next generation; for one thread, when every block has its turn."""
    following = turn.generation + Int32(1)
    ptx.store_word(exchange.state + NEXT, ptx.choose(following == Int32(GENERATIONS), Int32(0), following))


def arrive(exchange: Exchange) -> Any:
    """How many blocks had their turn before this one; for one thread, once its whole block has."""
    return ptx.atomic_add(exchange.state + ARRIVED, Uint32(1))


@cute.jit
def depart(exchange: Exchange, turn: Any, arrived: Any, blocks: Any) -> None:
    """``next_turn`` by the last of ``blocks`` blocks to arrive; for the thread that has ``arrived``."""
    if arrived == Uint32(blocks - 1):
        ptx.store_word(exchange.state + ARRIVED, Uint32(0))
        next_turn(exchange, turn)


def slot_offset(generation: Any, source: Any, sources: int, token: Any, capacity: int, hidden: int) -> Any:
    """Byte offset of a token's row in a mailbox [3][sources][capacity][hidden]."""
    row = (Int64(generation) * sources + Int64(source)) * capacity + Int64(token)
    return row * (hidden * 2)


def sanitised(words: Any) -> list[Any]:
    """Packed BF16 words without a sentinel half."""
    return [ptx.positive_zeros(word) for word in words]


def load_peers(table: Any, ranks: int) -> list[Any]:
    """The ranks' mailbox addresses: constant data, so it may be read before the grid wait."""
    return [ptx.load_address(table + 8 * peer) for peer in range(ranks)]


def form_of(mailbox: Mailbox | None) -> dict[str, Any]:
    """The ``form`` (and ``stride``) of kernels that store into every copy of a mailbox."""
    if mailbox is None or not mailbox.multicast_pointer:
        return {"form": "unicast"}
    stride = mailbox.replay_stride
    return {"form": "replay", "stride": stride} if stride else {"form": "multicast"}


def push_everywhere(
    peers: list[Any], multicast: Any, form: str, offset: Any, pack: Any, *, own: Any = None, stride: int = 0
) -> None:
    """Store a pack at ``offset`` of every rank's mailbox, rank ``own`` excepted.

    ``form``: "unicast"; "multicast" (one multimem store, which reaches the own copy too); "replay", the addressing of
    multicast with plain stores for ranks whose copies lie ``stride`` bytes apart.
    """
    if form == "multicast":
        ptx.multicast_pack(multicast + offset, pack)
        return
    for peer, base in enumerate(peers):
        target = multicast + peer * stride if form == "replay" else base
        _push_unless(target + offset, pack, own, peer)


def _push_unless(address: Any, pack: Any, own: Any, peer: int) -> None:
    if own is None:
        ptx.push_pack(address, pack)
    else:
        ptx.push_pack_if(own != Int32(peer), address, pack)


def load_routes(given: Contribution, token: Any, top_k: int) -> tuple[list[Any], list[Any]]:
    """A row's indices and weights."""
    base = Int64(token) * (top_k * 4)
    places = [ptx.load_word(given.indices + base + 4 * k).bitcast(Int32) for k in range(top_k)]
    return places, [ptx.load_word(given.weights + base + 4 * k).bitcast(Float32) for k in range(top_k)]


def load_rows(given: Contribution, places: list[Any], token: Any, column: Any, hidden: int) -> list[Any]:
    """A row's packs at byte ``column``: its experts' rows, then the shared expert's.

    A negative index stands for an expert of another rank, whose row is not read.
    """
    row_bytes = hidden * 2
    shared = given.x + Int64(token) * row_bytes + column
    rows = [given.gemm2 + Int64(place) * row_bytes + column for place in places]
    chosen = [ptx.choose(place >= Int32(0), row, shared) for place, row in zip(places, rows, strict=True)]
    return [ptx.load_pack(address) for address in (*chosen, shared)]


def finalized(routes: tuple[list[Any], list[Any]], rows: list[Any]) -> list[Any]:
    """Packed BF16 words of sum_k weight_k * gemm2[index_k] + shared, of ``load_rows``' packs (spec/decode.md B.5).

    FP32, k ascending, shared last, rounded once; the weight of an expert of another rank counts as zero.
    """
    sums = [Float32(0.0)] * FRAGMENT
    for place, scale, row in zip(*routes, rows[:-1], strict=True):
        held = place >= Int32(0)
        weight = ptx.choose(held, scale, Float32(0.0))
        for index, word in enumerate(row):
            low, high = ptx.unpack_bf16(ptx.choose(held, word, Uint32(0)))
            # Products are rounded like anyone else's, so that contributions can be compared in bits.
            sums[2 * index] = sums[2 * index] + ptx.multiply(low, weight)
            sums[2 * index + 1] = sums[2 * index + 1] + ptx.multiply(high, weight)
    for index, word in enumerate(rows[-1]):
        low, high = ptx.unpack_bf16(word)
        sums[2 * index], sums[2 * index + 1] = sums[2 * index] + low, sums[2 * index + 1] + high
    return [ptx.pack_bf16(sums[2 * index], sums[2 * index + 1]) for index in range(4)]


def rank_sum(packs: Any, sources: int) -> list[Any]:
    """Packed BF16 words of the sum of ``sources`` packs: FP32, ranks ascending, rounded once."""
    words = []
    for index in range(4):
        low, high = Float32(0.0), Float32(0.0)
        for source in range(sources):
            more_low, more_high = ptx.unpack_bf16(packs[4 * source + index])
            low, high = low + more_low, high + more_high
        words.append(ptx.pack_bf16(low, high))
    return words

"""Single PTX instructions under names that say what they do, for kernels in the CuTe DSL.

Addresses are 64-bit integers of global memory unless a name says otherwise. A *pack* is four 32-bit words: 16 bytes.
Every wrapper is opaque to the compiler, which neither hoists nor merges it. Importable where the CuTe DSL is.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx


def load_pack(address: Any) -> Any:
    """16 bytes, as four words, of ordinary global memory."""
    return _load_pack("ld.global.v4.u32", address)


def load_volatile_pack(address: Any) -> Any:
    """16 bytes that a peer or another block may be writing: always from the L2 of the memory's home."""
    return _load_pack("ld.volatile.global.v4.u32", address)


def stream_pack(address: Any) -> list[Any]:
    """16 bytes of a weight, past the L1 cache; no ``.nc``, which the assembler moves behind a wait."""
    return list(_load_pack("ld.global.L1::no_allocate.v4.u32", address))


def load_words(address: Any, count: int) -> list[Any]:
    """``count`` 32-bit words; 16 bytes at a time where the count allows, which then needs 16-byte alignment."""
    if count % 4 == 0:
        return [word for start in range(0, count, 4) for word in load_pack(address + start * 4)]
    return [load_word(address + index * 4) for index in range(count)]


def load_word(address: Any) -> Any:
    return inline_ptx("ld.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def load_pair(address: Any) -> list[Any]:
    """8 bytes, as two words."""
    found = inline_ptx(
        "ld.global.v2.u32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[address]
    )
    return list(found)


def load_byte(address: Any) -> Any:
    """A byte in a word."""
    return inline_ptx("ld.global.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def load_volatile_word(address: Any) -> Any:
    return inline_ptx("ld.volatile.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def load_address(address: Any) -> Any:
    """A 64-bit address stored in memory."""
    return inline_ptx("ld.global.u64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])


def store_pack(address: Any, pack: Sequence[Any]) -> None:
    _store("st.global.v4.b32", address, pack)


def store_pair(address: Any, pair: Sequence[Any]) -> None:
    """8 bytes."""
    _store("st.global.v2.b32", address, pair)


def store_word(address: Any, word: Any) -> None:
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def store_long(address: Any, value: Any) -> None:
    """8 bytes."""
    inline_ptx("st.global.b64 [{$r0}], {$r1};", read_only_args=[address, value])


def store_byte(address: Any, word: Any) -> None:
    """The low byte of a 32-bit word."""
    inline_ptx("st.global.u8 [{$r0}], {$r1};", read_only_args=[address, word])


def store_bf16(address: Any, value: Any) -> None:
    """An FP32 value rounded to BF16."""
    inline_ptx(
        "{ .reg .b16 half; cvt.rn.bf16.f32 half, {$r1}; st.global.b16 [{$r0}], half; }", read_only_args=[address, value]
    )


def push_pack(address: Any, pack: Sequence[Any]) -> None:
    """16 bytes into memory of this or a peer GPU, as system-scope relaxed stores: tearing between words is allowed."""
    _store("st.relaxed.sys.global.v4.b32", address, pack)


def push_pack_if(condition: Any, address: Any, pack: Sequence[Any]) -> None:
    """``push_pack`` where the condition holds."""
    flag = choose(condition, Uint32(1), Uint32(0))
    inline_ptx(
        "{ .reg .pred p; setp.ne.u32 p, {$r5}, 0; "
        "@p st.relaxed.sys.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}; }",
        read_only_args=[address, *pack, flag],
    )


def multicast_pack(address: Any, pack: Sequence[Any]) -> None:
    """16 bytes into every rank's copy behind a multicast address."""
    _store("multimem.st.relaxed.sys.global.v4.bf16x2", address, pack)


def push_word(address: Any, word: Any) -> None:
    """A word into memory that a peer or the host reads."""
    inline_ptx("st.relaxed.sys.global.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def atomic_add(address: Any, value: Any) -> Any:
    """The word before the addition, device scope."""
    return inline_ptx(
        "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Uint32],
        read_only_args=[address, value],
    )


def atomic_exchange(address: Any, value: Any) -> Any:
    """The word before the exchange, device scope."""
    return inline_ptx(
        "atom.relaxed.gpu.global.exch.b32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Uint32],
        read_only_args=[address, value],
    )


def fence_system() -> None:
    """Everything this thread wrote becomes visible to peers and host before what it writes next."""
    inline_ptx("fence.acq_rel.sys;")


def store_shared(address: Any, value: Any) -> None:
    """FP32 into this block's shared memory (32-bit address)."""
    inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_shared_words(address: Any, words: Sequence[Any]) -> None:
    """One or four words into shared memory."""
    operands = ", ".join(f"{{$r{index + 1}}}" for index in range(len(words)))
    kind = "v4.b32" if len(words) == 4 else "b32"
    operands = f"{{{operands}}}" if len(words) == 4 else operands
    inline_ptx(f"st.shared.{kind} [{{$r0}}], {operands};", read_only_args=[address, *words])


def load_shared(address: Any) -> Any:
    """FP32 of this block's shared memory (32-bit address)."""
    return inline_ptx("ld.volatile.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def load_shared_words(address: Any, count: int) -> list[Any]:
    """Two or four words of shared memory, so aligned."""
    places = ", ".join(f"{{$w{index}}}" for index in range(count))
    found = inline_ptx(
        f"ld.volatile.shared.v{count}.u32 {{{places}}}, [{{$r0}}];",
        write_only_types=[Uint32] * count,
        read_only_args=[address],
    )
    return list(found)


def open_barrier(barrier: Any, count: int) -> None:
    """Prepare an mbarrier (8 bytes of shared memory) whose first phase ends once ``count`` bytes have arrived.

    For one thread of the block; siblings may send after the cluster barrier that follows.
    """
    inline_ptx("mbarrier.init.shared::cta.b64 [{$r0}], 1;", read_only_args=[barrier])
    expect_bytes(barrier, count)
    inline_ptx("fence.mbarrier_init.release.cluster;")


def expect_bytes(barrier: Any, count: int) -> None:
    """The current phase of an mbarrier ends once ``count`` bytes have arrived; for one thread, once a phase."""
    inline_ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", read_only_args=[barrier, Uint32(count)])


def send_cluster(address: Any, barrier: Any, block: Any, value: Any) -> None:
    """FP32 to the same shared-memory address in block ``block`` of the cluster, counted by that block's mbarrier.

    Unlike a store and a cluster barrier it waits for none of this thread's earlier stores.
    """
    inline_ptx(
        "{ .reg .b32 place, counter; mapa.shared::cluster.u32 place, {$r0}, {$r2}; "
        "mapa.shared::cluster.u32 counter, {$r1}, {$r2}; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [place], {$r3}, [counter]; }",
        read_only_args=[address, barrier, block, value.bitcast(Uint32)],
    )


def await_bytes(barrier: Any, parity: Any) -> None:
    """Return once the mbarrier's phase of this parity (0, 1, 0, ...) is over; its senders are blocks of the cluster."""
    inline_ptx(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1}; @!done bra again; }",
        read_only_args=[barrier, parity],
    )


def fused_multiply_add(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in FP32 with one rounding, whatever the compiler would choose."""
    return _float("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", a, b, c)


def multiply(a: Any, b: Any) -> Any:
    """a * b in FP32, never contracted into a later addition."""
    return _float("mul.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def reciprocal_sqrt(a: Any) -> Any:
    """1 / sqrt(a), approximate to 2^-22."""
    return _float("rsqrt.approx.f32 {$w0}, {$r0};", a)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two FP32 values; a NaN loses."""
    return _float("max.f32 {$w0}, {$r0}, {$r1};", a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two FP32 values; a NaN loses."""
    return _float("min.f32 {$w0}, {$r0}, {$r1};", a, b)


def pack_bf16(low: Any, high: Any) -> Any:
    """Two FP32 values rounded to nearest even into one word of BF16 halves."""
    return inline_ptx("cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[high, low])


def pack_e4m3(values: Sequence[Any]) -> Any:
    """Four FP32 values rounded to nearest even into one word of E4M3 bytes, saturating at 448; NaN becomes 0x7F."""
    return inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=list(values),
    )


def unpack_bf16(word: Any) -> tuple[Any, Any]:
    """The low and the high BF16 half of a word as FP32."""
    return (word << Uint32(16)).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)


def halves_of(codes: Any) -> list[Any]:
    """The four E4M3 values of a word as FP16, in two words."""
    found = inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[codes],
    )
    return list(found)


def product(sums: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """FP32 sums [16, 8] plus FP16 A [16, 16] times B [16, 8], on tensor cores: the fragments of a lane."""
    found = inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *sums],
    )
    return list(found)


def a8_exponent(largest: Any) -> Any:
    """A8's biased scale exponent (signed) of a group whose largest magnitude is this FP32; NaN counts as 0."""
    largest = minimum(maximum(largest, Float32(1e-4)), Float32(2.0**128 - 2.0**104))
    bits = multiply(largest, Float32(float.fromhex("0x1.24924ap-9"))).bitcast(Uint32)
    return Int32((bits >> Uint32(23)) + choose((bits & Uint32(0x7FFFFF)) != Uint32(0), Uint32(1), Uint32(0)))


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where ``condition`` holds, else ``no``, without a branch."""
    return cutlass.select_(condition, yes, no)


def positive_zeros(word: Any) -> Any:
    """A word of BF16 halves with each 0x8000 turned into 0."""
    word = choose((word & Uint32(0xFFFF)) == Uint32(0x8000), word & Uint32(0xFFFF0000), word)
    return choose((word & Uint32(0xFFFF0000)) == Uint32(0x80000000), word & Uint32(0xFFFF), word)


def has_negative_zero(word: Any) -> Any:
    """Non-zero when a BF16 half of the word is 0x8000."""
    flipped = word ^ Uint32(0x80008000)
    return (flipped - Uint32(0x00010001)) & (flipped ^ Uint32(0xFFFFFFFF)) & Uint32(0x80008000)


def _load_pack(instruction: str, address: Any) -> Any:
    return inline_ptx(
        instruction + " {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def _store(instruction: str, address: Any, words: Sequence[Any]) -> None:
    operands = ", ".join(f"{{$r{index + 1}}}" for index in range(len(words)))
    inline_ptx(f"{instruction} [{{$r0}}], {{{operands}}};", read_only_args=[address, *words])


def _float(instruction: str, *values: Any) -> Any:
    return inline_ptx(instruction, write_only_types=[Float32], read_only_args=list(values))

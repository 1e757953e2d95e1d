"""Runs the PTX of a kernel on a CPU, all threads of a grid in step: what a GPU's compiler is given, without a GPU.

Knows the instructions of the kernels that tests run, and raises ``NotImplementedError`` naming any other. Memory is
checked: an address outside the tensors it was given, or not aligned, is an ``AssertionError``. Tensor-core products
are summed in float64 and rounded once. Waits for other kernels do nothing.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = NDArray[Any]
FIRST_ADDRESS = 1 << 20
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16).view(torch.int16).numpy()
TYPES = {
    "u8": np.uint8, "b8": np.uint8, "u16": np.uint16, "b16": np.uint16, "s16": np.int16, "u32": np.uint32,
    "b32": np.uint32, "s32": np.int32, "f32": np.float32, "u64": np.uint64, "b64": np.uint64, "s64": np.int64,
}  # fmt: skip


class Memory:
    """Tensors of a CPU at addresses of their own."""

    def __init__(self) -> None:
        self.bytes = np.zeros(0, np.uint8)
        self.spans: list[tuple[int, Tensor]] = []

    def place(self, tensor: Tensor) -> int:
        """The address of a tensor's bytes, which ``write_back`` updates."""
        start = FIRST_ADDRESS + len(self.bytes) + 256
        start += -start % 256
        raw = tensor.contiguous().view(torch.uint8).flatten().numpy()
        self.bytes = np.concatenate((self.bytes, np.zeros(start - FIRST_ADDRESS - len(self.bytes), np.uint8), raw))
        self.spans.append((start, tensor))
        return start

    def write_back(self) -> None:
        for start, tensor in self.spans:
            place = start - FIRST_ADDRESS
            raw = torch.from_numpy(self.bytes[place : place + tensor.numel() * tensor.element_size()].copy())
            tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))

    def places(self, addresses: Values, size: int) -> Values:
        """Indices [n, size] of the bytes at some addresses, which must lie within a tensor."""
        addresses = addresses.astype(np.int64)
        assert (addresses % size == 0).all(), f"an address of {size} bytes is not aligned"
        inside = np.zeros(len(addresses), bool)
        for start, tensor in self.spans:
            end = start + tensor.numel() * tensor.element_size()
            inside |= (addresses >= start) & (addresses + size <= end)
        assert inside.all(), f"{int((~inside).sum())} threads leave their tensors"
        return addresses[:, None] - FIRST_ADDRESS + np.arange(size)


class Shared:
    """The shared memory of every block, of each from address 0 on; it starts as garbage."""

    def __init__(self, size: int, blocks: int) -> None:
        self.size = size
        self.bytes = np.full(size * blocks, 0xFF, np.uint8)

    def places(self, addresses: Values, size: int, blocks: Values) -> Values:
        """Indices [n, size] of the bytes at some addresses of some blocks."""
        addresses = addresses.astype(np.int64)
        assert (addresses % size == 0).all(), f"an address of {size} bytes is not aligned"
        assert ((addresses >= 0) & (addresses + size <= self.size)).all(), "outside of shared memory"
        return (addresses + blocks * self.size)[:, None] + np.arange(size)


class Program:
    """The instructions of a kernel's PTX."""

    def __init__(self, text: str) -> None:
        body = text[text.index("{") + 1 : text.rindex("}")]
        header = text[: text.index("{")]
        self.parameters = re.findall(r"\.param \.(\w+) (\w+)", header)
        threads = re.search(r"\.reqntid (\d+)", header)
        assert threads is not None
        self.threads = int(threads.group(1))
        # Shared memory is declared in the kernel, or before it without a size, which the launch then gives.
        shared = re.search(r"\.shared \.align \d+ \.b8 (\w+)\[(\d*)\]", text)
        self.shared_name, self.shared_size = (shared.group(1), int(shared.group(2) or 0)) if shared else ("", 0)
        self.instructions: list[tuple[str, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        for line in body.splitlines():
            self._read(line.split("//")[0].strip())

    def _read(self, line: str) -> None:
        label = re.match(r"(\$\w+):", line)
        if label:
            self.labels[label.group(1)] = len(self.instructions)
            return
        if line.startswith("{ .reg"):
            line = line[1:-1]
        for part in line.split(";"):
            found = re.match(r"(@!?%p\d+\s+)?([a-z][\w.:]*)\s*(.*)", part.strip())
            if found is None or part.strip().startswith("."):
                continue
            guard, name, operands = found.groups()
            self.instructions.append((guard or "", name, _split(operands)))


def _split(operands: str) -> list[str]:
    """Operands, vectors and addresses kept whole."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", operands) if part.strip()]


class Grid:
    """All blocks of a launch, of (x, y) of them; they must not depend on each other."""

    def __init__(
        self, program: Program, memory: Memory, arguments: Sequence[float], size: tuple[int, int], shared: int
    ) -> None:
        blocks = size[0] * size[1]
        self.program, self.memory, self.shared = program, memory, Shared(program.shared_size or shared, blocks)
        self.threads = blocks * program.threads
        self.copies: list[tuple[Values, Values, Values, Values]] = []
        """On their way: thread, number of its group, places in shared memory and bytes of each."""
        self.groups = np.zeros(self.threads, np.int64)
        self.block = np.repeat(np.arange(blocks), program.threads)
        self.special = {
            "%tid.x": np.tile(np.arange(program.threads, dtype=np.uint32), blocks),
            "%ctaid.x": (self.block % size[0]).astype(np.uint32),
            "%ctaid.y": (self.block // size[0]).astype(np.uint32),
        }
        self.registers: dict[str, Values] = {}
        self.parameters = {
            name: np.array([value], TYPES[kind])
            for (kind, name), value in zip(program.parameters, arguments, strict=True)
        }
        self.place = np.zeros(self.threads, np.int64)
        self.mask = np.ones(self.threads, bool)

    def run(self) -> None:
        end = len(self.program.instructions)
        waiting = np.zeros(self.threads, bool)
        while (self.place < end).any():
            ready = (self.place < end) & ~waiting
            if not ready.any():
                waits = np.unique(np.stack((self.block[waiting], self.place[waiting])), axis=1)
                assert len(set(waits[0])) == waits.shape[1], "threads wait at different barriers"
                self.place[waiting] += 1
                waiting[:] = False
                continue
            here = int(self.place[ready].min())
            self.mask = ready & (self.place == here)
            later = self.place[ready & ~self.mask]
            stop = int(later.min()) if len(later) else end
            while here < stop:
                guard, name, operands = self.program.instructions[here]
                if name.startswith("bra"):
                    taken = self.mask & (self.condition(guard) if guard else True)
                    self.place[self.mask & ~taken], self.place[taken] = here + 1, self.program.labels[operands[0]]
                    break
                if name.startswith("bar"):
                    self.place[self.mask] = here
                    waiting |= self.mask
                    break
                if name == "ret":
                    self.place[self.mask] = end
                    break
                assert not guard, f"{name} has a guard"
                self.step(name, operands)
                here += 1
            else:
                self.place[self.mask] = here

    def condition(self, guard: str) -> Values:
        value = self.registers[guard.strip().lstrip("@!")]
        return ~value if "!" in guard else value

    # ------------------------------------------------------------------------------------------ operands

    def read(self, operand: str, kind: Any) -> Values:
        """An operand's bits as values of a NumPy type, one for each thread."""
        if operand in self.registers:
            value = self.registers[operand]
            if value.dtype == bool:
                return value
            wanted = np.dtype(kind)
            if value.itemsize > wanted.itemsize:
                value = value.astype(f"u{wanted.itemsize}")
            elif value.itemsize < wanted.itemsize:
                value = value.astype(wanted)
            return value.view(wanted)
        return np.full(self.threads, self.constant(operand, kind))

    def constant(self, operand: str, kind: Any) -> Any:
        if operand == self.program.shared_name:
            return 0
        if operand in self.special:
            return self.special[operand]
        if operand.startswith("0f"):
            return np.array([int(operand[2:], 16)], np.uint32).view(np.float32)[0]
        number = int(operand, 0)
        size = np.dtype(kind).itemsize
        return np.array([number % (1 << (8 * size))], f"u{size}").view(kind)[0]

    def write(self, operand: str, value: Values) -> None:
        value = np.array(np.broadcast_to(value, (self.threads,)))
        if not self.mask.all() and operand in self.registers:
            value = np.where(self.mask, value, self.registers[operand].view(value.dtype))
        self.registers[operand] = value

    def address(self, operand: str) -> Values:
        base, _, offset = operand.strip("[]").partition("+")
        return self.read(base.strip(), np.uint64).astype(np.int64) + int(offset or 0)

    def located(self, operand: str, size: int, threads: Values, shared: bool) -> tuple[Values, Values]:
        """Bytes of a memory, and indices [n, size] of those at the addresses of the ``threads`` of a mask."""
        addresses = self.address(operand)[threads]
        if shared:
            return self.shared.bytes, self.shared.places(addresses, size, self.block[threads])
        return self.memory.bytes, self.memory.places(addresses, size)

    # ------------------------------------------------------------------------------------------ instructions

    def step(self, name: str, operands: list[str]) -> None:
        parts = name.split(".")
        special = getattr(self, f"do_{parts[0]}", None)
        if special is not None:
            special(parts, operands)
            return
        if parts == ["max", "bf16x2"]:
            # The bits of a BF16 value are the upper ones of an FP32 value.
            words = [self.read(one, np.uint32) for one in operands[1:]]
            low = np.fmax(*((word << np.uint32(16)).view(np.float32) for word in words))
            high = np.fmax(*((word & np.uint32(0xFFFF0000)).view(np.float32) for word in words))
            self.write(operands[0], low.view(np.uint32) >> np.uint32(16) | high.view(np.uint32) & np.uint32(0xFFFF0000))
            return
        kind = TYPES.get(parts[-1])
        if parts[0] not in PLAIN or (kind is None and parts[-1] != "pred"):
            raise NotImplementedError(f"PTX instruction {name}")
        values = [self.read(one, bool if parts[-1] == "pred" else kind) for one in operands[1:]]
        lossy = {"min": np.fmin, "max": np.fmax}.get(parts[0]) if parts[1:] == ["f32"] else None
        with np.errstate(all="ignore"):
            self.write(operands[0], (lossy or PLAIN[parts[0]])(*values))

    def do_griddepcontrol(self, parts: list[str], operands: list[str]) -> None:
        pass

    do_pragma = do_griddepcontrol

    def do_mov(self, parts: list[str], operands: list[str]) -> None:
        if operands[0].startswith("{"):
            for index, one in enumerate(_split(operands[0][1:-1])):
                self.write(one, (self.read(operands[1], np.uint32) >> np.uint32(16 * index)).astype(np.uint16))
        elif operands[1].startswith("{"):
            low, high = (self.read(one, np.uint16).astype(np.uint32) for one in _split(operands[1][1:-1]))
            self.write(operands[0], low | high << np.uint32(16))
        elif parts[-1] == "pred":
            known = operands[1] in self.registers
            self.write(operands[0], self.registers[operands[1]] if known else np.array(operands[1] != "0"))
        else:
            self.write(operands[0], self.read(operands[1], TYPES[parts[-1]]))

    def do_ld(self, parts: list[str], operands: list[str]) -> None:
        kind = TYPES[parts[-1]]
        if parts[1] == "param":
            self.write(operands[0], self.parameters[operands[1].strip("[]")].view(kind))
            return
        targets = _split(operands[0][1:-1]) if operands[0].startswith("{") else [operands[0]]
        size = np.dtype(kind).itemsize * len(targets)
        found = np.zeros((self.threads, size), np.uint8)
        memory, places = self.located(operands[1], size, self.mask, "shared" in parts)
        found[self.mask] = memory[places]
        for index, target in enumerate(targets):
            value = np.ascontiguousarray(found.view(kind)[:, index])
            self.write(target, value.astype(np.uint32) if size < 4 else value)

    def do_st(self, parts: list[str], operands: list[str]) -> None:
        kind = TYPES[parts[-1]]
        sources = _split(operands[1][1:-1]) if operands[1].startswith("{") else [operands[1]]
        values = np.stack([self.read(one, kind) for one in sources], 1)
        size = np.dtype(kind).itemsize * len(sources)
        memory, places = self.located(operands[0], size, self.mask, "shared" in parts)
        memory[places] = values.view(np.uint8).reshape(self.threads, size)[self.mask]

    def do_cp(self, parts: list[str], operands: list[str]) -> None:
        """Copies arrive when they are awaited, and no earlier."""
        if parts[2] == "commit_group":
            self.groups[self.mask] += 1
            return
        if parts[2] in ("wait_group", "wait_all"):
            done = self.groups - int(operands[0]) if operands else self.groups + 1
            on_their_way = []
            for threads, groups, places, data in self.copies:
                arrived = self.mask[threads] & (groups < done[threads])
                self.shared.bytes[places[arrived]] = data[arrived]
                if not arrived.all():
                    on_their_way.append((threads[~arrived], groups[~arrived], places[~arrived], data[~arrived]))
            self.copies = on_their_way
            return
        size, copied = int(operands[2]), self.mask
        if len(operands) > 3:
            wanted = self.read(operands[3], np.int32)
            assert ((wanted == size) | (wanted == 0)).all()
            copied = self.mask & (wanted == size)
        data = np.zeros((self.threads, size), np.uint8)
        memory, places = self.located(operands[1], size, copied, shared=False)
        data[copied] = memory[places]
        _, places = self.located(operands[0], size, self.mask, shared=True)
        threads = np.flatnonzero(self.mask)
        self.copies.append((threads, self.groups[threads], places, data[threads]))

    def do_setp(self, parts: list[str], operands: list[str]) -> None:
        kind = TYPES[parts[-1]]
        compare = getattr(np, {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
                               "ge": "greater_equal"}[parts[1]])  # fmt: skip
        self.write(operands[0], compare(self.read(operands[1], kind), self.read(operands[2], kind)))

    def do_selp(self, parts: list[str], operands: list[str]) -> None:
        kind = TYPES[parts[-1]]
        yes, no = (self.read(one, kind) for one in operands[1:3])
        self.write(operands[0], np.where(self.registers[operands[3]], yes, no))

    def do_cvt(self, parts: list[str], operands: list[str]) -> None:
        if parts[-2:] == ["f16x2", "e4m3x2"]:
            codes = self.read(operands[1], np.uint16)
            low, high = (E4M3[part].view(np.uint16).astype(np.uint32) for part in (codes & 0xFF, codes >> 8))
            self.write(operands[0], low | high << np.uint32(16))
        elif parts[-2:] == ["f16x2", "f32"]:
            with np.errstate(all="ignore"):
                high, low = (self.read(one, np.float32).astype(np.float16) for one in operands[1:])
            self.write(operands[0], _word_of(low, high))
        elif parts[-2] in ("bf16x2", "e4m3x2", "bf16"):
            rounding, bits = (_bf16, 16) if parts[-2].startswith("bf16") else (_e4m3, 8)
            halves = [rounding(self.read(one, np.float32)).astype(np.uint32) for one in operands[1:]]
            word = halves[-1] if len(halves) == 1 else halves[1] | halves[0] << np.uint32(bits)
            self.write(operands[0], word.astype(np.uint32 if parts[-2] == "bf16x2" else np.uint16))
        else:
            source, target = TYPES[parts[-1]], TYPES[parts[-2]]
            value = self.read(operands[1], source).astype(target)
            self.write(operands[0], value)

    def do_mul(self, parts: list[str], operands: list[str]) -> None:
        if parts[-1] == "f16x2":
            a, b = (self.read(one, np.uint32).view(np.float16).reshape(-1, 2) for one in operands[1:])
            with np.errstate(all="ignore"):
                self.write(operands[0], _word_of(*(a * b).T))
            return
        kind = TYPES[parts[-1]]
        a, b = (self.read(one, kind) for one in operands[1:3])
        with np.errstate(all="ignore"):
            if parts[1] in ("wide", "hi"):
                size = np.dtype(kind).itemsize
                wide = f"{np.dtype(kind).kind}{2 * size}"
                product = a.astype(wide) * b.astype(wide)
                self.write(operands[0], product if parts[1] == "wide" else (product >> (8 * size)).astype(kind))
            else:
                self.write(operands[0], a * b)

    def do_mad(self, parts: list[str], operands: list[str]) -> None:
        kind = TYPES[parts[-1]]
        a, b, c = (self.read(one, kind) for one in operands[1:4])
        with np.errstate(all="ignore"):
            self.write(operands[0], a * b + c)

    def do_fma(self, parts: list[str], operands: list[str]) -> None:
        a, b, c = (self.read(one, np.float32).astype(np.float64) for one in operands[1:4])
        with np.errstate(all="ignore"):
            self.write(operands[0], (a * b + c).astype(np.float32))

    def do_prmt(self, parts: list[str], operands: list[str]) -> None:
        a, b = (self.read(one, np.uint32) for one in operands[1:3])
        selector = int(operands[3], 0)
        both = np.stack((a, b), 1).view(np.uint8).reshape(-1, 8)
        chosen = [(selector >> (4 * index)) & 15 for index in range(4)]
        assert max(chosen) < 8, "a sign-replicating selector"
        self.write(operands[0], np.ascontiguousarray(both[:, chosen]).view(np.uint32)[:, 0])

    # ------------------------------------------------------------------------------------------ warps

    def whole_warps(self) -> None:
        mask = self.mask.reshape(-1, 32)
        assert (mask.all(1) == mask.any(1)).all(), "an instruction of a warp by a part of it"

    def do_vote(self, parts: list[str], operands: list[str]) -> None:
        self.whole_warps()
        bits = self.registers[operands[1]].reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
        self.write(operands[0], np.repeat(bits.sum(1).astype(np.uint32), 32))

    def do_shfl(self, parts: list[str], operands: list[str]) -> None:
        self.whole_warps()
        target = operands[0].split("|")[0]
        distance = int(operands[2], 0)
        value = self.read(operands[1], np.uint32)
        self.write(target, value[np.arange(self.threads) ^ distance])

    def do_redux(self, parts: list[str], operands: list[str]) -> None:
        self.whole_warps()
        assert parts[2:] == ["max", "u32"]
        self.write(operands[0], np.repeat(self.read(operands[1], np.uint32).reshape(-1, 32).max(1), 32))

    def do_mma(self, parts: list[str], operands: list[str]) -> None:
        self.whole_warps()
        assert ".".join(parts[3:]) == "m16n8k16.row.col.f32.f16.f16.f32"
        targets, *rest = (_split(one[1:-1]) for one in operands)
        lane = np.arange(32)
        line, quarter = lane // 4, lane % 4
        a = np.zeros((self.threads // 32, 16, 16))
        b, c = np.zeros((self.threads // 32, 16, 8)), np.zeros((self.threads // 32, 16, 8))
        for index in range(4):
            value = _halves(self.read(rest[0][index], np.uint32))
            for half in range(2):
                a[:, line + 8 * (index % 2), 2 * quarter + 8 * (index // 2) + half] = value[..., half]
            row, column = line + 8 * (index // 2), 2 * quarter + index % 2
            c[:, row, column] = self.read(rest[2][index], np.float32).reshape(-1, 32)
        for index in range(2):
            value = _halves(self.read(rest[1][index], np.uint32))
            for half in range(2):
                b[:, 2 * quarter + 8 * index + half, line] = value[..., half]
        with np.errstate(all="ignore"):
            total = (a @ b + c).astype(np.float32)
        for index, target in enumerate(targets):
            self.write(target, total[:, line + 8 * (index // 2), 2 * quarter + index % 2].flatten())


def _halves(words: Values) -> Values:
    """FP16 pairs [warps, 32, 2] of words, in float64."""
    return words.view(np.float16).astype(np.float64).reshape(-1, 32, 2)


def _word_of(low: Values, high: Values) -> Values:
    """FP16 halves in words."""
    return np.stack((low, high), 1).copy().view(np.uint32)[:, 0]


def _bf16(values: Values) -> Values:
    bits: Values = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).view(torch.int16).numpy()
    return bits.view(np.uint16)


def _e4m3(values: Values) -> Values:
    bounded = torch.from_numpy(np.ascontiguousarray(values)).clamp(-448, 448)
    codes: Values = bounded.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return codes


def _shift(left: bool) -> Callable[[Values, Values], Values]:
    return lambda a, b: a << b.astype(a.dtype) if left else a >> b.astype(a.dtype)


PLAIN: dict[str, Callable[..., Values]] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": np.negative,
    "shl": _shift(True),
    "shr": _shift(False),
    "min": np.minimum,
    "max": np.maximum,
    "div": np.divide,
    "ex2": np.exp2,
    "popc": lambda a: np.array([int(one).bit_count() for one in a], np.uint32),
}
"""Instructions of one result from operands of one type; ``min`` and ``max`` as in their NaN forms."""


_program = cache(Program)


def launch(text: str, memory: Memory, arguments: Sequence[float], grid: tuple[int, int], shared: int = 0) -> None:
    """Run every block of a grid (x, y), each with ``shared`` bytes where the PTX does not say how many."""
    Grid(_program(text), memory, arguments, grid, shared).run()

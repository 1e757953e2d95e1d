"""Compile, without a GPU, every Triton kernel that a file's launches would launch.

    TRITON_INTERPRET=0 python triton_launches.py FILE CAPABILITY...

FILE defines ``launches() -> dict[str, Callable[[], object]]``: calls of launch functions with tensors of a CPU in
released shapes. Here a launch compiles its kernel for each compute capability (90, 100, 103) and runs nothing. For the
first, every launch is compiled; for the others, of the launches of a kernel with equal dtypes the largest. Prints a
JSON line for every call: its name, the capability, how many kernels it launched, and what the compiler says of those
that were compiled.
"""

import importlib.util
import json
import multiprocessing
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class NoDevice:
    """Stands for the driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def chain_order(ptx: str) -> str:
    """What a kernel does to memory others may write, in the order of its text.

    A letter each: l(oads) and s(tores) of global memory, w(ait) for the kernels before, n(ext) may start; runs of a
    letter are one.
    """
    letters = {
        "griddepcontrol.wait": "w",
        "griddepcontrol.launch_dependents": "n",
        "ld.global": "l",
        "cp.async.c": "l",
        "st.global": "s",
        "atom.": "s",
        "red.": "s",
    }
    found = re.findall("|".join(rf"(?<![\w.]){re.escape(word)}" for word in letters), ptx)
    return re.sub(r"(.)\1+", r"\1", "".join(letters[word] for word in found))


def cached_before_the_wait(ptx: str) -> int:
    """Loads of global memory before the wait that may come from the L1 cache, or all of a kernel that never waits."""
    before = ptx.partition("griddepcontrol.wait")[0]
    return len(re.findall(r"(?<![\w.])ld\.global(?!\S*\.cg)", before))


Launches = dict[str, Callable[[], object]]


def largest_of_each(launches: Launches) -> set[int]:
    """Numbers of launches, in their order: of those of a kernel with tensors of the same dtypes the largest."""
    from triton.runtime.jit import JITFunction

    run, sizes = JITFunction.run, list[tuple[tuple[str, ...], int]]()

    def look(self: Any, *args: Any, **options: Any) -> None:
        tensors = [arg for arg in args if hasattr(arg, "dtype")]
        signature = (self.__name__, *(str(tensor.dtype) for tensor in tensors))
        sizes.append((signature, sum(tensor.numel() for tensor in tensors)))

    JITFunction.run = look
    for launch in launches.values():
        launch()
    JITFunction.run = run
    by_size = sorted(range(len(sizes)), key=lambda number: sizes[number][1])
    return set({sizes[number][0]: number for number in by_size}.values())


def compile_launches(make: Callable[[], Launches], capability: int, every: bool) -> None:
    """Compile the kernels of all launches or, unless ``every``, of ``largest_of_each``; print what came of it."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(NoDevice(capability))
    launches, launched, found = make(), 0, list[dict[str, Any]]()
    chosen = None if every else largest_of_each(launches)
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        nonlocal launched
        if chosen is None or launched in chosen:
            kernel = run(self, *args, grid=grid, warmup=True, **options)
            found.append(
                {
                    "kernel": self.__name__,
                    "warps": kernel.metadata.num_warps,
                    "shared": kernel.metadata.shared,
                    "chained": kernel.metadata.launch_pdl,
                    "order": chain_order(kernel.asm["ptx"]),
                    "cached_early": cached_before_the_wait(kernel.asm["ptx"]),
                }
            )
        launched += 1

    JITFunction.run = compile_only
    for name, launch in launches.items():
        before = launched
        found.clear()
        launch()
        line = {"name": name, "capability": capability, "launched": launched - before, "kernels": found}
        print(json.dumps(line), flush=True)


def main() -> None:
    file, capabilities = Path(sys.argv[1]), [int(capability) for capability in sys.argv[2:]]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # What is loaded is shared: each capability has a process of its own from here on.
    context = multiprocessing.get_context("fork")
    for capability in capabilities:
        arguments = (module.launches, capability, capability == capabilities[0])
        process = context.Process(target=compile_launches, args=arguments)
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{file.stem} does not compile for {capability}")


if __name__ == "__main__":
    main()

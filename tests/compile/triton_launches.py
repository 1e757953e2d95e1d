"""Compile, for one GPU kind and without a GPU, every Triton kernel that a module's launches would launch.

    TRITON_INTERPRET=0 python triton_launches.py CAPABILITY FILE...

Each FILE defines ``launches() -> dict[str, Callable[[], object]]``: calls of launch functions with tensors of a CPU in
released shapes. Here a launch compiles its kernel for compute capability CAPABILITY (90, 100, 103) and runs nothing.
Prints a JSON line for every call: its name and the kernels it compiled, with what the compiler says of each.
"""

import importlib.util
import json
import re
import sys
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


def compile_instead_of_launching(capability: int, found: list[dict[str, Any]]) -> None:
    """From now on a launch compiles its kernel, and appends what came of it to ``found``."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(NoDevice(capability))
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        metadata = kernel.metadata
        found.append(
            {
                "kernel": self.__name__,
                "warps": metadata.num_warps,
                "shared": metadata.shared,
                "chained": metadata.launch_pdl,
                "order": chain_order(kernel.asm["ptx"]),
            }
        )
        return kernel

    JITFunction.run = compile_only


def main() -> None:
    capability, files = int(sys.argv[1]), sys.argv[2:]
    found: list[dict[str, Any]] = []
    compile_instead_of_launching(capability, found)
    for file in files:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, launch in module.launches().items():
            found.clear()
            launch()
            print(json.dumps({"name": f"{Path(file).stem}: {name}", "kernels": found}), flush=True)


if __name__ == "__main__":
    main()

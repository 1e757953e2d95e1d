"""What warps do in ``choose``, the router's choice, compiled without a GPU (spec/model.md 7).

    TRITON_INTERPRET=0 python choose_order.py WARPS...

A JSON line for each number of warps the kernel is launched with, whatever it spreads 384 experts over: the warps, and
how it finds the six best, a letter each in the order of its text: m(aximum or minimum over a warp in one instruction),
b(arrier); runs of a letter are one letter and their length.
"""

import json
import re
import sys
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton_launches import NoDevice

from quickseek.ops.moe import triton as kernels


def order(ptx: str) -> str:
    found = re.findall(r"redux\.sync|bar\.sync", ptx)
    letters = "".join("m" if word == "redux.sync" else "b" for word in found)
    return re.sub(r"(.)\1*", lambda run: f"{run[1]}{len(run[0])}", letters)


def main() -> None:
    driver.set_active(NoDevice(90))
    run, every = JITFunction.run, [int(warps) for warps in sys.argv[1:]]

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        for warps in every if self.__name__ == "choose" else []:
            kernel = run(self, *args, grid=grid, warmup=True, **options | {"num_warps": warps})
            print(json.dumps({"warps": warps, "order": order(kernel.asm["ptx"])}), flush=True)

    JITFunction.run = compile_only
    x, weight = torch.empty(1, 5120, dtype=torch.bfloat16), torch.empty(384, 5120, dtype=torch.bfloat16)
    bias, image = torch.empty(384), torch.empty(1, dtype=torch.bool)
    kernels.route(x, weight, bias, 6, 1.5, 1.0, bias, image)


if __name__ == "__main__":
    main()

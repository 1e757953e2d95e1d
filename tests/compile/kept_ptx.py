"""PTX of a kernel in CuTe DSL, for scripts that tests run once for each architecture."""

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

from triton_launches import chain_order

from quickseek.ops.compiled import compile_kernel


def ptx_of(kernel: Any, arguments: Any) -> tuple[str, str]:
    """PTX of ``kernel`` for the architecture in CUTE_DSL_ARCH, and the target that it names."""
    text = compile_kernel(kernel, arguments, "--keep-ptx").__ptx__
    target = re.search(r"^\.target (\S+)", text, re.MULTILINE)
    assert target is not None
    return text, target.group(1)


def tell(released: Iterable[tuple[str, Any, Any]], miniatures: Iterable[tuple[str, Any, Any]]) -> None:
    """Compile kernels (name, kernel, arguments) and print a JSON line each: with "ptx" as the script's argument, the
    miniatures and their PTX.
    """
    small = sys.argv[1:] == ["ptx"]
    for name, kernel, arguments in miniatures if small else released:
        text, target = ptx_of(kernel, arguments)
        found = {"name": name, "target": target, "order": chain_order(text), "constant": text.count("ld.global.nc")}
        print(json.dumps(found | ({"ptx": text, "shared": kernel.shared} if small else {})), flush=True)

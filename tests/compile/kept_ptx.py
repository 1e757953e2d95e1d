"""PTX of a kernel in CuTe DSL, for scripts that tests run once for each architecture."""

import re
from typing import Any

from quickseek.ops.compiled import compile_kernel


def ptx_of(kernel: Any, arguments: Any) -> tuple[str, str]:
    """PTX of ``kernel`` for the architecture in CUTE_DSL_ARCH, and the target that it names."""
    text = compile_kernel(kernel, arguments, "--keep-ptx").__ptx__
    target = re.search(r"^\.target (\S+)", text, re.MULTILINE)
    assert target is not None
    return text, target.group(1)

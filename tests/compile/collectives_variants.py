"""Compiles every collective kernel for the architecture in CUTE_DSL_ARCH, without a GPU; prints a JSON line each.

The architecture is read when the compiler is loaded, so a process compiles for one.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from kept_ptx import ptx_of

from quickseek.ops.collectives import all_reduce, gather, stamp
from quickseek.ops.collectives.boundary import BoundaryKernel
from quickseek.ops.collectives.publish import OwnerKernel, PublishKernel
from quickseek.ops.embedding import cute as embedding

HIDDEN, STREAMS, CAPACITY = 5120, 4, 384


def boundary(source: str, **changes: Any) -> BoundaryKernel:
    settings: dict[str, Any] = {
        "hidden": HIDDEN, "streams": STREAMS, "ranks": 4, "capacity": CAPACITY, "threads": 128, "cluster": 5,
        "normalise": True, "quantize": False, "top_k": 0, "form": "unicast",
    }  # fmt: skip
    return BoundaryKernel(source=source, **settings | changes)


def variants() -> Iterator[tuple[str, Any, str]]:
    """(name, kernel, its arguments): each protocol, kind and store form, and the odd shapes."""
    for name, kernel in {
        "fused": boundary("fused", quantize=True),
        "fused finalize, looped": boundary("fused", top_k=6, looped=True),
        "fused residual-only": boundary("fused", normalise=False),
        "fused, one block a row": boundary("fused", threads=640, cluster=1),
        "fused, 8 ranks, looped": boundary("fused", ranks=8, looped=True),
        "fused, one rank": boundary("fused", ranks=1, quantize=True, top_k=6),
        "fused, narrow, one stream": boundary("fused", hidden=264, streams=1, threads=64, cluster=1),
        "fused, wide": boundary("fused", hidden=16384, cluster=8, ranks=2),
        "fused multicast": boundary("fused", form="multicast"),
        "collect": boundary("collect", quantize=True),
        "reduced": boundary("reduced"),
    }.items():
        yield name, kernel, all_reduce.BOUNDARY_ARGUMENTS
    for form in ("unicast", "multicast"):
        publish = PublishKernel(HIDDEN, 4, CAPACITY, top_k=0, two_shot=False, form=form)
        yield f"publish {form}", publish, all_reduce.PUBLISH_ARGUMENTS
        yield f"owner {form}", OwnerKernel(HIDDEN, 4, CAPACITY, form=form), all_reduce.OWNER_ARGUMENTS
        yield f"all-gather {form}", gather.GatherKernel(4, 2048, form=form), gather.ARGUMENTS
    two_shot = PublishKernel(HIDDEN, 4, CAPACITY, top_k=6, two_shot=True, form="unicast")
    yield "publish finalize two-shot", two_shot, all_reduce.PUBLISH_ARGUMENTS
    yield "embedding", embedding.StreamEmbedding(HIDDEN, STREAMS), embedding.ARGUMENTS
    yield "stamp", stamp.StampKernel(), stamp.ARGUMENTS


def main() -> None:
    for name, kernel, arguments in variants():
        text, target = ptx_of(kernel, arguments)
        found = {
            "name": name,
            "target": target,
            "multimem": text.count("multimem.st"),
            "push": text.count("st.relaxed.sys.global.v4.b32"),
            "poll": text.count("ld.volatile.global.v4.u32"),
            "grid_wait": text.count("griddepcontrol.wait"),
            "trigger": text.count("griddepcontrol.launch_dependents"),
            "timer": text.count("%globaltimer"),
            "cached_poll": len(re.findall(r"ld\.global\.nc", text)),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

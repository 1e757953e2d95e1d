"""Every kernel once by the phased schedule, for a memory checker to watch: nothing here waits for another launch.

compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/collectives_phased.py [--small]
"""

import sys

import torch
from collectives_cases import KINDS, check, make_case, make_ranks, phased

from quickseek.ops.embedding import embed_streams

SHAPES = ((2, 5120, 4), (4, 1024, 2))


def main(small: bool) -> None:
    for options in ({"two_shot_rows": 1}, {"two_shot_rows": 9}, {"two_shot_rows": 9, "replay_multicast": True}):
        for ranks, hidden, streams in SHAPES[:1] if small else SHAPES:
            instances = make_ranks(ranks, hidden, streams, 8, **options)
            for seed, rows in enumerate((3,) if small else (1, 3, 8)):
                for kind in KINDS:
                    case = make_case(ranks, rows, hidden, streams, seed, kind=kind, finalize=seed % 2 == 1)
                    for rank, result in enumerate(phased(instances, case)):
                        check(case, rank, result)
    (alone,) = make_ranks(1, 5120, 4, 8)
    case = make_case(1, 5, 5120, 4, 9, kind="quantize")
    check(case, 0, alone(case.partials[0], **case.arguments(0)))
    table = torch.randn(100, 5120, device="cuda").bfloat16()
    ids = torch.tensor([-1, 0, 99, 100], dtype=torch.int32, device="cuda")
    embed_streams(ids, table, table.new_empty(4, 5120), table.new_empty(4, 4, 5120))
    torch.cuda.synchronize()
    print("phased schedule done")


if __name__ == "__main__":
    main("--small" in sys.argv)

"""Kernels of a chain start early and touch nothing early."""

import pytest
import torch

from interpreted_kernels import add_one, late_answer, read_ahead, read_at_once
from quickseek.ops.triton_chain import MOST_FETCHED, chained, fetched_bytes

COUNT = 1 << 16


def test_launches_may_overlap() -> None:
    class Kernel:
        __name__ = "kernel"

        def __getitem__(self, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
            return lambda *args, **options: (grid, args, options)

    assert chained(Kernel())[(3,)](1, width=2) == ((3,), (1,), {"width": 2, "launch_pdl": True})


def test_what_the_cache_could_not_keep_is_not_asked_for() -> None:
    assert fetched_bytes(torch.empty(64, 100, dtype=torch.bfloat16)) == 200
    rows = MOST_FETCHED // 4096
    assert fetched_bytes(torch.empty(rows, 4096, dtype=torch.uint8, device="meta")) == 4096
    assert fetched_bytes(torch.empty(rows + 1, 4096, dtype=torch.uint8, device="meta")) == 0


def test_a_chained_kernel_gives_what_it_should(device: torch.device) -> None:
    given = torch.arange(COUNT, dtype=torch.int32, device=device)
    out = torch.full_like(given, -1)
    add_one[(COUNT // 1024,)](given, out)
    assert torch.equal(out, given + 1)


@pytest.mark.gpu
def test_a_slow_predecessor_is_waited_for() -> None:
    device = torch.device("cuda")
    # Compiled before anything is timed.
    late_answer[(1,)](torch.zeros(COUNT, dtype=torch.int32, device=device), 10, COUNT)
    read_at_once[(1,)](*(torch.zeros(COUNT, dtype=torch.int32, device=device) for _ in range(2)))
    add_one[(1,)](*(torch.zeros(COUNT, dtype=torch.int32, device=device) for _ in range(2)))
    torch.cuda.synchronize()
    early = 0
    for captured in (False, True):
        for kernel in (add_one, read_at_once):
            slow, out = (torch.zeros(COUNT, dtype=torch.int32, device=device) for _ in range(2))
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            if captured:
                with torch.cuda.graph(graph):
                    late_answer[(1,)](slow, 2_000_000, COUNT)
                    kernel[(COUNT // 1024,)](slow, out)
                graph.replay()
            else:
                late_answer[(1,)](slow, 2_000_000, COUNT)
                kernel[(COUNT // 1024,)](slow, out)
            torch.cuda.synchronize()
            if kernel is add_one:
                assert torch.equal(out, torch.full_like(out, 8))
            else:
                early += int((out == 1).sum())
    # The control starts before its predecessor has written: kernels do overlap, and one that does not wait is wrong.
    assert early


@pytest.mark.gpu
def test_what_the_kernel_before_the_last_wrote_may_be_read_ahead() -> None:
    device = torch.device("cuda")
    programs, times = 1024, 40
    slow, zeros, other = (torch.zeros(1024, dtype=torch.int32, device=device) for _ in range(3))
    out = torch.zeros(times, 3, programs, dtype=torch.int32, device=device)

    def run(turns: int) -> None:
        for one, two, early in out:
            # The same memory is read, written and read again, so that caches hold what it was.
            add_one[(1,)](zeros, slow)
            add_one[(1,)](zeros, other)
            read_ahead[(programs,)](slow, one)
            late_answer[(1,)](slow, turns, 1024)
            add_one[(1,)](zeros, other)
            read_ahead[(programs,)](slow, two)
            add_one[(1,)](zeros, slow)
            late_answer[(1,)](slow, turns, 1024)
            read_ahead[(programs,)](slow, early)

    # Compiled before it is captured.
    run(16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(20_000)
    for repeat in (lambda: run(20_000), graph.replay):
        out.zero_()
        repeat()
        torch.cuda.synchronize()
        assert (out[:, 0] == 2).all() and (out[:, 1] == 8).all()
        # The control: with no kernel between, what is read ahead is what was there before.
        assert (out[:, 2] == 2).any()

"""Closing an LLM whose ranks have lost each other."""

from pathlib import Path

from engine_cases import written
from quickseek.llm import LLM
from quickseek.parallel.faults import PeersLost
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import World

FAILED = "rank 1 failed in a step: ValueError: torn"


def close_after_a_fault(world: World, directory: Path) -> tuple[str | None, list[str]]:
    """What the world has lost by its own account, and what the step and three ways to close raised."""
    llm = LLM(directory, world=world, tensor_parallel_size=2, max_num_seqs=1, max_model_len=16)
    assert world.lost is None
    raised: list[str] = []
    try:
        with world.as_one("a step"):
            if world.rank == 1:
                raise ValueError("torn")
            world.barrier()
    except PeersLost as lost:
        raised.append(str(lost))
    # Negative control: whoever waits for the peers raises.
    for attempt in (world.barrier, llm.close, llm.close):
        try:
            attempt()
        except PeersLost as lost:
            raised.append(str(lost))
    assert llm.runner.closed
    return None if world.lost is None else str(world.lost), raised


def test_a_model_whose_peers_are_lost_closes_without_waiting_for_them(tmp_path: Path) -> None:
    told = spawn(close_after_a_fault, 2, written(tmp_path, "tiny-tp"))
    assert told == [(FAILED, [FAILED, FAILED])] * 2, "the step and the barrier, and nothing else"

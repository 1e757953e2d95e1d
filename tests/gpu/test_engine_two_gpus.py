"""The engine on two GPUs, TP 2: the same tokens on both ranks, stock and specialized, and what a lost rank does."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_cases import CLOSE_CALL, OWN_SHARE, behind_the_best, reference_of, written
from launched_ranks import Orders, run_ranks
from quickseek.errors import CollectiveTimeout
from quickseek.llm import LLM
from quickseek.ops.collectives import AllReduceMHC, LamportAllGather
from quickseek.parallel.launch import spawn
from quickseek.parallel.world import World
from quickseek.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu2, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

OPTIONS: dict[str, Any] = {"device": "cuda", "tensor_parallel_size": 2, "max_model_len": 512, "max_num_seqs": 4}
OPTIONS |= {"jit_warmup": False, "kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False}
PROMPTS = [[0, *range(20, 20 + count)] for count in (3, 40, 17, 120)]
CYCLES = int(os.environ.get("QUICKSEEK_CYCLES", "1000"))
LIMIT_S, STALL_S = 5.0, 12.0
"""How long collectives wait for a peer, and how long one stays away."""
EXIT_S = 30.0
"""For a process that has raised to end, its GPU's context with it."""


def serve(world: World, directory: str, backend: str, drafts: int) -> dict[str, Any]:
    """Answers of the first round and of all, and what ran. The same prompts together get the same answers each time."""
    llm = LLM(directory, world=world, decode_backend=backend, num_speculative_tokens=drafts, **OPTIONS)
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    graphs = llm.runner.graphs
    assert graphs is not None
    told = [[output.token_ids for output in outputs]]
    while graphs.replays < CYCLES:
        kind = (len(told) - 1) % 3
        told.append([output.token_ids for output in llm.generate(PROMPTS[kind:], params)])
        same = 0 if kind == 0 else 1 + kind
        assert told[-1] == told[same], f"round {len(told) - 1}"
    return {
        "told": told,
        "tokens": [output.token_ids for output in outputs],
        "errors": [output.error for output in outputs],
        "replays": graphs.replays,
        "specialized": llm.runner.cycle.specialized,
        "map": llm.model.backbone.hashes.token_map.cpu(),
    }


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("backend", ["stock", "latency_specialized"])
def test_ranks_take_the_same_tokens_and_the_reference_could_have(tmp_path: Path, backend: str, drafts: int) -> None:
    if backend == "latency_specialized":
        pytest.importorskip("cutlass")
    directory = written(tmp_path, "tiny-tp")
    first, second = spawn(serve, 2, str(directory), backend, drafts, device="cuda", timeout_s=200)
    assert first["tokens"] == second["tokens"] and first["errors"] == [None] * len(PROMPTS)
    assert first["told"] == second["told"], "a later round"
    assert first["replays"] >= CYCLES
    assert first["specialized"] == (first["replays"] if backend == "latency_specialized" else 0)
    model = reference_of(directory, first["map"])
    behind = behind_the_best(model, PROMPTS, first["tokens"])
    print(f"{backend}, {drafts} drafts: {float((behind == 0).double().mean()):.1%}, at most {float(behind.max()):.2f}")
    assert behind.max() < CLOSE_CALL and (behind == 0).double().mean() > OWN_SHARE
    assert behind_the_best(model, PROMPTS, [answer[::-1] for answer in first["tokens"]]).max() > CLOSE_CALL


@pytest.mark.parametrize(("dead", "drafts"), [(1, 0), (1, 3), (0, 3)])
def test_a_rank_whose_peer_is_killed_raises_an_error_that_names_it_and_ends(
    tmp_path: Path, dead: int, drafts: int
) -> None:
    """As under torchrun, where no parent ends the survivor; tests/decode/test_survivors.py has the same on a CPU."""
    pytest.importorskip("cutlass")
    options = OPTIONS | {"decode_backend": "latency_specialized", "num_speculative_tokens": drafts}
    orders = Orders(str(written(tmp_path, "tiny-tp")), dead, most=400, wait_s=LIMIT_S, options=options)
    ranks = run_ranks(tmp_path, 2, orders, LIMIT_S + EXIT_S)
    gone, survivor = ranks[dead], ranks[1 - dead]
    print(survivor.code, survivor.tokens, survivor.after_s, survivor.error[-2000:])
    assert gone.code == -9 and gone.tokens >= 20, gone.error
    assert survivor.code == 1 and survivor.after_s < LIMIT_S + EXIT_S, survivor.error
    assert not survivor.done and 20 <= survivor.tokens < 400
    assert survivor.last_words.startswith("quickseek.errors.CollectiveTimeout: ")
    assert survivor.last_words.endswith(f"missing source ranks: {dead}")


@pytest.mark.parametrize(("how", "told"), [("raised", "a caller's own fault"), ("in a step", "a step's own fault")])
def test_a_rank_whose_peer_raises_raises_an_error_that_names_it_and_its_fault(
    tmp_path: Path, how: str, told: str
) -> None:
    pytest.importorskip("cutlass")
    options = OPTIONS | {"decode_backend": "latency_specialized", "num_speculative_tokens": 3}
    orders = Orders(str(written(tmp_path, "tiny-tp")), 1, how, most=400, wait_s=LIMIT_S, options=options)
    survivor, gone = run_ranks(tmp_path, 2, orders, LIMIT_S + EXIT_S)
    print(survivor.code, survivor.tokens, survivor.after_s, survivor.error[-2000:], gone.error[-2000:])
    assert (survivor.code, gone.code) == (1, 1) and not survivor.done and 20 <= survivor.tokens < 400
    assert survivor.after_s < LIMIT_S + EXIT_S and gone.after_s < LIMIT_S + EXIT_S
    assert survivor.last_words.startswith("quickseek.parallel.faults.PeersLost: rank 1 failed")
    assert survivor.last_words.endswith(f"ValueError: {told}") and told in gone.error


def test_ranks_of_which_none_is_killed_answer_in_full(tmp_path: Path) -> None:
    """Negative control: what ends a rank is the end of its peer."""
    pytest.importorskip("cutlass")
    options = OPTIONS | {"decode_backend": "latency_specialized"}
    orders = Orders(str(written(tmp_path, "tiny-tp")), None, most=400, wait_s=LIMIT_S, options=options)
    for one in run_ranks(tmp_path, 2, orders, LIMIT_S + EXIT_S):
        assert (one.code, one.tokens, one.done) == (0, 400, True), one.error


def stall(world: World, directory: str, drafts: int) -> dict[str, Any]:
    """Rank 1 does nothing for longer than its peer waits, in the middle of an answer; then both serve again."""
    for collective in (AllReduceMHC, LamportAllGather):
        collective.__init__.__kwdefaults__["timeout_s"] = LIMIT_S
    llm = LLM(directory, world=world, decode_backend="latency_specialized", num_speculative_tokens=drafts, **OPTIONS)
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    report: dict[str, Any] = {"plain": llm.generate(PROMPTS[:1], params)[0].token_ids, "shown": [], "missing": []}
    stalled = False
    try:
        for _, output in llm.stream(PROMPTS[0], params):
            report["shown"], last = list(output.token_ids), time.monotonic()
            if world.rank == 1 and len(output.token_ids) >= 20 and not stalled:
                stalled = True
                time.sleep(STALL_S)
    except CollectiveTimeout as error:
        report |= {"after_s": time.monotonic() - last, "missing": [error.missing]}
    try:
        llm.generate(PROMPTS[:1], params)
    except CollectiveTimeout as error:
        report["missing"].append(error.missing)
    llm.reset()
    return report | {"again": llm.generate(PROMPTS[:1], params)[0].token_ids}


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_rank_that_stalls_is_named_in_time_and_both_serve_again(tmp_path: Path, drafts: int) -> None:
    pytest.importorskip("cutlass")
    first, second = spawn(stall, 2, str(written(tmp_path, "tiny-tp")), drafts, device="cuda", timeout_s=150)
    print(first["after_s"], second["after_s"], len(first["shown"]), len(second["shown"]))
    assert first["missing"] == [(1,), (1,)] and second["missing"] == [(), ()]
    assert LIMIT_S - 1.0 < first["after_s"] < LIMIT_S + 1.0
    for report in (first, second):
        assert report["again"] == report["plain"] and 20 <= len(report["shown"]) < 60
        assert report["shown"] == report["plain"][: len(report["shown"])]
    assert first["shown"] == second["shown"], "both raise at the results of the same step"

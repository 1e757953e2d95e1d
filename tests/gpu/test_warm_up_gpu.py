"""On a GPU nothing is compiled once an engine has started, whatever its requests ask for; and what it keeps."""

import gc
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from engine_cases import written
from quickseek.config import DecodeConfig
from quickseek.decode.executor import SpecializedDecode
from quickseek.decode.memory import DecodeMemory
from quickseek.llm import LLM
from quickseek.parallel.virtual import VirtualWorld, run_virtual
from quickseek.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

T = TypeVar("T")

OPTIONS: dict[str, Any] = {"device": "cuda", "max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}
OPTIONS |= {"max_num_seqs": 6, "num_speculative_tokens": 3, "max_num_batched_tokens": 192}
ASKED: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_p": 0.9}, {"logprobs": 3}, {"min_tokens": 2}, {"top_k": 4}]
ASKED += [{"presence_penalty": 0.5}, {"logit_bias": {5: 1.0}}]
if find_spec("xgrammar") is not None:
    ASKED.append({"regex": "[ab]{1,8}", "ignore_eos": False})


def serve(llm: LLM, count: int = 60, seed: int = 0) -> None:
    """Prompts of 1 to 130 tokens, and a few long ones, from requests of all kinds that join while others run."""
    chooser, runner, waiting = random.Random(seed), llm.runner, []
    for number in range(count):
        length = chooser.randint(1, 130) if number % 8 else chooser.randint(130, 480)
        params = replace(
            SamplingParams(max_tokens=chooser.randint(1, 20), ignore_eos=True), **ASKED[number % len(ASKED)]
        )
        prompt = [chooser.randrange(3, llm.config.vocab_size) for _ in range(length)]
        waiting.append(llm._requests([prompt], params)[0])
    while waiting or not runner.idle:
        while waiting and chooser.random() < 0.4:
            runner.add(waiting.pop())
        for update in runner.step():
            assert update.output.error is None, update.output.error


def compiled_while_serving(directory: Path, options: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Kernels compiled at start and by requests in a process of its own, and the names of the latter."""
    with LLM(directory, **OPTIONS | options) as llm:
        ready = llm.compilation.kernels
        serve(llm)
        late = llm.compilation.kernels - ready
        graphs = llm.runner.graphs
        assert graphs is not None and graphs.replays > 20 and llm.runner.cycle.steps >= graphs.replays
        return ready, late, sorted(llm.compilation._named)


def in_a_new_process(function: Callable[..., T], *arguments: Any) -> T:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result(timeout=540)


@pytest.fixture(scope="module")
def tiny_tp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("checkpoint"), "tiny-tp")


@pytest.mark.parametrize("backend", ["stock", "latency_specialized"])
def test_requests_of_all_kinds_compile_nothing_after_the_start(tiny_tp: Path, backend: str) -> None:
    ready, late, names = in_a_new_process(compiled_while_serving, tiny_tp, {"decode_backend": backend})
    assert ready > 50 and late == 0, names


def test_without_a_warm_up_they_do(tiny_tp: Path) -> None:
    """Negative control: the counter sees what requests compile, and names nothing, since it was to be expected."""
    _, late, names = in_a_new_process(compiled_while_serving, tiny_tp, {"jit_warmup": False})
    assert late > 10 and not names


def memory_of_two_engines(directory: Path) -> None:
    cold: dict[str, Any] = OPTIONS | {"jit_warmup": False}

    def used() -> int:
        return torch.cuda.memory_allocated()

    LLM(directory, **cold).close()
    with_workspaces = used()
    clear_workspaces()
    before = used()
    llm = LLM(directory, **cold)
    assert used() > before + llm.runner.plan.total_bytes // 2
    llm.close()
    assert used() <= with_workspaces + (1 << 20), f"with workspaces: {with_workspaces} and now {left()}"
    clear_workspaces()
    assert used() <= before + (1 << 20), f"without workspaces: {before} and now {left()}"


def test_a_closed_engine_gives_its_memory_back(tiny_tp: Path) -> None:
    """Workspaces of cuBLAS, which PyTorch keeps for each CUDA stream, are no engine's; nor does another add one."""
    in_a_new_process(memory_of_two_engines, tiny_tp)


def clear_workspaces() -> None:
    """Free the workspaces of cuBLAS; no graph that uses one may be left."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


def left() -> str:
    """How much is in use, and the largest blocks of it as bytes and CUDA stream."""
    blocks = [
        (block["size"], segment["stream"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    return f"{sum(size for size, _ in blocks)} in {len(blocks)} blocks: {sorted(blocks, reverse=True)[:8]}"


def kept(world: VirtualWorld, directory: Path) -> tuple[int, int]:
    """Bytes that an executor says its mailboxes take, and what was allocated by fabrics while it was built."""
    llm = LLM(
        directory, world=world, tensor_parallel_size=2, **OPTIONS | {"decode_backend": "stock", "jit_warmup": False}
    )
    allocated, fabric = list[int](), world.fabric()
    allocate = fabric.allocate

    def counted(*given: Any, **named: Any) -> Any:
        mailbox = allocate(*given, **named)
        allocated.append(mailbox.local.nbytes)
        return mailbox

    fabric.allocate = counted  # type: ignore[method-assign]
    world.fabric = lambda: fabric  # type: ignore[method-assign]
    executor = SpecializedDecode.for_target(llm.model, DecodeConfig())
    return DecodeMemory.of(executor).mailboxes, sum(allocated)


def test_mailboxes_are_counted_to_the_byte(tiny_tp: Path) -> None:
    for told, allocated in run_virtual(kept, 2, tiny_tp, device="cuda", timeout_s=300.0):
        assert told == allocated > 100_000

"""Which kernels a run of the engine would compile on a GPU, found without one: launches are named and run nothing.

    TRITON_INTERPRET=0 python dry_launches.py DIRECTORY OPTIONS

OPTIONS is a JSON object of ``LLM``'s. Every door takes its kernels, a launch tells the specialisation that it asks for
and returns, and all new memory holds zeros: token 0 is chosen everywhere. Prints a JSON object: how many
specialisations the warm-up (``warm``) and the requests after it (``load``) asked for, and those that only the requests
did: ``missed``, and ``missed by less``, where the warm-up reads prompts of one token only.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quickseek.engine.warm_up import WarmUp
from quickseek.llm import LLM
from quickseek.ops import forms, sampling
from quickseek.ops.linear import cute as linear_cute
from quickseek.ops.linear import triton as linear_triton
from quickseek.ops.moe import cute as moe_cute
from quickseek.ops.moe import triton as moe_triton
from quickseek.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "compile"))
from triton_launches import NoDevice

CAPABILITY = 90
Asked = tuple[str, str]
asked: set[Asked] = set()


def ask(self: JITFunction[Any], *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """In place of a launch."""
    *_, binder = self.device_caches[0]
    _, specialization, options = binder(*given, **named)
    asked.add((self.__name__, f"{specialization} {options}"))


def stand_in(kernel: type, arguments: Any, device: Any, **configuration: Any) -> Callable[..., None]:
    """Of ``ops.compiled.compiled``."""
    asked.add((kernel.__name__, str(sorted(configuration.items()))))
    return lambda *given: None


def few_experts(x: torch.Tensor, slots: int, inner: int, *codes: torch.Tensor) -> Any:
    fits = slots <= moe_triton.MOST_CUTE_SLOTS and moe_cute.fits(x.shape[1], inner, *codes)
    return moe_cute if fits else None


def few_products(x: torch.Tensor, kind: str, codes: torch.Tensor, outputs: int, dtype: torch.dtype) -> Any:
    few = x.shape[0] <= linear_triton.MOST_CUTE_ROWS and codes.numel() <= linear_triton.MOST_CUTE_BYTES
    fits = few and kind == "fp8" and dtype == torch.bfloat16 and linear_cute.fits(x, codes, outputs)
    return linear_cute if fits else None


def go_dry() -> None:
    """From here on every door takes its kernels, and none runs."""
    driver.set_active(NoDevice(CAPABILITY))
    JITFunction.run = ask  # type: ignore[method-assign]
    forms._module = lambda door, on_cuda: _kernels(door)  # type: ignore[assignment]
    for module in (linear_cute, moe_cute):
        module.compiled, module.current_stream = stand_in, lambda device: None  # type: ignore[attr-defined]
    linear_triton.few_rows, moe_triton.few_rows = few_products, few_experts
    sampling.valid = lambda logits: torch.ones(logits.shape[0], dtype=torch.bool)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, zeroed(getattr(owner, name)))


def zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``make``, whose memory holds zeros."""

    def made(*given: Any, **named: Any) -> torch.Tensor:
        memory = make(*given, **named)
        return memory if memory.is_meta else memory.zero_()

    return made


def _kernels(door: str) -> Any:
    return __import__(f"{door}.triton", fromlist=["_"])


@contextmanager
def collecting() -> Iterator[set[Asked]]:
    """What is asked for inside."""
    asked.clear()
    found: set[Asked] = set()
    yield found
    found |= asked


def serve(llm: LLM, seed: int, count: int) -> None:
    """Requests of all kinds that come and go: prompts of 1 to 130 tokens, some nearly as long as the context."""
    chooser = random.Random(seed)
    runner, waiting = llm.runner, []
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"logprobs": 0}, {"logprobs": 3}, {"min_tokens": 2}]
    kinds += [{"presence_penalty": 0.5}, {"logit_bias": {5: 1.0}}, {"top_k": 4, "min_p": 0.1}]
    for number in range(count):
        length = chooser.randint(1, 130) if number % 5 else chooser.randint(1, llm.max_model_len - 12)
        params = SamplingParams(max_tokens=chooser.randint(1, 9), ignore_eos=True, **chooser.choice(kinds))
        waiting.append(llm._requests([[chooser.randrange(3, llm.config.vocab_size) for _ in range(length)]], params)[0])
    while waiting or not runner.idle:
        while waiting and chooser.random() < 0.4:
            runner.add(waiting.pop())
        for update in runner.step():
            assert update.output.error is None, update.output.error


def main() -> None:
    directory, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    go_dry()
    with collecting() as warm:
        llm = LLM(directory, mode="trained", **options)
    with collecting() as load:
        serve(llm, 1, 30)
    with collecting() as less:
        options = {"most_requests": llm.runner.plan.max_num_seqs, "most_tokens": 1, "replays": False, "paced": False}
        WarmUp(llm.runner.cycle, **options).run()
    found = {"missed": sorted(load - warm), "missed by less": sorted(load - less)}
    print(json.dumps({"warm": len(warm), "load": len(load)} | found))


if __name__ == "__main__":
    main()

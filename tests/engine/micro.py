"""A model of every mechanism small enough to run tens of thousands of steps, and a runner over it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from quickseek.checkpoint.miniature import miniature_config, miniature_tensors
from quickseek.checkpoint.miniature_tokenizer import tokenizer_files
from quickseek.config import ModelConfig
from quickseek.engine.plan import MemoryPlan
from quickseek.engine.request import Request
from quickseek.engine.runner import Runner, RunnerOptions
from quickseek.model.causal_lm import CausalLM
from quickseek.model.loader import TensorSource
from quickseek.numerics import Numerics
from quickseek.sampling_params import SamplingParams
from quickseek.tokenizer.compressed_ids import compressed_id_table
from quickseek.tokenizer.tokenizer import Tokenizer

MAX_LENGTH = 96


@cache
def micro_config() -> ModelConfig:
    """Window only, Full and Reuse at ratio 2, a candidate source and a Reindex at ratio 1, one Engram, one stage."""
    return replace(
        miniature_config("tiny"),
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=2,
        head_dim=32,
        q_lora_rank=32,
        o_groups=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        compress_ratios=(0, 2, 2, 1, 1, 0),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 4),
        index_topk=4,
        candidate_source_layer_id=3,
        candidate_topk_blocks=3,
        candidate_block_size=2,
        engram_layer_ids=(1,),
        engram_num_embeddings=(434,),
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=(3, 4),
        dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=1,
        max_position_embeddings=MAX_LENGTH,
    )


@cache
def micro_tokenizer() -> Tokenizer:
    files = tokenizer_files(micro_config().vocab_size)
    return Tokenizer(_text(files["tokenizer.json"]), {}, "micro", micro_config().vocab_size)


def _text(content: bytes | str) -> str:
    return content if isinstance(content, str) else content.decode()


@cache
def micro_model(draft: bool) -> CausalLM:
    """The model in float64 exact mode, with or without its drafter."""
    config = micro_config()
    model = CausalLM(config, Numerics.exact(torch.float64), draft=draft)
    model.load(TensorSource(miniature_tensors(config)))
    model.set_token_map(compressed_id_table(micro_tokenizer(), config.vocab_size))
    return model.eval()


def make_runner(
    *,
    drafts: int = 0,
    num_blocks: int | None = None,
    max_num_seqs: int = 4,
    snapshots: int = 4,
    block_tokens: int = 8,
    max_model_len: int = MAX_LENGTH,
    **options: object,
) -> Runner:
    """A runner over the micro model; ``num_blocks`` None: enough for everybody."""
    plan = MemoryPlan.build(
        micro_config(),
        Numerics.exact(torch.float64),
        budget_bytes=1 << 28,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_snapshots=snapshots,
        num_speculative_tokens=drafts,
        block_tokens=block_tokens,
    )
    if num_blocks is not None:
        plan = replace(plan, num_blocks=num_blocks)
    chosen = RunnerOptions(prefix_caching=snapshots > 0, guarded=True, **options)  # type: ignore[arg-type]
    return Runner(micro_model(drafts > 0), micro_tokenizer(), plan, "micro", chosen)


GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def make_request(
    prompt: Sequence[int], params: SamplingParams = GREEDY, *, max_model_len: int = MAX_LENGTH, **fields: object
) -> Request:
    request = Request.create(list(prompt), params, micro_config(), max_model_len)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def finish_all(runner: Runner, most_steps: int = 5000) -> dict[str, list[int]]:
    """Run to the end; the tokens of every request by id."""
    outputs: dict[str, list[int]] = {}
    for _ in range(most_steps):
        if runner.idle:
            return outputs
        for update in runner.step():
            outputs[update.output.request_id] = list(update.output.token_ids)
    raise AssertionError(f"the runner is not idle after {most_steps} steps")


def tokens_of(runner: Runner, requests: Sequence[Request]) -> list[list[int]]:
    """Add all requests at once and run them; their tokens in order."""
    for request in requests:
        runner.add(request)
    outputs = finish_all(runner)
    return [outputs[request.request_id] for request in requests]


@cache
def _alone(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    params = replace(GREEDY, max_tokens=count)
    return tuple(tokens_of(make_runner(snapshots=0, max_num_seqs=1), [make_request(prompt, params)])[0])


def alone(prompt: Sequence[int], count: int = 12) -> list[int]:
    """What plain greedy decoding of one request gives: no batch, no cache, no speculation, one prompt step."""
    return list(_alone(tuple(prompt), count))


def assert_nothing_leaks(runner: Runner) -> None:
    """Drop every snapshot: then every block and slot must be free."""
    scheduler = runner.scheduler
    assert runner.idle and not runner.answers and not scheduler.running and not scheduler.waiting
    if scheduler.prefix is not None:
        for snapshot in list(scheduler.prefix.snapshots):
            scheduler.prefix._evict(snapshot)
        assert scheduler.prefix.slots.available == runner.plan.num_snapshots
    assert scheduler.pool.available == scheduler.pool.usable
    assert scheduler.slots.available == runner.plan.max_num_seqs

"""The memory plan against the sizes of spec/model.md 6.9 and 6.10, and against what it refuses."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quickseek.checkpoint.miniature import miniature_config
from quickseek.config import ModelConfig
from quickseek.decode.memory import DecodeMemory
from quickseek.engine.blocks import BlockPool
from quickseek.engine.plan import OPTIONS, MemoryPlan, graph_bytes
from quickseek.engine.pools import Pools
from quickseek.engine.scheduler import Scheduler, SchedulerLimits
from quickseek.errors import ConfigError
from quickseek.numerics import Numerics
from quickseek.ops.cache import SLACK
from quickseek.parallel.fabric import VirtualFabric
from quickseek.parallel.watchdog import Watchdog

RELEASED = ModelConfig.from_file(Path(__file__).parent.parent / "golden/released_config.json")
TINY = miniature_config("tiny")
GIB = 1 << 30


def released(**options: int) -> MemoryPlan:
    defaults = {"budget_bytes": 20 * GIB, "max_num_seqs": 4, "max_model_len": 100_000}
    return MemoryPlan.build(RELEASED, Numerics.trained(), **(defaults | options))


def test_a_token_of_the_released_model_takes_890_bytes() -> None:
    for block_tokens in (8, 16, 64):
        assert released(block_tokens=block_tokens).bytes_per_token == (3 / 2 + 1) * (288 + 68) == 890


def test_a_slot_of_the_released_model_holds_rings_open_rows_and_history() -> None:
    rings, open_rows, history = 40 * (128 + SLACK) * 528, 3 * (1 + SLACK) * 2 * 512 * 4, (3 + SLACK) * 4
    assert released().slot_bytes == rings + open_rows + history
    assert released(num_speculative_tokens=5).slot_bytes == rings + open_rows + history + 3 * (128 + SLACK) * 528


def test_a_request_takes_its_slot_and_the_blocks_of_its_rows_and_those_ahead() -> None:
    plan = released(num_speculative_tokens=5)
    assert plan.request_bytes(100) == plan.slot_bytes + 7 * 16 * 890
    assert plan.request_bytes(101) == plan.slot_bytes + 8 * 16 * 890


@pytest.mark.parametrize(("numerics", "value"), [(Numerics.exact(), 4), (Numerics.exact(torch.float64), 8)])
def test_plain_caches_hold_values(numerics: Numerics, value: int) -> None:
    plan = MemoryPlan.build(RELEASED, numerics, budget_bytes=20 * GIB, max_num_seqs=1, max_model_len=1000)
    assert plan.bytes_per_token == 2.5 * (512 + 128) * value


def test_bf16_records_take_3200_bytes_a_token() -> None:
    plan = MemoryPlan.build(
        RELEASED, Numerics.exact(torch.bfloat16), budget_bytes=20 * GIB, max_num_seqs=1, max_model_len=1000
    )
    assert plan.bytes_per_token == 3200


@pytest.mark.parametrize("numerics", [Numerics.exact(), Numerics.trained()], ids=["plain", "packed"])
@pytest.mark.parametrize("drafts", [0, 5])
def test_the_pools_take_what_the_plan_says(numerics: Numerics, drafts: int) -> None:
    plan = MemoryPlan.build(
        TINY, numerics, budget_bytes=8 << 20, max_num_seqs=2, max_model_len=200, num_speculative_tokens=drafts
    )
    pools = Pools(
        TINY,
        numerics,
        num_slots=plan.num_slots,
        num_blocks=plan.num_blocks,
        block_tokens=plan.block_tokens,
        max_model_len=plan.max_model_len,
        draft=drafts > 0,
        device="meta",
    )
    assert sum(pools.bytes().values()) == plan.total_bytes <= plan.budget_bytes
    larger = dataclasses.replace(plan, num_blocks=plan.num_blocks + 1)
    assert sum(pools.bytes().values()) != larger.total_bytes


def test_long_contexts_are_counted_beyond_32_bits() -> None:
    plan = released(budget_bytes=100 * GIB, max_num_seqs=256, max_model_len=1_048_576, num_speculative_tokens=5)
    assert plan.total_bytes <= 100 * GIB < plan.total_bytes + plan.block_bytes
    largest_offset = (plan.num_blocks - 1) * (plan.block_tokens * 288)
    assert largest_offset > 2**31
    pools = Pools(
        RELEASED,
        Numerics.trained(),
        num_slots=plan.num_slots,
        num_blocks=plan.num_blocks,
        block_tokens=plan.block_tokens,
        max_model_len=plan.max_model_len,
        draft=True,
        device="meta",
    )
    assert sum(pools.bytes().values()) == plan.total_bytes
    assert plan.num_blocks * plan.block_bytes != (plan.num_blocks * plan.block_bytes) % 2**32


def test_a_plan_takes_no_more_blocks_than_full_contexts_need() -> None:
    plan = released(budget_bytes=1000 * GIB, num_snapshots=3)
    assert plan.num_blocks == 1 + 7 * -(-(99_999 + 2) // 16)
    assert plan.longest == plan.max_model_len == 100_000
    assert plan.snapshot_slots == range(5, 8) and plan.num_slots == 8


def test_plan_and_scheduler_agree_on_the_longest_request() -> None:
    for budget in (30 << 20, 40 << 20, 200 << 20):
        plan = released(budget_bytes=budget, max_num_seqs=2, num_speculative_tokens=3)
        limits = SchedulerLimits(
            max_num_seqs=2, max_num_batched_tokens=8, max_model_len=100_000, num_speculative_tokens=3
        )
        assert plan.longest == Scheduler(limits, BlockPool(plan.num_blocks, plan.block_tokens)).max_length


def test_what_does_not_fit_names_the_option_to_change() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes = 1048576: expected .* one request of two tokens"):
        released(budget_bytes=1 << 20)
    with pytest.raises(ConfigError, match="max_num_seqs = 64: expected at most 7 in"):
        released(budget_bytes=24 << 20, max_num_seqs=64)
    with pytest.raises(ConfigError, match="num_prefix_snapshots = 64: expected at most 3 beside 4 requests"):
        released(budget_bytes=24 << 20, num_snapshots=64)
    for key, value in (("max_num_seqs", 0), ("max_model_len", 1), ("num_snapshots", -1), ("block_tokens", 12)):
        with pytest.raises(ConfigError, match=f"{OPTIONS.get(key, key)} = {value}"):
            released(**{key: value})


def test_more_drafts_than_the_rings_have_slack_for_are_refused() -> None:
    released(budget_bytes=24 << 20, num_speculative_tokens=6)
    with pytest.raises(ConfigError, match="num_speculative_tokens = 7: expected at most 6: rings hold 8 rows"):
        released(budget_bytes=24 << 20, num_speculative_tokens=7)


def test_the_advice_of_a_refusal_is_right_to_the_slot() -> None:
    released(budget_bytes=24 << 20, max_num_seqs=7)
    with pytest.raises(ConfigError):
        released(budget_bytes=24 << 20, max_num_seqs=8)
    released(budget_bytes=24 << 20, num_snapshots=3)
    with pytest.raises(ConfigError):
        released(budget_bytes=24 << 20, num_snapshots=4)


def test_a_plan_is_printed_in_a_few_lines() -> None:
    text = str(released(num_snapshots=2))
    assert len(text.splitlines()) == 5
    assert "890 bytes a token" in text and "4 request and 2 snapshot slots" in text and "longest request 100000" in text


def test_a_plan_tells_what_lies_beside_the_caches() -> None:
    plan = released()
    assert "(counted once the model is loaded), 0.0 MiB left for graphs" in str(plan)
    mib = 1 << 20
    full = dataclasses.replace(plan, mailbox_bytes=3 * mib, embedding_bytes=1010 * mib, graph_bytes=600 * mib)
    assert "mailboxes 3.0 MiB, embedding's replica 1010.0 MiB, 600.0 MiB left for graphs" in str(full)
    assert full.total_bytes == plan.total_bytes, "the budget is that of the caches"


def test_graphs_are_left_more_room_the_more_logits_a_step_has() -> None:
    few, many = graph_bytes(RELEASED, 1, 0), graph_bytes(RELEASED, 16, 5)
    assert (many - few) / (few - 512 * 2**20) == 16 * 6 - 1
    assert many == 512 * 2**20 + 32 * 96 * RELEASED.vocab_size


def test_a_plan_that_does_not_fit_a_gpu_beside_its_graphs_says_what_does() -> None:
    plan = dataclasses.replace(released(), graph_bytes=2 * GIB)
    plan.check_room(plan.total_bytes + 2 * GIB)
    with pytest.raises(
        ConfigError, match=rf"kv_cache_memory_bytes = {20 * GIB}: expected at most {plan.total_bytes - 1}"
    ):
        plan.check_room(plan.total_bytes + 2 * GIB - 1)
    with pytest.raises(ConfigError, match="at most 0: 1024 MiB of the GPU are free, and graphs are left 2048 MiB"):
        plan.check_room(GIB)


def test_what_an_executor_keeps_is_counted_mailbox_by_mailbox() -> None:
    def box(size: int) -> SimpleNamespace:
        return SimpleNamespace(local=torch.zeros(size, dtype=torch.uint8))

    def boundary(*sizes: int) -> SimpleNamespace:
        implementation = SimpleNamespace(mailboxes=[box(size) for size in sizes])
        return SimpleNamespace(all_reduce=SimpleNamespace(collective=SimpleNamespace(implementation=implementation)))

    fabric = VirtualFabric.ranks(1, "cpu")[0]
    gather = SimpleNamespace(_gather=SimpleNamespace(launches=True, mailbox=box(100)))
    in_turns = SimpleNamespace(_gather=SimpleNamespace(launches=False))
    executor: Any = SimpleNamespace(
        fabric=fabric,
        boundaries=boundary(1000, 200),
        draft=SimpleNamespace(boundaries=boundary(30)),
        row_shard=SimpleNamespace(lamport=gather),
        gather=SimpleNamespace(gather=in_turns),
        embedding=SimpleNamespace(table=torch.zeros(4, 8, dtype=torch.bfloat16)),
    )
    control = Watchdog.of(fabric).mailbox.local.nbytes
    assert DecodeMemory.of(executor) == DecodeMemory(mailboxes=control + 1330, embedding=64)
    executor.draft = executor.row_shard = executor.embedding = None
    assert DecodeMemory.of(executor) == DecodeMemory(mailboxes=control + 1200)
    executor.fabric = None
    assert DecodeMemory.of(executor) == DecodeMemory.of(None) == DecodeMemory()

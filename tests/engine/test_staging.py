"""Numbers reach a device that runs late, and results come back from it, as they were when they were sent."""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from late_device import LateDevice
from micro import GREEDY, make_request, make_runner, micro_config
from torch import Tensor

from quickseek.engine.batch import PrefillBatch
from quickseek.engine.readback import UNREAD, PinnedReadbacks
from quickseek.engine.slot_state import NO_LIMIT, SlotState
from quickseek.engine.staging import ALIGNMENT, PinnedStaging, Staging, staging_on
from quickseek.engine.tick import PrefillChunk
from quickseek.sampling_params import SamplingParams

CPU = torch.device("cpu")


def parts(number: int, rows: int = 5) -> list[Tensor]:
    """Tensors of several shapes and dtypes, other ones for each number."""
    return [
        torch.arange(rows) + 100 * number,
        torch.full((2, 3), number / 8, dtype=torch.float64),
        torch.empty(0, dtype=torch.int64),
        torch.tensor([True, False, number % 2 == 0]),
        torch.full((1, 2, 7), -number, dtype=torch.int32),
    ]


@pytest.mark.parametrize("patient", [True, False])
def test_a_segment_is_written_again_only_once_its_copies_have_passed(
    monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    device = LateDevice(monkeypatch)
    device.patient = patient
    staging = PinnedStaging(CPU, segments=3, size=2048)
    table = torch.zeros(40, 4, dtype=torch.int64)
    sent = []
    for number in range(40):
        sent.append(staging.copy(*parts(number)))
        staging.write(table[number, 1:3], torch.tensor([number, number + 1]))
    device.run()
    expected = [parts(number) for number in range(40)]
    pairs = [pair for both in zip(sent, expected, strict=True) for pair in zip(*both, strict=True)]
    right = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    written = torch.equal(table[:, 1:3], torch.stack([torch.arange(40), torch.arange(40) + 1], 1))
    assert (right and written, device.allocated) == (patient, 3)
    assert (device.waits > 3) == patient


def test_the_host_waits_only_for_a_device_that_is_a_whole_ring_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(monkeypatch)
    staging, target = PinnedStaging(CPU, segments=4, size=8 * ALIGNMENT), torch.zeros(1, dtype=torch.int64)
    for number in range(4 * 8):
        staging.write(target, torch.tensor([number]))
    assert device.waits == 0
    staging.write(target, torch.tensor([99]))
    assert device.waits == 1 and target.item() == 7, "only the first segment was waited for"


def test_a_segment_grows_to_what_must_fit_and_parts_begin_where_kernels_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(monkeypatch)
    staging = PinnedStaging(CPU, segments=2, size=256)
    sent = [staging.copy(*parts(number, 1000)) for number in range(5)]
    device.run()
    for number, found in enumerate(sent):
        for ours, expected in zip(found, parts(number, 1000), strict=True):
            assert torch.equal(ours, expected) and ours.dtype == expected.dtype and ours.is_contiguous()
            assert ours.storage_offset() * ours.element_size() % ALIGNMENT == 0
    assert device.allocated == 2 + 2, "each segment grows once"


def test_a_cpu_has_its_tensors_where_they_are() -> None:
    staging, numbers = staging_on(CPU), torch.arange(3)
    assert type(staging) is Staging and staging.copy(numbers)[0] is numbers
    staging.write(target := torch.zeros(3, dtype=torch.int64), numbers)
    assert target.tolist() == [0, 1, 2]


# ------------------------------------------------------------------------------------------ what is sent


def test_a_prefill_step_is_one_copy_of_what_its_chunks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(monkeypatch)
    long, short = make_request(range(30, 50)), make_request([7, 8])
    long.slot, short.slot = 3, 1
    chunks = [PrefillChunk(long, 2, 4, last=False, replayed=1, oldest=2), PrefillChunk(short, 0, 2, last=True)]
    batch = PrefillBatch.build(chunks, 3, PinnedStaging(CPU))
    assert len(device.queue) == 1
    device.run()
    assert batch.slots.tolist() == [3, 1] and batch.ids.tolist() == [32, 33, 34, 35, 7, 8]
    assert batch.rows.positions.tolist() == [2, 3, 4, 5, 0, 1] and batch.rows.requests.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.rows.starts.tolist() == [2, 0] and batch.rows.ends.tolist() == [6, 2]
    assert batch.rows.first_rows.tolist() == [0, 4] and (batch.rows.max_rows, batch.rows.max_length) == (4, 6)
    assert batch.lookback.tolist() == [[31, 30, -1], [-1, -1, -1]] and batch.last.tolist() == [1]
    assert batch.oldest is not None and batch.oldest.tolist() == [2, 0]
    assert batch.keep_from is not None and batch.keep_from.tolist() == [3, 0]
    plain = PrefillBatch.build(chunks[1:], 3, Staging())
    assert plain.oldest is None and plain.keep_from is None


BIASED = SamplingParams(
    max_tokens=9, min_tokens=4, temperature=0.7, top_p=0.8, top_k=11, min_p=0.1, seed=2**62 + 1, stop_token_ids=(5, 6),
    presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5, logit_bias={40: 3.0, 41: -100.0},
)  # fmt: skip


def test_a_request_that_begins_is_written_to_its_slot_and_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(monkeypatch)
    state = SlotState(micro_config(), 4, 2, CPU)
    state.staging = PinnedStaging(CPU)
    before = {name: value.clone() for name, value in vars(state).items() if isinstance(value, Tensor)}
    request = make_request([20, 21, 20], BIASED, output_ids=[30, 30])
    free = replace(BIASED, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    for params in (free, replace(GREEDY, logit_bias={50: 1.0})):
        request.params = params
        state.begin(2, request, 3)
    assert len(device.queue) == 2 * 2, "one row for each dtype"
    device.run()
    assert state.bias_ids[2, :2].tolist() == [50, -1] and state.bias_values[2, 0] == 1.0 and state.seeds[2] >= 0
    assert state.ends[2].unique().tolist() == [-1] and state.repetition[2] == 1.0
    state.staging = Staging()
    request.params = BIASED
    state.begin(2, request, 3)
    numbers = (state.lengths, state.produced, state.draft_counts, state.limits, state.min_tokens, state.top_k)
    assert [column[2].item() for column in numbers] == [3, 2, 0, 9, 4, 11]
    shares = (state.temperature, state.top_p, state.min_p, state.presence, state.frequency, state.repetition)
    assert [column[2].item() for column in shares] == [0.7, 0.8, 0.1, 0.5, -0.25, 1.5]
    assert state.seeds[2] == request.seed == 2**62 + 1 and not state.finished[2]
    assert state.ends[2, :4].tolist() == [5, 6, micro_config().eos_token_id, -1]
    assert state.bias_ids[2, :3].tolist() == [40, 41, -1] and state.bias_values[2, :3].tolist() == [3.0, -100.0, 0.0]
    assert state.output_counts[2].nonzero().flatten().tolist() == [30] and state.output_counts[2, 30] == 2
    assert state.prompt_seen[2].nonzero().flatten().tolist() == [20, 21]
    others = torch.tensor([0, 1, 3])
    for name, value in before.items():
        if value.shape[0] == 4:
            assert torch.equal(vars(state)[name][others], value[others]), name
    assert state.limits[1] == NO_LIMIT


# ------------------------------------------------------------------------------------------ what comes back


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Result:
    number: Tensor
    pair: Pair | None


def on_device(rows: int) -> Result:
    return Result(torch.zeros(rows, dtype=torch.int64), Pair(torch.zeros(1), torch.zeros(2, dtype=torch.bool)))


def late_results(device: LateDevice, back: PinnedReadbacks, count: int) -> list[int]:
    """The first numbers of results that are written over by the next, each read one cycle late."""
    result, seen = on_device(3), []
    unread = []
    for number in range(count):
        device.queue.append(partial(result.number.fill_, number))
        unread.append(back.copy(result))
        if len(unread) == 2:
            seen.append(int(unread.pop(0).get().number[2]))
    return [*seen, int(unread.pop().get().number[2])]


def test_results_read_a_cycle_late_are_their_own_and_allocate_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(monkeypatch)
    back = PinnedReadbacks(CPU)
    back.reserve(on_device(3))
    assert device.allocated == 3 * UNREAD
    assert late_results(device, back, 20) == list(range(20)) and device.allocated == 3 * UNREAD
    assert late_results(device, PinnedReadbacks(CPU), 20) == list(range(20)) and device.allocated == 6 * UNREAD
    unread = [back.copy(on_device(3)) for _ in range(UNREAD + 1)]
    assert device.allocated == 6 * UNREAD + 3, "one too many under way takes new memory"
    back.copy(replace(on_device(3), pair=None))
    assert device.allocated == 6 * UNREAD + 4, "another shape"
    assert len({id(readback.get().number) for readback in unread}) == UNREAD + 1
    device.patient = False
    assert late_results(device, back, 20) != list(range(20)), "reading too early is not noticed"


def test_the_runner_sends_through_its_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, sent = make_runner(drafts=2), []

    class Counted(Staging):
        def copy(self, *parts: Tensor) -> tuple[Tensor, ...]:
            sent.append(len(parts))
            return super().copy(*parts)

    runner.pools.staging = Counted()
    for prompt in ([3, 4, 5], [6, 7]):
        runner.add(make_request(prompt))
    runner.step()
    assert sent == [9], "one copy for the prefill step"
    for _ in range(3):
        runner.step()
    assert sent == [9, 1], "and one for the batch that decodes on"

"""Hashing, gathering and injecting n-gram memory (spec/model.md 8.3, 8.4)."""

import math

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_float64
from golden_data import RELEASED_CONFIG
from op_cases import assert_nan_stays, filled_ring, normal, poisoned_cache
from quickseek import formats
from quickseek.config import ModelConfig
from quickseek.ops import engram as door
from quickseek.ops.engram import DEAD, HashConstants
from quickseek.ops.linear import Fp8Weight
from quickseek.ops.rows import StepRows

IDS = torch.tensor([0, 5, 17, 99091, 2, 40000])
ALL = (0, 1, 2, 8, 9, 10, 16, 17, 23)
VECTORS = [
    (0, 0, "5702652 24393184 39183301 131476717 152385926 164143652 257520185 283540304 380066193"),
    (0, 3, "379248 18191193 40143441 141971515 148328099 170128869 264890446 278007708 369009118"),
    (0, 5, "6679910 16782730 43003303 132845944 145935012 163758992 257550619 272700256 380094770"),
    (1, 0, "14361964 29977809 32716444 132225184 150270452 174805952 261362261 279862797 372375971"),
    (1, 5, "3960641 18934143 36495512 128332280 159292871 165451944 257700134 281210574 376031112"),
]


@pytest.fixture(scope="module")
def released() -> list[HashConstants]:
    layout = ModelConfig.from_file(RELEASED_CONFIG).engram_layout
    return [
        HashConstants(
            torch.tensor(layout.multipliers[i]), torch.tensor(layout.primes[i]), torch.tensor(layout.offsets[i]), pad=2
        )
        for i in range(2)
    ]


def windows_of(ids: Tensor) -> Tensor:
    rows = StepRows.build([0], [ids.shape[0]])
    return door.token_windows(ids, poisoned_cache(1, 11, 1, torch.int32), rows, 3)


# ---------------------------------------------------------------------------------------------- hashing


@pytest.mark.parametrize(("layer", "position", "printed"), VECTORS)
def test_released_constants_hash_to_the_printed_rows(
    released: list[HashConstants], layer: int, position: int, printed: str
) -> None:
    found = door.hash_ngrams(windows_of(IDS), released[layer])
    assert found.shape == (6, 24)
    assert found[position, list(ALL)].tolist() == [int(word) for word in printed.split()]


def test_multipliers_that_went_through_a_double_hash_to_other_rows(released: list[HashConstants]) -> None:
    right = released[0]
    products = IDS[3].double() * right.multipliers.double()
    assert int(products[0]) != int(IDS[3]) * int(right.multipliers[0])
    wrong = HashConstants(right.multipliers + 2, right.primes, right.offsets, right.pad)
    assert not torch.equal(door.hash_ngrams(windows_of(IDS), wrong), door.hash_ngrams(windows_of(IDS), right))


def test_rows_lie_inside_their_column(released: list[HashConstants]) -> None:
    ids = torch.randint(0, 99092, (500,), generator=torch.Generator().manual_seed(0))
    for constants in released:
        rows = door.hash_ngrams(windows_of(ids), constants) - constants.offsets
        assert (rows >= 0).all() and (rows < constants.primes).all()


def test_a_dead_token_blocks_everything_behind_it(released: list[HashConstants]) -> None:
    ids = IDS.clone()
    ids[3] = DEAD
    blocked = door.hash_ngrams(windows_of(ids), released[0])
    stand_in = torch.tensor([[2, 2, 2, 2], [2, 2, 2, 2], [40000, 2, 2, 2]])
    assert_bits(blocked[3:], door.hash_ngrams(stand_in, released[0]))
    assert_bits(blocked[:3], door.hash_ngrams(windows_of(IDS), released[0])[:3])
    assert not torch.equal(blocked[5], door.hash_ngrams(windows_of(IDS), released[0])[5])


# ---------------------------------------------------------------------------------------------- look-back


def test_windows_run_backwards_and_stop_at_the_start() -> None:
    assert windows_of(IDS).tolist()[:4] == [[0, -1, -1, -1], [5, 0, -1, -1], [17, 5, 0, -1], [99091, 17, 5, 0]]


@pytest.mark.parametrize("start", range(1, 7))
def test_history_and_given_ids_continue_the_sequence(start: int) -> None:
    ids = torch.cat((IDS, torch.tensor([7, 8])))
    whole = windows_of(ids)
    rows = StepRows.build([start], [8 - start])
    history = filled_ring([ids.unsqueeze(1).to(torch.int32)], [start], rows=11)
    assert_bits(door.token_windows(ids[start:], history, rows, 3), whole[start:])
    given = torch.tensor([[int(ids[start - 1 - k]) if start - 1 - k >= 0 else DEAD for k in range(3)]])
    assert_bits(door.token_windows(ids[start:], None, rows, 3, given), whole[start:])
    if start >= 3:
        assert not torch.equal(door.token_windows(ids[start:], None, rows, 3, given.flip(1)), whole[start:])


def test_look_back_never_crosses_into_another_request() -> None:
    rows = StepRows.build([0, 0, 4], [2, 3, 2])
    ids = torch.arange(10, 17)
    earlier = torch.arange(20, 24, dtype=torch.int32).unsqueeze(1)
    history = filled_ring([earlier[:0], earlier[:0], earlier], [0, 0, 4], rows=11)
    found = door.token_windows(ids, history, rows, 3).tolist()
    assert found[2] == [12, -1, -1, -1]
    assert found[5] == [15, 23, 22, 21]
    assert found[6] == [16, 15, 23, 22]


def test_a_look_back_without_a_source_is_refused() -> None:
    rows = StepRows.build([0], [2])
    with pytest.raises(ValueError, match="history and given are both None"):
        door.token_windows(IDS[:2], None, rows, 3)
    with pytest.raises(ValueError, match=r"given has shape \(1, 2\): expected \[1, 3\]"):
        door.token_windows(IDS[:2], None, rows, 3, torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"ids has dtype torch.int32: expected torch.int64"):
        door.token_windows(IDS[:2].to(torch.int32), None, rows, 3, torch.zeros(1, 3, dtype=torch.int64))


# ---------------------------------------------------------------------------------------------- rows


def test_gathered_rows_are_concatenated_in_column_order() -> None:
    table = normal(20, 32)
    rows = torch.tensor([[3, 19, 0], [5, 5, 7]])
    out = door.gather_rows(table, rows, torch.float64)
    assert_bits(out, torch.stack([torch.cat([table[r] for r in row]) for row in rows.tolist()]))


def test_packed_rows_are_dequantised_by_their_own_scales() -> None:
    table = normal(20, 64, dtype=torch.float32)
    table[5:10] *= 2.0**-20
    packed = Fp8Weight(*formats.quantize_a8(table))
    rows = torch.tensor([[3, 19], [5, 7]])
    values = formats.dequantize_a8(packed.codes, packed.scales, torch.bfloat16)
    assert_bits(door.gather_rows(packed, rows, torch.bfloat16), door.gather_rows(values, rows, torch.bfloat16))
    packed.scales[4] = formats.E8M0_NAN
    assert door.gather_rows(packed, rows, torch.float32).isfinite().all(), "only the rows asked for are read"


# ---------------------------------------------------------------------------------------------- injection

N, HIDDEN = 4, 6


def parts(rows: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dead = torch.zeros(rows, dtype=torch.bool)
    return (normal(rows, N, HIDDEN), normal(rows, (N + 1) * HIDDEN, seed=1), normal(N, HIDDEN, seed=2),
            normal(N, HIDDEN, seed=3), dead)  # fmt: skip


def test_the_injection_is_the_definition() -> None:
    streams, key_value, q, k, dead = parts()
    dead[2] = True
    out = door.inject(streams, key_value, q, k, dead, 1e-20)
    for t in range(5):
        for i in range(N):
            x, key = streams[t, i], key_value[t, i * HIDDEN : (i + 1) * HIDDEN]
            value = key_value[t, N * HIDDEN :]
            norms = math.sqrt(float(x.square().mean())) * math.sqrt(float(key.square().mean()))
            d = float((x * q[i] * k[i] * key).sum()) / norms / math.sqrt(HIDDEN)
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(d), 1e-6)), d)))
            assert_float64(out[t, i], x if t == 2 else x + gate * value)
    with pytest.raises(AssertionError):
        assert_float64(door.inject(streams, key_value, q.flip(0), k, dead, 1e-20), out)


def test_a_dead_row_keeps_its_bits_even_if_its_memory_is_nan() -> None:
    streams, key_value, q, k, dead = parts()
    dead[2] = True
    key_value[2] = torch.nan
    streams[2, 0, 0] = -0.0
    assert_bits(door.inject(streams, key_value, q, k, dead, 1e-20)[2], streams[2])


def test_a_dot_product_near_zero_gives_a_gate_near_one_half() -> None:
    streams, key_value, q, k, dead = parts(1)
    out = door.inject(streams, key_value, q * 1e-30, k, dead, 1e-20)
    gates = ((out - streams) / key_value[:, N * HIDDEN :].unsqueeze(1)).flatten()
    assert ((gates - 0.5).abs() < 3e-4).all() and ((gates - 0.5).abs() > 2e-4).all(), "sqrt(1e-6) / 4 from one half"


def test_tiny_streams_are_normalised_too() -> None:
    streams, key_value, q, k, dead = parts()
    small = door.inject(streams * 1e-6, key_value, q, k, dead, 1e-20) - streams * 1e-6
    whole = door.inject(streams, key_value, q, k, dead, 1e-20) - streams
    assert (small - whole).abs().max() < 1e-6
    coarse = door.inject(streams * 1e-6, key_value, q, k, dead, 1e-6) - streams * 1e-6
    assert (coarse - whole).abs().max() > 1e-3, "an epsilon of 1e-6 would show"


def test_a_nan_row_stays_in_its_row() -> None:
    streams, key_value, q, k, dead = parts()
    assert_nan_stays(lambda x: door.inject(x, key_value, q, k, dead, 1e-20), streams, 3)
    assert_nan_stays(lambda x: door.inject(streams, x, q, k, dead, 1e-20), key_value, 3)


def test_the_injection_is_differentiable() -> None:
    streams, key_value, q, k, dead = parts(2)
    dead[0] = True
    inputs = tuple(x.clone().requires_grad_() for x in (streams, key_value, q, k))
    assert torch.autograd.gradcheck(lambda *args: door.inject(*args, dead, 1e-20), inputs)


def test_shapes_that_do_not_fit_are_named() -> None:
    streams, key_value, q, k, dead = parts()
    with pytest.raises(ValueError, match=r"key_value has shape \(5, 29\): expected \[5, 30\]"):
        door.inject(streams, key_value[:, 1:], q, k, dead, 1e-20)
    with pytest.raises(ValueError, match="q_weight has shape"):
        door.inject(streams, key_value, q[1:], k, dead, 1e-20)
    constants = HashConstants(torch.ones(4, dtype=torch.int64), torch.ones(6, dtype=torch.int64), torch.ones(6), 2)
    with pytest.raises(ValueError, match=r"windows has shape \(2, 3\): expected \[\*, 4\]"):
        door.hash_ngrams(torch.zeros(2, 3, dtype=torch.int64), constants)

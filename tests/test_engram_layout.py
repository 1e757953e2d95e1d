"""Primes, offsets and multipliers of the n-gram memory (spec/model.md 8.2, 15) and the golden checkpoint's."""

from dataclasses import replace

import pytest
import torch

from golden_data import RELEASED_CONFIG, base_config, golden
from quickseek.checkpoint.miniature import miniature_config
from quickseek.config import ModelConfig
from quickseek.engram_layout import EngramLayout
from quickseek.errors import ConfigError

RELEASED_PRIMES = [
    "57 79 81 97 121 129 133 183 189 207 211 253 277 289 307 321 339 381 393 399 403 409 447 463",
    "477 487 499 507 511 573 609 627 667 669 693 697 711 729 759 769 781 799 813 819 841 877 879 889",
]


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return ModelConfig.from_file(RELEASED_CONFIG)


def test_released_primes_are_the_listed_ones_and_sum_to_the_table_sizes(released: ModelConfig) -> None:
    layout = released.engram_layout
    for index, listed in enumerate(RELEASED_PRIMES):
        assert list(layout.primes[index]) == [16_000_000 + int(word) for word in listed.split()]
    assert [layout.rows(index) for index in range(2)] == [384_006_168, 384_016_682]
    assert list(released.engram_num_embeddings) == [384_006_168, 384_016_682]


def test_released_offsets_are_sums_of_the_primes_before(released: ModelConfig) -> None:
    offsets = released.engram_layout.offsets[0]
    assert offsets[:3] == (0, 16_000_057, 32_000_136)
    assert (offsets[8], offsets[16], offsets[23]) == (128_000_880, 256_002_934, 368_005_705)
    assert released.engram_layout.columns == 24
    assert released.engram_layout.width == 6144
    assert released.engram_layout.lookback == 3


def test_released_multipliers_are_the_listed_integers(released: ModelConfig) -> None:
    assert released.engram_layout.multipliers == (
        (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    )
    assert all(isinstance(value, int) for row in released.engram_layout.multipliers for value in row)
    bound = (2**63 - 1) // 99092
    assert all(value < bound for row in released.engram_layout.multipliers for value in row)


def test_miniature_constants_are_the_listed_ones() -> None:
    layout = miniature_config("tiny").engram_layout
    assert layout.primes == ((61, 67, 71, 73, 79, 83), (89, 97, 101, 103, 107, 109))
    assert layout.multipliers == (
        (29432665354320283, 1858887604025671, 13811301742127767, 28416873036538857),
        (10572492676857985, 31363478807949293, 4177968828027753, 26999475799961605),
    )


def test_constants_of_the_golden_checkpoint_are_the_golden_ones() -> None:
    layout, want = base_config().engram_layout, golden("engram_constants")
    for name in ("primes", "offsets", "multipliers"):
        assert torch.equal(torch.tensor(getattr(layout, name)), want[name]), name


def test_primes_of_a_later_layer_skip_those_already_used() -> None:
    layout = base_config().engram_layout
    every = [prime for row in layout.primes for prime in row]
    assert len(set(every)) == len(every)
    assert all(prime >= 64 and all(prime % d for d in range(2, prime)) for prime in every)


@pytest.mark.parametrize("sizes", [(434, 607), (433, 606), (606, 434)])
def test_a_table_size_that_is_not_the_sum_of_its_primes_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"engram_num_embeddings = \[.*\]: expected the sums .*\[434, 606\]"):
        replace(miniature_config("tiny"), engram_num_embeddings=sizes)


def test_another_compressed_vocabulary_has_other_multipliers() -> None:
    right = miniature_config("tiny")
    wrong = EngramLayout.from_config(replace(right, engram_compressed_vocab_size=257))
    assert wrong.multipliers != right.engram_layout.multipliers
    assert wrong.primes == right.engram_layout.primes

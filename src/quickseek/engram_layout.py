"""Sizes and constants of the n-gram memory, derived from the configuration alone (spec/model.md 8.2)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quickseek.errors import ConfigError

if TYPE_CHECKING:
    from quickseek.config import ModelConfig

LOOKBACK_MULTIPLIER_SEED = 10007
"""The multipliers of layer L come from numpy's default generator seeded with this times L."""


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    for small in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        if number % small == 0:
            return number == small
    # Miller-Rabin with these witnesses is exact below 3.3e24.
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        x = pow(witness, odd, number)
        if x in (1, number - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % number
            if x == number - 1:
                break
        else:
            return False
    return True


@dataclass(frozen=True)
class EngramLayout:
    """Hash constants of every Engram layer; columns run over orders 2..N, heads within an order.

    ``primes``, ``offsets``: per layer, one entry a column. ``multipliers``: per layer, one int64 for the token
    itself and one for each token of look-back. All are Python ints: products exceed 2^53.
    """

    layer_ids: tuple[int, ...]
    max_ngram: int
    heads: int
    head_dim: int
    pad_id: int
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    multipliers: tuple[tuple[int, ...], ...]

    @property
    def lookback(self) -> int:
        """Tokens of history that a hash reads."""
        return self.max_ngram - 1

    @property
    def columns(self) -> int:
        """Table rows that one token reads from one layer's table."""
        return self.lookback * self.heads

    @property
    def width(self) -> int:
        """Channels of the concatenated rows of one token."""
        return self.columns * self.head_dim

    def rows(self, index: int) -> int:
        """Rows of the table of the index-th Engram layer."""
        return sum(self.primes[index])

    @classmethod
    def from_config(cls, config: "ModelConfig") -> "EngramLayout":
        """Derive the layout; raises ConfigError when a table size of the configuration disagrees."""
        orders = config.engram_max_ngram_size - 1
        used: set[int] = set()
        primes = []
        for _ in config.engram_layer_ids:
            columns: list[int] = []
            for _ in range(orders):
                candidate = config.engram_vocab_size - 1
                for _ in range(config.engram_n_heads):
                    candidate += 1
                    while candidate in used or not _is_prime(candidate):
                        candidate += 1
                    used.add(candidate)
                    columns.append(candidate)
            primes.append(tuple(columns))
        offsets = tuple(tuple(sum(columns[:i]) for i in range(len(columns))) for columns in primes)
        bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
        multipliers = tuple(
            tuple(
                int(value) * 2 + 1
                for value in np.random.default_rng(LOOKBACK_MULTIPLIER_SEED * layer).integers(
                    0, bound, size=orders + 1, dtype=np.int64
                )
            )
            for layer in config.engram_layer_ids
        )
        layout = cls(
            layer_ids=tuple(config.engram_layer_ids),
            max_ngram=config.engram_max_ngram_size,
            heads=config.engram_n_heads,
            head_dim=config.engram_head_dim,
            pad_id=config.engram_pad_token_id,
            primes=tuple(primes),
            offsets=offsets,
            multipliers=multipliers,
        )
        derived = [layout.rows(i) for i in range(len(layout.layer_ids))]
        if list(config.engram_num_embeddings) != derived:
            raise ConfigError(
                "engram_num_embeddings",
                list(config.engram_num_embeddings),
                f"the sums of the derived primes, {derived}",
            )
        return layout

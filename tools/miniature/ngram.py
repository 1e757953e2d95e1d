"""A byte n-gram model with interpolated Witten-Bell smoothing: what the miniature must be clearly better than."""

import numpy as np

BYTES = 256


class ByteModel:
    """Probabilities of a byte after up to ``context`` bytes, from counts of one text.

    The estimate of each order is mixed with that of the next lower one in proportion to how many kinds of bytes
    followed the context (Witten and Bell 1991); below order 0 all bytes are equal.
    """

    def __init__(self, text: bytes, context: int) -> None:
        if not 0 <= context <= 6:
            raise ValueError(f"context = {context}: expected 0 to 6")
        self.context = context
        data = np.frombuffer(text, dtype=np.uint8)
        self.tables = [_Counts(data, length) for length in range(context + 1)]

    def bits(self, text: bytes) -> float:
        """Mean bits per byte of a text; its first bytes have shorter contexts."""
        data = np.frombuffer(text, dtype=np.uint8)
        return float(-np.log2(self.probabilities(data)).mean())

    def probabilities(self, data: np.ndarray) -> np.ndarray:
        """Probability of each byte of uint8 ``data`` after the bytes before it."""
        p = np.full(len(data), 1.0 / BYTES)
        for length, table in enumerate(self.tables):
            mixed = table.mix(data, p[length:])
            p = np.concatenate((p[:length], mixed))
        return p


class _Counts:
    """Counts of (context, byte) of one context length, as sorted keys."""

    def __init__(self, data: np.ndarray, length: int) -> None:
        self.length = length
        keys = _keys(data, length)
        self.keys, self.counts = np.unique(keys, return_counts=True)
        contexts = self.keys // BYTES
        self.contexts, first = np.unique(contexts, return_index=True)
        self.totals = np.add.reduceat(self.counts, first)
        self.kinds = np.diff(np.append(first, len(contexts)))

    def mix(self, data: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Estimates for the bytes from index ``length`` on, given the lower order's for the same bytes."""
        keys = _keys(data, self.length)
        count = _look_up(self.keys, self.counts, keys)
        total = _look_up(self.contexts, self.totals, keys // BYTES)
        kinds = _look_up(self.contexts, self.kinds, keys // BYTES)
        mixed = (count + kinds * lower) / np.maximum(total + kinds, 1)
        return np.where(total > 0, mixed, lower)


def _keys(data: np.ndarray, length: int) -> np.ndarray:
    """Each byte with the ``length`` bytes before it, as one number; from index ``length`` on."""
    keys = np.zeros(max(len(data) - length, 0), dtype=np.int64)
    for offset in range(length + 1):
        keys = keys * BYTES + data[offset : offset + len(keys)]
    return keys


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)

"""The byte n-gram model that the miniature is measured against: probabilities that sum to one, and longer is better."""

import numpy as np
import pytest

from miniature.ngram import BYTES, ByteModel

TEXT = b"the cat sat on the mat and the rat sat on the cat " * 20
CONTEXTS = (0, 1, 2, 3)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("before", [b"the", b"zzz", b"t"])
def test_probabilities_of_all_bytes_after_a_context_sum_to_one(context: int, before: bytes) -> None:
    model = ByteModel(TEXT, context)
    rows = [model.probabilities(np.frombuffer(before + bytes([b]), dtype=np.uint8))[-1] for b in range(BYTES)]
    assert abs(sum(rows) - 1.0) < 1e-12 and min(rows) > 0


def test_one_context_is_the_formula_by_hand() -> None:
    # After "a": b twice, c once, so 3 + 2 kinds; order 0 has 7 bytes of 3 kinds.
    model = ByteModel(b"abacaba", 1)
    order_0 = (2 + 3 / BYTES) / (7 + 3)
    found = model.probabilities(np.frombuffer(b"ab", dtype=np.uint8))[1]
    assert abs(found - (2 + 2 * order_0) / (3 + 2)) < 1e-12


def test_longer_contexts_and_the_same_text_give_fewer_bits() -> None:
    bits = [ByteModel(TEXT, context).bits(TEXT[:300]) for context in CONTEXTS]
    assert bits == sorted(bits, reverse=True)
    assert ByteModel(TEXT, 3).bits(TEXT[:300]) < ByteModel(TEXT[::-1], 3).bits(TEXT[:300])


def test_a_context_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="context = 7: expected 0 to 6"):
        ByteModel(TEXT, 7)

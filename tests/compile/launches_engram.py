"""Engram of the released model, few and many rows; the table is a short one, its row numbers are 64 bits anyway."""

from collections.abc import Callable

import torch

from quickseek.ops.cache import CacheView, PlainCodec
from quickseek.ops.engram import HashConstants, triton
from quickseek.ops.linear import Fp8Weight
from quickseek.ops.rows import StepRows


def launches() -> dict[str, Callable[[], object]]:
    storage = torch.zeros(65, 139, 1, dtype=torch.int32)
    history = CacheView(storage, torch.ones(64, 1, dtype=torch.int64), PlainCodec(1, torch.int32))
    rows = StepRows.build([100] * 64, [6] * 64)
    ids = torch.zeros(384, dtype=torch.int64)
    given = torch.zeros(64, 3, dtype=torch.int64)
    words = torch.zeros(24, dtype=torch.int64)
    constants = HashConstants(words[:4].contiguous(), words, words, pad=2)
    table = Fp8Weight(torch.zeros(64, 256, dtype=torch.float8_e4m3fn), torch.zeros(64, 8, dtype=torch.uint8))
    numbers = torch.zeros(384, 24, dtype=torch.int64)
    streams = torch.zeros(384, 4, 5120, dtype=torch.bfloat16)
    key_value = torch.zeros(384, 25600, dtype=torch.bfloat16)
    norm, dead = torch.zeros(4, 5120, dtype=torch.bfloat16), torch.zeros(384, dtype=torch.bool)
    return {
        "windows": lambda: triton.token_windows(ids, history, rows, 3, None),
        "windows of given ids": lambda: triton.token_windows(ids, None, rows, 3, given),
        "hashes": lambda: triton.hash_ngrams(torch.zeros(384, 4, dtype=torch.int64), constants),
        "rows": lambda: triton.gather_rows(table, numbers, torch.bfloat16),
        "plain rows": lambda: triton.gather_rows(norm, numbers, torch.bfloat16),
        "injection": lambda: triton.inject(streams, key_value, norm, norm, dead, 1e-20),
    }

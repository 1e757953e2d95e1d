"""RMSNorm and rotation in released shapes."""

from collections.abc import Callable

import torch

from quickseek.ops.norm_rope import Rotation
from quickseek.ops.norm_rope import triton as kernels

EPS = 1e-20


def launches() -> dict[str, Callable[[], object]]:
    x = torch.zeros(8, 5120, dtype=torch.bfloat16)
    key, key_weight = torch.zeros(8, 128, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16)
    projected, queries = x[:, :1792], torch.zeros(8, 16, 512, dtype=torch.bfloat16)
    q_weight, kv_weight = torch.zeros(1280, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.bfloat16)
    positions, frequencies = torch.zeros(8, dtype=torch.int64), torch.zeros(32)
    turn = Rotation(torch.zeros(8, 32), torch.zeros(8, 32))
    return {
        "rms_norm hidden": lambda: kernels.rms_norm(x, x[0], EPS),
        "rms_norm key": lambda: kernels.rms_norm(key, key_weight, EPS),
        "rotation": lambda: kernels.rotation(positions, frequencies),
        "apply_rope": lambda: kernels.apply_rope(queries, turn, False),
        "apply_rope_over": lambda: kernels.apply_rope_over(queries, turn, True),
        "normalised_latents": lambda: kernels.normalised_latents(projected, q_weight, kv_weight, EPS, turn, True),
        "normalised_kv": lambda: kernels.normalised_kv(projected[:, 1280:], kv_weight, EPS, turn, True),
    }

"""Quantisation and cache records in released shapes."""

from collections.abc import Callable

import torch

from quickseek.ops.cache import Codec, GlobalKvCodec, IndexKeyCodec, PlainCodec, WindowCodec
from quickseek.ops.quantize import triton as kernels

CODECS: list[Codec] = [
    WindowCodec(512),
    GlobalKvCodec(512),
    IndexKeyCodec(128),
    PlainCodec(1024, torch.float32),
    PlainCodec(1, torch.int32),
]


def records(codec: Codec) -> dict[str, Callable[[], object]]:
    storage = torch.zeros(16, 64, codec.record, dtype=codec.dtype)
    requests, ends = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    table = torch.zeros(8, 4, dtype=torch.int64)
    dtype = codec.dtype if codec.kind == "plain" else torch.bfloat16
    values = torch.zeros(8, codec.width, dtype=dtype)
    return {
        "write": lambda: kernels.write_records(storage, table, codec, requests, requests, values),
        "keep": lambda: kernels.keep_records(storage, table, codec, requests, requests, ends, values),
        "read": lambda: kernels.read_records(storage, table, codec, requests, requests, dtype),
    }


def launches() -> dict[str, Callable[[], object]]:
    x = torch.zeros(8, 32, 128, dtype=torch.bfloat16)
    return {f"{what} {codec.kind} {codec.width}": call for codec in CODECS for what, call in records(codec).items()} | {
        "quantize_a8": lambda: kernels.quantize_a8(x),
        "fake_quantize_a8": lambda: kernels.fake_quantize_a8(x),
        "fake_quantize_q4i": lambda: kernels.fake_quantize_q4i(x),
        "fake_quantize_q4k": lambda: kernels.fake_quantize_q4k(x),
        "swizzle_scales": lambda: kernels.swizzle_scales(torch.zeros(8, 160, dtype=torch.uint8)),
    }

"""``StreamEmbedding``: the lookup that writes the embedding and all residual streams at once (spec/decode.md D)."""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32
from torch import Tensor

from quickseek.ops import ptx
from quickseek.ops.compiled import compiled, current_stream

THREADS = 128
MAX_BLOCKS = 528
"""Four blocks for each of an H200's 132 multiprocessors."""
ARGUMENTS = "aaaaiii"


class StreamEmbedding:
    """Items are (row, 16-byte vector) pairs, taken in strides of the grid.

    Nothing is read before the grid wait but what the launch itself carries: ids are a result of the step before.
    """

    def __init__(self, hidden: int, hc_mult: int) -> None:
        self.hidden, self.hc_mult, self.vectors = hidden, hc_mult, hidden // 8

    @cute.jit
    def __call__(
        self,
        ids: Int64,
        table: Int64,
        embedding: Int64,
        streams: Int64,
        rows: Int32,
        vocab: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        self.kernel(ids, table, embedding, streams, rows, vocab, blocks).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, ids: Int64, table: Int64, embedding: Int64, streams: Int64, rows: Int32, vocab: Int32, blocks: Int32
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        for item in cutlass.range(block * THREADS + thread, rows * self.vectors, blocks * THREADS, unroll=1):
            row, vector = item // self.vectors, item % self.vectors
            column = Int64(vector) * 16
            token = ptx.load_word(ids + Int64(row) * 4).bitcast(Int32)
            known = token >= Int32(0) and token < vocab
            place = ptx.choose(known, token, Int32(0))
            pack = [
                ptx.choose(known, word, Uint32(0))
                for word in ptx.load_pack(table + Int64(place) * (self.hidden * 2) + column)
            ]
            ptx.store_pack(embedding + Int64(row) * (self.hidden * 2) + column, pack)
            for lane in cutlass.range_constexpr(self.hc_mult):
                target = (Int64(row) * self.hc_mult + lane) * (self.hidden * 2) + column
                ptx.store_pack(streams + target, pack)


def launch(ids: Tensor, table: Tensor, embedding: Tensor, streams: Tensor) -> None:
    """Look ids up on the current CUDA stream; arguments come validated and ids are not empty."""
    for name, tensor in (("table", table), ("embedding", embedding), ("streams", streams)):
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} starts at {tensor.data_ptr():#x}: 16-byte alignment")
    device: torch.device = table.device
    kernel = compiled(StreamEmbedding, ARGUMENTS, device, hidden=table.shape[1], hc_mult=streams.shape[1])
    items = ids.shape[0] * (table.shape[1] // 8)
    blocks = min(MAX_BLOCKS, -(-items // THREADS))
    kernel(
        ids.data_ptr(), table.data_ptr(), embedding.data_ptr(), streams.data_ptr(),
        ids.shape[0], table.shape[0], blocks, current_stream(device),
    )  # fmt: skip

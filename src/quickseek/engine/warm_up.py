"""Warm-up: every kind of step that requests can bring is run once, so that nothing is compiled while serving.

Kernels are compiled for classes of rows, of contexts and of what is asked for. A CUDA graph holds those of its decode
step; prompts, the answers' first tokens and steps that run eagerly have theirs compiled here. All of it runs on the
scratch slot and block, what these held is put back, and every rank does the same in the same order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from quickseek.engine.batch import PrefillBatch
from quickseek.engine.cycle import Cycle, Needs
from quickseek.engine.grammar import mask_words
from quickseek.engine.request import Request
from quickseek.engine.tick import PrefillChunk
from quickseek.ops.cache import SCRATCH
from quickseek.sampling_params import MAX_LOGPROBS, SamplingParams

TOKEN = 0
"""What prompts are made of: nothing depends on it."""


class WarmUp:
    """Runs the steps of one ``cycle``.

    ``most_requests`` run at once, ``most_tokens`` of prompts in one step. ``replays``: prompts may replay a window of a
    cached prefix. ``paced``: decode steps may run eagerly, with fewer drafts than the cycle has.
    """

    def __init__(self, cycle: Cycle, *, most_requests: int, most_tokens: int, replays: bool, paced: bool) -> None:
        self.cycle, self.pools, self.config = cycle, cycle.pools, cycle.model.config
        self.most_requests, self.replays, self.paced = most_requests, replays, paced
        self.longest = self.pools.reach
        self.most_tokens = min(most_tokens, self.longest)
        self.steps = 0

    @torch.inference_mode()
    def run(self) -> None:
        """Run every step. Collective; nothing that a request can read is changed."""
        with self._kept():
            for count, end in self._prompts():
                self._read([count], [end])
            for requests in sizes(self.most_requests):
                self._read([1] * requests, [min(self.longest, requests + 1)] * requests)
                self._choose_first(requests)
                self._decode(requests)

    def _prompts(self) -> Iterator[tuple[int, int]]:
        """Rows of a step and where they end: all contexts that lists of selections grow with, the largest first.

        Beyond these the lists are full, and what else depends on the context depends on nothing else: one row for each.
        """
        ratios = [ratio for ratio in self.config.compress_ratios if ratio]
        full = min(self.longest, 2 * max(ratios, default=0) * self.config.index_topk)
        for count in reversed(sizes(self.most_tokens)):
            for end in {count, *(end for end in contexts(full) if end > count)}:
                yield count, end
        for end in contexts(self.longest):
            yield 1, end

    def _read(self, counts: list[int], ends: list[int]) -> None:
        """A step of prompts' rows, as the runner launches it."""
        for replayed in (0, 1) if self.replays else (0,):
            batch = PrefillBatch.build(
                [
                    PrefillChunk(_scratch(end), end - count, count, last=True, replayed=replayed, oldest=replayed)
                    for count, end in zip(counts, ends, strict=True)
                ],
                self.config.engram_max_ngram_size - 1,
                self.pools.staging,
            )
            hidden = self.cycle.prefill(
                batch.slots, batch.ids, batch.rows, batch.lookback, oldest=batch.oldest, keep_from=batch.keep_from
            )
            self.cycle.first_token(batch.slots[batch.last], hidden[batch.last], Needs.of([]))
            self.steps += 1

    def _choose_first(self, requests: int) -> None:
        hidden = torch.zeros(
            requests, self.config.hidden_size, dtype=self.cycle.model.numerics.dtype, device=self.pools.device
        )
        for needs, masks in self._kinds(requests, 1):
            self.cycle.first_token(self._slots(requests), hidden, needs, masks)

    def _decode(self, requests: int) -> None:
        """Decode steps that no graph holds: those of requests that ask for more, those the host paces."""
        drafts = self.cycle.drafts
        for count in range(drafts + 1) if self.paced else (drafts,):
            step = self.cycle.verify(self._slots(requests), self.longest, count)
            self.steps += 1
            for needs, masks in self._kinds(requests, count + 1):
                self.cycle.decide(step, needs, masks)

    def _kinds(self, requests: int, rows: int) -> Iterator[tuple[Needs, Tensor | None]]:
        """What requests may ask of D: each by itself and all of it, greedily and sampled."""
        plain = Needs.of([])
        words = mask_words(self.config.vocab_size)
        masks = torch.full((requests, rows, words), -1, dtype=torch.int32)
        asked = [plain, replace(plain, penalties=True), replace(plain, bias=True), replace(plain, min_tokens=True)]
        asked += [replace(plain, logprobs=most) for most in (0, 1, MAX_LOGPROBS)]
        for needs in asked:
            for sampled in (False, True):
                yield replace(needs, sampled=sampled), None
                yield replace(needs, sampled=sampled, masks=True), self.pools.staging.copy(masks)[0]

    def _slots(self, requests: int) -> Tensor:
        return torch.full((requests,), SCRATCH, dtype=torch.int64, device=self.pools.device)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Put back what the scratch slot and block held, and what was counted."""
        cycle = self.cycle
        held = [cache.tensor[SCRATCH] for cache in self.pools.caches.values()] + cycle.state.of(SCRATCH)
        copies, counted = [tensor.clone() for tensor in held], (cycle.steps, cycle.specialized)
        try:
            yield
        finally:
            for tensor, copy in zip(held, copies, strict=True):
                tensor.copy_(copy)
            cycle.steps, cycle.specialized = counted


def sizes(most: int) -> list[int]:
    """Powers of two up to ``most``, the numbers half-way between them, and ``most``."""
    found, size = {most}, 1
    while size <= most:
        found |= {size, min(size + size // 2, most)}
        size *= 2
    return sorted(found)


def contexts(most: int) -> list[int]:
    """Positions up to ``most``: powers of two, and one less than each."""
    found, size = {most}, 2
    while size <= most:
        found |= {size - 1, size}
        size *= 2
    return sorted(found)


def _scratch(length: int) -> Request:
    """A prompt of ``length`` tokens in the scratch slot."""
    return Request([TOKEN] * length, SamplingParams(), 1, seed=0, slot=SCRATCH)

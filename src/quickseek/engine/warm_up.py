"""Warm-up: every kind of step that requests can bring is run once, so that nothing is compiled while serving.

Kernels are compiled for classes of rows, of contexts and of what is asked for. A CUDA graph holds those of its decode
step; prompts, the answers' first tokens and steps that run eagerly have theirs compiled here. All of it runs on the
scratch slot and block, what these held is put back, and every rank does the same in the same order.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import lcm

import torch
from torch import Tensor

from quickseek.decode.executor import SpecializedDecode
from quickseek.engine.batch import PrefillBatch
from quickseek.engine.cycle import Cycle, Needs
from quickseek.engine.grammar import mask_words
from quickseek.engine.request import Request
from quickseek.engine.tick import PrefillChunk
from quickseek.ops.cache import SCRATCH
from quickseek.sampling_params import MAX_LOGPROBS, SamplingParams

TOKEN = 0
"""What prompts are made of: nothing depends on it."""
POWERS = (1, 2, 4, 8, 16, 32)
"""Numbers of rows that are run with more contexts: attention shares the keys of few rows out among programs."""


class WarmUp:
    """Runs the steps of one ``cycle``.

    ``most_requests`` run at once, ``most_tokens`` of prompts in one step. ``replays``: prompts may replay a window of a
    cached prefix. ``paced``: decode steps may run eagerly, with fewer drafts than the cycle has.
    """

    def __init__(self, cycle: Cycle, *, most_requests: int, most_tokens: int, replays: bool, paced: bool) -> None:
        self.cycle, self.pools, self.config = cycle, cycle.pools, cycle.model.config
        self.most_requests, self.replays, self.paced = most_requests, replays, paced
        self.longest = self.pools.reach
        self.most_tokens = min(most_tokens, most_requests * self.longest)
        self.steps = 0

    @torch.inference_mode()
    def run(self) -> None:
        """Run every step. Collective; nothing that a request can read is changed."""
        with self._kept():
            for count in reversed(sizes(self.most_tokens)):
                for end in self._ends(count):
                    self._read(count, end)
            for requests in range(self.most_requests, 0, -1):
                self._together(requests)

    def _ends(self, count: int) -> list[int]:
        """Where requests end that have ``count`` rows together, as kernels tell contexts apart.

        How wide a row's list of selections is, and whether that is a multiple of 16; of few rows also how attention
        shares their keys out, and of one how the lists of long contexts are chosen.
        """
        # Shorter ones do not hold so many rows.
        least = -(-count // self.most_requests)
        found = self._widths(least)
        if count in POWERS:
            found |= set(contexts(self.longest if count == 1 else max(found)))
        return sorted(end for end in found if least <= end <= self.longest)

    def _widths(self, least: int) -> set[int]:
        """Contexts of ``least`` tokens or more with lists of each kind: a multiple of 16, another number, and all."""
        ratios = {ratio for ratio in self.config.compress_ratios if ratio}
        unit = lcm(*ratios)
        multiple = -(-least // (16 * unit)) * 16 * unit
        full = max(ratios, default=0) * self.config.index_topk + unit
        return {min(end, self.longest) for end in (multiple, multiple + unit, max(full, multiple))}

    def _read(self, count: int, end: int) -> None:
        """A step of ``count`` rows of prompts at ``end``, of as few requests as it takes, as the runner launches it."""
        requests = -(-count // end)
        rows = [count // requests + (number < count % requests) for number in range(requests)]
        for replayed in (0, 1) if self.replays else (0,):
            chunks = [
                PrefillChunk(_scratch(end), end - mine, mine, last=True, replayed=replayed, oldest=replayed)
                for mine in rows
            ]
            batch = PrefillBatch.build(chunks, self.config.engram_max_ngram_size - 1, self.pools.staging)
            self.cycle.prefill(
                batch.slots, batch.ids, batch.rows, batch.lookback, oldest=batch.oldest, keep_from=batch.keep_from
            )
            # Decode steps go on from there, and must stay within the block table.
            self.cycle.state.lengths[SCRATCH] = 0
            self.steps += 1

    def _together(self, requests: int) -> None:
        """What ``requests`` requests do at once: begin their answers, and decode eagerly.

        What one of them asks for is asked of some numbers of requests only: the kernels of D see them as rows.
        """
        kinds = requests in sizes(self.most_requests)
        hidden = self.cycle.model.head.weight.new_zeros(requests, self.config.hidden_size)
        hidden = hidden.to(self.cycle.model.numerics.dtype)
        for needs, masks in self._kinds(requests, 1) if kinds else self._plain():
            self.cycle.first_token(self._slots(requests), hidden, needs, masks)
        drafts = self.cycle.drafts
        for count in range(drafts, -1 if self.paced else drafts - 1, -1):
            for end in sorted({self.longest, *self._widths(count + 1)}):
                step = self.cycle.verify(self._slots(requests), end, count)
                self.steps += 1
            for needs, masks in self._kinds(requests, count + 1) if kinds else self._plain():
                self.cycle.decide(step, needs, masks)

    @staticmethod
    def _plain() -> Iterator[tuple[Needs, Tensor | None]]:
        for sampled in (False, True):
            yield replace(Needs.of([]), sampled=sampled), None

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
        executor = cycle.model.backbone.executor
        held = [cache.tensor[SCRATCH] for cache in self.pools.caches.values()] + cycle.state.of(SCRATCH)
        copies, counted = [tensor.clone() for tensor in held], (cycle.steps, cycle.specialized)
        try:
            with executor.uncounted() if isinstance(executor, SpecializedDecode) else nullcontext():
                yield
        finally:
            for tensor, copy in zip(held, copies, strict=True):
                tensor.copy_(copy)
            cycle.steps, cycle.specialized = counted


def sizes(most: int) -> list[int]:
    """Numbers of rows up to ``most`` of which one lies in every class that kernels are compiled for.

    Classes end where a launch's constants meet sizes of the model (rows times heads, pairs for each expert), so that
    some are narrow. Beyond 256 there are few.
    """
    found = {most, *range(1, 25), *range(28, 129, 4), *range(136, 257, 8), 33, 65, 129, 257}
    size = 256
    while size < most:
        found |= {size, size + size // 2}
        size *= 2
    return sorted(one for one in found if one <= most)


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

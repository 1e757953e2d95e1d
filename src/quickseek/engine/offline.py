"""The offline loop: a list of requests from prompts to tokens on contiguous state, eagerly.

Speculation verifies a draft by choosing the target's token first and comparing: every token is the one that plain
decoding with the same seed would have chosen, greedy or sampled.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from quickseek.engine.request import Request
from quickseek.model.causal_lm import CausalLM
from quickseek.model.state import ContiguousState
from quickseek.ops import sampling

Progress = tuple[Request, list[int]]
"""A request and the tokens it has just been given."""


class OfflineEngine:
    """Runs requests together, at most ``max_num_seqs`` at a time, prompts in chunks of ``chunk`` rows."""

    def __init__(
        self, model: CausalLM, *, num_speculative_tokens: int = 0, max_num_seqs: int = 16, chunk: int = 2048
    ) -> None:
        self.model, self.config = model, model.config
        self.speculative = num_speculative_tokens
        self.max_num_seqs, self.chunk = max_num_seqs, chunk

    @torch.inference_mode()
    def run(self, requests: Iterable[Request]) -> Iterator[Progress]:
        """Yield progress as tokens are chosen, until every request has finished."""
        waiting = deque(requests)
        if not waiting:
            return
        longest = max(len(request.prompt_ids) + request.limit for request in waiting)
        state = ContiguousState(
            self.config,
            self.model.numerics,
            max_requests=min(self.max_num_seqs, len(waiting)),
            max_length=longest + self.speculative,
            draft=self.model.draft is not None,
        )
        running: list[Request] = []
        while waiting or running:
            while waiting and len(running) < self.max_num_seqs:
                request = waiting.popleft()
                request.slot = state.acquire()
                yield request, self._prefill(request, state)
                self._keep(request, running, state)
            if running:
                progress = self._decode(running, state)
                for request in running:
                    if request.finish_reason is not None:
                        self._free(request, state)
                running = [request for request in running if request.finish_reason is None]
                yield from progress

    def _keep(self, request: Request, running: list[Request], state: ContiguousState) -> None:
        if request.finish_reason is None:
            running.append(request)
        else:
            self._free(request, state)

    def _free(self, request: Request, state: ContiguousState) -> None:
        assert request.slot is not None
        state.release(request.slot)
        request.slot = None

    # ------------------------------------------------------------------------------------------ steps

    def _prefill(self, request: Request, state: ContiguousState) -> list[int]:
        """Read the prompt and choose the first token."""
        slot, prompt = request.slot, request.prompt_ids
        assert slot is not None
        hidden = torch.empty(0)
        for first in range(0, len(prompt), self.chunk):
            ids = prompt[first : first + self.chunk]
            hidden = self._step([slot], [ids], state, num_prefills=1)
            state.commit(slot, len(ids))
        token = self._choose(self.model.logits(hidden[-1:]), [request], [len(prompt)])
        request.append(token[0], self.config.eos_token_id)
        self._propose([request], state)
        return token

    def _decode(self, running: Sequence[Request], state: ContiguousState) -> list[Progress]:
        """One step of every request: its last token and its drafts, verified."""
        slots = [request.slot for request in running if request.slot is not None]
        ids = [[request.output_ids[-1], *request.drafts] for request in running]
        hidden = self._step(slots, ids, state, num_prefills=0)
        owners = [request for request, rows in zip(running, ids, strict=True) for _ in rows]
        positions = [
            request.length + row for request, rows in zip(running, ids, strict=True) for row in range(len(rows))
        ]
        chosen = iter(self._choose(self.model.logits(hidden), owners, positions))
        progress = []
        for request, rows in zip(running, ids, strict=True):
            targets = [next(chosen) for _ in rows]
            progress.append((request, self._accept(request, targets, state)))
        self._propose([request for request in running if request.finish_reason is None], state)
        return progress

    def _accept(self, request: Request, targets: Sequence[int], state: ContiguousState) -> list[int]:
        """Give a request the targets of its accepted drafts and one more, and commit their rows."""
        assert request.slot is not None
        before, drafts = len(request.output_ids), request.drafts
        for row, target in enumerate(targets):
            request.append(target, self.config.eos_token_id)
            if request.finish_reason is not None or row == len(drafts) or drafts[row] != target:
                break
        taken = request.output_ids[before:]
        state.commit(request.slot, len(taken))
        request.drafted += len(drafts)
        request.accepted += len(taken) - 1
        return taken

    def _step(
        self, slots: Sequence[int], ids: Sequence[Sequence[int]], state: ContiguousState, *, num_prefills: int
    ) -> Tensor:
        """Hidden states of new rows; keeps the drafter's context."""
        context = state.context(slots, [len(rows) for rows in ids], num_prefills=num_prefills)
        flat = torch.tensor([token for rows in ids for token in rows], dtype=torch.int64)
        output = self.model.backbone(flat, context.rows.positions, context=context)
        if self.model.draft is None:
            assert isinstance(output, Tensor)
            return output
        hidden, aux = output
        self.model.draft.write_context(aux, self.model.backbone.rows_returned(context), context)
        return hidden

    def _propose(self, requests: Sequence[Request], state: ContiguousState) -> None:
        """Draft what may follow each request's last token."""
        draft = self.model.draft
        if draft is None or not self.speculative or not requests:
            return
        context, last = state.draft_context([request.slot for request in requests if request.slot is not None])
        anchors = torch.tensor([request.output_ids[-1] for request in requests])
        embed = self.model.backbone.embed
        assert embed is not None
        proposed = draft.propose(anchors, last, embed, self.model.head, context, count=self.speculative)
        for request, tokens in zip(requests, proposed.tokens.tolist(), strict=True):
            # The last token that a request may produce needs no row of its own.
            request.drafts = tokens[: request.limit - len(request.output_ids) - 1]

    def _choose(self, logits: Tensor, owners: Sequence[Request], positions: Sequence[int]) -> list[int]:
        """A token for each row of logits [T, V], which belongs to ``owners[t]`` and stands at ``positions[t]``."""
        if all(request.params.temperature == 0 for request in owners):
            tokens: list[int] = sampling.greedy(logits).tolist()
            return tokens
        params = [request.params for request in owners]
        tokens = sampling.sample(
            logits,
            torch.tensor([p.temperature for p in params], dtype=torch.float64),
            torch.tensor([p.top_p for p in params], dtype=torch.float64),
            torch.tensor([request.seed for request in owners]),
            torch.tensor(list(positions)),
            sampling.PURPOSE_TOKEN,
        ).tolist()
        return tokens

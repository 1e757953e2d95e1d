"""Runs requests on a model with contiguous state, as an engine would: prompts, chunks, steps, drafts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quickseek.model.causal_lm import CausalLM
from quickseek.model.dspark import Drafts
from quickseek.model.state import ContiguousState


class Batch:
    """``size`` requests of one model, each at its own length."""

    def __init__(self, model: CausalLM, size: int = 1, max_length: int = 256) -> None:
        self.model = model
        draft, self.device = model.draft is not None, model.head.weight.device
        self.state = ContiguousState(
            model.config, model.numerics, max_requests=size, max_length=max_length, draft=draft, device=self.device
        )
        self.slots = [self.state.acquire() for _ in range(size)]

    def run(
        self,
        ids: Tensor | Sequence[Tensor],
        *,
        commit: int | None = None,
        prefill: bool = False,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Logits [rows, V] of one step in which each request runs its own ids; ``commit`` rows of each are kept.

        ``commit`` None keeps all. With decoder replay only the replayed rows have logits.
        """
        parts = [ids] if isinstance(ids, Tensor) else list(ids)
        counts = [part.shape[0] for part in parts]
        context = self.state.context(self.slots, counts, num_prefills=len(parts) if prefill else 0)
        out = self.model.backbone(
            torch.cat(parts).to(self.device), context.rows.positions, inputs_embeds=inputs_embeds, context=context
        )
        hidden, aux = out if isinstance(out, tuple) else (out, None)
        if aux is not None and self.model.draft is not None:
            self.model.draft.write_context(aux, context.rows, context)
        logits = self.model.logits(hidden)
        for slot, count in zip(self.slots, counts, strict=True):
            self.state.commit(slot, count if commit is None else commit)
        return logits

    def chunks(self, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        """Logits [rows, V] of a prompt that arrives in chunks."""
        return torch.cat([self.run(part) for part in ids.split(list(sizes))])

    def draft(self, anchors: Sequence[int]) -> Drafts:
        """Greedy drafts after one anchor for each request."""
        assert self.model.draft is not None and self.model.backbone.embed is not None
        context, last = self.state.draft_context(self.slots)
        return self.model.draft.propose(
            torch.tensor(list(anchors), device=self.device), last, self.model.backbone.embed, self.model.head, context
        )

    def cache(self, name: str, rows: Sequence[int] | Tensor, request: int = 0) -> Tensor:
        """Values [len(rows), width] of cache ``name`` at these rows of a request."""
        context = self.state.context(self.slots, [1] * len(self.slots))
        numbers = torch.as_tensor(rows, dtype=torch.int64)
        return context.view(name).gather(torch.full_like(numbers, request), numbers, self.model.numerics.wide)

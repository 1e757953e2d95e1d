"""The cycle (design.md 4.5): V runs the rows, D chooses, commits and drafts; all over device state.

Nothing here reads the device from the host: what the host must know comes back in ``Decision``, to be read when it
suits. Which optional work a step does is decided from host facts that all ranks share (``Needs``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quickseek.engine.graphs import EagerGraphs
from quickseek.engine.pools import Pools
from quickseek.engine.request import Request
from quickseek.engine.slot_state import SlotState
from quickseek.model.causal_lm import CausalLM
from quickseek.model.context import ForwardContext
from quickseek.ops import sampling
from quickseek.ops.rows import StepRows
from quickseek.ops.sampling import LogProbabilities, SparseDistribution, Verified


@dataclass(frozen=True)
class Needs:
    """What the requests of a step ask for; ``logprobs``: the most alternatives, None for no log-probabilities."""

    sampled: bool
    penalties: bool
    bias: bool
    min_tokens: bool
    masks: bool
    logprobs: int | None

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Needs":
        """The union of what ``requests`` ask for."""
        params = [request.params for request in requests]
        logprobs = [p.logprobs for p in params if p.logprobs is not None]
        return cls(
            sampled=any(not p.greedy for p in params),
            penalties=any(p.penalised for p in params),
            bias=any(p.logit_bias for p in params),
            min_tokens=any(p.min_tokens for p in params),
            masks=any(p.masked for p in params),
            logprobs=max(logprobs) if logprobs else None,
        )


@dataclass(frozen=True)
class VerifyStep:
    """What V hands to D: raw logits [B, r, V], the drafts [B, r - 1] that ran, the first predicted positions [B]."""

    slots: Tensor
    logits: Tensor
    drafts: Tensor
    draft_counts: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Decision:
    """What D decided for each request of a step, on the device.

    ``tokens`` int64 [B, r] (the first ``counts`` [B] of each are new), ``accepted`` drafts among them, ``finished``
    bool [B], ``valid`` bool [B] (False: the logits held no choice), ``drafts`` [B, k] and ``confidence`` [B, k] of the
    next step, None without a drafter.
    """

    tokens: Tensor
    counts: Tensor
    accepted: Tensor
    finished: Tensor
    valid: Tensor
    logprobs: LogProbabilities | None
    drafts: Tensor | None
    confidence: Tensor | None


class Cycle:
    """V and D over the pools and slot state of one model.

    ``sampled_drafts``: drafts are drawn at the request's temperature (rejection sampling) instead of greedily.
    ``steps`` counts V's, ``specialized`` those whose layers an executor ran.
    """

    def __init__(
        self, model: CausalLM, pools: Pools, state: SlotState, *, drafts: int = 0, sampled_drafts: bool = False
    ) -> None:
        self.model, self.pools, self.state = model, pools, state
        self.drafts, self.sampled_drafts = drafts, sampled_drafts
        self.graphs: EagerGraphs = EagerGraphs()
        self.steps = self.specialized = 0

    # ------------------------------------------------------------------------------------------ prefill

    def prefill(
        self,
        slots: Tensor,
        ids: Tensor,
        rows: StepRows,
        lookback: Tensor,
        *,
        oldest: Tensor | None = None,
        keep_from: Tensor | None = None,
    ) -> Tensor:
        """Run prompt rows ``ids`` [T] of the requests in ``slots`` [B] and commit them; hidden states of the last rows.

        ``lookback`` int64 [B, n]: the tokens before each request's first row, nearest first, -1 before the start.
        """
        context = self.pools.context(slots, rows, num_prefills=slots.shape[0], oldest=oldest, keep_from=keep_from)
        hidden, returned = self._run(ids, context, lookback)
        self.state.lengths[slots] = rows.ends
        last = torch.cat((returned.first_rows[1:], returned.first_rows.new_full((1,), hidden.shape[0]))) - 1
        return hidden[last]

    def first_token(self, slots: Tensor, hidden: Tensor, needs: Needs, masks: Tensor | None = None) -> Decision:
        """Choose the first token of answers whose prompts end in hidden states [B, H], and draft what follows."""
        batch = slots.shape[0]
        step = VerifyStep(
            slots=slots,
            logits=self.model.logits(hidden).unsqueeze(1),
            drafts=slots.new_empty(batch, 0),
            draft_counts=slots.new_zeros(batch),
            positions=self.state.lengths[slots],
        )
        return self.decide(step, needs, masks, rows_ran=False)

    # ------------------------------------------------------------------------------------------ V and D

    def verify(self, slots: Tensor, max_length: int, drafts: int | None = None) -> VerifyStep:
        """V: run the anchor and the first ``drafts`` drafts (None: all) of the requests in ``slots`` [B].

        ``max_length``: the host's bound on the positions that this reaches.
        """
        state = self.state
        drafts = self.drafts if drafts is None else drafts
        starts, drafted = state.lengths[slots], state.drafts[slots, :drafts]
        ids = torch.cat((state.anchors[slots].unsqueeze(1), drafted), 1)
        rows = StepRows.uniform(starts, drafts + 1, min(max_length, self.pools.reach))
        context = self.graphs.record(self.pools.context(slots, rows, num_prefills=0))
        executor = self.model.backbone.executor
        runs = executor.runs if executor is not None else 0
        hidden, _ = self._run(ids.flatten(), context, None)
        self.count(executor is not None and executor.runs > runs)
        return VerifyStep(
            slots=slots,
            logits=self.model.logits(hidden).unflatten(0, (-1, drafts + 1)),
            drafts=drafted,
            draft_counts=state.draft_counts[slots].clamp_max(drafts),
            positions=starts + 1,
        )

    def count(self, specialized: bool) -> None:
        """Count one V."""
        self.steps += 1
        self.specialized += specialized

    def decide(self, step: VerifyStep, needs: Needs, masks: Tensor | None = None, *, rows_ran: bool = True) -> Decision:
        """D: accept or sample, commit, draft. ``masks`` int32 [B, r, words] of a grammar."""
        slots = step.slots
        tokens, accepted, valid = self._agreed(*self._accept(step, needs, masks))
        counts = self.state.take(slots, tokens, accepted, rows_ran=rows_ran)
        logprobs = None
        if needs.logprobs is not None:
            logprobs = sampling.log_probabilities(
                step.logits.flatten(0, 1), tokens.clamp_min(0).flatten(), needs.logprobs
            )
        drafts = confidence = None
        if self.drafts:
            drafts, confidence = self._draft(slots, needs, recorded=rows_ran)
        used = torch.arange(tokens.shape[1], device=tokens.device) < counts.unsqueeze(1)
        return Decision(
            tokens=tokens,
            counts=counts,
            accepted=torch.minimum(accepted, (counts - 1).clamp_min(0)),
            finished=self.state.finished[slots],
            valid=(valid.view_as(used) | ~used).all(1),
            logprobs=logprobs,
            drafts=drafts,
            confidence=confidence,
        )

    def _accept(self, step: VerifyStep, needs: Needs, masks: Tensor | None) -> tuple[Verified, Tensor]:
        """What stands of the drafts, and which rows held a choice at all, bool [B * r]."""
        state, (batch, count) = self.state, step.logits.shape[:2]
        rows = step.slots.repeat_interleave(count)
        logits = sampling.adjust(
            step.logits.flatten(0, 1),
            penalties=state.penalties(step.slots, step.drafts) if needs.penalties else None,
            bias=state.bias(rows) if needs.bias else None,
            bitmask=masks.flatten(0, 1) if masks is not None else None,
            ends=state.forbidden_ends(step.slots, count) if needs.min_tokens else None,
        )
        valid = sampling.valid(logits)
        if not needs.sampled:
            chosen = sampling.greedy(logits).view(batch, count)
            return sampling.match(chosen, step.drafts, step.draft_counts), valid
        chances = sampling.probabilities(
            logits, state.temperature[rows], state.top_p[rows], top_k=state.top_k[rows], min_p=state.min_p[rows]
        )
        sources: SparseDistribution | None = None
        if self.sampled_drafts and count > 1:
            sources = state.draft_distribution(step.slots, count - 1)
        verified = sampling.verify(
            chances.view(batch, count, -1),
            step.drafts,
            sources,
            state.seeds[step.slots],
            step.positions,
            step.draft_counts,
        )
        return verified, valid

    def _agreed(self, verified: Verified, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, r], accepted drafts [B] and which rows held a choice [B * r], as rank 0 found them."""
        tokens, accepted = verified.tokens, verified.accepted
        if self.model.world.size == 1:
            return tokens, accepted, valid
        told = torch.cat((tokens, accepted.unsqueeze(1), valid.view(tokens.shape).to(tokens.dtype)), 1)
        tokens, accepted, held = self.model.world.broadcast(told).split((tokens.shape[1], 1, tokens.shape[1]), 1)
        return tokens.contiguous(), accepted.squeeze(1), held.flatten() != 0

    # ------------------------------------------------------------------------------------------ parts

    def _run(self, ids: Tensor, context: ForwardContext, lookback: Tensor | None) -> tuple[Tensor, StepRows]:
        """Hidden states of a step and the rows they belong to; the drafter's context is kept."""
        backbone = self.model.backbone
        output = backbone(ids, context.rows.positions, lookback_token_ids=lookback, context=context)
        returned = backbone.rows_returned(context)
        if self.model.draft is None:
            assert isinstance(output, Tensor)
            return output, returned
        hidden, aux = output
        self.model.draft.write_context(aux, returned, context)
        return hidden, returned

    def _draft(self, slots: Tensor, needs: Needs, *, recorded: bool) -> tuple[Tensor, Tensor]:
        """Draft what follows each request's anchor; drafts and their confidence [B, k].

        ``recorded``: as part of a decode cycle and its graph, not after a prompt.
        """
        state, draft, embed = self.state, self.model.draft, self.model.backbone.embed
        assert draft is not None and embed is not None
        last = state.lengths[slots] - 1
        context = self.pools.context(slots, StepRows.uniform(last, 1, 0), num_prefills=0)
        context = self.graphs.record(context) if recorded else context
        sources: list[SparseDistribution] = []

        def choose(logits: Tensor, number: int) -> Tensor:
            tokens, source = sampling.draft_distribution(
                logits, state.temperature[slots], state.seeds[slots], last + 2 + number
            )
            sources.append(source)
            return self.model.world.broadcast(tokens)

        sampled = self.sampled_drafts and needs.sampled
        proposed = draft.propose(
            state.anchors[slots],
            last,
            embed,
            self.model.head,
            context,
            count=self.drafts,
            choose=choose if sampled else None,
        )
        # How many drafts are verified may depend on the confidence.
        tokens, confidence = self._told(proposed.tokens, proposed.confidence)
        state.drafts[slots] = tokens
        # Filled by index: assigning a number would copy it from the host, which a graph cannot hold.
        state.draft_counts.index_fill_(0, slots, self.drafts)
        if sampled:
            state.draft_ids[slots] = torch.stack([source.ids for source in sources], 1)
            state.draft_chances[slots] = torch.stack([source.probabilities for source in sources], 1)
        elif self.sampled_drafts:
            state.draft_ids.index_fill_(0, slots, 0)
            state.draft_ids[slots, :, 0] = tokens
            state.draft_chances.index_fill_(0, slots, 0.0)
            state.draft_chances[:, :, 0].index_fill_(0, slots, 1.0)
        return tokens, confidence

    def _told(self, tokens: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Integers [B, n] and floating-point numbers [B, m] as rank 0 has them, in one broadcast."""
        if self.model.world.size == 1:
            return tokens, numbers
        told = torch.cat((tokens, numbers.to(torch.float64).view(torch.int64)), 1)
        tokens, bits = self.model.world.broadcast(told).split((tokens.shape[1], numbers.shape[1]), 1)
        return tokens.contiguous(), bits.contiguous().view(torch.float64).to(numbers.dtype)

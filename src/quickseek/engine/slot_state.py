"""What the device knows of each running request, by request slot (design.md 4.3).

Lengths, anchors, drafts, counts and finished flags change on the device only; the host writes a slot when a request
starts in it and keeps a late mirror of what comes back.
"""

import torch
from torch import Tensor

from quickseek.config import ModelConfig
from quickseek.engine.request import Request
from quickseek.ops.sampling import DRAFT_WIDTH, Bias, Ends, Penalties, SparseDistribution, drafts_before
from quickseek.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

NO_LIMIT = 2**62


class SlotState:
    """Tensors of ``num_slots`` rows; slot 0 is scratch and always finished, so padded rows produce nothing.

    ``lengths``: committed positions. ``anchors``: the token chosen last, which has no row yet. ``drafts`` [S, k] and
    how many of them are to be verified, ``draft_counts``; ``draft_ids`` and ``draft_chances`` [S, k, W]: what sampled
    drafts were drawn from. ``produced``: tokens of the answer. ``ends`` [S, E]: ids that end it, -1 for none.
    """

    def __init__(self, config: ModelConfig, num_slots: int, drafts: int, device: torch.device) -> None:
        self.device = device

        def integers(*shape: int, fill: int = 0) -> Tensor:
            return torch.full((num_slots, *shape), fill, dtype=torch.int64, device=device)

        def floats(fill: float) -> Tensor:
            return torch.full((num_slots,), fill, dtype=torch.float64, device=device)

        width = min(DRAFT_WIDTH, config.vocab_size)
        self.eos_token_id = config.eos_token_id
        self.lengths, self.anchors, self.produced = integers(), integers(), integers()
        self.drafts, self.draft_counts = integers(drafts), integers()
        self.draft_ids = integers(drafts, width)
        self.draft_chances = torch.zeros(num_slots, drafts, width, dtype=torch.float64, device=device)
        self.finished = torch.ones(num_slots, dtype=torch.bool, device=device)
        self.limits, self.min_tokens = integers(fill=NO_LIMIT), integers()
        self.seeds, self.ends = integers(), integers(MAX_STOP_TOKEN_IDS + 1, fill=-1)
        self.temperature, self.top_p, self.top_k, self.min_p = floats(0.0), floats(1.0), integers(), floats(0.0)
        self.presence, self.frequency, self.repetition = floats(0.0), floats(0.0), floats(1.0)
        self.bias_ids = integers(MAX_LOGIT_BIAS, fill=-1)
        self.bias_values = torch.zeros(num_slots, MAX_LOGIT_BIAS, dtype=torch.float64, device=device)
        self.output_counts = torch.zeros(num_slots, config.vocab_size, dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros(num_slots, config.vocab_size, dtype=torch.bool, device=device)

    def begin(self, slot: int, request: Request, length: int) -> None:
        """Put ``request``, of which ``length`` positions are in the caches, into ``slot``."""
        params = request.params
        self.lengths[slot], self.produced[slot] = length, len(request.output_ids)
        self.draft_counts[slot], self.finished[slot] = 0, False
        self.limits[slot], self.seeds[slot] = request.limit, request.seed
        self.min_tokens[slot] = min(params.min_tokens, request.limit)
        self.temperature[slot], self.top_p[slot] = params.temperature, params.top_p
        self.top_k[slot], self.min_p[slot] = params.top_k, params.min_p
        self.presence[slot], self.frequency[slot] = params.presence_penalty, params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        ends = params.ends(self.eos_token_id)
        self.ends[slot] = -1
        self.ends[slot, : len(ends)] = torch.tensor(ends, dtype=torch.int64)
        self.bias_ids[slot] = -1
        if params.logit_bias:
            bias = params.logit_bias
            self.bias_ids[slot, : len(bias)] = torch.tensor(list(bias), dtype=torch.int64)
            self.bias_values[slot, : len(bias)] = torch.tensor(list(bias.values()), dtype=torch.float64)
        self.output_counts[slot], self.prompt_seen[slot] = 0, False
        if params.penalised:
            self.prompt_seen[slot, torch.tensor(request.prompt_ids, dtype=torch.int64)] = True
            outputs = torch.tensor(request.output_ids, dtype=torch.int64, device=self.device)
            self.output_counts[slot].index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))

    # ------------------------------------------------------------------------------------------ what rows ask for

    def penalties(self, slots: Tensor, drafts: Tensor) -> Penalties:
        """Of the k + 1 rows of each request in ``slots`` [B] with drafts [B, k]."""
        rows = slots.repeat_interleave(drafts.shape[1] + 1)
        return Penalties(
            self.output_counts,
            self.prompt_seen,
            rows,
            drafts_before(drafts),
            self.presence[rows],
            self.frequency[rows],
            self.repetition[rows],
        )

    def bias(self, rows: Tensor) -> Bias:
        """Of rows whose requests are in slots ``rows`` [T]."""
        return Bias(self.bias_ids[rows], self.bias_values[rows])

    def forbidden_ends(self, slots: Tensor, count: int) -> Ends:
        """Of ``count`` rows of each request in ``slots`` [B]."""
        before = self.produced[slots].unsqueeze(1) + torch.arange(count, device=self.device)
        rows = slots.repeat_interleave(count)
        return Ends(self.ends[rows], (before < self.min_tokens[slots].unsqueeze(1)).flatten())

    def draft_distribution(self, slots: Tensor, count: int) -> SparseDistribution:
        """What the first ``count`` drafts of requests in ``slots`` [B] were drawn from."""
        return SparseDistribution(self.draft_ids[slots, :count], self.draft_chances[slots, :count])

    # ------------------------------------------------------------------------------------------ commit

    def take(self, slots: Tensor, tokens: Tensor, accepted: Tensor, *, rows_ran: bool) -> Tensor:
        """Commit ``accepted`` [B] drafts and one more token of ``tokens`` [B, r]; returns how many were produced [B].

        A request ends inside its tokens at the first that ends it or reaches its limit; a finished one takes none.
        ``rows_ran``: the rows of the taken tokens' predecessors were run by this step (False for the first token of
        an answer, whose prompt is committed apart).
        """
        numbers = torch.arange(tokens.shape[1], device=self.device)
        offered = numbers <= accepted.unsqueeze(1)
        ends = (tokens.unsqueeze(-1) == self.ends[slots].unsqueeze(1)).any(-1) & (tokens >= 0)
        ends |= self.produced[slots].unsqueeze(1) + numbers + 1 >= self.limits[slots].unsqueeze(1)
        ends &= offered
        ended_before = ends.to(torch.int64).cumsum(1) - ends.to(torch.int64) > 0
        taken = offered & ~ended_before & ~self.finished[slots].unsqueeze(1)
        count = taken.sum(1)
        last = tokens.gather(1, (count - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        self.anchors[slots] = torch.where(count > 0, last, self.anchors[slots])
        self.produced[slots] += count
        if rows_ran:
            self.lengths[slots] += count
        self.finished[slots] |= (ends & taken).any(1)
        flat = slots.unsqueeze(1) * self.output_counts.shape[1] + tokens.clamp_min(0)
        self.output_counts.view(-1).index_add_(0, flat.flatten(), taken.flatten().to(torch.int32))
        return count

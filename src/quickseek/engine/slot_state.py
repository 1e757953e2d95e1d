"""What the device knows of each running request, by request slot (design.md 4.3).

Lengths, anchors, drafts, counts and finished flags change on the device only; the host writes a slot when a request
starts in it and keeps a late mirror of what comes back.
"""

import torch
from torch import Tensor

from quickseek.config import ModelConfig
from quickseek.engine.request import Request
from quickseek.engine.staging import staging_on
from quickseek.ops.sampling import DRAFT_WIDTH, Bias, Ends, Penalties, SparseDistribution, drafts_before
from quickseek.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

NO_LIMIT = 2**62
NO_ENDS = MAX_STOP_TOKEN_IDS + 1
"""Ids that may end an answer: the most stop ids, and the end token."""


class SlotState:
    """Tensors of ``num_slots`` rows; slot 0 is scratch and always finished, so padded rows produce nothing.

    ``lengths``: committed positions. ``anchors``: the token chosen last, which has no row yet. ``drafts`` [S, k] and
    how many of them are to be verified, ``draft_counts``; ``draft_ids`` and ``draft_chances`` [S, k, W]: what sampled
    drafts were drawn from. ``produced``: tokens of the answer. ``ends`` [S, E]: ids that end it, -1 for none.

    What the host writes when a request begins is columns of one table for each dtype, so that it is one copy.
    """

    def __init__(self, config: ModelConfig, num_slots: int, drafts: int, device: torch.device) -> None:
        self.device = device

        def integers(*shape: int, fill: int = 0) -> Tensor:
            return torch.full((num_slots, *shape), fill, dtype=torch.int64, device=device)

        width = min(DRAFT_WIDTH, config.vocab_size)
        self.eos_token_id = config.eos_token_id
        self.staging = staging_on(device)
        self.anchors, self.drafts = integers(), integers(drafts)
        self.draft_ids = integers(drafts, width)
        self.draft_chances = torch.zeros(num_slots, drafts, width, dtype=torch.float64, device=device)
        self.finished = torch.ones(num_slots, dtype=torch.bool, device=device)
        self._blank_integers = torch.tensor([0, 0, 0, NO_LIMIT, 0, 0, 0] + [-1] * (NO_ENDS + MAX_LOGIT_BIAS))
        self._blank_floats = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0] + [0.0] * MAX_LOGIT_BIAS, dtype=torch.float64)
        self._integers = self._blank_integers.repeat(num_slots, 1).to(device)
        self._floats = self._blank_floats.repeat(num_slots, 1).to(device)
        numbers, self.ends, self.bias_ids = self._integers.split((7, NO_ENDS, MAX_LOGIT_BIAS), 1)
        self.lengths, self.produced, self.draft_counts, self.limits, self.min_tokens, self.seeds, self.top_k = (
            numbers.unbind(1)
        )
        shares, self.bias_values = self._floats.split((6, MAX_LOGIT_BIAS), 1)
        self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition = shares.unbind(1)
        self.output_counts = torch.zeros(num_slots, config.vocab_size, dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros(num_slots, config.vocab_size, dtype=torch.bool, device=device)

    def begin(self, slot: int, request: Request, length: int) -> None:
        """Put ``request``, of which ``length`` positions are in the caches, into ``slot``."""
        params, bias = request.params, request.params.logit_bias or {}
        integers, floats = self._blank_integers.clone(), self._blank_floats.clone()
        least = min(params.min_tokens, request.limit)
        numbers = [length, len(request.output_ids), 0, request.limit, least, request.seed, params.top_k]
        numbers += params.ends(self.eos_token_id)
        integers[: len(numbers)] = torch.tensor(numbers)
        shares = [params.temperature, params.top_p, params.min_p]
        shares += [params.presence_penalty, params.frequency_penalty, params.repetition_penalty, *bias.values()]
        floats[: len(shares)] = torch.tensor(shares, dtype=torch.float64)
        first = integers.numel() - MAX_LOGIT_BIAS
        integers[first : first + len(bias)] = torch.tensor(list(bias), dtype=torch.int64)
        self.staging.write(self._integers[slot], integers)
        self.staging.write(self._floats[slot], floats)
        self.finished[slot] = False
        self.output_counts[slot], self.prompt_seen[slot] = 0, False
        if params.penalised:
            prompt, outputs = self.staging.copy(
                torch.tensor(request.prompt_ids, dtype=torch.int64), torch.tensor(request.output_ids, dtype=torch.int64)
            )
            # By index_fill_: an assignment by tensor would copy its number from the host, which waits.
            self.prompt_seen[slot].index_fill_(0, prompt, True)
            self.output_counts[slot].index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))

    def of(self, slot: int) -> list[Tensor]:
        """All that is known of ``slot``, where it lies."""
        tables = (self.anchors, self.drafts, self.draft_ids, self.draft_chances, self.finished)
        return [table[slot] for table in (*tables, self._integers, self._floats, self.output_counts, self.prompt_seen)]

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

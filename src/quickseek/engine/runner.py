"""The runner: carries out what the scheduler says, one tick after the other, and reads results one cycle late."""

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from quickseek.engine.answer import Answer, RequestOutput, TokenLogprobs
from quickseek.engine.batch import PrefillBatch
from quickseek.engine.blocks import BlockPool
from quickseek.engine.cycle import Cycle, Decision, Needs
from quickseek.engine.decisions import Decisions
from quickseek.engine.grammar import GrammarCompiler, mask_words
from quickseek.engine.graphs import CudaGraphs, Recorder, padded_sizes
from quickseek.engine.peers import Peers
from quickseek.engine.plan import MemoryPlan
from quickseek.engine.pools import Pools
from quickseek.engine.prefix import PrefixCache
from quickseek.engine.readback import Readback, Readbacks, readbacks_from
from quickseek.engine.request import Request, Status
from quickseek.engine.scheduler import Scheduler, SchedulerLimits
from quickseek.engine.slot_state import SlotState
from quickseek.engine.staging import Staging
from quickseek.engine.tick import PrefillChunk, Restore, Tick
from quickseek.engine.warm_up import WarmUp
from quickseek.errors import QuickseekError
from quickseek.model.causal_lm import CausalLM
from quickseek.sampling_params import SamplingParams
from quickseek.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")


class EngineClosed(QuickseekError, RuntimeError):
    """An engine was asked for something after it was closed."""


class Closeable(Protocol):
    """What steps a runner from a thread of its own."""

    def close(self) -> None:
        """Return once it steps no more; nothing to do if it does not."""


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """``confidence``: verify only drafts whose cumulative confidence reaches it (host-paced; 0: all).

    ``sampled_drafts``: draw drafts at the request's temperature. ``snapshot_interval``: see ``SchedulerLimits``.
    ``guarded``: canaries around every pool, checked after each step. ``graphs``: replay decode steps from CUDA graphs
    on a GPU. ``approximate_prefix``: reuse full blocks without a snapshot by replaying a window (spec/model.md 9),
    which is not exact. ``rank_check_interval``: ticks after which ranks compare what they decided (0: never).
    ``warm_up``: run every kind of step once (engine/warm_up.py).
    """

    max_num_batched_tokens: int = 2048
    prefix_caching: bool = True
    approximate_prefix: bool = False
    snapshot_interval: int = 0
    sampled_drafts: bool = False
    confidence: float = 0.0
    guarded: bool = False
    graphs: bool = True
    rank_check_interval: int = 0
    warm_up: bool = False


@dataclass(frozen=True)
class Update:
    """New text of a request, and whether it is the last; ``output`` grows with every later update."""

    text: str
    output: RequestOutput
    finished: bool = False


@dataclass(frozen=True)
class _Results:
    """A decision, and ``Peers.flag`` as it was behind it."""

    decision: Decision
    flag: Tensor | None


@dataclass
class _Launched:
    """Results of a cycle that the host has not read: each decision with its requests, and whether it ran rows."""

    cycle: int
    decisions: list[tuple[list[Request], Readback[_Results], bool]] = field(default_factory=list)


BATCH_REFRESH = 16
"""Cycles after which the bound on a batch's positions is taken anew."""


@dataclass(frozen=True)
class _Batch:
    """A decode batch as the launch path needs it; kept while the same requests decode, so that launching the same
    batch again touches nothing per request."""

    requests: list[Request] = field(default_factory=list)
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    needs: Needs = field(default_factory=lambda: Needs.of([]))
    reach: int = 0
    age: int = 0

    def next(self, requests: list[Request], drafts: int, staging: Staging) -> "_Batch":
        """The batch of ``requests`` for the next cycle, with a bound on the positions it reaches."""
        if requests == self.requests and self.age < BATCH_REFRESH:
            return replace(self, reach=self.reach + drafts + 1, age=self.age + 1)
        slots = self.slots
        if requests != self.requests:
            slots = staging.copy(torch.tensor([_slot(request) for request in requests]))[0]
        # The host knows lengths as of the last cycle it has read; one more may be under way.
        reach = max(request.num_computed for request in requests) + 2 * (drafts + 1)
        return _Batch(list(requests), slots, Needs.of(requests), reach)


@dataclass
class _Common:
    """What a runner and all that are renewed from one another have in common; ``parts`` in the order they were made."""

    closed: bool = False
    parts: dict[str, Any] = field(default_factory=dict)


class _Part(Generic[T]):
    """An attribute that lies in ``_Common.parts``: EngineClosed once any of the runners was closed."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, runner: "Runner", owner: type) -> T:
        try:
            part: T = runner._common.parts[self.name]
        except KeyError:
            runner._check_open()
            raise AttributeError(f"Runner has no {self.name} yet") from None
        return part

    def __set__(self, runner: "Runner", part: T) -> None:
        runner._common.parts[self.name] = part


class Runner:
    """Requests in, updates out. ``step`` runs one tick; every rank runs the same ticks in the same order.

    ``drivers``: what steps it from other threads, to be closed before it is. After ``close``, neither it nor a runner
    that was renewed from it, or that it was renewed from, is usable: EngineClosed.
    """

    model = _Part[CausalLM]()
    pools = _Part[Pools]()
    state = _Part[SlotState]()
    cycle = _Part[Cycle]()
    peers = _Part[Peers]()
    graphs = _Part[CudaGraphs | None]()
    _readbacks = _Part[Readbacks]()

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        plan: MemoryPlan,
        identity: str,
        options: RunnerOptions | None = None,
    ) -> None:
        options = RunnerOptions() if options is None else options
        self._common = _Common()
        self.model, self.tokenizer, self.plan, self.options = model, tokenizer, plan, options
        self.config, self.drafts, self._identity = model.config, plan.num_speculative_tokens, identity
        self._compiler: GrammarCompiler | None = None
        self._compiling = threading.Lock()
        self.drivers: weakref.WeakSet[Closeable] = weakref.WeakSet()
        self._begin()
        self._use_device(model.world.device)
        self.pools = Pools(
            self.config,
            model.numerics,
            num_slots=plan.num_slots,
            num_blocks=plan.num_blocks,
            block_tokens=plan.block_tokens,
            max_model_len=self.scheduler.table_width * plan.block_tokens,
            draft=model.draft is not None,
            device=model.world.device,
            guarded=options.guarded,
        )
        self.state = SlotState(self.config, plan.num_slots, self.drafts, self.pools.device)
        self.cycle = Cycle(model, self.pools, self.state, drafts=self.drafts, sampled_drafts=options.sampled_drafts)
        self.peers = Peers.of(model)
        self._readbacks = readbacks_from(self.pools.device)
        with self._starting():
            self.graphs = self._capture() if options.graphs and self.pools.device.type == "cuda" else None
            if options.warm_up:
                # Behind the captures: each gives back the memory that PyTorch had kept for eager steps.
                self._warm_up()

    def _begin(self) -> None:
        """Everything that the host knows of requests, while there is none."""
        plan, options = self.plan, self.options
        pool = BlockPool(plan.num_blocks, plan.block_tokens)
        prefix = None
        if options.prefix_caching:
            window = self.config.sliding_window if options.approximate_prefix else None
            slots = range(plan.max_num_seqs + 1, plan.num_slots)
            prefix = PrefixCache(pool, slots, self._identity, replay_window=window)
        limits = SchedulerLimits(
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            num_speculative_tokens=self.drafts,
            snapshot_interval=options.snapshot_interval,
        )
        self.scheduler = Scheduler(limits, pool, prefix)
        self.decisions = Decisions(self.model.world, options.rank_check_interval)
        self.answers: dict[str, Answer] = {}
        self._unread: deque[_Launched] = deque()
        self._batch = _Batch()
        self._proposed: dict[str, tuple[list[int], list[float]]] = {}
        self._failures: list[Update] = []

    def renewed(self) -> "Runner":
        """A runner without requests in the place of this one, a step of which was interrupted.

        What host and device knew of requests no longer agrees. Memory and graphs are taken over: there may be no room
        for others, and nothing is left in them that a request reads before it has written it.
        """
        self._check_open()
        runner = copy(self)
        runner._begin()
        return runner

    def close(self) -> None:
        """Close ``drivers``, wait for the device, and let go of model, caches and graphs; nothing to do a second time.

        Requests that are under way are dropped. Each rank closes by itself.
        """
        self.close_drivers()
        if self.closed:
            return
        device, watchdog, parts = self.pools.device, self.peers.watchdog, self._common.parts
        self._begin()
        self._common.closed = True
        try:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        finally:
            if watchdog is not None:
                watchdog.close()
            # The latest first: the pool of the graphs may hold what the others point at.
            while parts:
                parts.popitem()

    @property
    def closed(self) -> bool:
        """Whether this runner, or one that shares its parts, was closed."""
        return self._common.closed

    def close_drivers(self) -> None:
        """End all that steps this runner from other threads."""
        for driver in list(self.drivers):
            driver.close()

    def _check_open(self) -> None:
        if self.closed:
            raise EngineClosed("this engine was closed: build another LLM")

    def _capture(self) -> CudaGraphs:
        """The graphs of decode steps whose requests choose greedily or by sampling and ask for nothing else."""
        graphs = CudaGraphs(self.cycle, padded_sizes(self.plan.max_num_seqs), Recorder.of(self.model.world))
        plain = Needs.of([])
        graphs.capture([plain, replace(plain, sampled=True)])
        for decision in graphs.decisions:
            self._readbacks.reserve(_Results(decision, self.peers.flag))
        return graphs

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """For steps that run before the first request: raises CollectiveTimeout if a peer did not come to one of them.

        Ranks launch all of them before they look, and fail as one (``World.as_one``).
        """
        with self.model.world.as_one("the start of the engine"):
            with self.peers.deferred():
                yield
            self.peers.check_launched()

    def _warm_up(self) -> None:
        options = self.options
        WarmUp(
            self.cycle,
            most_requests=self.plan.max_num_seqs,
            most_tokens=options.max_num_batched_tokens,
            replays=options.approximate_prefix,
            paced=self.drafts > 0 and options.confidence > 0,
        ).run()

    @staticmethod
    def _use_device(device: torch.device) -> None:
        """Make a GPU the current one, which is a thread's own matter: the one that steps need not have loaded."""
        if device.type == "cuda":
            torch.cuda.set_device(device)

    # ------------------------------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queue a request; PromptError or ConfigError if it can never run."""
        self._check_open()
        request.params.check_vocabulary(self.config.vocab_size)
        self.compile_grammar(request.params)
        answer = Answer(request, self.tokenizer, self._compiler)
        self.scheduler.add(request)
        self.answers[request.request_id] = answer

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compile what ``params`` ask an answer to follow, so that ``add`` finds it done; from any thread.

        ConfigError names the field that cannot be compiled.
        """
        if params.structure is None:
            return
        with self._compiling:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self.tokenizer)
        self._compiler.compile(params)

    def abort(self, request_id: str) -> Update | None:
        """Drop a request at any moment; its last update, or None if it is not there (any more)."""
        self.scheduler.abort(request_id)
        answer = self.answers.get(request_id)
        return None if answer is None else self._end(answer, "abort")

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to run or to read."""
        return self.scheduler.idle and not self._unread

    # ------------------------------------------------------------------------------------------ a tick

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Run one tick: launch its steps, then read the results of the one before.

        An exception in a part of it ends the requests of that part with "error"; the others go on. Of one that not all
        ranks raise alike all raise ``PeersLost``, for good. Raises ``CollectiveTimeout``, before any token of the first
        void step is given out, when a peer did not come: then nothing of any request goes on, and ``renewed`` runners
        raise it too until ``peers.reset()``.
        """
        self._check_open()
        with self.model.world.as_one("a tick of the engine"):
            self._use_device(self.pools.device)
            if not self._unread:
                self.peers.check()
            tick = self.scheduler.schedule()
            self.decisions.saw(tick)
            with self.peers.deferred():
                return self._run(tick)

    def _run(self, tick: Tick) -> list[Update]:
        for save in tick.saves:
            self.pools.copy_slot(save.request_slot, save.snapshot_slot)
        if tick.preempted or tick.restores:
            self._batch = _Batch()
        for restore in tick.restores:
            with self._failing([restore.request]):
                self._restore(restore)
        for update in tick.table_updates:
            self.pools.set_table(update.slot, update.first, list(update.blocks))
        prefills = [chunk for chunk in tick.prefills if chunk.request.state is Status.PREFILL]
        paced = self._host_paced(tick.decodes, [chunk.request for chunk in prefills])
        # The host-paced lane needs every token before it can go on; the free lane reads one cycle late.
        updates = self._read(tick.cycle - 1) if paced else []
        launched = _Launched(tick.cycle)
        if prefills:
            with self._failing([chunk.request for chunk in prefills]):
                self._prefill(prefills, launched)
        # Only what has just been read can have ended a request since it was scheduled.
        decodes = [r for r in tick.decodes if r.state is Status.DECODE] if paced else tick.decodes
        if decodes:
            with self._failing(decodes):
                self._decode(decodes, launched)
        self._unread.append(launched)
        self.pools.check_guards(tick.cycle)
        updates += self._read(tick.cycle if paced or tick.empty else tick.cycle - 1)
        updates += self._failures
        self._failures = []
        return updates

    @contextmanager
    def _failing(self, requests: Sequence[Request]) -> Iterator[None]:
        """Whatever goes wrong inside, on all ranks alike, ends ``requests`` and nobody else."""
        try:
            with self.model.world.as_one("a step of the engine"):
                yield
        except Exception as error:
            self._batch = _Batch()
            self._failures += [self._fail(self.answers[r.request_id], error) for r in requests if self._lives(r)]

    def _lives(self, request: Request) -> bool:
        return request.state is not Status.FINISHED and request.request_id in self.answers

    def _fail(self, answer: Answer, error: Exception) -> Update:
        self.scheduler.finish(answer.request, frozen=False)
        return self._end(answer, "error", f"{type(error).__name__}: {error}")

    def _host_paced(self, decodes: list[Request], reading: Sequence[Request]) -> bool:
        """Whether a request of the tick needs the host between V and D; a batch that goes on is not asked again."""
        if self.drafts and self.options.confidence:
            return True
        known = decodes == self._batch.requests
        masks = self._batch.needs.masks if known else any(request.params.masked for request in decodes)
        return masks or any(request.params.masked for request in reading)

    def _restore(self, restore: Restore) -> None:
        self.pools.clear_table(restore.request_slot)
        if restore.snapshot_slot is not None:
            self.pools.copy_slot(restore.snapshot_slot, restore.request_slot)
        for source, target in restore.copies:
            self.pools.copy_block(source, target)
        self.state.begin(restore.request_slot, restore.request, restore.length)

    def _prefill(self, chunks: Sequence[PrefillChunk], launched: _Launched) -> None:
        """One eager step of prompt rows; prompts that end in it choose their first token."""
        batch = PrefillBatch.build(chunks, self.config.engram_max_ngram_size - 1, self.pools.staging)
        hidden = self.cycle.prefill(
            batch.slots, batch.ids, batch.rows, batch.lookback, oldest=batch.oldest, keep_from=batch.keep_from
        )
        for chunk in chunks:
            self.scheduler.prefilled(chunk)
        requests = [chunk.request for chunk in chunks if chunk.last]
        if requests:
            masks, last = self._masks(requests, 0, {}), batch.last
            decision = self.cycle.first_token(batch.slots[last], hidden[last], Needs.of(requests), masks)
            launched.decisions.append((requests, self._send_back(decision), False))

    def _decode(self, requests: list[Request], launched: _Launched) -> None:
        batch = self._batch = self._batch.next(requests, self.drafts, self.pools.staging)
        slots, drafts, masks = batch.slots, self.drafts, None
        if batch.needs.masks or (self.drafts and self.options.confidence):
            proposed = {request.request_id: self._chosen_drafts(request) for request in requests}
            drafts = max(len(tokens) for tokens in proposed.values())
            counts = [len(proposed[request.request_id]) for request in requests]
            self.state.draft_counts[slots] = self.pools.staging.copy(torch.tensor(counts))[0]
            masks = self._masks(requests, drafts, proposed)
        if self.graphs is not None and masks is None and drafts == self.drafts:
            decision = self.graphs.run(slots, batch.reach, batch.needs)
        else:
            decision = self.cycle.decide(self.cycle.verify(slots, batch.reach, drafts), batch.needs, masks)
        launched.decisions.append((batch.requests, self._send_back(decision), True))

    def _chosen_drafts(self, request: Request) -> list[int]:
        """The drafts to verify, as the host knows them: all, or those the drafter is confident of."""
        tokens, confidence = self._proposed.get(request.request_id, ([], []))
        survival, count = 1.0, 0
        for value in confidence:
            survival *= value
            if survival < self.options.confidence:
                break
            count += 1
        return tokens[:count]

    def _masks(self, requests: Sequence[Request], drafts: int, proposed: dict[str, list[int]]) -> Tensor | None:
        """Grammar masks int32 [B, drafts + 1, words] of a step, or None if no request has any."""
        if not any(request.params.masked for request in requests):
            return None
        words = mask_words(self.config.vocab_size)
        masks = torch.full((len(requests), drafts + 1, words), -1, dtype=torch.int32)
        for number, request in enumerate(requests):
            answer = self.answers.get(request.request_id)
            if answer is not None and answer.masks is not None:
                with self._failing([request]):
                    answer.masks.fill(proposed.get(request.request_id, []), masks[number])
        return self.pools.staging.copy(masks)[0]

    # ------------------------------------------------------------------------------------------ results

    def _send_back(self, decision: Decision) -> Readback[_Results]:
        return self._readbacks.copy(_Results(decision, self.peers.flag))

    def _read(self, cycle: int) -> list[Update]:
        """Read every unread result up to ``cycle``."""
        updates: list[Update] = []
        fault = None if self.peers.watchdog is None else self.peers.error
        while self._unread and self._unread[0].cycle <= cycle:
            launched = self._unread.popleft()
            for requests, sent, rows_ran in launched.decisions:
                results = sent.get(fault)
                self.peers.check_results(results.flag)
                self._read_decision(requests, results.decision, rows_ran, updates)
            self.scheduler.completed(launched.cycle)
        return updates

    def _read_decision(
        self, requests: list[Request], decision: Decision, rows_ran: bool, updates: list[Update]
    ) -> None:
        tokens, counts = decision.tokens.tolist(), decision.counts.tolist()
        accepted, finished, valid = decision.accepted.tolist(), decision.finished.tolist(), decision.valid.tolist()
        drafts = decision.drafts.tolist() if decision.drafts is not None else None
        confidence = decision.confidence.tolist() if decision.confidence is not None else None
        logprobs = _logprob_rows(decision) if decision.logprobs is not None else None
        faults: list[tuple[Request, Exception]] = []
        for number, request in enumerate(requests):
            # One that was preempted meanwhile keeps its tokens: it starts again only after this has been read. One
            # that was aborted or has finished has no use for them.
            if not self._lives(request):
                continue
            answer = self.answers[request.request_id]
            taken = tokens[number][: counts[number]]
            if not taken:
                continue
            if rows_ran and self.drafts:
                self._count_drafts(answer, len(tokens[number]) - 1, accepted[number])
            if drafts is not None and confidence is not None:
                self._proposed[request.request_id] = (drafts[number], confidence[number])
            try:
                if not valid[number]:
                    raise ArithmeticError("the model's logits hold no choice (NaN or infinite)")
                rows = None if logprobs is None else logprobs[number][: len(taken)]
                update = self._take(answer, taken, _limited(rows, request), rows_ran, finished[number])
            except Exception as error:  # one request's fault must not become another's
                faults.append((request, error))
            else:
                updates.append(update)
        for request, fault in faults:
            with self._failing([request]):
                raise fault

    def _count_drafts(self, answer: Answer, offered: int, accepted: int) -> None:
        answer.request.drafted += offered
        answer.request.accepted += accepted
        at = answer.output.accepted_at
        at.extend([0] * (self.drafts - len(at)))
        for position in range(accepted):
            at[position] += 1

    def _take(
        self, answer: Answer, tokens: list[int], logprobs: list[TokenLogprobs] | None, rows_ran: bool, finished: bool
    ) -> Update:
        """Give an answer its new tokens; tell the scheduler; end it where it ends."""
        request = answer.request
        text, kept = answer.take(tokens, logprobs)
        request.output_ids += tokens[:kept]
        if answer.output.stop_reason is not None:
            self.scheduler.finish(request, frozen=False)
            return self._end(answer, "stop", text=text)
        if rows_ran:
            self.scheduler.committed(request, len(tokens))
        if finished:
            request.finish_reason = "stop" if tokens[-1] in request.params.ends(self.config.eos_token_id) else "length"
            self.scheduler.finish(request)
            return self._end(answer, request.finish_reason, text=text)
        answer.output.cached_tokens = request.cached_tokens
        return Update(text, answer.output)

    def _end(self, answer: Answer, reason: str, error: str | None = None, text: str = "") -> Update:
        request = answer.request
        request.finish_reason = request.finish_reason or reason
        del self.answers[request.request_id]
        self._proposed.pop(request.request_id, None)
        return Update(text + answer.end(reason, error), answer.output, finished=True)


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot


def _limited(rows: list[TokenLogprobs] | None, request: Request) -> list[TokenLogprobs] | None:
    """As many alternatives as this request asked for: another of the step may have asked for more."""
    if rows is None or request.params.logprobs is None:
        return None
    most = request.params.logprobs
    return [TokenLogprobs(row.token_id, row.logprob, row.rank, row.top[:most]) for row in rows]


def _logprob_rows(decision: Decision) -> list[list[TokenLogprobs]]:
    logprobs, tokens = decision.logprobs, decision.tokens
    assert logprobs is not None
    flat = [
        TokenLogprobs(token, chosen, rank, tuple(zip(ids, values, strict=True)))
        for token, chosen, rank, ids, values in zip(
            tokens.flatten().tolist(),
            logprobs.chosen.tolist(),
            logprobs.rank.tolist(),
            logprobs.ids.tolist(),
            logprobs.values.tolist(),
            strict=True,
        )
    ]
    width = tokens.shape[1]
    return [flat[first : first + width] for first in range(0, len(flat), width)]

"""``LLM``: the offline door. A checkpoint directory in, text out."""

import gc
import hashlib
import json
import logging
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quickseek.checkpoint.hub import resolve
from quickseek.compilation import COMPILATION, Compilation
from quickseek.config import DecodeConfig, EngineConfig, ModelConfig
from quickseek.decode.executor import SpecializedDecode
from quickseek.decode.memory import DecodeMemory
from quickseek.decode.places import Places
from quickseek.decode.requirements import specialized_decode_config
from quickseek.engine.answer import RequestOutput
from quickseek.engine.plan import MemoryPlan, graph_bytes
from quickseek.engine.request import Request
from quickseek.engine.runner import EngineClosed, Runner, RunnerOptions, Update
from quickseek.errors import ConfigError, PromptError
from quickseek.model.causal_lm import load_model
from quickseek.numerics import Numerics
from quickseek.parallel.launch import world_of_process
from quickseek.parallel.world import SoloWorld, World, require_agreement, together
from quickseek.sampling_params import SamplingParams
from quickseek.tokenizer.compressed_ids import check_compressed_count, compressed_id_table
from quickseek.tokenizer.instructions import ToolsInstructions
from quickseek.tokenizer.prompt import render
from quickseek.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PromptInput = str | Sequence[int]
"""Text (no control tokens are recognised in it), or token ids."""


class LLM:
    """A loaded model with its tokenizer.

    ``model``: a checkpoint directory, or a hub repository "owner/name". ``world``: the ranks, each with an LLM of its
    own that does what the others do; None: the ranks that were spawned, or torchrun's, or this process alone.
    ``options``: the fields of ``EngineConfig``; an unknown one is a TypeError. As a context manager it is closed at the
    end of the block.
    """

    def __init__(self, model: str | Path, *, world: World | None = None, **options: Any) -> None:
        self.engine_config = EngineConfig(**options)
        config = self.engine_config
        # A rank's own GPU is that of its place on the host; a number in ``device`` is checked against it.
        kind = torch.device(config.device).type
        self.world = world_on(config.device, world_of_process(kind) if world is None else world)
        if config.tensor_parallel_size != self.world.size:
            expected = f"the number of ranks that were launched (torchrun, or parallel.launch.spawn), {self.world.size}"
            raise ConfigError("tensor_parallel_size", config.tensor_parallel_size, expected)
        if self.world.device.type == "cuda" and config.resolved_mode != "trained":
            raise ConfigError("mode", config.mode, "'trained' on a GPU: exact arithmetic runs on a CPU")
        # Ranks decide alike because they were told alike; only the number of the device is a rank's own.
        require_agreement(self.world, {key: value for key, value in asdict(config).items() if key != "device"})
        # What takes a moment to find wrong is read before the weights, which take minutes.
        token_map = together(self.world, "reading the model's small files", lambda: self._read_files(model))
        self._instructions: ToolsInstructions | None = None
        self._inboxes: dict[str, deque[Update]] = {}
        self._lock = threading.RLock()
        decode = specialized_decode_config(config, self.config, world=self.world)
        COMPILATION.watch_triton()
        kernels, seconds = COMPILATION.kernels, COMPILATION.seconds
        with COMPILATION.start_up(config.warms_up):
            self._build(decode, token_map)
        told = COMPILATION.kernels - kernels, COMPILATION.seconds - seconds
        logger.info("ready: %d kernels were compiled, which took %.1f s", *told)

    def _build(self, decode: DecodeConfig | None, token_map: Tensor | None) -> None:
        """Load the weights and make all that runs on them."""
        config = self.engine_config
        self.model, _ = load_model(
            self._directory,
            numerics_of(config),
            world=self.world,
            draft=config.num_speculative_tokens > 0,
            decoder_replay=config.decoder_replay,
            device=self.world.device,
        )
        if token_map is not None:
            self.model.set_token_map(token_map)
        # Before the caches: the executor's mailboxes and copies stay as long as the weights do.
        self.executor = None
        if decode is not None:
            decode = replace(decode, jit_warmup=config.warms_up)
            self.executor = SpecializedDecode.for_target(self.model, decode)
        # Graphs of stock steps read weights where they lie, too.
        parts = {"backbone": self.model.backbone, "head": self.model.head, "draft": self.model.draft}
        self._places = Places(**{name: part for name, part in parts.items() if part is not None})
        self.runner = self._runner()

    @property
    def compilation(self) -> Compilation:
        """How many kernels this process has compiled so far, and how long that took."""
        return COMPILATION

    def _read_files(self, model: str | Path) -> Tensor | None:
        """Read configuration and tokenizer and check the options against them; the compressed ids, if any are used."""
        options = self.engine_config
        self._directory = resolve(model)
        self.config = ModelConfig.from_file(self._directory)
        self.max_model_len = longest_context(options, self.config)
        if options.num_speculative_tokens > self.config.dspark_block_size:
            expected = f"at most the trained block size, {self.config.dspark_block_size}"
            raise ConfigError("num_speculative_tokens", options.num_speculative_tokens, expected)
        memory_plan(options, self.config)
        self.tokenizer = Tokenizer.from_directory(self._directory, vocab_size=self.config.vocab_size)
        for key, found in (("bos_token_id", self.tokenizer.bos_id), ("eos_token_id", self.tokenizer.eos_id)):
            if found != getattr(self.config, key):
                raise ConfigError(key, getattr(self.config, key), f"{found}, the tokenizer's", source=str(model))
        if not self.config.engram_layer_ids:
            return None
        table = compressed_id_table(self.tokenizer, self.config.vocab_size)
        check_compressed_count(table, self.config.engram_compressed_vocab_size)
        return table

    def _runner(self) -> Runner:
        config = self.engine_config
        kept = DecodeMemory.of(self.executor)
        plan = replace(memory_plan(config, self.config), mailbox_bytes=kept.mailboxes, embedding_bytes=kept.embedding)
        logger.info("%s", plan)
        if self.world.device.type == "cuda":
            plan.check_room(self.world.all_reduce_min(free_bytes(self.world.device)))
        options = RunnerOptions(
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefix_caching=config.enable_prefix_caching and config.num_prefix_snapshots > 0,
            approximate_prefix=config.approximate_prefix_caching,
            snapshot_interval=config.prefix_snapshot_interval,
            sampled_drafts=config.draft_sample_method == "probabilistic",
            confidence=config.draft_confidence_threshold,
            guarded=config.guard_pools,
            rank_check_interval=config.rank_check_interval,
            warm_up=config.warms_up,
        )
        # Whatever changes a row of a cache is part of a cached prefix's name.
        facts = [str(self._directory.resolve()), self.config.to_dict(), str(self.model.numerics), config.decoder_replay]
        identity = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return Runner(self.model, self.tokenizer, plan, identity, options)

    # ------------------------------------------------------------------------------------------ prompts

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        reasoning_effort: int | str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the trained format (spec/model.md 11), ready for the model's answer."""
        if self._instructions is None and _has_tools(messages, tools):
            self._instructions = ToolsInstructions.from_directory(self._directory)
        prompt = render(
            messages,
            thinking=thinking,
            reasoning_effort=reasoning_effort,
            tools=tools,
            response_format=response_format,
            instructions=self._instructions,
        )
        return self.tokenizer.encode_prompt(prompt)

    def encode_text(self, text: str) -> list[int]:
        """The begin token and the ids of plain text, in which no control token is recognised."""
        if not text:
            raise PromptError("the prompt is empty: expected at least one character")
        return [self.config.bos_token_id, *self.tokenizer.encode(text)]

    # ------------------------------------------------------------------------------------------ answers

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue one prompt or several (text gets the begin token; ids are taken as they are), in their order.

        ``progress`` shows a bar on the terminal.
        """
        batch: Sequence[Any] = [prompts] if isinstance(prompts, str) else _listed(prompts, "prompts")
        if batch and isinstance(batch[0], int):
            batch = [batch]
        ids = [self._prompt_ids(prompt, f"prompts[{number}]") for number, prompt in enumerate(batch)]
        return self._run(ids, sampling_params, progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; ``options`` are those of ``encode_chat``."""
        batch = _listed(messages, "messages")
        if batch and isinstance(batch[0], Mapping):
            batch = [batch]
        ids = [self.encode_chat(conversation, **options) for conversation in batch]
        return self._run(ids, sampling_params, progress)

    def stream(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None
    ) -> Iterator[tuple[str, RequestOutput]]:
        """Text as it comes, each piece with the output so far, which is finished with the last.

        ``prompt``: text, or token ids, such as ``encode_chat`` gives for a conversation.
        """
        for update in self._updates(self._requests([self._prompt_ids(prompt, "prompt")], sampling_params)):
            yield update.text, update.output

    def _prompt_ids(self, prompt: Any, name: str) -> list[int]:
        """Token ids of text, or of a list of them, which an error calls ``name``."""
        return self.encode_text(prompt) if isinstance(prompt, str) else _listed(prompt, name)

    # ------------------------------------------------------------------------------------------ its end

    def close(self) -> None:
        """End what serves from it, and free weights, caches, graphs and mailboxes; nothing to do a second time.

        Every rank closes, and waits for its peers before it frees what they can store into, unless one of them is known
        to be lost. Whatever is asked of it afterwards raises EngineClosed; streams that are under way do, too.
        """
        self._close(wait=True)

    def _close(self, wait: bool) -> None:
        # Not under the lock: a driver's thread may be in a step of its own, which ends first.
        self.runner.close_drivers()
        with self._lock:
            if self.runner.closed:
                return
            lost = self.runner.peers.error() is not None or self.world.lost is not None
            self._inboxes.clear()
            try:
                self.runner.close()
                if wait and not lost:
                    self.world.barrier()
            finally:
                del self.model, self.executor, self._places
                # Modules and executor refer to each other.
                gc.collect()
                if self.world.device.type == "cuda":
                    torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the peers may be anywhere, and would not come.
        self._close(wait=kind is None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Only what is not there is looked for here.
            if name in ("model", "executor"):
                raise EngineClosed(f"{name}: this LLM was closed, or its start failed")
            raise AttributeError(f"LLM has no attribute {name!r}")

    # ------------------------------------------------------------------------------------------ after a fault

    def reset(self) -> None:
        """Serve again after a ``CollectiveTimeout``: every mailbox is emptied, requests and prefixes are forgotten.

        Collective: each rank calls it once it has raised, or has ended what it ran.
        """
        with self._lock:
            self._check_open()
            self.runner.peers.reset()
            self.runner = self.runner.renewed()

    def refresh(self) -> None:
        """Go on with weights that were changed in place: what was derived from them is made again, prefixes forgotten.

        Collective. RuntimeError while requests are under way, or naming weights that have moved (RankDisagreement where
        ranks differ): graphs would go on reading the old ones.
        """
        with self._lock:
            self._check_open()
            if self._inboxes or not self.runner.idle:
                raise RuntimeError("weights cannot be refreshed while requests are under way")
            if self.executor is None:
                together(self.world, "refreshing weights", self._places.check)
                self.model.backbone.finalize_mhc_broadcast_weights()
            else:
                self.executor.refresh()
            self.runner = self.runner.renewed()

    def _run(self, prompts: Sequence[list[int]], params: SamplingParams | None, progress: bool) -> list[RequestOutput]:
        requests = self._requests(prompts, params)
        updates = self._updates(requests)
        if progress:
            updates = _with_bar(updates, len(requests))
        outputs = {update.output.request_id: update.output for update in updates}
        return [outputs[request.request_id] for request in requests]

    def _requests(self, prompts: Sequence[list[int]], params: SamplingParams | None) -> list[Request]:
        """Requests of all prompts, checked before any of them runs."""
        self._check_open()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params is a {type(params).__name__}: expected one SamplingParams for all")
        params.check_vocabulary(self.config.vocab_size)
        return [Request.create(ids, params, self.config, self.max_model_len) for ids in prompts]

    def _updates(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Run requests to their end; those that are left when the caller stops early are aborted.

        Several of these may be under way, in one thread or many: whoever runs a step files everybody's updates.
        """
        live = {request.request_id for request in requests}
        runner = self.runner
        try:
            with self._lock:
                for request in requests:
                    self._inboxes[request.request_id] = deque()
                    runner.add(request)
            while live:
                for update in self._take(runner, live):
                    if update.finished:
                        live.discard(update.output.request_id)
                    yield update
        finally:
            with self._lock:
                for request in requests:
                    self._inboxes.pop(request.request_id, None)
                    if runner is self.runner:
                        runner.abort(request.request_id)
                # Others would miss what these steps bring; they run them themselves.
                while runner is self.runner and not self._inboxes and not runner.idle:
                    self._step()

    def _take(self, runner: Runner, live: Collection[str]) -> list[Update]:
        """The updates of some requests that have come, of one step more if there are none."""
        with self._lock:
            self._check_open()
            if runner is not self.runner:
                raise RuntimeError("a step that this request was part of was interrupted")
            if not any(self._inboxes[request_id] for request_id in live):
                self._step()
            taken: list[Update] = []
            for request_id in live:
                taken += self._inboxes[request_id]
                self._inboxes[request_id].clear()
            return taken

    def _check_open(self) -> None:
        if self.runner.closed:
            raise EngineClosed("this LLM was closed")

    def _step(self) -> None:
        try:
            for update in self.runner.step():
                if update.output.request_id in self._inboxes:
                    self._inboxes[update.output.request_id].append(update)
        except BaseException:
            # Interrupted anywhere (Ctrl-C): what host and device know no longer agrees, so both begin anew.
            self.runner = self.runner.renewed()
            raise


def world_on(device: str, world: World) -> World:
    """``world``, or one rank on ``device``; ConfigError when that is not there, or not where the ranks are."""
    wanted = torch.device(device)
    if wanted.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (wanted.index or 0) >= count:
            why = " (this PyTorch is built without CUDA)" if torch.version.cuda is None else ""
            raise ConfigError("device", device, f"one of the {count} GPUs that this machine has, or 'cpu'{why}")
    if world.size == 1:
        if wanted.type == "cuda":
            wanted = torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
            torch.cuda.set_device(wanted)
        return world if world.device == wanted else SoloWorld(wanted)
    if world.device.type != wanted.type or wanted.index not in (None, world.device.index):
        raise ConfigError("device", device, f"{str(world.device)!r}, that of the ranks that were launched")
    return world


def numerics_of(options: EngineConfig) -> Numerics:
    """The roundings that an engine's mode and dtype stand for."""
    if options.resolved_mode == "trained":
        return Numerics.trained()
    return Numerics.exact(torch.float64 if options.dtype == "float64" else torch.float32)


def longest_context(options: EngineConfig, config: ModelConfig) -> int:
    """``max_model_len``, or what the model allows; ConfigError beyond that."""
    limit, asked = config.max_position_embeddings, options.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError("max_model_len", asked, f"at most the model's max_position_embeddings, {limit}")
    return limit if asked is None else asked


def memory_plan(options: EngineConfig, config: ModelConfig) -> MemoryPlan:
    """The pools of an engine; ConfigError names the option to change where they do not fit."""
    plan = MemoryPlan.build(
        config,
        numerics_of(options),
        budget_bytes=options.kv_cache_memory_bytes,
        max_num_seqs=options.max_num_seqs,
        max_model_len=longest_context(options, config),
        num_snapshots=options.num_prefix_snapshots if options.enable_prefix_caching else 0,
        num_speculative_tokens=options.num_speculative_tokens,
        block_tokens=options.block_size,
    )
    if not options.device.startswith("cuda"):
        return plan
    return replace(plan, graph_bytes=graph_bytes(config, options.max_num_seqs, options.num_speculative_tokens))


def free_bytes(device: torch.device) -> int:
    """What a GPU has left for this process: free memory, and what PyTorch holds of it without use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _with_bar(updates: Iterator[Update], count: int) -> Iterator[Update]:
    """Pass updates through, and show how many requests have finished and how many tokens came."""
    from rich.progress import MofNCompleteColumn, Progress

    tokens = 0
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), transient=True) as bar:
        task = bar.add_task("requests", total=count)
        seen: dict[str, int] = {}
        for update in updates:
            output = update.output
            tokens += len(output.token_ids) - seen.get(output.request_id, 0)
            seen[output.request_id] = len(output.token_ids)
            bar.update(task, advance=int(output.finished), description=f"{tokens} tokens")
            yield update


def _listed(value: Any, name: str) -> list[Any]:
    """The items of a list or of anything like it; bytes, whose items are integers, are none."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return list(value)
    raise PromptError(f"{name} is a {type(value).__name__}: expected a list")


def _has_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> bool:
    if not isinstance(messages, Sequence):
        return False  # the renderer says what is wrong
    return bool(tools) or any(isinstance(message, Mapping) and message.get("tools") for message in messages)

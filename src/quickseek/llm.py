"""``LLM``: the offline door. A checkpoint directory in, text out."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quickseek.config import EngineConfig
from quickseek.engine.offline import OfflineEngine
from quickseek.engine.request import Request
from quickseek.errors import ConfigError, PromptError
from quickseek.model.causal_lm import load_model
from quickseek.numerics import Numerics
from quickseek.parallel.world import World, default_world
from quickseek.sampling_params import SamplingParams
from quickseek.tokenizer.compressed_ids import check_compressed_count, compressed_id_table
from quickseek.tokenizer.detokenizer import IncrementalDetokenizer
from quickseek.tokenizer.instructions import ToolsInstructions
from quickseek.tokenizer.prompt import render
from quickseek.tokenizer.tokenizer import Tokenizer

PromptInput = str | Sequence[int]
"""Text (no control tokens are recognised in it), or token ids."""


@dataclass
class RequestOutput:
    """What one prompt produced.

    ``finish_reason``: "stop" or "length". ``first_token_s`` and ``total_s`` count from the call; with several prompts
    they include waiting. ``drafted`` and ``accepted`` count speculative tokens.
    """

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    first_token_s: float = 0.0
    total_s: float = 0.0
    drafted: int = 0
    accepted: int = 0


class LLM:
    """A loaded model with its tokenizer; ``options`` are the fields of ``EngineConfig``, an unknown one is a TypeError."""

    def __init__(self, model: str | Path, *, world: World | None = None, **options: Any) -> None:
        self.engine_config = EngineConfig(**options)
        self.world = default_world() if world is None else world
        if self.engine_config.tensor_parallel_size != self.world.size:
            raise ConfigError(
                "tensor_parallel_size",
                self.engine_config.tensor_parallel_size,
                f"the number of ranks that were launched, {self.world.size}",
            )
        if torch.device(self.engine_config.device).type != "cpu":
            raise NotImplementedError(f"LLM on device {self.engine_config.device!r}: GPU forms of the operations")
        self.model, checkpoint = load_model(
            model,
            self.numerics(),
            world=self.world,
            draft=self.engine_config.num_speculative_tokens > 0,
            decoder_replay=self.engine_config.decoder_replay,
        )
        self.config = checkpoint.config
        self.max_model_len = self._max_model_len()
        if self.engine_config.num_speculative_tokens > self.config.dspark_block_size:
            raise ConfigError(
                "num_speculative_tokens",
                self.engine_config.num_speculative_tokens,
                f"at most the trained block size, {self.config.dspark_block_size}",
            )
        self.tokenizer = Tokenizer.from_directory(model, vocab_size=self.config.vocab_size)
        self._instructions: ToolsInstructions | None = None
        self._directory = Path(model)
        if self.config.engram_layer_ids:
            table = compressed_id_table(self.tokenizer, self.config.vocab_size)
            check_compressed_count(table, self.config.engram_compressed_vocab_size)
            self.model.set_token_map(table)
        self.engine = OfflineEngine(
            self.model,
            num_speculative_tokens=self.engine_config.num_speculative_tokens,
            max_num_seqs=self.engine_config.max_num_seqs,
            chunk=self.engine_config.max_num_batched_tokens,
        )

    def numerics(self) -> Numerics:
        """The roundings that the engine options ask for."""
        if self.engine_config.resolved_mode == "trained":
            return Numerics.trained()
        return Numerics.exact(torch.float64 if self.engine_config.dtype == "float64" else torch.float32)

    def _max_model_len(self) -> int:
        limit, asked = self.config.max_position_embeddings, self.engine_config.max_model_len
        if asked is not None and asked > limit:
            raise ConfigError("max_model_len", asked, f"at most the model's max_position_embeddings, {limit}")
        return limit if asked is None else asked

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
        self, prompts: PromptInput | Sequence[PromptInput], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Continue one prompt or several (text gets the begin token; ids are taken as they are)."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch: Sequence[Any] = [prompts] if single else prompts
        ids = [self.encode_text(prompt) if isinstance(prompt, str) else list(prompt) for prompt in batch]
        return self._run(ids, sampling_params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; ``options`` are those of ``encode_chat``."""
        batch: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self._run([self.encode_chat(conversation, **options) for conversation in batch], sampling_params)

    def stream(
        self, prompt_ids: Sequence[int], sampling_params: SamplingParams | None = None
    ) -> Iterator[tuple[str, RequestOutput]]:
        """Text as it comes, each piece with the output so far, whose ``finish_reason`` is set with the last."""
        pieces: list[str] = []
        for output in self._progress([list(prompt_ids)], sampling_params, lambda _, text: pieces.append(text)):
            yield "".join(pieces), output
            pieces.clear()

    def _run(self, prompts: Sequence[list[int]], params: SamplingParams | None) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        for output in self._progress(prompts, params, lambda _output, _text: None):
            outputs[id(output)] = output
        return sorted(outputs.values(), key=lambda output: self._order[id(output)])

    def _progress(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | None,
        on_text: Callable[[RequestOutput, str], None],
    ) -> Iterator[RequestOutput]:
        """Run prompts; yields an output each time it has grown."""
        params = params or SamplingParams()
        started = time.perf_counter()
        requests = [Request.create(ids, params, self.config, self.max_model_len) for ids in prompts]
        outputs = {id(request): RequestOutput(request.prompt_ids) for request in requests}
        self._order = {id(output): index for index, output in enumerate(outputs.values())}
        detokenizers = {key: IncrementalDetokenizer(self.tokenizer) for key in outputs}
        for request, tokens in self.engine.run(requests):
            output, detokenizer = outputs[id(request)], detokenizers[id(request)]
            output.total_s = time.perf_counter() - started
            output.first_token_s = output.first_token_s or output.total_s
            output.token_ids.extend(tokens)
            output.drafted, output.accepted = request.drafted, request.accepted
            output.finish_reason = request.finish_reason
            text = "".join(detokenizer.push(token) for token in tokens)
            if request.finish_reason is not None:
                text += detokenizer.flush()
            output.text += text
            on_text(output, text)
            yield output


def _has_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> bool:
    return bool(tools) or any(isinstance(message, Mapping) and message.get("tools") for message in messages)

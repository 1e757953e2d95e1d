"""The backbone: embedding, layers, final collapse and norm (spec/model.md 1, 5; spec/api.md "Backbone")."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quickseek.config import ModelConfig
from quickseek.errors import ConfigError
from quickseek.model.context import ForwardContext, StepExecutor, StepShared
from quickseek.model.engram import NgramHashState
from quickseek.model.layer import Layer
from quickseek.model.loader import TensorSource, WeightLoader, WeightSource
from quickseek.model.modules import RMSNorm
from quickseek.model.replay import DecoderReplayLayers, why_unsupported
from quickseek.model.vocabulary import VocabParallelEmbedding
from quickseek.numerics import Numerics
from quickseek.ops import mhc, norm_rope
from quickseek.ops.rows import StepRows
from quickseek.parallel.world import World, default_world

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IntermediateTensors:
    """What a pipeline stage hands on: ``hidden_states`` [b, hc, H] and ``pre_mix`` [b, hc] in the wide dtype."""

    hidden_states: Tensor
    pre_mix: Tensor


ForwardOutput = Tensor | tuple[Tensor, list[Tensor]] | IntermediateTensors


class DeepseekV4Model(nn.Module):
    """The layers of DeepSeek-V4.1, or of one pipeline stage of it.

    ``stage``: the layers held here (None: all); a stage must not cut a group of layers that share a KV source.
    ``prefix`` names the model inside a larger checkpoint and is empty for the released one.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        prefix: str = "",
        world: World | None = None,
        numerics: Numerics | None = None,
        stage: range | None = None,
        decoder_replay: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.prefix = config, prefix
        self.world = default_world() if world is None else world
        self.numerics = Numerics.exact() if numerics is None else numerics
        self.stage = _check_stage(config, range(config.num_hidden_layers) if stage is None else stage)
        self.is_first = self.stage.start == 0
        self.is_last = self.stage.stop == config.num_hidden_layers
        self.executor: StepExecutor | None = None
        self._aux_hidden_state_layers: tuple[int, ...] = ()
        self.decoder_replay = decoder_replay and self._decoder_replay_supported()
        self.embed = VocabParallelEmbedding(config, self.numerics, self.world) if self.is_first else None
        self.layers = nn.ModuleList(
            Layer(config, layer, f"layers.{layer}", self.numerics, self.world) for layer in self.stage
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, self.numerics) if self.is_last else None
        self.hashes = NgramHashState(config)

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Layers whose entering streams' mean ``forward`` also returns; the number of layers stands for the end."""
        return self._aux_hidden_state_layers

    @aux_hidden_state_layers.setter
    def aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        for layer in layers:
            if not 0 <= layer <= self.config.num_hidden_layers:
                raise ConfigError("aux_hidden_state_layers", list(layers), f"ids up to {self.config.num_hidden_layers}")
            if layer < self.stage.start:
                raise NotImplementedError(f"auxiliary hidden states of layer {layer}, which an earlier stage holds")
        self._aux_hidden_state_layers = tuple(layers)

    def _decoder_replay_supported(self) -> bool:
        reason = why_unsupported(self.config)
        if reason is not None:
            logger.warning("decoder replay is off: %s", reason)
        return reason is None

    # ------------------------------------------------------------------------------------------ forward

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        """Embedding rows [T, H] of ids [T]."""
        if self.embed is None:
            raise RuntimeError("this pipeline stage has no embedding")
        out: Tensor = self.embed(ids)
        return out

    def make_empty_intermediate_tensors(
        self, batch: int, dtype: torch.dtype, device: torch.device | str
    ) -> IntermediateTensors:
        """Zero intermediates of ``batch`` rows, to receive a previous stage's."""
        n, hidden = self.config.hc_mult, self.config.hidden_size
        return IntermediateTensors(
            torch.zeros(batch, n, hidden, dtype=dtype, device=device),
            torch.zeros(batch, n, dtype=self.numerics.wide, device=device),
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        lookback_token_ids: Tensor | None = None,
        *,
        context: ForwardContext,
    ) -> ForwardOutput:
        """Normalised hidden states [T, H] of a flattened batch; they feed the head.

        ``input_ids``, ``positions``: [T]. ``inputs_embeds`` [T, H] replaces the embedding rows. With
        ``aux_hidden_state_layers`` set: (hidden states, the means over the streams that enter those layers, in the
        configured order). A stage that is not the last returns its intermediates. With decoder replay, a prefill
        step returns the rows of each request's last window only.
        """
        if self.is_first == (intermediate_tensors is not None):
            raise ValueError("intermediate_tensors: expected exactly on pipeline stages after the first")
        rows = context.rows
        dead = self.hashes.is_image(input_ids)
        hashes = self.hash_ngrams(input_ids, dead, context, lookback_token_ids)
        step = self.executor.plan(positions, intermediate_tensors, context=context) if self.executor else None
        if step is not None:
            assert self.executor is not None
            embedded = self.executor.embed(input_ids) if inputs_embeds is None else (inputs_embeds, None)
            x, streams = (self.embed_input_ids(input_ids), None) if embedded is None else embedded
            stacked = torch.stack(hashes, 1) if hashes else None
            output: ForwardOutput = step.run(x, positions, input_ids, stacked, dead, streams)
            return output
        embeddings = self.prepare_embeddings(hashes)
        shared = self.share(context, dead)
        if intermediate_tensors is None:
            x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            streams, pre = mhc.first_streams(x.to(self.numerics.dtype), self.config.hc_mult)
        else:
            streams, pre = intermediate_tensors.hidden_states, intermediate_tensors.pre_mix
        if streams.shape[0] != rows.positions.shape[0]:
            raise ValueError(f"{streams.shape[0]} rows of input: the context describes {rows.positions.shape[0]}")
        return self._run_layers(streams, pre, shared, dead, embeddings, context)

    def _run_layers(
        self,
        streams: Tensor,
        pre: Tensor,
        shared: StepShared,
        dead: Tensor,
        embeddings: dict[int, Tensor],
        context: ForwardContext,
    ) -> ForwardOutput:
        replay = DecoderReplayLayers.plan(self.config, context) if self.decoder_replay else None
        aux: dict[int, Tensor] = {}
        for module in self.layers:
            assert isinstance(module, Layer)
            if module.engram is not None:
                streams = module.engram(streams, embeddings[module.layer], dead)
            if module.layer in self.aux_hidden_state_layers:
                trims = replay if module.layer <= self.config.decoder_start else None
                entering = streams if trims is None else streams[trims.kept]
                aux[module.layer] = mhc.stream_mean(entering)
            if replay is not None and module.layer == self.config.decoder_start:
                streams, pre, shared = replay.cut(module, streams, pre, shared, context)
            else:
                equal = module.layer == 0 and module.engram is None and module.hc_attn.broadcast_fn is not None
                streams, pre = module(streams, pre, shared, context, equal_copies=equal)
        if not self.is_last:
            return IntermediateTensors(streams, pre)
        assert self.norm is not None
        if self.config.num_hidden_layers in self.aux_hidden_state_layers:
            aux[self.config.num_hidden_layers] = mhc.stream_mean(streams)
        hidden: Tensor = self.norm(mhc.collapse(streams, pre))
        if self.aux_hidden_state_layers:
            return hidden, [aux[layer] for layer in self.aux_hidden_state_layers]
        return hidden

    def share(self, context: ForwardContext, dead: Tensor) -> StepShared:
        """What the layers of a forward hand to each other, as it begins; ``dead`` bool [T]: rows of image spans."""
        config, rows = self.config, context.rows
        window_only, compressed = rotary_frequencies(config, self.numerics.wide, rows.positions.device)
        turns = {
            False: norm_rope.rotation(rows.positions, window_only),
            True: norm_rope.rotation(rows.positions, compressed),
        }
        # A group turns by the position of its first token (spec/model.md 6.3); only rows that close one are used.
        group_turns = {1: turns[True]}
        for source in config.kv_source_layer_ids:
            ratio = config.ratio(source)
            if ratio not in group_turns:
                group_turns[ratio] = norm_rope.rotation(rows.positions - (ratio - 1), compressed)
        return StepShared(
            rows=rows,
            turns=turns,
            group_turns=group_turns,
            oldest=torch.zeros_like(rows.starts) if context.oldest is None else context.oldest,
            image_rows=dead if self.config.image_token_id is not None else None,
        )

    def rows_returned(self, context: ForwardContext) -> StepRows:
        """The rows whose hidden states ``forward`` returns: all, unless decoder replay trims the step."""
        replay = DecoderReplayLayers.plan(self.config, context) if self.decoder_replay else None
        return context.rows if replay is None else context.rows.select(replay.kept, replay.starts)

    # ------------------------------------------------------------------------------------------ n-gram memory

    def hash_ngrams(
        self, ids: Tensor, dead: Tensor, context: ForwardContext, lookback_token_ids: Tensor | None = None
    ) -> list[Tensor]:
        """Row numbers [T, columns] of every Engram layer of the whole model; none without such layers."""
        if not self.config.engram_layer_ids:
            return []
        hashed: list[Tensor] = self.hashes(ids, dead, context, lookback_token_ids)
        return hashed

    def prepare_embeddings(self, hashes: Sequence[Tensor]) -> dict[int, Tensor]:
        """Gathered table rows by layer, before the layers run: ids depend on tokens only."""
        gathered = {}
        for module in self.layers:
            if isinstance(module, Layer) and module.engram is not None:
                gathered[module.layer] = module.engram.gather(hashes[module.engram.index])
        return gathered

    # ------------------------------------------------------------------------------------------ weights

    def load_weights(self, weights: WeightSource | Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill the parameters of this stage and rank; returns the names of the tensors it used.

        ``weights``: an open checkpoint, or (name, tensor) pairs in stored form or as logical values.
        """
        source: WeightSource = weights if hasattr(weights, "mapped") else TensorSource(weights)  # type: ignore[assignment]
        loader = WeightLoader(source, self.numerics, self.prefix)
        self.load(loader)
        return loader.loaded

    def load(self, loader: WeightLoader) -> None:
        """Fill the parameters from a loader."""
        if self.embed is not None:
            self.embed.load(loader, "embed.weight")
        for module in self.layers:
            assert isinstance(module, Layer)
            module.load(loader)
        if self.norm is not None:
            loader.tensor(self.norm.weight, "norm.weight")
        self.finalize_mhc_broadcast_weights()

    def finalize_mhc_broadcast_weights(self) -> None:
        """Sum the first layer's attention mixing weight over the copies (spec/model.md 5.4)."""
        if self.is_first:
            first = self.layers[0]
            assert isinstance(first, Layer)
            first.hc_attn.finalize_broadcast_weights()


def rotary_frequencies(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Frequencies of window-only layers (no YaRN) and of layers with global KV (always YaRN), spec/model.md 6.2."""
    width = config.qk_rope_head_dim
    plain = norm_rope.rotary_frequencies(width, config.rope_theta, dtype=dtype, device=device)
    scaled = norm_rope.rotary_frequencies(
        width,
        config.compress_rope_theta,
        factor=config.rope_factor,
        original_length=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        dtype=dtype,
        device=device,
    )
    return plain, scaled


def _check_stage(config: ModelConfig, stage: range) -> range:
    if not (0 <= stage.start < stage.stop <= config.num_hidden_layers and stage.step == 1):
        raise ConfigError("stage", stage, f"a range of layers inside 0..{config.num_hidden_layers}")
    for layer in stage:
        for source in (config.kv_source(layer), config.index_source(layer)):
            if source is not None and source < stage.start:
                raise ConfigError("stage", stage, f"a stage that holds layer {source}, which layer {layer} reads from")
        if (
            config.reads_candidates(layer)
            and layer in config.index_source_layer_ids
            and config.candidate_source_layer_id < stage.start
        ):
            raise ConfigError("stage", stage, f"a stage that holds candidate source {config.candidate_source_layer_id}")
    return stage

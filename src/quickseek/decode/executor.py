"""``SpecializedDecode``: small decode steps in a faster schedule of the stock layers' own modules (spec/decode.md A).

Built once, after loading and before the caches are sized; it takes pure decode steps of up to FUSED_MHC_MAX_ROWS rows
that are recorded into a graph (on a CPU: that stand for one). Every other forward runs the stock layers untouched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from quickseek.config import DecodeConfig
from quickseek.decode.attention import AttentionStep
from quickseek.decode.boundary import Boundaries, BoundaryAllReduce
from quickseek.decode.draft import DraftDecode
from quickseek.decode.embedding import replicate
from quickseek.decode.engram import EngramPrefetch
from quickseek.decode.gates import FORKS, FUSED_MHC_MAX_ROWS, GATES, DecodeStep, Gates, device_kind, step_gates
from quickseek.decode.gates import captures_pure_decode as captures_pure_decode
from quickseek.decode.head import LogitsGather
from quickseek.decode.layers import LayerPlan, Memory, run_layers
from quickseek.decode.moe import MoEStep
from quickseek.decode.places import Places
from quickseek.decode.requirements import uses_checked_library
from quickseek.decode.row_shard import RowShard
from quickseek.decode.streams import SideStreams
from quickseek.errors import DecodeUnsupported
from quickseek.model.attention import Attention
from quickseek.model.backbone import DeepseekV4Model, IntermediateTensors
from quickseek.model.causal_lm import CausalLM
from quickseek.model.context import ForwardContext
from quickseek.model.layer import Layer
from quickseek.model.vocabulary import VocabParallelHead
from quickseek.ops import mhc
from quickseek.ops.collectives import AllReduceMHC
from quickseek.parallel.fabric import Fabric, LoopbackFabric, SymmetricFabric
from quickseek.parallel.virtual import VirtualWorld
from quickseek.parallel.world import World, require_agreement, together

DecodeOutput = Tensor | tuple[Tensor, list[Tensor]]
"""Hidden states [n, H], or these and the auxiliary states in the configured order: what the backbone returns."""


class SpecializedDecode:
    """The executor of one rank's whole model. Construction and steps are collective.

    ``lm_head`` gathers its logits through the executor from then on. Raises DecodeUnsupported, naming what it needs,
    for a pipeline stage or an attention that is not the model's own; RankDisagreement when ranks were configured
    differently. ``runs`` counts the steps that it ran itself: replays of one that was captured are not among them.
    """

    def __init__(
        self,
        backbone: DeepseekV4Model,
        config: DecodeConfig,
        lm_head: VocabParallelHead,
        *,
        gates: Gates | None = None,
        fabric: Fabric | None = None,
    ) -> None:
        self.backbone, self.config, self.world = backbone, config, backbone.world
        if not (backbone.is_first and backbone.is_last and backbone.embed is not None and backbone.norm is not None):
            raise DecodeUnsupported(["the whole model on each rank (this is a pipeline stage)"])
        self.layers = [layer for layer in backbone.layers if isinstance(layer, Layer)]
        strangers = {type(layer.attn).__name__ for layer in self.layers} - {Attention.__name__}
        if strangers:
            raise DecodeUnsupported([f"the model's own attention (found {', '.join(sorted(strangers))})"])
        device = self.world.device
        self.gates = (GATES[device_kind(device)] if gates is None else gates).without(config.off)
        # What ranks must decide alike is compared once, before the first collective is built (spec/decode.md A.7).
        require_agreement(self.world, {"decode settings": config, "gates": self.gates})
        self.fabric, self.runs = _fabric(self.world) if fabric is None else fabric, 0
        if self.fabric is not None and self.fabric.turns is not None:
            self.gates = self.gates.without(FORKS)
        self.streams = SideStreams(device)
        self.boundaries = Boundaries(self.boundary(backbone.config.num_experts_per_tok), self.streams.mhc)
        self.row_shard: RowShard | None = None
        if self.gates.row_shard and self.world.size > 1 and backbone.config.index_source_layer_ids:
            self.row_shard = RowShard.of(backbone.config, self.gates.row_shard, self.world, self.fabric)
        self.plans = [
            LayerPlan(
                layer.layer,
                layer,
                AttentionStep(layer.attn, self.streams.inputs, self.streams.mhc, self.row_shard),
                MoEStep(layer.ffn, self.streams.shared_expert),
                layer.engram,
            )
            for layer in self.layers
        ]
        self.engram = EngramPrefetch([layer.engram for layer in self.layers if layer.engram], self.streams.engram)
        self.embedding = None
        if self.gates.replicated_embedding:
            self.embedding = replicate(backbone.embed, backbone.config.vocab_size, backbone.config.hc_mult)
        self.gather: LogitsGather | None = None
        if self.gates.logits_gather and self.world.size > 1:
            self.gather = LogitsGather(lm_head.weight.shape[0], self.gates.logits_gather, self.world, self.fabric)
        lm_head.gather = self.gather
        self.draft: DraftDecode | None = None
        self.places = Places(backbone=backbone, head=lm_head)

    @classmethod
    def for_target(cls, model: CausalLM, config: DecodeConfig, *, gates: Gates | None = None) -> "SpecializedDecode":
        """Build the executor of a loaded model and let its backbone and drafter ask it from now on. Collective."""
        executor = cls(model.backbone, config, model.head, gates=gates)
        model.backbone.executor = executor
        if model.draft is not None:
            executor.draft = DraftDecode(executor, model.draft) if executor.gates.draft else None
            model.draft.executor, model.draft.markov_head.gather = executor.draft, executor.gather
            executor.places = Places(backbone=model.backbone, head=model.head, draft=model.draft)
        return executor

    def boundary(self, top_k: int) -> BoundaryAllReduce:
        """The collective of one stack of layers whose experts are chosen ``top_k`` at a time. Collective."""
        config = self.backbone.config
        return BoundaryAllReduce(
            AllReduceMHC(
                hidden_size=config.hidden_size,
                hc_mult=config.hc_mult,
                max_num_tokens=FUSED_MHC_MAX_ROWS,
                top_k=top_k,
                device=self.world.device,
                residual_only=True,
                world=self.world,
                fabric=self.fabric,
            )
        )

    # ------------------------------------------------------------------------------------------ a step

    def embed(self, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """(embedding [n, H], streams [n, hc, H]) of ids [n] from the replicated table; None: the backbone embeds."""
        if self.embedding is None:
            return None
        ids = ids.to(torch.int32)
        return self.embedding(ids) if self.embedding.accepts(ids) else None

    def plan(
        self, positions: Tensor, intermediate_tensors: IntermediateTensors | None, *, context: ForwardContext
    ) -> DecodeStep | None:
        """The step that runs this forward, or None for the stock layers.

        Only what is recorded into a FULL graph of pure decode, 1 to FUSED_MHC_MAX_ROWS rows, without pipeline input.
        """
        rows = positions.shape[0]
        prefixes = [layer.attn.prefix for layer in self.layers]
        if intermediate_tensors is not None or not 0 < rows <= FUSED_MHC_MAX_ROWS:
            return None
        if not captures_pure_decode(prefixes, context=context):
            return None
        row_shard = self.row_shard is not None and self.row_shard.takes(context.rows)
        return replace(step_gates(rows, self), row_shard=row_shard, context=context)

    def run(
        self,
        step: DecodeStep,
        x: Tensor,
        positions: Tensor,
        input_ids: Tensor,
        engram_hashes: Tensor | None,
        engram_mask: Tensor | None,
        streams: Tensor | None = None,
    ) -> DecodeOutput:
        """Hidden states [n, H] of the embedding x [n, H], with auxiliary states as the backbone returns them.

        ``streams`` [n, hc, H]: copies of x, from the replicated embedding; None: made here. ``engram_hashes`` int64
        [n, Engram layers, columns]. ``engram_mask`` bool [n]: rows of image spans, which take no n-gram memory. Side
        work is joined on every path, an error included; ranks fail as one (``World.as_one``). ValueError when the rows
        are not those of the context.
        """
        backbone, context = self.backbone, step.context
        assert context is not None and backbone.norm is not None
        if not x.shape[0] == step.rows == context.rows.positions.shape[0]:
            raise ValueError(f"{x.shape[0]} rows of input: the context describes {context.rows.positions.shape[0]}")
        with self.world.as_one("a step of the specialized decode"):
            self.boundaries.all_reduce.reset()
            mask = torch.zeros_like(input_ids, dtype=torch.bool) if engram_mask is None else engram_mask
            shared = backbone.share(context, mask)
            memory = None
            try:
                if engram_hashes is not None:
                    memory = Memory(self.engram, mask)
                    self.engram.lookup(engram_hashes)
                    if step.engram_prefetch:
                        self.engram.start(step.rows)
                final, pre, aux = run_layers(
                    self.plans,
                    self.boundaries,
                    step,
                    x.to(backbone.numerics.dtype),
                    shared,
                    streams=streams,
                    memory=memory,
                    aux_layers=backbone.aux_hidden_state_layers,
                )
            finally:
                self.engram.join()
                self.streams.join()
            self.runs += 1
            hidden: Tensor = backbone.norm(mhc.collapse(final, pre))
            wanted = backbone.aux_hidden_state_layers
            if not wanted:
                return hidden
            if backbone.config.num_hidden_layers in wanted:
                aux[backbone.config.num_hidden_layers] = mhc.stream_mean(final)
            return hidden, [aux[layer] for layer in wanted]

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, steps add nothing to ``runs`` and what the parts count: for those that no request asked for."""
        counters = [one for one in (self, self.draft, self.gather, self.row_shard) if one is not None]
        kept = [(one, name, vars(one)[name]) for one in counters for name in ("runs", "fused") if name in vars(one)]
        try:
            yield
        finally:
            for one, name, count in kept:
                setattr(one, name, count)

    # ------------------------------------------------------------------------------------------ weights

    def refresh(self) -> None:
        """Copy again what was derived from weights, after these have changed in place. Collective.

        RuntimeError names weights that lie elsewhere than when this was built (RankDisagreement where ranks differ).
        """
        together(self.world, "refreshing weights", self.places.check)
        self.backbone.finalize_mhc_broadcast_weights()
        if self.embedding is not None:
            self.embedding.refresh()


def _fabric(world: World) -> Fabric | None:
    """What all collectives of an executor share; None on a CPU, where they run over the world itself."""
    if world.device.type == "cpu":
        return None
    if world.size == 1:
        return LoopbackFabric(1, world.device)
    if isinstance(world, VirtualWorld):
        return world.fabric()
    return SymmetricFabric(world, multicast=uses_checked_library("NVLink multicast"))

"""Pipeline stages: cut where no layer reads from another stage, they equal the whole (spec/model.md 9, 14.28)."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compare import assert_float64
from model_helpers import FLOAT64, alone, config_of, differs, logical_weights, prompt, token_map
from quickseek.config import ModelConfig
from quickseek.errors import ConfigError
from quickseek.model.backbone import DeepseekV4Model, IntermediateTensors
from quickseek.model.state import ContiguousState
from quickseek.model.vocabulary import VocabParallelHead
from quickseek.numerics import Numerics
from quickseek.parallel.world import SoloWorld

RELEASED = Path(__file__).parent.parent / "golden/released_config.json"


class Pipeline:
    """The stages of a model in one process, each with the caches of its own layers only."""

    def __init__(self, config: ModelConfig, cuts: list[int]) -> None:
        self.config = config
        bounds = [0, *cuts, config.num_hidden_layers]
        weights = logical_weights(config)
        self.stages, self.states = [], []
        for start, stop in pairwise(bounds):
            stage = DeepseekV4Model(config=config, numerics=FLOAT64, stage=range(start, stop))
            stage.load_weights(weights.items())
            stage.hashes.set_token_map(token_map(config))
            state = ContiguousState(config, FLOAT64, max_requests=3, max_length=80, layers=range(start, stop))
            self.stages.append(stage)
            self.states.append(state)
        self.head = VocabParallelHead(config, config.hidden_size, FLOAT64, SoloWorld())
        self.head.weight.copy_(weights["head.weight"])

    def acquire(self) -> int:
        slots = {state.acquire() for state in self.states}
        assert len(slots) == 1
        return slots.pop()

    def feed(self, step: dict[int, Tensor]) -> dict[int, Tensor]:
        counts = [len(ids) for ids in step.values()]
        ids, carried = torch.cat(list(step.values())), None
        for stage, state in zip(self.stages, self.states, strict=True):
            context = state.context(list(step), counts)
            out = stage(ids, context.rows.positions, carried, context=context)
            carried = out if isinstance(out, IntermediateTensors) else None
            for slot, count in zip(step, counts, strict=True):
                state.commit(slot, count)
        return dict(zip(step, self.head(out).split(counts), strict=True))


@pytest.mark.parametrize("cuts", [[4], [1], [2, 4], [1, 2, 4]])
def test_stages_equal_the_whole_model_in_prefill_chunks_and_decode(cuts: list[int]) -> None:
    pipeline = Pipeline(config_of(), cuts)
    a, b = pipeline.acquire(), pipeline.acquire()
    prompts = {a: prompt(40), b: prompt(33, 1)}
    found: dict[int, list[Tensor]] = {a: [], b: []}
    for step in [{a: 25, b: 7}, {b: 11}, {a: 5, b: 1}, *[{a: 1, b: 1}] * 10, {b: 4}]:
        done = {slot: sum(len(part) for part in found[slot]) for slot in step}
        rows = {slot: prompts[slot][done[slot] : done[slot] + count] for slot, count in step.items()}
        for slot, logits in pipeline.feed(rows).items():
            found[slot].append(logits)
    for slot, ids in prompts.items():
        assert_float64(torch.cat(found[slot]), alone(ids).logits, f"stages cut at {cuts}")


def test_handing_on_a_stale_mixing_coefficient_is_noticed() -> None:
    pipeline = Pipeline(config_of(), [4])
    slot = pipeline.acquire()
    context = pipeline.states[0].context([slot], [20])
    first = pipeline.stages[0](prompt(20), context.rows.positions, context=context)
    one_hot = torch.zeros_like(first.pre_mix)
    one_hot[:, 0] = 1.0
    context = pipeline.states[1].context([slot], [20])
    out = pipeline.stages[1](
        prompt(20), context.rows.positions, IntermediateTensors(first.hidden_states, one_hot), context=context
    )
    assert differs(pipeline.head(out), alone(prompt(20)).logits)


@pytest.mark.parametrize("cut", [3, 5, 6, 7])
def test_a_stage_that_cuts_a_sharing_group_is_refused(cut: int) -> None:
    with pytest.raises(ConfigError, match=r"stage = range\(\d, 8\): expected a stage that holds layer [24]"):
        DeepseekV4Model(config=config_of(), numerics=FLOAT64, stage=range(cut, 8))


def test_the_released_model_can_be_cut_only_between_its_sharing_groups() -> None:
    config = ModelConfig.from_file(RELEASED)
    allowed = []
    for cut in range(1, config.num_hidden_layers):
        try:
            with torch.device("meta"):
                # A stage of one layer shows whether this layer can begin a stage.
                DeepseekV4Model(config=config, numerics=Numerics.trained(), stage=range(cut, cut + 1))
        except ConfigError as error:
            assert error.key == "stage"
        else:
            allowed.append(cut)
    assert allowed == [1, 2, 8, 14, 20]


@pytest.mark.parametrize("stage", [range(0), range(4, 9), range(-1, 4), range(0, 8, 2)])
def test_a_stage_outside_the_model_is_refused(stage: range) -> None:
    with pytest.raises(ConfigError, match="stage"):
        DeepseekV4Model(config=config_of(), numerics=FLOAT64, stage=stage)


def test_empty_intermediates_have_the_shapes_and_dtypes_that_a_stage_hands_on() -> None:
    pipeline = Pipeline(config_of(), [4])
    slot = pipeline.acquire()
    context = pipeline.states[0].context([slot], [3])
    made = pipeline.stages[0](prompt(3), context.rows.positions, context=context)
    empty = pipeline.stages[1].make_empty_intermediate_tensors(3, torch.float64, "cpu")
    assert isinstance(made, IntermediateTensors)
    for name in ("hidden_states", "pre_mix"):
        given, expected = getattr(empty, name), getattr(made, name)
        assert (given.shape, given.dtype) == (expected.shape, expected.dtype)
        assert not given.any()
    assert list(empty.hidden_states.shape) == [3, 4, 256] and list(empty.pre_mix.shape) == [3, 4]


def test_in_trained_mode_the_mixing_coefficients_travel_in_float32() -> None:
    with torch.device("meta"):
        stage = DeepseekV4Model(config=config_of(), numerics=Numerics.trained(), stage=range(4, 8))
    empty = stage.make_empty_intermediate_tensors(2, torch.bfloat16, "meta")
    assert (empty.hidden_states.dtype, empty.pre_mix.dtype) == (torch.bfloat16, torch.float32)


def test_a_stage_with_the_wrong_kind_of_input_is_refused() -> None:
    pipeline = Pipeline(config_of(), [4])
    slot = pipeline.acquire()
    first, second = pipeline.stages
    empty = first.make_empty_intermediate_tensors(3, torch.float64, "cpu")
    context = pipeline.states[0].context([slot], [3])
    with pytest.raises(ValueError, match="intermediate_tensors"):
        first(prompt(3), context.rows.positions, empty, context=context)
    context = pipeline.states[1].context([slot], [3])
    with pytest.raises(ValueError, match="intermediate_tensors"):
        second(prompt(3), context.rows.positions, context=context)
    with pytest.raises(ValueError, match="2 rows of input: the context describes 3"):
        short = second.make_empty_intermediate_tensors(2, torch.float64, "cpu")
        second(prompt(3), context.rows.positions, short, context=context)
    with pytest.raises(RuntimeError, match="no embedding"):
        second.embed_input_ids(prompt(3))

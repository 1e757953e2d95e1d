"""Auxiliary hidden states: means over the streams that enter the chosen layers (spec/model.md 10.2)."""

import pytest
import torch
from torch import Tensor

from compare import assert_float64
from model_helpers import FLOAT64, config_of, differs, forward, logical_weights, prompt, token_map
from quickseek.errors import ConfigError
from quickseek.model.backbone import DeepseekV4Model
from quickseek.model.causal_lm import CausalLM
from quickseek.model.loader import TensorSource
from quickseek.model.state import ContiguousState

LAYERS = 8


def model_with(layers: tuple[int, ...], *, decoder_replay: bool = False) -> CausalLM:
    config = config_of()
    model = CausalLM(config, FLOAT64, decoder_replay=decoder_replay)
    model.load(TensorSource(logical_weights(config)))
    model.set_token_map(token_map(config))
    model.backbone.aux_hidden_state_layers = layers
    return model


def run(model: CausalLM, count: int = 20) -> tuple[Tensor, list[Tensor]]:
    state = ContiguousState(model.config, FLOAT64, max_requests=1, max_length=count)
    return forward(model, prompt(count), state.context([state.acquire()], [count], num_prefills=1))


@pytest.fixture(scope="module")
def entering() -> list[Tensor]:
    """Means of the streams entering layers 0..7 (an Engram's injection included), and of those leaving the last."""
    model, means = model_with(()), []
    for layer in model.backbone.layers:
        layer.register_forward_pre_hook(lambda _, arguments: means.append(arguments[0].mean(1)))
    model.backbone.layers[-1].register_forward_hook(lambda _, arguments, out: means.append(out[0].mean(1)))
    run(model)
    return means


def test_without_chosen_layers_there_are_no_auxiliary_states() -> None:
    model = model_with(())
    state = ContiguousState(model.config, FLOAT64, max_requests=1, max_length=4)
    context = state.context([state.acquire()], [4])
    assert isinstance(model.backbone(prompt(4), context.rows.positions, context=context), Tensor)


@pytest.mark.parametrize("layers", [(5, 6, 7), (7, 5, 6), (0, 1, 3, 4), (LAYERS,), (LAYERS, 2), tuple(range(9))])
def test_states_are_stream_means_in_the_order_asked_for(layers: tuple[int, ...], entering: list[Tensor]) -> None:
    _, states = run(model_with(layers))
    assert len(states) == len(layers)
    for layer, found in zip(layers, states, strict=True):
        assert_float64(found, entering[layer], f"state of layer {layer}")


def test_an_exchanged_order_and_a_shift_by_one_layer_are_noticed(entering: list[Tensor]) -> None:
    _, states = run(model_with((5, 6)))
    assert differs(states[0], states[1])
    assert differs(states[0], entering[6]) and differs(states[0], entering[4])


def test_choosing_states_leaves_the_hidden_states_bit_for_bit_as_they_were() -> None:
    hidden, _ = run(model_with((0, 4, LAYERS)))
    assert torch.equal(hidden, run(model_with(()))[0])


def test_a_replayed_prompt_gives_the_same_rows_of_every_chosen_layer(entering: list[Tensor]) -> None:
    hidden, states = run(model_with(tuple(range(LAYERS + 1)), decoder_replay=True))
    assert {state.shape[0] for state in states} == {hidden.shape[0]} == {8}
    for layer in range(5):
        assert_float64(states[layer], entering[layer][-8:], f"state of layer {layer}, which replay leaves exact")
    assert differs(states[6], entering[6][-8:])


def test_layers_that_this_stage_cannot_give_are_refused_by_name() -> None:
    config = config_of()
    backbone = model_with(()).backbone
    with pytest.raises(ConfigError, match=r"aux_hidden_state_layers = \[9\]"):
        backbone.aux_hidden_state_layers = (9,)
    last = DeepseekV4Model(config=config, numerics=FLOAT64, stage=range(config.decoder_start, LAYERS))
    last.aux_hidden_state_layers = (config.decoder_start, LAYERS)
    with pytest.raises(NotImplementedError, match="layer 1, which an earlier stage holds"):
        last.aux_hidden_state_layers = (1,)

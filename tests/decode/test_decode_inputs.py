"""What else a decode step may be given: rows of images, embeddings in place of ids, a wrong number of rows."""

from typing import Any

import pytest
import torch
from decode_runs import build
from torch import Tensor

from compare import assert_float64
from model_helpers import Driver, config_of, differs, forward, prompt
from quickseek.config import DecodeConfig
from quickseek.decode.executor import SpecializedDecode
from quickseek.engine.graphs import EagerGraphs
from quickseek.model.context import ForwardContext

IMAGE = 300


@pytest.fixture(scope="module")
def driver() -> Driver:
    driver = Driver(build(config_of("tiny", image_token_id=IMAGE)))
    driver.feed({driver.state.acquire(): prompt(12)}, num_prefills=1)
    with torch.no_grad():
        for layer in driver.model.backbone.layers:
            layer.ffn.gate.bias_vl.copy_(layer.ffn.gate.bias.flip(0) + 1)
    SpecializedDecode.for_target(driver.model, DecodeConfig())
    return driver


def context_of(driver: Driver, recorded: bool) -> ForwardContext:
    context = driver.state.context([1], [5])
    return EagerGraphs().record(context) if recorded else context


def hidden(driver: Driver, recorded: bool, ids: Tensor, **inputs: Any) -> Tensor:
    runs = driver.model.backbone.executor.runs
    out = forward(driver.model, ids, context_of(driver, recorded), **inputs)[0]
    assert driver.model.backbone.executor.runs == runs + recorded
    return out


def test_rows_of_images_take_no_memory_and_the_image_bias_as_in_the_stock_model(driver):
    ids = prompt(5, 3)
    ids[1:3] = IMAGE
    found = hidden(driver, True, ids)
    assert_float64(found, hidden(driver, False, ids))
    # Negative control: were they text, the result would be another.
    driver.model.backbone.hashes.config = config_of("tiny")
    assert differs(hidden(driver, True, ids), found)
    driver.model.backbone.hashes.config = driver.model.config


def test_embeddings_in_place_of_ids_are_what_runs(driver):
    ids = prompt(5, 3)
    rows = torch.randn(5, driver.model.config.hidden_size, dtype=torch.float64, generator=torch.manual_seed(1))
    found = hidden(driver, True, ids, inputs_embeds=rows)
    assert_float64(found, hidden(driver, False, ids, inputs_embeds=rows))
    assert differs(found, hidden(driver, True, ids))


def test_more_embeddings_than_rows_of_the_step_are_refused_before_anything_runs(driver):
    rows = torch.randn(6, driver.model.config.hidden_size, dtype=torch.float64)
    with pytest.raises(ValueError, match="6 rows of input: the context describes 5"):
        hidden(driver, True, prompt(5, 3), inputs_embeds=rows)
    executor = driver.model.backbone.executor
    assert executor.streams.open == []

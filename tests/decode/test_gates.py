"""Gates read rows (one of them requests too) alone, at the published borders; which forwards the executor takes."""

from dataclasses import replace

import pytest
from decode_runs import build

from model_helpers import FLOAT64, Driver, config_of, prompt
from quickseek.config import DecodeConfig
from quickseek.decode.executor import SpecializedDecode, captures_pure_decode
from quickseek.decode.gates import FUSED_MHC_MAX_ROWS, GATES, PATHS, Gates, gates_of
from quickseek.engine.graphs import EagerGraphs
from quickseek.errors import ConfigError, DecodeUnsupported
from quickseek.model.attention import DraftAttention
from quickseek.model.backbone import DeepseekV4Model
from quickseek.model.context import SLOT_GROUP, GraphMode
from quickseek.model.vocabulary import VocabParallelHead
from quickseek.parallel.world import SoloWorld

PREFIXES = [f"layers.{layer}" for layer in range(8)]


@pytest.fixture(scope="module")
def executor() -> SpecializedDecode:
    return SpecializedDecode.for_target(build(config_of("tiny")), DecodeConfig())


@pytest.fixture(scope="module")
def driver(executor) -> Driver:
    driver = Driver(build(config_of("tiny")), max_length=500)
    driver.feed({driver.state.acquire(): prompt(12)}, num_prefills=1)
    return driver


def decode_context(driver: Driver, rows: int = 1):
    return EagerGraphs().record(driver.state.context([1], [rows]))


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("path", ["side_stream", "overlap_inputs", "engram_prefetch", "deferred_finalize"])
def test_a_path_runs_up_to_its_limit_and_not_one_row_more(kind, path):
    most = min(getattr(GATES[kind], path), FUSED_MHC_MAX_ROWS)
    assert [getattr(gates_of(rows, GATES[kind]), path) for rows in range(1, 385)] == [r <= most for r in range(1, 385)]


@pytest.mark.parametrize("rows", [0, -1, FUSED_MHC_MAX_ROWS + 1])
def test_a_step_of_no_rows_or_too_many_is_refused(rows):
    with pytest.raises(ValueError, match="expected 1 to 384"):
        gates_of(rows, Gates())


def test_every_path_can_be_named_off_and_a_name_that_is_none_is_refused():
    for path in PATHS:
        assert getattr(GATES["cpu"].without((path,)), path) == 0
    with pytest.raises(ConfigError, match="side_stream"):
        Gates().without(("side stream",))


def test_a_step_cannot_be_changed_and_knows_its_executor(executor, driver):
    step = executor.plan(decode_context(driver).rows.positions, None, context=decode_context(driver))
    assert step is not None and step.executor is executor and step.rows == 1
    with pytest.raises(AttributeError):
        step.rows = 2  # type: ignore[misc]


def test_pure_decode_that_is_recorded_is_taken(executor, driver):
    context = decode_context(driver)
    assert captures_pure_decode(PREFIXES, context=context)
    assert executor.plan(context.rows.positions, None, context=context) is not None


@pytest.mark.parametrize("why", ["eager", "piecewise", "mode none", "prefill", "no mapping", "no group", "no cache"])
def test_every_other_forward_is_left_to_the_stock_layers(executor, driver, why):
    context = decode_context(driver)
    group = replace(context.metadata[SLOT_GROUP], num_prefills=1)
    context = {
        "eager": replace(context, capturing=False),
        "piecewise": replace(context, graph_mode=GraphMode.PIECEWISE),
        "mode none": replace(context, graph_mode=GraphMode.NONE),
        "prefill": replace(context, metadata=dict(context.metadata) | {SLOT_GROUP: group}),
        "no mapping": replace(context, metadata=list(context.metadata.values())),
        "no group": replace(context, metadata={}),
        "no cache": replace(context, caches={n: c for n, c in context.caches.items() if n != "layers.7.window"}),
    }[why]
    assert not captures_pure_decode(PREFIXES, context=context)
    if why not in ("no mapping", "no group"):
        assert executor.plan(context.rows.positions, None, context=context) is None


def test_pipeline_input_and_too_many_rows_are_left_to_the_stock_layers(executor, driver):
    context = decode_context(driver)
    model = executor.backbone
    received = model.make_empty_intermediate_tensors(1, FLOAT64.dtype, "cpu")
    assert executor.plan(context.rows.positions, received, context=context) is None
    many = decode_context(driver, 385)
    assert executor.plan(many.rows.positions, None, context=many) is None
    most = decode_context(driver, 384)
    assert executor.plan(most.rows.positions, None, context=most) is not None


def test_a_prompt_step_is_not_recorded_so_the_stock_layers_run_it(driver):
    context = EagerGraphs().record(driver.state.context([1], [3], num_prefills=1))
    assert (context.graph_mode, context.capturing) == (GraphMode.NONE, False)


def test_a_pipeline_stage_or_a_foreign_attention_is_refused_by_name():
    config = config_of("tiny")
    head = VocabParallelHead(config, config.hidden_size, FLOAT64, SoloWorld())
    stage = DeepseekV4Model(config=config, world=SoloWorld(), numerics=FLOAT64, stage=range(2))
    with pytest.raises(DecodeUnsupported, match="needs the whole model on each rank"):
        SpecializedDecode(stage, DecodeConfig(), head)
    model = DeepseekV4Model(config=config, world=SoloWorld(), numerics=FLOAT64)
    model.layers[2].attn = DraftAttention(config, 2, "layers.2", FLOAT64, SoloWorld())
    with pytest.raises(DecodeUnsupported, match=r"the model's own attention \(found DraftAttention\)"):
        SpecializedDecode(model, DecodeConfig(), head)

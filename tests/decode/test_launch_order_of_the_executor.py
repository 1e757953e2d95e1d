"""The executor launches attention right behind the product that makes its queries, with nothing joined in between."""

from dataclasses import replace

import pytest
import torch
from decode_runs import Requests, Seen

from drawn_memory import by_interpreter
from kernel_order import breaches, launches
from model_helpers import SMALLEST, token_map
from quickseek.checkpoint.miniature import miniature_tensors
from quickseek.config import DecodeConfig
from quickseek.decode.executor import SpecializedDecode
from quickseek.decode.gates import GATES
from quickseek.model.causal_lm import CausalLM
from quickseek.model.loader import TensorSource
from quickseek.numerics import Numerics

pytestmark = by_interpreter

@pytest.mark.parametrize("gates", ["cpu", "sm90"])
@torch.inference_mode()
def test_steps_and_drafts_of_the_executor(gates: str) -> None:
    """With the inputs of attention beside its queries, and without."""
    config = replace(SMALLEST, vocab_size=512)
    model = CausalLM(config, Numerics.trained(), draft=True)
    model.load(TensorSource(miniature_tensors(config)))
    model.set_token_map(token_map(config))
    requests, seen = Requests(model.eval(), recorded=True, requests=2), Seen()
    executor = SpecializedDecode.for_target(model, DecodeConfig(), gates=GATES[gates])
    with launches() as launched:
        for counts in ((1,), (3, 2)):
            requests.decode(counts, seen)
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    assert executor.runs == 2 and executor.draft is not None and executor.draft.runs == 2
    assert launched.count("_attend early") == 2 * layers and launched.count("join") > 2 * config.num_hidden_layers
    assert not breaches(launched)

"""Fixtures of all tests: the golden checkpoint and the miniature as models, loaded once in a session."""

import multiprocessing

import pytest
import torch

import interpreter  # before anything that defines kernels

# isort: split
import golden_data
from quickseek.model.causal_lm import CausalLM
from quickseek.parallel import launch

# The models of the tests are too small for a second thread to help, and threads that wait for a core do harm.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Ranks of tests come from a process that has loaded what they need: to load it takes longer than most of them run.
    launch.START_METHOD = "forkserver"
    multiprocessing.set_forkserver_preload(["pytest", "hypothesis", "quickseek.llm", "torch.distributed"])


@pytest.fixture(scope="session")
def exact_model() -> CausalLM:
    """The golden checkpoint in exact float32."""
    return golden_data.base_model(golden_data.EXACT)


@pytest.fixture(scope="session")
def cache_quantised_model() -> CausalLM:
    """The golden checkpoint in float32 with fake-quantised caches."""
    return golden_data.base_model(golden_data.CACHE_QUANTISED)


@pytest.fixture(scope="session")
def released_model() -> CausalLM:
    """The golden checkpoint in trained mode, the routing weight where the released reference has it."""
    return golden_data.base_model(golden_data.RELEASED)


@pytest.fixture(scope="session")
def tiny_model() -> CausalLM:
    """The miniature of spec/model.md 15 in float64, from its unquantised weights."""
    return golden_data.tiny_model()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tests of kernels run: the GPU, or the CPU by the interpreter."""
    return torch.device("cpu" if interpreter.INTERPRETED or not torch.cuda.is_available() else "cuda")

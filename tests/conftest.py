"""Shapes and types are checked at every call while the tests run; production pays nothing for them."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# All but `cli`, whose annotations typer reads.
ROOMS = ("api", "capture", "decode", "demo", "doctor", "models", "trace", "values")

assert not any(name.startswith("floatscope") for name in sys.modules), "the shape checks must be installed first"
install_import_hook([f"floatscope.{room}" for room in ROOMS], "beartype.beartype")

settings.register_profile("floatscope", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("floatscope")
torch.set_num_threads(1)  # the tensors here are tiny: threads that wait for each other on a busy machine cost seconds


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def llada(tmp_path_factory):
    """A tiny masked diffusion model with random weights, in LLaDA's layout: bidirectional, 3 layers, GQA."""
    import floatscope as fs

    shape = {"n_layers": 3, "d_model": 32, "n_kv_heads": 2, "mlp_hidden_size": 48, "embedding_size": 64}
    return fs.open_llada(fs.write_random_llada(tmp_path_factory.mktemp("llada"), **shape))

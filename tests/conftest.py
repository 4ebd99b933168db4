"""Shapes and types are checked at every call while the tests run; production pays nothing for them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import type_checks
from example_counts import FEW

# All but `cli`, whose annotations typer reads, and the kernels, whose source Triton reads.
CAPTURE = (Path(__file__).parent.parent / "src/floatscope/capture").glob("*.py")
ROOMS = (
    *(f"capture.{path.stem}" for path in CAPTURE if not path.stem.endswith("kernel")),
    "analysis",
    "canvas",
    "compat",
    "errors",
    "files",
    "interventions",
    "models",
    "pipelines",
    "reports",
    "sampling",
    "schema",
    "syntax",
    "tasks",
    "traces",
)

assert not any(name.startswith("floatscope") for name in sys.modules), "the shape checks must be installed first"
type_checks.install([f"floatscope.{room}" for room in ROOMS])

settings.load_profile(FEW)  # unless pytest is started with --hypothesis-profile=all
torch.set_num_threads(1)  # the tensors here are tiny: threads that wait for each other on a busy machine cost seconds
os.environ["OMP_NUM_THREADS"] = "1"  # and so in the commands that tests run
os.fsync = lambda descriptor: None  # 14 ms a file; only a power cut would show it, and no test cuts the power


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def llada(tmp_path_factory):
    """A tiny masked diffusion model with random weights, in LLaDA's layout: bidirectional, 3 layers, GQA."""
    import floatscope as fs

    shape = {"layers": 3, "width": 32, "kv_heads": 2, "ffn": 48, "vocab_size": 64}
    return fs.load(fs.write_random(tmp_path_factory.mktemp("llada"), **shape), device="cpu")

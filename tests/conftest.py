"""Shapes and types are checked at every call while the tests run; production pays nothing for them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from beartype import BeartypeConf
from beartype.claw import beartype_packages
from hypothesis import settings
from jaxtyping import install_import_hook

from example_counts import FEW

# All but `lab`; `cli`, whose annotations typer reads; and the kernels, whose source Triton reads.
ROOMS = (
    "analysis",
    "canvas",
    "capture",
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
SOURCE = Path(__file__).parent.parent / "src"
MODULES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path.read_text() for path in SOURCE.rglob("*.py")}
CHECKED = [name for name in MODULES if name.split(".")[1] in ROOMS and not name.endswith("kernel")]
# jaxtyping's checks of shapes cost much at every call, so that modules without shapes get beartype's checks of types
# alone, except those whose annotations beartype cannot resolve by itself.
SHAPED = [
    name for name in CHECKED if any(word in MODULES[name] for word in ("jaxtyping", "NamedTuple", "TYPE_CHECKING"))
]
KERNELS = tuple(name for name in MODULES if name.endswith("kernel"))

assert not any(name.startswith("floatscope") for name in sys.modules), "the checks must be installed first"
install_import_hook(SHAPED, "beartype.beartype")
beartype_packages(
    [f"floatscope.{room}" for room in ROOMS],
    conf=BeartypeConf(claw_is_pep526=False, claw_skip_package_names=KERNELS),
)

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

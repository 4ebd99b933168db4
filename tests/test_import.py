"""`import floatscope` is light, and everything it promises is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import floatscope as fs

HEAVY = (
    "torch",
    "transformers",
    "matplotlib",
    "numpy",
    "safetensors",
    "xarray",
    "triton",
    "jaxtyping",
    "rich",
    "typer",
)


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_loads_nothing_heavy():
    code = f"import sys, floatscope; print([name for name in {HEAVY} if name in sys.modules])"
    assert python(code).strip() == "[]"


def test_errors_can_be_caught_without_loading_torch():
    assert python("import sys, floatscope; floatscope.UserError; print('torch' in sys.modules)").strip() == "False"


def test_looking_around_loads_nothing_either():
    assert python("import sys, floatscope; dir(floatscope); print('torch' in sys.modules)").strip() == "False"


@pytest.mark.parametrize("name", fs.__all__)
def test_every_public_name_resolves(name):
    assert getattr(fs, name).__name__.rpartition(".")[2] == name
    assert name in dir(fs)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'floatscope' has no attribute 'wacth'"):
        fs.wacth  # noqa: B018


def test_matplotlib_waits_for_the_first_picture():
    code = "import sys, floatscope as fs; fs.Watch, fs.decode, fs.Trace; print('matplotlib' in sys.modules)"
    assert python(code).strip() == "False"

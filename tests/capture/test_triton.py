"""The Triton kernels equal float64 in the interpreter: full, causal, padding, rectangular, GQA, many groups, carry."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_cases import KEY_STATS_CASES, REDUCTION_CASES, SKIP_CASES

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def errors():
    path = os.pathsep.join([str(HERE), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, HERE / "triton_cases.py"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout)


@pytest.mark.parametrize("case", [*REDUCTION_CASES, *SKIP_CASES, "gradient", *KEY_STATS_CASES])
def test_the_kernel_equals_float64(errors, case):
    limits = {"carry": 1e-5}  # fixed-point sums in steps of 6e-8
    assert {
        quantity: error for quantity, error in errors[case].items() if not error <= limits.get(quantity, 3e-6)
    } == {}

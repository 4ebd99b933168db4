"""Private APIs of torch and transformers are used in `floatscope.compat` alone, and the tested range is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from floatscope import compat

SOURCE = Path(compat.__file__).parent
PRIVATE = re.compile(
    r"\b(torch|transformers)(\.\w+)*\._\w+|aten\._\w+|masking_utils import|transformers\.integrations"
    r"|ALL_ATTENTION_FUNCTIONS|\b_attn_implementation|\b_supports_(attention_backend|sdpa)"
)
OUTSIDE = {"models/description.py", "models/loader.py", "models/prepared_checkpoint.py", "models/dit.py"}
"""Not moved yet: what the loader reads of a config, and what a module of transformers declares and calls."""


def test_private_names_occur_in_compat_alone():
    users = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if PRIVATE.search(path.read_text("utf-8"))}
    assert "compat.py" in users
    assert users - {"compat.py"} <= OUTSIDE


def test_the_list_of_private_apis_is_what_compat_uses():
    names = {name.rpartition(".")[2] for names in compat.PRIVATE_APIS.values() for name in names}
    code = re.sub(r'""".*?"""', "", Path(compat.__file__).read_text("utf-8"), flags=re.DOTALL).partition("# --- torch")[
        2
    ]
    used = {found[0].rpartition(".")[2] for found in re.finditer(r"(torch|aten|config)(\._\w+)+", code)}
    assert all(name in code for name in names)
    assert used - {"_trace_wrapped_higher_order_op"} <= names


def test_installed_releases_are_in_the_tested_range():
    assert compat.describe_untested() == []


@pytest.mark.parametrize(
    ("installed", "sentences"),
    [
        ({"torch": "2.100.1+cu130"}, ["torch 2.100 is newer than 2.13, the newest tested"]),
        ({"transformers": "4.57.1"}, [f"transformers 4.57 is older than {compat.TESTED['transformers'][0]}, the"]),
    ],
)
def test_untested_release_is_described(monkeypatch, installed, sentences):
    monkeypatch.setattr(compat, "version", lambda name: installed.get(name, f"{compat.TESTED[name][1]}.9"))
    found = compat.describe_untested()
    assert len(found) == len(sentences)
    assert all(sentence.startswith(start) for sentence, start in zip(found, sentences, strict=True))


def test_chosen_kernel_is_the_one_that_sdpa_runs():
    q = torch.randn(1, 4, 64, 16)
    assert compat.choose_sdpa_kernel(q, q, q) == SDPBackend.FLASH_ATTENTION
    out, lse = compat.run_cpu_flash_kernel(q, q, q, None, False, 0.25)
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=0.25))
    torch.testing.assert_close(lse, (0.25 * q @ q.mT).logsumexp(-1))


@pytest.mark.parametrize("run", [compat.run_flash_kernel, compat.run_efficient_kernel, compat.run_cudnn_kernel])
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_kernels_take_these_arguments_and_return_the_log_sum_exp(run, causal):
    """On the meta device: shapes without a GPU."""
    q, k = (torch.empty(2, 4, length, 16, dtype=torch.bfloat16, device="meta") for length in (40, 48))
    out, lse = run(q, k, k, causal, 0.25)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]


def test_mask_functions_of_transformers_are_recognised():
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    kinds = [compat.mask_kind(f) for f in (causal_mask_function, bidirectional_mask_function, print, None)]
    assert kinds == ["causal", "full", None, None]

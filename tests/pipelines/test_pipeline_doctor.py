"""`doctor` passes on a correct machine and reports each kind of error."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from floatscope.capture import attention, verify
from floatscope.capture.visibility import Visibility
from floatscope.cli.doctor import _print_report
from floatscope.pipelines import doctor
from floatscope.pipelines.doctor import Case, Report

CASE = Case("cpu", "causal", "left", "float32", grouped=True, cached=False)


@pytest.fixture(scope="module")
def report() -> Report:
    return doctor.examine()


def test_captured_equals_executed_on_this_machine(report):
    assert report.failures == []
    assert report.ok


def test_every_kind_of_call_is_checked(report):
    kinds = {
        (call.case.mask, call.case.padding, call.case.dtype, call.case.grouped, call.case.cached)
        for call in report.calls
    }
    assert len(kinds) == 7 * 4 * 3 * 2 * 2
    assert all(set(call.errors) == {"output", "received", "mass", "entropy", "carry"} for call in report.calls)


def test_models_of_every_kind_are_checked(report):
    assert [model.model for model in report.models if model.device == "cpu"] == [
        "masked diffusion, left padding",
        "causal, grouped heads, cache, left padding",
        "sliding window, left padding",
        "plain torch, scaled_dot_product_attention",
    ]


def test_a_backend_that_is_not_triton_has_a_reason(report):
    assert all((call.backend == "triton") == (call.reason is None) for call in report.calls)


def test_a_backend_use_says_what_distinguishes_its_cases():
    uses = Report(
        {},
        [
            doctor.CallCheck(replace(CASE, padding=p, dtype=d), "blocked" if p == "holes" else "triton", None, {})
            for p in ("none", "left", "holes")
            for d in ("float32", "bfloat16")
        ],
    ).backend_uses()
    assert [(row.where, row.cases, row.backend) for row in uses] == [
        ("none or left padding", 4, "triton"),
        ("holes padding", 2, "blocked"),
    ]


def test_private_apis_are_listed_with_the_tested_releases(report):
    record = report.as_json()["libraries"]
    assert [row["library"] for row in record] == ["torch", "transformers"]
    assert all(row["problem"] is None and row["private_apis"] for row in record)
    untested = [replace(use, installed="99.0.1") for use in report.libraries]
    console = Console(width=200, record=True, file=io.StringIO())
    _print_report(console, replace(report, libraries=untested))
    text = console.export_text()
    assert "untested: torch 99.0 is newer than" in text
    assert "torch._fused_sdp_choice" in text


def test_facts_name_the_kernel_torch_chooses(report):
    assert {"python", "torch", "transformers", "triton", "cpu"} <= set(report.facts)
    assert report.facts["attention on cpu"].startswith("flash (float32)")


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    with doctor.use_one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_a_wrong_log_sum_exp_is_reported(monkeypatch):
    def shifted(call):
        result = attention.attend(call)
        return replace(result, lse=result.lse + 1e-3)

    monkeypatch.setattr(doctor, "attend_with_edits", shifted)
    outcome = doctor.check_case(CASE)
    assert outcome.failed_quantities == ["mass"]
    assert "output" not in outcome.failed_quantities


def test_a_wrong_output_is_reported(monkeypatch):
    def scaled(call):
        result = attention.attend(call)
        return replace(result, output=result.output * 1.001)

    monkeypatch.setattr(doctor, "attend_with_edits", scaled)
    assert doctor.check_case(CASE).failed_quantities == ["output"]


def test_a_mask_that_is_read_wrongly_is_reported(monkeypatch):
    """`verify` recomputes with the mask as it was read; only the unwatched model shows the intended mask."""
    monkeypatch.setattr(
        Visibility,
        "from_rule",
        lambda Q, K, rule, valid=None, offset=None, batch=1: Visibility.causal(Q, K, valid, offset),
    )
    windowed = next(at for at in doctor.iter_trials() if at[2].name.startswith("sliding window"))
    verdict = doctor.check_model(*windowed)
    assert verdict.problem is None
    assert verdict.error > verdict.limit
    [failure] = Report({}, [], [verdict]).failures
    assert failure.startswith("sliding window, left padding on cpu in float32: watched and unwatched outputs differ by")


def test_a_mismatch_of_verify_is_reported_with_its_layer(monkeypatch):
    monkeypatch.setitem(verify.REDUCTION_TOLERANCE, torch.float32, 0.0)
    verdict = doctor.check_model(*next(doctor.iter_trials()))
    assert "captured differs from executed at layer 'model.layers.0.self_attn', step 0" in verdict.problem

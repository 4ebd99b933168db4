"""The doctor finds nothing wrong where nothing is, and finds it where something is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from floatscope.capture import attention, verify
from floatscope.capture.visibility import Visibility
from floatscope.pipelines import doctor
from floatscope.pipelines.doctor import Case, Report

CALL = Case("cpu", "causal", "left", "float32", grouped=True, cached=False)


@pytest.fixture(scope="module")
def report() -> Report:
    return doctor.examine()


def test_captured_is_executed_on_this_machine(report):
    assert report.failures == []
    assert report.ok


def test_every_kind_of_call_is_tried(report):
    tried = {(o.case.mask, o.case.padding, o.case.dtype, o.case.grouped, o.case.cached) for o in report.outcomes}
    assert len(tried) == 7 * 4 * 3 * 2 * 2
    assert all(set(o.errors) == {"output", "received", "mass", "entropy", "carried"} for o in report.outcomes)


def test_whole_models_of_every_kind_are_tried(report):
    assert [v.model for v in report.verdicts if v.device == "cpu"] == [
        "masked diffusion, left padding",
        "causal, grouped heads, cache, left padding",
        "sliding window, left padding",
        "plain torch, scaled_dot_product_attention",
    ]


def test_a_backend_that_is_not_triton_has_a_reason(report):
    assert all((o.backend == "triton") == (o.reason is None) for o in report.outcomes)


def test_what_sets_cases_apart_is_said():
    served = Report(
        {},
        [
            doctor.Outcome(replace(CALL, padding=p, dtype=d), "blocked" if p == "holes" else "triton", None, {})
            for p in ("none", "left", "holes")
            for d in ("float32", "bfloat16")
        ],
    ).served()
    assert [(row.where, row.cases, row.backend) for row in served] == [
        ("none or left padding", 4, "triton"),
        ("holes padding", 2, "blocked"),
    ]


def test_facts_name_the_kernel_torch_chooses(report):
    assert {"python", "torch", "transformers", "triton", "cpu"} <= set(report.facts)
    assert report.facts["attention on cpu"].startswith("flash (float32)")


def test_threads_are_left_as_they_were():
    before = torch.get_num_threads()
    with doctor.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_a_wrong_log_sum_exp_is_found(monkeypatch):
    def shifted(call):
        done = attention.attend(call)
        return replace(done, lse=done.lse + 1e-3)

    monkeypatch.setattr(doctor, "attend", shifted)
    outcome = doctor.check(CALL)
    assert outcome.wrong == ["mass"]
    assert "output" not in outcome.wrong


def test_a_wrong_output_is_found(monkeypatch):
    def bent(call):
        done = attention.attend(call)
        return replace(done, output=done.output * 1.001)

    monkeypatch.setattr(doctor, "attend", bent)
    assert doctor.check(CALL).wrong == ["output"]


def test_a_mask_read_wrongly_is_found_though_capture_agrees_with_itself(monkeypatch):
    """`verify` recomputes under the mask as it was read; only the unwatched model knows what was meant."""
    monkeypatch.setattr(
        Visibility,
        "by_rule",
        lambda Q, K, rule, valid=None, offset=None, batch=1: Visibility.causal(Q, K, valid, offset),
    )
    windowed = next(at for at in doctor.trials() if at[2].name.startswith("sliding window"))
    verdict = doctor.try_out(*windowed)
    assert verdict.problem is None
    assert verdict.error > verdict.limit
    [failure] = Report({}, [], [verdict]).failures
    assert failure.startswith("sliding window, left padding on cpu in float32: watched and unwatched outputs differ by")


def test_a_mismatch_that_verify_finds_is_reported_with_its_layer(monkeypatch):
    monkeypatch.setitem(verify.REDUCED, torch.float32, 0.0)
    verdict = doctor.try_out(*next(doctor.trials()))
    assert "captured differs from executed at layer 'model.layers.0.self_attn', step 0" in verdict.problem

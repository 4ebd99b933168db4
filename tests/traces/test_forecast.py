"""A forecast equals the bytes of the recorded arrays, and says what to change if they are too many."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_decodings import HEADS, LAYERS, REGIONS, decode_arm, decode_mdm, record_traces

from example_counts import examples
from floatscope.errors import UserError
from floatscope.files.sizes import format_size
from floatscope.schema import LEVELS
from floatscope.traces import Forecast, forecast
from floatscope.traces.size_forecast import DEFAULT_BUDGET

SHAPE = {"layers": LAYERS, "heads": HEADS, "regions": len(REGIONS), "visibilities": 2}
LLADA = {"steps": 32, "layers": 32, "heads": 32, "keys": 1024, "regions": 8, "commits": 32}


def nbytes(trace) -> dict[str, int]:
    return {name: array.nbytes for name, array in trace.arrays.items()}


@examples(25)
@given(st.sampled_from(LEVELS), st.integers(2, 20), st.integers(1, 6), st.integers(1, 5), st.integers(0, 9))
def test_a_forecast_equals_the_recorded_arrays(level, prompt, new, steps, seed):
    trace = record_traces([decode_mdm(seed, prompt, new, steps)], level=level)[0]
    size = forecast(level=level, samples=3, steps=steps, keys=prompt + new, commits=new, **SHAPE)
    assert size.bytes == {name: 3 * n for name, n in nbytes(trace).items()}
    assert size.total == 3 * sum(nbytes(trace).values())


@pytest.mark.parametrize("level", LEVELS)
def test_a_forecast_of_a_growing_canvas(level):
    trace = record_traces([decode_arm(0, 6, 5)[0]], level=level, meta={"rows": "cache"})[0]
    size = forecast(level=level, samples=1, steps=5, keys=10, positions=11, queries=6, commits=5, **SHAPE)
    assert size.bytes == nbytes(trace)


def test_a_forecast_of_named_fields_counts_them_and_the_canvas():
    full = forecast(level="full", samples=2, **LLADA).bytes
    named = forecast(fields=("received", "rows"), samples=2, **LLADA).bytes
    assert {name: full[name] for name in named} == named
    assert {"received", "rows", "tokens", "commit_token"} <= set(named)
    assert "matrix" not in named


def test_the_experts_of_each_token_are_counted():
    plain, more = forecast(samples=2, **LLADA), forecast(samples=2, experts=8, **LLADA)
    numbers = 2 * 32 * 32 * 1024 * 8  # sample, step, layer, key, expert
    assert more.bytes == {**plain.bytes, "expert_ids": 2 * numbers, "expert_weights": 2 * numbers}
    with pytest.raises(UserError, match=r"most of it 'received_heads'.* Use level=\"summary\""):
        forecast(level="heads", samples=2, experts=8, **LLADA).check(more.total)


def test_the_default_is_summary():
    assert forecast(samples=2, **LLADA) == forecast(level="summary", samples=2, **LLADA)


def test_the_printed_table_adds_up_and_is_aligned():
    size = forecast(level="heads", samples=200, **LLADA)
    lines = str(size).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["field", "axes", "type", "per", "sample", "200", "samples"]
    assert lines[1].split("  ")[0] == "received_heads"
    assert " step 32 × layer 32 × head 32 × group 4 × key 1024 " in lines[1]
    assert lines[-1].split() == ["total", *format_size(size.total // 200).split(), *format_size(size.total).split()]


def test_a_run_within_the_budget_passes():
    size = forecast(samples=2, **LLADA)
    size.check()
    size.check(size.total)
    size.check(f"{size.total}B")
    with pytest.raises(UserError):
        size.check(size.total - 1)


def refusal(size: Forecast, budget: int | str = DEFAULT_BUDGET) -> str:
    with pytest.raises(UserError) as caught:
        size.check(budget)
    return str(caught.value)


def test_a_lower_level_is_offered_if_it_fits():
    size = forecast(level="full", samples=20, **LLADA)
    text = refusal(size, "100GiB")
    assert text.startswith('level="full" needs ')
    assert "for 20 samples, most of it 'matrix'; the budget is 100 GiB. Use level=\"rows\" (" in text
    level = re.search(r'Use level="(\w+)"', text)[1]
    forecast(level=level, samples=20, **LLADA).check("100GiB")
    raised = re.search(r"budget=(\w+)", text)[1]
    size.check(raised)


def test_the_highest_level_that_fits_is_offered():
    heads = forecast(level="heads", samples=20, **LLADA).total
    text = refusal(forecast(level="full", samples=20, **LLADA), heads)
    assert 'Use level="heads" (' in text


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("budget", ["300MiB", "8GiB", "40GiB"])
def test_otherwise_the_most_samples_that_fit_are_offered(level, budget):
    size = forecast(level=level, samples=100_000, **LLADA)
    text = refusal(size, budget)
    for lower_level, limit in re.findall(r'(?:level="(\w+)" with )?samples=(\d+)', text):
        shape = {"level": lower_level or level, **LLADA}
        forecast(samples=int(limit), **shape).check(budget)
        with pytest.raises(UserError):
            forecast(samples=int(limit) + 1, **shape).check(budget)
    assert "samples=" in text


def test_otherwise_fewer_steps_are_offered():
    size = forecast(level="full", samples=5, **LLADA)
    text = refusal(size, "10MB")
    steps = int(
        re.search(r'Not even one sample fits: use level="summary", samples=1 and steps=(\d+), or raise', text)[1]
    )
    forecast(samples=1, **{**LLADA, "steps": steps}).check("10MB")
    with pytest.raises(UserError):
        forecast(samples=1, **{**LLADA, "steps": steps + 1}).check("10MB")


def test_otherwise_only_a_larger_budget_helps():
    size = forecast(samples=5, **LLADA)
    text = refusal(size, "1kB")
    assert "Not even one step of one sample fits: raise the budget, budget=1GiB" in text


def test_named_fields_are_offered_fewer_samples():
    text = refusal(forecast(fields=("received_heads",), samples=50_000, **LLADA))
    assert text.startswith("fields received_heads needs ")
    assert "Use samples=" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "sumary"}, r"unknown level 'sumary' \(did you mean 'summary'\?\)"),
        ({"fields": ("recieved",)}, r"unknown field 'recieved' \(did you mean 'received'\?\)"),
        ({"fields": ()}, "no fields to capture"),
        ({"level": "full", "fields": ("rows",)}, r'give level="full" or the fields \(rows\), not both'),
        ({"steps": -1}, "a run cannot have -1 steps; give 0 or more"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        forecast(**{"samples": 1, **LLADA, **arguments})

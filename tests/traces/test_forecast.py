"""A forecast equals the bytes of the arrays it foretells, and says what to type when they are too many."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import HEADS, LAYERS, REGIONS, arm, mdm, record

from floatscope.errors import UserError
from floatscope.files.sizes import format_size, parse_size
from floatscope.schema import LEVELS
from floatscope.traces import Forecast, forecast
from floatscope.traces.forecast import BUDGET

SHAPE = {"layers": LAYERS, "heads": HEADS, "regions": len(REGIONS), "visibilities": 2}
LLADA = {"steps": 32, "layers": 32, "heads": 32, "keys": 1024, "regions": 8, "commits": 32}


def nbytes(trace) -> dict[str, int]:
    return {name: array.nbytes for name, array in trace.arrays.items()}


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(LEVELS), st.integers(2, 20), st.integers(1, 6), st.integers(1, 5), st.integers(0, 9))
def test_a_forecast_equals_the_recorded_arrays(keep, prompt, new, steps, seed):
    trace = record([mdm(seed, prompt, new, steps)], keep=keep)[0]
    size = forecast(keep=keep, samples=3, steps=steps, keys=prompt + new, commits=new, **SHAPE)
    assert size.bytes == {name: 3 * n for name, n in nbytes(trace).items()}
    assert size.total == 3 * sum(nbytes(trace).values())


@pytest.mark.parametrize("keep", LEVELS)
def test_a_forecast_of_a_growing_canvas(keep):
    trace = record([arm(0, 6, 5)[0]], keep=keep, meta={"rows": "cache"})[0]
    size = forecast(keep=keep, samples=1, steps=5, keys=10, positions=11, queries=6, commits=5, **SHAPE)
    assert size.bytes == nbytes(trace)


def test_a_forecast_of_named_fields_counts_those_and_the_canvas():
    whole = forecast(keep="full", samples=2, **LLADA).bytes
    some = forecast(fields=("received", "rows"), samples=2, **LLADA).bytes
    assert {name: whole[name] for name in some} == some
    assert {"received", "rows", "tokens", "commit_token"} <= set(some)
    assert "matrix" not in some


def test_the_default_is_summary():
    assert forecast(samples=2, **LLADA) == forecast(keep="summary", samples=2, **LLADA)


def test_the_table_adds_up_and_is_aligned():
    size = forecast(keep="heads", samples=200, **LLADA)
    lines = str(size).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["field", "axes", "type", "a", "sample", "200", "samples"]
    assert lines[1].startswith("received_heads  step 32 × layer 32 × head 32 × group 4 × key 1024 ")
    assert lines[-1].split() == ["total", *format_size(size.total // 200).split(), *format_size(size.total).split()]


def test_a_run_within_its_budget_passes():
    size = forecast(samples=2, **LLADA)
    size.check()
    size.check(size.total)
    size.check(f"{size.total}B")
    with pytest.raises(UserError):
        size.check(size.total - 1)


def refused(size: Forecast, budget: int | str = BUDGET) -> str:
    with pytest.raises(UserError) as caught:
        size.check(budget)
    return str(caught.value)


def test_a_lower_level_is_offered_if_it_fits():
    size = forecast(keep="full", samples=20, **LLADA)
    text = refused(size, "100GiB")
    assert text.startswith('keep="full" needs ')
    assert "for 20 samples, most of it 'matrix'; the budget is 100 GiB. Use keep=\"rows\" (" in text
    level = re.search(r'Use keep="(\w+)"', text)[1]
    forecast(keep=level, samples=20, **LLADA).check("100GiB")
    raised = re.search(r"budget=(\w+)", text)[1]
    size.check(raised)


def test_the_highest_level_that_fits_is_the_one_offered():
    heads = forecast(keep="heads", samples=20, **LLADA).total
    text = refused(forecast(keep="full", samples=20, **LLADA), heads)
    assert 'Use keep="heads" (' in text


@pytest.mark.parametrize("keep", LEVELS)
@pytest.mark.parametrize("budget", ["300MiB", "8GiB", "40GiB"])
def test_else_the_most_samples_that_fit_are_offered(keep, budget):
    size = forecast(keep=keep, samples=100_000, **LLADA)
    text = refused(size, budget)
    for level, limit in re.findall(r'(?:keep="(\w+)" with )?samples=(\d+)', text):
        own = {"keep": level or keep, **LLADA}
        forecast(samples=int(limit), **own).check(budget)
        with pytest.raises(UserError):
            forecast(samples=int(limit) + 1, **own).check(budget)
    assert "samples=" in text


def test_else_fewer_steps_are_offered():
    size = forecast(keep="full", samples=5, **LLADA)
    text = refused(size, "10MB")
    steps = int(
        re.search(r'Not even one sample fits: use keep="summary", samples=1 and steps=(\d+), or raise', text)[1]
    )
    forecast(samples=1, **{**LLADA, "steps": steps}).check("10MB")
    with pytest.raises(UserError):
        forecast(samples=1, **{**LLADA, "steps": steps + 1}).check("10MB")


def test_else_only_a_larger_budget_helps():
    size = forecast(samples=5, **LLADA)
    text = refused(size, "1kB")
    assert "Not even one step of one sample fits: raise the budget, budget=1GiB" in text


def test_named_fields_are_offered_fewer_samples():
    text = refused(forecast(fields=("received_heads",), samples=50_000, **LLADA))
    assert text.startswith("fields received_heads needs ")
    assert "Use samples=" in text


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"keep": "sumary"}, r"unknown keep level 'sumary' \(did you mean 'summary'\?\)"),
        ({"fields": ("recieved",)}, r"unknown field 'recieved' \(did you mean 'received'\?\)"),
        ({"fields": ()}, "nothing to keep"),
        ({"keep": "full", "fields": ("rows",)}, r'give keep="full" or the fields \(rows\), not both'),
        ({"steps": -1}, "a run cannot have -1 steps; give 0 or more"),
    ],
)
def test_a_forecast_of_nonsense_is_refused(asked, message):
    with pytest.raises(UserError, match=message):
        forecast(**{"samples": 1, **LLADA, **asked})


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * 1024**3), ("500MB", 500_000_000), ("1.5 kb", 1500), (".5MiB", 512 * 1024), ("3 b", 3), (17, 17)],
)
def test_sizes_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["8", "8G", "GiB", "-1GB", "1e3MB", "", "8 gigs", "inf GB", "1.2.3GB"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(UserError, match=re.escape(f"'{text}' is not a size; write a number and a unit, such as 8GiB")):
        parse_size(text)


@pytest.mark.parametrize("size", [0, -5, "0GB"])
def test_a_size_is_above_zero(size):
    with pytest.raises(UserError, match="a size must be above zero"):
        parse_size(size)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (BUDGET, "8.00 GiB"),
    ],
)
def test_sizes_as_people_read_them(size, text):
    assert format_size(size) == text


@given(st.integers(1, 2**60))
def test_a_written_size_reads_back_to_three_figures(size):
    assert parse_size(format_size(size)) == pytest.approx(size, rel=6e-3)

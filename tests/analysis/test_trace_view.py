"""The commits that count: those of the answer, or all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from dense_decodings import (
    ALL_KINDS,
    BOS,
    END,
    LINE,
    MASK,
    STOP,
    WITH_END,
    WORDS,
    Decoding,
    build_trace,
    canvas,
    causal,
    growing,
    random_answer,
)

import floatscope as fs
from floatscope.analysis import TraceView, analyse, trace_views
from floatscope.analysis.run_tables import ANALYSES
from floatscope.analysis.trace_view import answer_commits
from floatscope.errors import UserError
from floatscope.traces import Trace

pytestmark = pytest.mark.filterwarnings("error")
PROMPT = 20
W = WORDS[0]
READ_COMMITS = (
    "top_keys", "drift", "lifetimes", "layer_drift", "head_floating", "position_profile", "predicting_rows",
    "retrieval", "commits", "order", "arness", "coupling",
)  # fmt: skip


def trace_of_answer(answer: Sequence[int], when: Sequence[int] | None = None, **special: int) -> Trace:
    """A canvas that is filled with `answer`, from left to right unless `when` says otherwise."""
    when = range(len(answer)) if when is None else when
    n, steps = PROMPT + len(answer), max(when) + 1
    tokens = np.array([BOS, *[W] * (PROMPT - 1), *answer])
    attention = np.full((steps, 2, 1, n, n), 1 / n)
    regions = {"question": range(5), "evidence": range(5, 8)}
    decoding = canvas(attention, PROMPT, when=when, tokens=tokens, regions=regions)
    return build_trace(decoding, special={"bos": BOS, "mask": MASK, **special})


def answer_positions(trace: Trace) -> list[int]:
    """Where the commits of the answer are, counted from the first new position."""
    return sorted((trace.arrays["commit_position"][answer_commits(trace)] - PROMPT).tolist())


@pytest.mark.parametrize("role", ["eos", "eot", "pad"])
def test_the_answer_ends_before_the_first_end_of_text_token(role):
    trace = trace_of_answer([W, W, STOP, END, END, END], **{role: END})
    assert answer_positions(trace) == [0, 1, 2]
    view = TraceView(trace)
    assert view.commits.tolist() == [0, 1, 2]
    assert view.steps_with_commits.tolist() == [0, 1, 2]


def test_the_first_of_several_end_tokens_counts():
    assert answer_positions(trace_of_answer([W, LINE, STOP, END], eos=END, eot=STOP, pad=LINE)) == [0]
    assert answer_positions(trace_of_answer([W, LINE, STOP, END], eos=END, eot=STOP)) == [0, 1]
    assert answer_positions(trace_of_answer([W, LINE, STOP, END], eos=END)) == [0, 1, 2]


def test_a_word_after_the_end_is_not_part_of_the_answer():
    assert answer_positions(trace_of_answer([W, W, END, W, W], eos=END)) == [0, 1]


@pytest.mark.parametrize("special", [{}, {"eos": END}], ids=["no end is known", "no end is written"])
def test_without_an_end_token_every_commit_is_of_the_answer(special):
    answer = [W, W, W] if special else [W, END, W]
    assert answer_positions(trace_of_answer(answer, **special)) == [0, 1, 2]


def test_bos_and_mask_do_not_end_an_answer():
    assert answer_positions(trace_of_answer([W, BOS, W], eos=END)) == [0, 1, 2]


def test_an_end_that_is_committed_first_ends_the_answer_by_position():
    """Position 2 is an end and is filled at step 0; then 4, 3 (also ends), and then the answer from the right."""
    trace = trace_of_answer([W, W, END, END, END], when=[4, 3, 0, 2, 1], eos=END)
    assert answer_positions(trace) == [0, 1]
    view = TraceView(trace)
    assert trace.arrays["commit_position"][view.commits].tolist() == [PROMPT + 1, PROMPT]
    assert view.steps_with_commits.tolist() == [3, 4]
    assert TraceView(trace, counted="all").steps_with_commits.tolist() == [0, 1, 2, 3, 4]


def test_a_step_with_a_commit_of_the_answer_counts_although_it_also_ends():
    trace = trace_of_answer([W, W, END, END], when=[0, 2, 2, 1], eos=END)
    view = TraceView(trace)
    assert view.steps_with_commits.tolist() == [0, 2]
    assert len(view.commits) == 2


def test_an_end_token_in_the_prompt_does_not_end_the_answer():
    trace = trace_of_answer([W, W, END], eos=END)
    tokens = trace.arrays["tokens"].copy()
    tokens[:, 5] = END
    assert answer_positions(replace(trace, arrays={**trace.arrays, "tokens": tokens})) == [0, 1]


def test_the_answer_of_a_growing_text():
    """The commits of an autoregressive model are at the positions after its keys."""
    whole = np.broadcast_to(causal(30) / causal(30).sum(1, keepdims=True), (1, 1, 30, 30))
    decoding = growing(whole, 26)
    decoding = replace(decoding, commits=[(t, p, r, END if t >= 3 else W) for t, p, r, _ in decoding.commits])
    view = TraceView(build_trace(decoding, special=WITH_END))
    assert view.commits.tolist() == view.steps_with_commits.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_answer_commits_equals_a_loop(seed, kind):
    decoding = random_answer(seed, kind)
    trace = build_trace(decoding, special=WITH_END)
    ends = [position for _, position, _, token in decoding.commits if token == END]
    expected = [all(position < end for end in ends) for _, position, _, _ in decoding.commits]
    assert answer_commits(trace).tolist() == expected
    assert sum(expected) == 3 + seed % 2


# Refusals


EMPTY = (
    r"^the answer of 'hand' is empty: no token comes before its first end-of-text token; count all commits with"
    r" commits=\"all\"$"
)


@pytest.mark.parametrize("name", READ_COMMITS)
@pytest.mark.parametrize("answer", [[END, END, END], [END, END, W]])
def test_an_empty_answer_is_refused_with_the_remedy(name, answer):
    trace = trace_of_answer(answer, eos=END)
    with pytest.raises(UserError, match=EMPTY):
        ANALYSES[name](TraceView(trace, "rulli"))
    assert len(ANALYSES[name](TraceView(trace, "rulli", "all")))


def test_the_remedy_works_for_all_tables():
    trace = trace_of_answer([END, END, W], eos=END)
    refused, complete = (analyse(trace, "rulli", commits=commits) for commits in ("answer", "all"))
    assert {name for name, reason in refused.missing.items() if "is empty" in reason} == set(READ_COMMITS)
    assert "floating" not in refused
    assert not set(READ_COMMITS) & set(complete.missing)
    assert "floating" in complete


def test_an_unknown_choice_of_commits_is_refused():
    with pytest.raises(UserError, match=r"unknown commits to count 'answers' \(did you mean 'answer'\?\)"):
        fs.analysis.floating(trace_of_answer([W]), commits="answers")


def test_a_trace_without_commits_has_steps_that_count_but_no_commits_that_count():
    """As a trace of the finished text, or of `fs.watch`."""
    decoding: Decoding = canvas(np.full((3, 1, 1, 24, 24), 1 / 24), PROMPT, when=[0, 1, 2, 2])
    trace = build_trace(replace(decoding, commits=()), state="final", special=WITH_END)
    assert answer_commits(trace).tolist() == []
    for counted in ("answer", "all"):
        view = TraceView(trace, counted=counted)
        assert view.steps_with_commits.tolist() == [0, 1, 2]
        with pytest.raises(UserError, match=r"^the trace of 'hand' has no commits; trace a decoding, step by step$"):
            view.commits  # noqa: B018


# The choice reaches every analysis


def test_views_and_analyses_take_the_choice():
    trace = trace_of_answer([W, W, END, END], eos=END)
    assert [view.counted for view in trace_views([trace], commits="all")] == ["all"]
    assert [view.counted for view in trace_views([trace])] == ["answer"]
    for name in ("commits", "top_keys", "layer_drift"):
        table = getattr(fs.analysis, name)
        assert sorted(set(table(trace, "rulli")["step"])) == [0, 1], name
        assert sorted(set(table(trace, "rulli", commits="all")["step"])) == [0, 1, 2, 3], name
    assert fs.analysis.commits(TraceView(trace, counted="all"))["commit"].tolist() == [0, 1, 2, 3]

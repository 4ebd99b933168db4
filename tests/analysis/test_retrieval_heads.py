"""Retrieval heads: heads that copy, heads that do not, and a slow reference over whole attention rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import slow_reference as slow
from dense_decodings import (
    BOS,
    END,
    WITH_END,
    WORDS,
    Decoding,
    attend,
    build_trace,
    canvas,
    causal,
    end_answer,
    growing,
    shift_rows,
)

from floatscope.analysis import TraceView
from floatscope.analysis.retrieval_heads import THRESHOLD, head_correlation, head_map, layer_profile, retrieval
from floatscope.errors import UserError
from floatscope.traces import Trace
from pairs import every_pair

pytestmark = pytest.mark.filterwarnings("error")
A, B, C, OTHER = WORDS[:4]
RIGHT = {"prediction": "It was Velmora", "answers": ["Velmora"]}
SCORES = ["copies", "wu_set", "wu_count", "active"]


def attend_to_keys(
    n: int, heads: list[dict[int, int]], mask: np.ndarray | None = None, mass: float = 0.6
) -> np.ndarray:
    """One layer [layer, head, query, key]: the rows in `heads[h]` give a key `mass`; the rest is uniform."""
    uniform = np.ones((n, n)) / n if mask is None else mask / mask.sum(1, keepdims=True)
    attention = np.stack([uniform] * len(heads))
    for head, keys in enumerate(heads):
        for row, key in keys.items():
            attention[head, row] *= 1 - mass
            attention[head, row, key] += mass
    return attention[None]


def retrieval_scores(trace: Trace) -> list[list[float]]:
    return retrieval(TraceView(trace))[SCORES].to_numpy().tolist()


# Heads with known scores: the text is … A … [A B A] … and the answer A B C A, two tokens per step

TEXT = np.array([BOS, OTHER, A, OTHER, A, B, A, *[OTHER] * 5, A, B, C, A])
HEADS = {
    "copies all": {12: 4, 13: 5, 14: 6, 15: 6},
    "attends to the wrong token": {12: 5, 13: 4, 14: 4, 15: 5},
    "copies from elsewhere": {12: 2, 15: 2},
    "copies one token twice": {12: 4, 15: 4},
    "attends to nothing": {},
}


def decode_masked(heads: list[dict[int, int]]) -> Decoding:
    steps = np.stack([attend_to_keys(16, heads)] * 2)
    return canvas(steps, 12, when=[0, 0, 1, 1], tokens=TEXT, regions={"question": (1, 2), "evidence": (4, 5, 6)})


def test_heads_of_a_masked_model_that_commits_in_parallel():
    table = retrieval(TraceView(build_trace(decode_masked(list(HEADS.values())), **RIGHT)))
    by_head = table.set_index(pd.Index(HEADS))
    assert table["head"].tolist() == list(range(len(HEADS)))
    assert by_head.loc["copies all", SCORES].tolist() == [3, 1, 1, 1]  # C is not in the evidence
    assert by_head.loc["attends to the wrong token", SCORES].tolist() == [0, 0, 0, 0]
    assert by_head.loc["copies from elsewhere", SCORES].tolist() == [0, 0, 0, 0]
    assert by_head.loc["copies one token twice", SCORES].tolist() == [2, 1 / 2, 2 / 3, 1]  # 2 tokens, 3 positions
    assert by_head.loc["attends to nothing", SCORES].tolist() == [0, 0, 0, 0]
    onto, rest = 0.6 + 0.4 * 3 / 16, 0.4 * 3 / 16
    expected = [onto, onto, (2 * rest + 2 * 3 / 16) / 4, (2 * onto + 2 * 3 / 16) / 4, 3 / 16]
    np.testing.assert_allclose(by_head["mass"], expected, rtol=1e-3)
    assert by_head["base"].tolist() == pytest.approx([3 / 16] * len(HEADS))
    np.testing.assert_allclose(by_head["ratio"], np.array(expected) * 16 / 3, rtol=1e-3)


def test_the_predicting_row_of_a_shifted_model():
    """The predicting row is the one before the position; the same heads, one row earlier."""
    decoding = decode_masked([{row - 1: key for row, key in keys.items()} for keys in HEADS.values()])
    shifted = replace(decoding, commits=[(t, p, p - 1, token) for t, p, _, token in decoding.commits])
    assert retrieval_scores(build_trace(shifted, **RIGHT)) == retrieval_scores(
        build_trace(decode_masked(list(HEADS.values())), **RIGHT)
    )


def trace_with_late_commit(step: int) -> Trace:
    """Row 12 attends to the last key, which becomes A at step 1, and commits A itself at `step`."""
    steps = np.stack([attend_to_keys(16, [{12: 15}])] * 3)
    return build_trace(canvas(steps, 12, when=[step, 0, 2, 1], tokens=TEXT, regions={"evidence": (4, 15)}))


@pytest.mark.parametrize(("step", "copies"), [(0, 0), (1, 0), (2, 1)])
def test_the_token_of_a_key_is_read_at_the_step_of_the_commit(step, copies):
    assert retrieval(TraceView(trace_with_late_commit(step)))["copies"].tolist() == [copies]


def test_a_row_without_measurements_copies_nothing():
    trace = trace_with_late_commit(2)
    blank = replace(trace, arrays={**trace.arrays, "row_key": np.full_like(trace.arrays["row_key"], -1)})
    assert retrieval(TraceView(blank))["copies"].tolist() == [0]


def test_heads_of_an_autoregressive_model():
    """The text repeats after 36 tokens, and three of the repeated tokens are the evidence."""
    total, prompt = 43, 38
    copying, wrong = ({n - 1: n - back for n in range(prompt, total + 1)} for back in (36, 37))
    whole = attend_to_keys(total, [copying, wrong], causal(total))
    decoding = growing(whole, prompt, regions={"evidence": (3, 4, 5)})
    assert len(decoding.commits) == 6
    assert retrieval_scores(build_trace(decoding, **RIGHT)) == [[3, 1, 1, 1], [0, 0, 0, 0]]


def test_layers_and_heads_have_their_own_scores():
    layers = np.concatenate([attend_to_keys(16, [{}, {12: 4}, {}]), attend_to_keys(16, [{13: 5, 15: 6}, {}, {}])])
    regions = {"evidence": (4, 5, 6)}
    decoding = canvas(np.stack([layers] * 2), 12, when=[0, 0, 1, 1], tokens=TEXT, regions=regions)
    table = retrieval(TraceView(build_trace(decoding)))
    assert table[["layer", "depth", "head"]].to_numpy().tolist() == [[i, i, h] for i in (0, 1) for h in range(3)]
    assert table["copies"].tolist() == [0, 1, 0, 2, 0, 0]
    assert table["wu_set"].tolist() == [0, 1 / 2, 0, 1, 0, 0]
    assert (table["sample"] == "hand").all()


@pytest.mark.parametrize(
    ("prediction", "answers", "counted"),
    [
        ("The Velmora!", ["velmora"], True),
        ("Mira Tal", ["Mira Tal Beley"], True),
        ("Mira", ["Mira Tal"], False),  # half of the words is not enough
        ("Mira", ["Gromora", "Mira"], True),  # the best of several
        ("ka", ["ka ka"], False),  # a word that occurs once is recalled once
        ("ka so ka", ["ka ka"], True),
        ("the", ["the"], False),  # nothing is left after normalisation
        ("Gromora", ["Velmora"], False),
        ("Velmora", [], False),
        (None, ["Velmora"], False),
        ("", ["Velmora"], False),
    ],
)
def test_events_are_counted_where_the_answer_was_recalled(prediction, answers, counted):
    table = retrieval(
        TraceView(build_trace(decode_masked([HEADS["copies all"]]), prediction=prediction, answers=answers))
    )
    assert table["wu_set"].tolist() == [1]
    np.testing.assert_array_equal(table["wu_count"], [1 if counted else np.nan])


def test_a_trace_without_answers_has_no_wu_count():
    assert retrieval(TraceView(build_trace(decode_masked([HEADS["copies all"]]))))["wu_count"].isna().all()


# A slow reference


def random_decoding(seed: int, kind: str) -> Decoding:
    """A decoding with few distinct tokens, so that random heads often copy."""
    rng = np.random.default_rng([seed, len(kind)])
    steps, layers, heads = int(rng.integers(2, 6)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
    prompt, new = int(rng.integers(18, 25)), int(rng.integers(3, 10))
    n = prompt + new
    evidence = np.sort(rng.choice(np.arange(1, prompt), int(rng.integers(1, 9)), replace=False))
    regions = {"question": range(3, 7), "evidence": evidence.tolist(), "answer": range(prompt, n)}
    text = rng.integers(WORDS[0], WORDS[0] + 3, n + 1)
    evidence_bias = np.where(np.isin(np.arange(n), evidence), 2.0, 0.0)
    if kind == "cached":
        whole = attend(rng.normal(evidence_bias, 1.5, (layers, heads, n, n)), causal(n))
        decoding = growing(whole, prompt, regions=regions)
        commits = [(t, p, row, int(text[p])) for t, p, row, _ in decoding.commits]
        return replace(decoding, tokens=[text[: len(state)] for state in decoding.states], commits=commits)
    attention = attend(rng.normal(evidence_bias, 1.5, (steps, layers, heads, n, n)))
    decoding = canvas(attention, prompt, when=rng.integers(0, steps, new).tolist(), tokens=text[:n], regions=regions)
    if kind == "shifted":
        return shift_rows(decoding)
    return decoding


def slow_scores(decoding: Decoding, layer: int, head: int, which: str = "answer") -> dict[str, float]:
    evidence, copied, events, mass = set(decoding.regions["evidence"]), set(), 0, 0.0
    indices = slow.count_commits(decoding, which, [END])
    for t, _, row, token in (decoding.commits[i] for i in indices):
        looks = decoding.attention[t][layer, head, row]
        key = max(range(len(looks)), key=lambda j: looks[j])
        mass += sum(looks[j] for j in evidence)
        if key in evidence and decoding.tokens[t][key] == token:
            events += 1
            copied.add(token)
    needle = {int(decoding.tokens[0][j]) for j in evidence}
    return {
        "copies": events,
        "wu_set": len(copied & needle) / len(needle),
        "wu_count": events / len(evidence),
        "active": float(events > 0),
        "mass": mass / len(indices),
        "base": slow.uniform_predicting_mass(decoding, layer, sorted(evidence), indices),
    }


KINDS = ("full", "shifted", "cached")


def test_the_random_decodings_cover_the_cases():
    """Heads that copy nothing, something and everything, and one token more than once."""
    decodings = [random_decoding(seed, kind) for seed in range(6) for kind in KINDS]
    rows = [
        slow_scores(decoding, layer, head)
        for decoding in decodings
        for layer, head in np.ndindex(decoding.layers, decoding.heads)
    ]
    assert {0, 1} < {one["wu_set"] for one in rows}
    assert any(0 < one["wu_set"] < one["wu_count"] for one in rows)
    assert any(one["wu_set"] > one["wu_count"] for one in rows)


@every_pair(commits=["answer", "all"], seed=range(6), kind=KINDS)
def test_retrieval_equals_the_slow_reference(seed, kind, commits):
    """The answer lacks the last one or two tokens; an end-of-text token in the evidence can be copied too."""
    decoding = end_answer(random_decoding(seed, kind), -1 - seed % 2)
    key = decoding.regions["evidence"][0]
    for tokens in decoding.tokens:
        tokens[key] = END
    table = retrieval(build_trace(decoding, "random", special=WITH_END, **RIGHT), commits=commits)
    rows = [(layer, head) for layer in range(decoding.layers) for head in range(decoding.heads)]
    assert table[["layer", "head"]].to_numpy().tolist() == [list(row) for row in rows]
    expected = pd.DataFrame([slow_scores(decoding, *row, commits) for row in rows])
    for name in SCORES:
        assert table[name].tolist() == pytest.approx(expected[name].tolist(), rel=1e-12), name
    np.testing.assert_allclose(table["base"], expected["base"], rtol=1e-6)
    np.testing.assert_allclose(table["mass"], expected["mass"], rtol=2e-3)
    np.testing.assert_allclose(table["ratio"], expected["mass"] / expected["base"], rtol=2e-3)


def test_copies_after_the_answer_do_not_count():
    """The head copies all four tokens; the last two are end-of-text tokens, and the evidence has one."""
    text = TEXT.copy()
    text[[6, 14, 15]] = END
    heads = [{12: 4, 13: 5, 14: 6, 15: 6}]
    decoding = replace(decode_masked(heads), tokens=[np.where(np.arange(16) < 12, text, A)] * 2)
    decoding = replace(decoding, commits=[(t, p, row, int(text[p])) for t, p, row, _ in decoding.commits])
    trace = build_trace(decoding, special=WITH_END, **RIGHT)
    assert retrieval(trace)[SCORES].to_numpy().tolist() == [[2, 2 / 3, 2 / 3, 1]]
    assert retrieval(trace, commits="all")[SCORES].to_numpy().tolist() == [[4, 1, 4 / 3, 1]]


# Tables of a run


def build_table(values: np.ndarray) -> pd.DataFrame:
    """[sample, layer, head] → the table of `retrieval` of a run with these scores."""
    cells = [(f"s{s}", layer, layer / 2, head) for s, layer, head in np.ndindex(values.shape)]
    table = pd.DataFrame(cells, columns=["sample", "layer", "depth", "head"])
    return table.assign(wu_set=values.ravel(), mass=2 * values.ravel())


def test_the_head_map_of_a_run():
    values = np.array([[[0.0, 1.0], [0.5, np.nan]], [[1.0, 1.0], [0.0, np.nan]]])
    retrieval_scores = head_map(build_table(values))
    np.testing.assert_array_equal(retrieval_scores, [[0.5, 1.0], [0.25, np.nan]])
    assert (retrieval_scores.index.name, retrieval_scores.columns.name) == ("layer", "head")
    np.testing.assert_array_equal(head_map(build_table(values), "mass"), [[1.0, 2.0], [0.5, np.nan]])


def test_the_share_of_samples_with_an_active_head():
    tables = [
        retrieval(TraceView(build_trace(decode_masked(heads))))
        for heads in ([{12: 4}, {}], [{12: 4}, {12: 4}], [{}, {}])
    ]
    assert head_map(pd.concat(tables), "active").to_numpy().tolist() == [[2 / 3, 1 / 3]]


def test_the_layer_profile_of_a_run():
    values = np.array([[[0.0, THRESHOLD, 0.2, 0.9], [0.5, 0.6, np.nan, np.nan], [np.nan] * 4]])
    rows = layer_profile(build_table(values))
    assert rows.columns.tolist() == ["layer", "depth", "mean", "max", "retrieving", "strong"]
    expected = [[0, 0, 0.3, 0.9, 0.5, 0.25], [1, 0.5, 0.55, 0.6, 1, 0.5], [2, 1, *[np.nan] * 4]]
    np.testing.assert_allclose(rows.to_numpy(float), expected)  # exactly .1 and exactly .5 are not above


def test_the_head_correlation_of_two_models():
    rng = np.random.default_rng(0)
    a, b = rng.random((3, 4, 5)), rng.random((2, 4, 5))
    assert head_correlation(build_table(a), build_table(a)) == pytest.approx(1)
    assert head_correlation(build_table(a), build_table(1 - a)) == pytest.approx(-1)
    x, y = a.mean(0).ravel(), b.mean(0).ravel()
    r = sum((p - x.mean()) * (q - y.mean()) for p, q in zip(x, y, strict=True)) / (20 * x.std() * y.std())
    assert head_correlation(build_table(a), build_table(b)) == pytest.approx(r)
    assert head_correlation(build_table(a), build_table(b), "mass") == pytest.approx(r)
    partial = b.copy()
    partial[:, 0, 0] = np.nan
    x, y = x[1:], y[1:]
    r = sum((p - x.mean()) * (q - y.mean()) for p, q in zip(x, y, strict=True)) / (19 * x.std() * y.std())
    assert head_correlation(build_table(a), build_table(partial)) == pytest.approx(r)


@pytest.mark.parametrize("value", [0.0, 0.1, np.nan])
def test_equal_heads_have_no_correlation(value):
    a, b = build_table(np.random.default_rng(0).random((3, 2, 2))), build_table(np.full((3, 2, 2), value))
    assert np.isnan(head_correlation(a, b))
    assert np.isnan(head_correlation(b, a))


def test_models_of_different_shapes_are_refused():
    a, b = build_table(np.zeros((1, 2, 3))), build_table(np.zeros((1, 3, 2)))
    with pytest.raises(UserError, match="2 layers of 3 heads and 3 layers of 2 heads; only maps of one shape can be"):
        head_correlation(a, b)


@pytest.mark.parametrize("function", [head_map, layer_profile])
def test_an_unknown_score_is_named(function: Callable[[pd.DataFrame, str], pd.DataFrame]):
    with pytest.raises(UserError, match=r"unknown score 'wu_sett' \(did you mean 'wu_set'\?\)"):
        function(build_table(np.zeros((1, 1, 1))), "wu_sett")


# Refusals


@pytest.mark.parametrize("regions", [{}, {"question": (1, 2)}, {"question": (1, 2), "evidence": ()}])
def test_a_trace_without_evidence_is_refused(regions):
    with pytest.raises(UserError, match=r'\'hand\' has no evidence; give a passage .* its "evidence"'):
        retrieval(TraceView(build_trace(replace(decode_masked([{}]), regions=regions))))


def test_a_trace_without_commits_is_refused():
    with pytest.raises(UserError, match="'hand' has no commits; trace a decoding, step by step"):
        retrieval(TraceView(build_trace(replace(decode_masked([{}]), commits=()))))


@pytest.mark.parametrize("name", ["row_key", "row_regions"])
def test_a_field_that_is_not_stored_is_named(name):
    trace = build_trace(decode_masked([{}]))
    without = replace(trace, arrays={field: array for field, array in trace.arrays.items() if field != name})
    with pytest.raises(UserError, match=f"does not store '{name}'"):
        retrieval(without)

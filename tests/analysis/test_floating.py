"""Floating: every column against loops, and known worlds with exact values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import slow_reference as slow
from dense_decodings import (
    ALL_KINDS,
    END,
    JOINING_KEY,
    WITH_END,
    Decoding,
    attend,
    build_trace,
    canvas,
    end_answer,
    random_answer,
    with_joining_key,
)

from floatscope.analysis import TraceView, analyse, anchor_movement, floating, top_keys
from floatscope.analysis.floating import QUERY_GROUPS, attention_moved, depth_third, floating_index
from floatscope.traces import Trace

pytestmark = pytest.mark.filterwarnings("error")
NEAR = {"rtol": 2e-5, "atol": 2e-6, "check_dtype": False}


# Loops as a slow reference

cases = pytest.mark.parametrize(("seed", "kind"), [(seed, kind) for kind in ALL_KINDS for seed in range(4)])
counted = pytest.mark.parametrize("commits", ["answer", "all"])


@functools.cache
def case(seed: int, kind: str) -> tuple[Decoding, Trace]:
    """A decoding whose answer ends before its last commits, and its trace."""
    decoding = random_answer(seed, kind)
    return decoding, build_trace(decoding, f"{kind}-{seed}", special=WITH_END)


@functools.cache
def slow_top_keys(seed: int, kind: str, commits: str) -> list[dict[str, object]]:
    decoding, trace = case(seed, kind)
    steps = slow.count_steps(decoding, commits, [END])
    rows: list[dict[str, object]] = []
    for group in QUERY_GROUPS:
        for layer in range(decoding.layers):
            path = slow.anchor_path(decoding, layer, group)
            own = [path[t] for t in steps if path[t] >= 0]
            modal = slow.mode(own) if own else -1
            for t in steps:
                received = slow.all_received(decoding, t, layer, group)
                lift, lead = slow.leader(decoding, t, layer, group)
                moved = excess = at_modal = np.nan
                if t + 1 in steps:
                    differences = slow.moved(received, slow.all_received(decoding, t + 1, layer, group))
                    moved, at_modal = sum(differences.values()), differences.get(modal, 0.0)
                    excess = slow.excess_moved(decoding, t, t + 1, layer, group)
                first = slow.moved(slow.all_received(decoding, steps[0], layer, group), received)
                rows.append(
                    {
                        "sample": trace.sample,
                        "group": group,
                        "step": t,
                        "layer": layer,
                        "depth": layer / max(1, decoding.layers - 1),
                        "top_key": path[t],
                        "modal_key": modal,
                        "lift": lift,
                        "lead": lead,
                        "moved": moved,
                        "excess_moved": excess,
                        "moved_modal": at_modal,
                        "modal_share": received[modal] if modal >= 0 else 0.0,
                        "moved_from_first": sum(first.values()),
                    }
                )
    return rows


def slow_floating(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The index from the rows of all samples."""

    def mean(values: Sequence[float]) -> float:
        defined = [value for value in values if value == value]
        return sum(defined) / len(defined) if defined else np.nan

    index = []
    for sample, group, layer in dict.fromkeys((row["sample"], row["group"], row["layer"]) for row in rows):
        of_layer = [row for row in rows if (row["group"], row["layer"]) == (group, layer)]
        own = [row for row in of_layer if row["sample"] == sample]
        path = [row["top_key"] for row in own if row["top_key"] >= 0]
        every = [row["top_key"] for row in of_layer if row["top_key"] >= 0]
        columns = ("moved", "excess_moved", "moved_modal", "modal_share", "lift", "lead")
        means = {name: mean([row[name] for row in own]) for name in columns}
        third = "shallow" if own[0]["depth"] < 1 / 3 else "middle" if own[0]["depth"] < 2 / 3 else "deep"
        index.append(
            {
                "sample": sample,
                "group": group,
                "layer": layer,
                "depth": own[0]["depth"],
                **means,
                "moved_overall": own[-1]["moved_from_first"],
                "moved_rest": means["moved"] - means["moved_modal"],
                "anchor_steps": len(path) / len(own),
                "within": slow.share_elsewhere(path, slow.mode(path)) if path else np.nan,
                "across": slow.share_elsewhere(path, slow.mode(every)) if path else np.nan,
                "third": third,
            }
        )
    return index


def assert_same_rows(table: pd.DataFrame, expected: list[dict[str, object]], by: list[str]) -> None:
    """The same rows in any order, with the same columns."""
    rows = pd.DataFrame(expected).sort_values(by, ignore_index=True)
    assert set(table.columns) == set(rows.columns)
    pd.testing.assert_frame_equal(table[list(rows)].sort_values(by, ignore_index=True), rows, **NEAR)


@cases
@counted
def test_top_keys_equals_the_slow_reference(seed, kind, commits):
    table = top_keys(case(seed, kind)[1], commits=commits)
    assert_same_rows(table, slow_top_keys(seed, kind, commits), ["group", "layer", "step"])


@pytest.mark.parametrize("kind", ALL_KINDS)
@counted
def test_floating_equals_the_slow_reference(kind, commits):
    """Over four texts of different lengths and numbers of layers."""
    table = floating([case(seed, kind)[1] for seed in range(4)], commits=commits)
    rows = [row for seed in range(4) for row in slow_top_keys(seed, kind, commits)]
    assert_same_rows(table, slow_floating(rows), ["sample", "group", "layer"])


def test_the_random_decodings_cover_the_cases():
    """Steps with and without an anchor, leaders that change, step pairs that do not count, keys that join."""
    for kind in ALL_KINDS:
        rows = pd.DataFrame([row for seed in range(4) for row in slow_top_keys(seed, kind, "answer")])
        for group in QUERY_GROUPS:
            if (kind, group) == ("window", "predicting"):  # no key of the narrow layers is seen at every step
                continue
            own = rows[rows["group"] == group]
            assert (own["top_key"] >= 0).any(), (kind, group)
            assert (own["moved"] > 0.02).any(), (kind, group)
        assert any(slow_top_keys(seed, kind, "answer") != slow_top_keys(seed, kind, "all") for seed in range(4)), kind
    every = pd.DataFrame([row for k in ALL_KINDS for seed in range(4) for row in slow_top_keys(seed, k, "answer")])
    assert (every["top_key"] < 0).any()
    anchored = every[every["top_key"] >= 0]
    assert (anchored["top_key"] != anchored["modal_key"]).any()


@cases
def test_every_commit_is_an_answer_commit_without_an_end_token(seed, kind):
    decoding, _ = case(seed, kind)
    trace = build_trace(decoding)
    pd.testing.assert_frame_equal(floating(trace), floating(trace, commits="all"))


def test_the_index_of_a_run_is_that_of_its_analysis():
    traces = [case(seed, "full")[1] for seed in range(3)]
    for commits in ("answer", "all"):
        tables = analyse(traces, "rulli(eps=1)", commits=commits)
        pd.testing.assert_frame_equal(tables["floating"], floating(traces, commits=commits))
        pd.testing.assert_frame_equal(tables["top_keys"], top_keys(traces, commits=commits))


# Known worlds

N, PROMPT, LAYERS, HEADS = 40, 30, 2, 3
SHARE = 0.5


def point_at(key: int, share: float = SHARE, n: int = N) -> np.ndarray:
    """Every row gives `share` to the key and spreads the rest evenly over all keys: both are moved as a whole."""
    A = np.full((n, n), (1 - share) / n)
    A[:, key] += share
    return A


def decode(matrices: Sequence[np.ndarray], when: Sequence[int] | None = None, prompt: int = PROMPT) -> Decoding:
    """The same attention in all layers and heads."""
    return canvas(np.stack([np.broadcast_to(A, (LAYERS, HEADS, *A.shape)) for A in matrices]), prompt, when=when)


def index_of(trace: Trace, **options: object) -> pd.DataFrame:
    """The index of a world that is the same in all layers, for both query groups."""
    table = floating(trace, **options).set_index(["group", "layer"])
    assert len(table) == len(QUERY_GROUPS) * LAYERS
    return table


def assert_index(trace: Trace, expected: dict[str, float], **options: object) -> None:
    """The values of both query groups and all layers."""
    for place, row in index_of(trace, **options).iterrows():
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), (place, name)


POINTED = {
    "lift": SHARE * N + 1 - SHARE,
    "lead": SHARE * N / (1 - SHARE),
    "anchor_steps": 1,
}


@pytest.mark.parametrize("key", [0, 7, 35])
def test_a_fixed_sink_moves_nothing(key):
    trace = build_trace(decode([point_at(key)] * 10))
    still = dict.fromkeys(
        ["moved", "excess_moved", "moved_overall", "moved_modal", "moved_rest", "within", "across"], 0
    )
    assert_index(trace, {**still, **POINTED, "modal_share": SHARE + (1 - SHARE) / N})
    table = top_keys(trace)
    assert (table[["top_key", "modal_key"]] == key).all(axis=None)
    assert len(table) == 10 * len(QUERY_GROUPS) * LAYERS
    assert index_of(trace).loc["all", "third"].tolist() == ["shallow", "deep"]


@pytest.mark.parametrize("seed", range(3))
def test_nearly_uniform_attention_moves_nothing_although_its_leader_changes(seed):
    scores = np.random.default_rng(seed).normal(0, 0.02, (10, LAYERS, HEADS, N, N))
    trace = build_trace(canvas(attend(scores), PROMPT))
    assert len(np.unique(trace.top_key())) > 5  # the key of largest lift is a matter of chance
    assert (trace.anchor_path() == -1).all()
    index = index_of(trace)
    for group, moved, lead in (("all", 0.002, 0.01), ("predicting", 0.01, 0.03)):
        own = index.loc[group]
        assert (own[["moved", "excess_moved", "moved_overall"]] < moved).all(axis=None)
        assert (own[["moved", "excess_moved", "moved_overall"]] > 0).all(axis=None)
        assert (own["lead"] < lead).all()
        assert (own["lift"] < 1.1).all()
    assert (index[["anchor_steps", "moved_modal", "modal_share"]] == 0).all(axis=None)
    assert index[["within", "across"]].isna().all(axis=None)
    assert (top_keys(trace)[["top_key", "modal_key"]] == -1).all(axis=None)


@pytest.mark.parametrize("steps", [2, 5, 10])
def test_an_anchor_that_moves_one_key_per_step(steps):
    """Its share leaves a key and arrives at the next. All keys are equally frequent, so the first one is the mode."""
    trace = build_trace(decode([point_at(3 + t) for t in range(steps)]))
    base = (1 - SHARE) / N
    assert_index(
        trace,
        {
            **POINTED,
            "moved": SHARE,
            "excess_moved": SHARE * (1 - 1 / N),
            "moved_overall": SHARE,
            "moved_modal": SHARE / 2 / (steps - 1),
            "moved_rest": SHARE - SHARE / 2 / (steps - 1),
            "modal_share": base + SHARE / steps,
            "within": 1 - 1 / steps,
            "across": 1 - 1 / steps,
        },
    )
    drift = anchor_movement.drift(trace, "rulli")
    assert drift["slope"].tolist() == pytest.approx([1] * LAYERS)
    assert drift["displacement"].tolist() == [steps - 1] * LAYERS


@pytest.mark.parametrize("steps", [5, 6])
def test_an_anchor_that_jumps_between_two_keys(steps):
    """After an even number of jumps it is back at its first key."""
    trace = build_trace(decode([point_at((4, 20)[t % 2]) for t in range(steps)]))
    at_mode = (steps + 1) // 2
    assert_index(
        trace,
        {
            **POINTED,
            "moved": SHARE,
            "excess_moved": SHARE * (1 - 1 / N),
            "moved_overall": 0 if steps % 2 else SHARE,
            "moved_modal": SHARE / 2,
            "moved_rest": SHARE / 2,
            "modal_share": (1 - SHARE) / N + SHARE * at_mode / steps,
            "within": 1 - at_mode / steps,
            "across": 1 - at_mode / steps,
        },
    )


def test_a_step_below_the_least_lift_of_an_anchor_does_not_count():
    """A lift of 1.9 is not an anchor and a lift of 2.1 is; the attention that moves is counted in both cases."""
    shares = [(lift - 1) / (N - 1) for lift in (2.1, 1.9)]
    path, strength = [3, 9, 3, 12], [0, 1, 0, 1]
    trace = build_trace(decode([point_at(key, shares[i]) for key, i in zip(path, strength, strict=True)]))
    moved = shares[0] - (shares[0] - shares[1]) / N  # the larger share goes, but every key keeps or gets a base
    expected = {"anchor_steps": 0.5, "within": 0, "across": 0, "lift": 2.0, "moved": moved, "moved_overall": moved}
    assert_index(trace, expected)
    assert (
        top_keys(trace)["top_key"].to_numpy().reshape(2, 4, LAYERS)[0] == [[3, 3], [-1, -1], [3, 3], [-1, -1]]
    ).all()


# Commits after the answer


def decode_with_ends(order: str) -> Decoding:
    """Ten tokens, of which the first four are the answer. At a step of the answer the sink is key 3, at a step of an
    end-of-text token another key."""
    answer, ends = range(4), range(4, 10)
    steps = [*answer, *ends] if order == "answer first" else [*ends, *answer]
    when = [steps.index(place) for place in range(10)]
    matrices = [point_at(3 if place in answer else 5 + place) for place in steps]
    return end_answer(decode(matrices, when), 4)


@pytest.mark.parametrize("order", ["answer first", "ends first"])
def test_commits_after_the_answer_do_not_count(order):
    trace = build_trace(decode_with_ends(order), special=WITH_END)
    assert_index(trace, {"moved": 0, "excess_moved": 0, "moved_overall": 0, "within": 0, "across": 0, **POINTED})
    assert sorted(set(top_keys(trace)["step"])) == ([0, 1, 2, 3] if order == "answer first" else [6, 7, 8, 9])
    # Four steps at key 3, six elsewhere: of nine step pairs six move, five among the ends and one next to the answer.
    assert_index(trace, {"moved": SHARE * 6 / 9, "moved_overall": SHARE, "within": 0.6}, commits="all")
    assert sorted(set(top_keys(trace, commits="all")["step"])) == list(range(10))
    assert_index(build_trace(decode_with_ends(order)), {"moved": SHARE * 6 / 9, "within": 0.6})  # no end is known


def test_a_step_pair_counts_if_both_steps_do():
    """The answer is written at steps 0, 2 and 3, and attention moves at every step."""
    matrices = [point_at(3 + 2 * t) for t in range(4)]
    trace = build_trace(end_answer(decode(matrices, [0, 2, 3, *[1] * 7]), 3), special=WITH_END)
    table = top_keys(trace).set_index(["group", "layer", "step"]).sort_index()
    for group in QUERY_GROUPS:
        each = table.loc[(group, 0)]
        assert each.index.tolist() == [0, 2, 3]
        for name, value in (("moved", SHARE), ("excess_moved", SHARE * (1 - 1 / N))):
            assert each[name].tolist() == pytest.approx([np.nan, value, np.nan], rel=1e-5, nan_ok=True)
        assert each["moved_from_first"].tolist() == pytest.approx([0, SHARE, SHARE], rel=1e-5)
        assert each["top_key"].tolist() == [3, 7, 9]
    assert_index(trace, {"moved": SHARE, "within": 2 / 3})


def test_a_single_step_moves_nothing_that_can_be_measured():
    table = index_of(build_trace(decode([point_at(3)], [0] * 10)))
    assert table[["moved", "excess_moved", "moved_modal", "moved_rest"]].isna().all(axis=None)
    assert (table[["within", "across"]] == 0).all(axis=None)


# Keys that join


@pytest.mark.parametrize("cached", [True, False])
def test_a_key_that_joins_is_not_eligible(cached):
    decoding, late = with_joining_key(cached), JOINING_KEY
    trace = build_trace(decoding)
    lift = trace.received(scale="lift")
    assert (lift[-1].argmax(-1) == late).all()  # it would lead
    assert decoding.visible[-1][0][:, late].sum() >= 16  # and enough rows see it at the last step
    eligible = trace.received(scale="lift", eligible=True)
    assert (np.isfinite(eligible) == (np.arange(eligible.shape[-1]) <= 14)).all()  # 16 of 30 rows see key 14
    assert (trace.anchor_path() == 0).all()
    assert (trace.top_key() == 0).all()
    table = top_keys(trace)
    own = table[table["group"] == "all"]
    assert (own[["top_key", "modal_key"]] == 0).all(axis=None)
    predicting = table[table["group"] == "predicting"].set_index(["layer", "step"])["top_key"].loc[0]
    assert (predicting.loc[:2] == 0).all()
    assert (predicting.loc[3:] == -1).all()  # of the eligible keys none has more than a tenth of uniform attention
    assert floating(trace).set_index("group").loc["all", ["within", "across"]].to_numpy().max() == 0


def test_attention_moves_over_the_keys_of_both_steps():
    """The new key takes .9 of its own row. Of the keys before it the row before has half on the first key more."""
    trace = build_trace(with_joining_key(cached=True))
    moved = top_keys(trace).set_index(["group", "layer", "step"])["moved"]
    # Row 31 over keys 0 to 31: .5 at key 0, and .5 / 32 at every key; row 32 over the same keys is uniform.
    assert moved[("predicting", 0, 2)] == pytest.approx(0.5 * 31 / 32, rel=1e-5)
    # Row 30 and row 31 over keys 0 to 30: .5 at key 0 and the rest spread evenly, up to normalisation.
    rows = [np.array([0.5 + 0.5 / n, *[0.5 / n] * 30]) for n in (31, 32)]
    a, b = (row / row.sum() for row in rows)
    assert moved[("predicting", 0, 1)] == pytest.approx(np.abs(a - b).sum() / 2, rel=1e-4)


# Traces without commits or measurements


def test_a_final_state_counts_every_step_and_has_no_predicting_rows():
    decoding = replace(decode([point_at(3), point_at(9), point_at(3)]), commits=())
    trace = build_trace(decoding, state="final")
    index = index_of(trace)
    assert (
        index.loc["all", ["moved", "within"]].to_numpy().tolist() == [pytest.approx([SHARE, 1 / 3], rel=1e-5)] * LAYERS
    )
    own = index.loc["predicting"]
    undefined = ["moved", "excess_moved", "moved_overall", "moved_modal", "moved_rest", "modal_share", "lift", "lead"]
    assert own[[*undefined, "within", "across"]].isna().all(axis=None)
    assert (own["anchor_steps"] == 0).all()


def test_attention_that_was_not_measured_has_not_moved():
    trace = build_trace(decode([point_at(3)] * 4))
    received = trace.arrays["received"].copy()
    received[2, :, 0] = np.nan
    table = top_keys(replace(trace, arrays={**trace.arrays, "received": received}))
    own = table[(table["group"] == "all") & (table["layer"] == 0)]
    assert own["top_key"].tolist() == [3, 3, -1, 3]
    for name in ("moved", "excess_moved", "moved_modal"):
        assert own[name].tolist() == pytest.approx([0, np.nan, np.nan, np.nan], abs=1e-7, nan_ok=True), name
    for name in ("modal_share", "moved_from_first", "lift", "lead"):
        assert np.isnan(own[name]).tolist() == [False, False, True, False], name


def test_the_attention_moved_overall_needs_the_last_step():
    trace = build_trace(decode([point_at(3), point_at(9), point_at(3)]))
    received = trace.arrays["received"].copy()
    received[2, 0, 0] = np.nan
    index = index_of(replace(trace, arrays={**trace.arrays, "received": received}))
    assert index.loc["all", "moved_overall"].tolist() == pytest.approx([np.nan, 0], abs=1e-6, nan_ok=True)
    assert index.loc["all", "moved"].tolist() == pytest.approx([SHARE] * 2, rel=1e-5)


def test_a_canvas_of_one_key():
    trace = build_trace(canvas(np.ones((2, 1, 1, 1, 1)), 0, when=[1]))
    table = floating(trace, commits="all")
    assert table["lift"].tolist() == [1, 1]
    assert table["lead"].isna().all()
    assert table["anchor_steps"].tolist() == [0, 0]


def test_attention_moved_is_the_total_variation_distance():
    nan = np.nan
    a, b = np.array([0.2, 0.2, 0.6, nan]), np.array([0.1, 0.5, 0.2, 0.2])
    present = np.array([True, True, True, False])
    np.testing.assert_allclose(attention_moved(a, b, present).sum(), (abs(0.2 - 0.125) + abs(0.2 - 0.625) + 0.35) / 2)
    np.testing.assert_allclose(attention_moved(a, a, present), 0, atol=1e-12)
    assert np.isnan(attention_moved(a, np.full(4, nan), present)).all()
    rng = np.random.default_rng(0)
    x, y, z = rng.dirichlet(np.ones(6), 3)
    everything = np.ones(6, bool)
    xy, yx, yz, xz = (attention_moved(p, q, everything).sum() for p, q in ((x, y), (y, x), (y, z), (x, z)))
    assert xy == pytest.approx(yx)
    assert xz <= xy + yz
    assert attention_moved(3 * x, y, everything).sum() == pytest.approx(xy)  # normalised
    assert attention_moved(np.eye(6)[0], np.eye(6)[1], everything).sum() == 1


@pytest.mark.parametrize(
    ("depth", "third"),
    [(0.0, "shallow"), (0.33, "shallow"), (1 / 3, "middle"), (0.5, "middle"), (0.67, "deep"), (1.0, "deep")],
)
def test_thirds_of_the_model(depth, third):
    assert depth_third(depth) == third


# Several texts


def index_of_paths(paths: dict[str, list[int]]) -> pd.DataFrame:
    traces = [build_trace(decode([point_at(key) for key in path]), sample) for sample, path in paths.items()]
    table = floating_index(pd.concat([top_keys(TraceView(trace)) for trace in traces], ignore_index=True))
    pd.testing.assert_frame_equal(table, floating(traces))
    return table[table["group"] == "all"].groupby("sample")[["within", "across"]].mean()


def test_across_texts_the_mode_is_that_of_all_steps():
    index = index_of_paths({"one": [9, 9, 9, 9], "two": [5, 5, 9, 5], "three": [9, 9, 2, 2]})
    assert index["within"].to_dict() == {"one": 0, "two": 0.25, "three": 0.5}
    assert index["across"].to_dict() == {"one": 0, "two": 0.75, "three": 0.5}


def test_of_tied_modes_the_smaller_key_counts():
    index = index_of_paths({"one": [9, 9], "two": [5, 5]})
    assert index["within"].to_dict() == {"one": 0, "two": 0}
    assert index["across"].to_dict() == {"one": 1, "two": 0}

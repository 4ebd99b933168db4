"""The paper's figures from our runs: every section with its charts, numbers of the arrays, and what is missing said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.analysis.asked import asked, gold_place
from floatscope.analysis.flow import flow
from floatscope.analysis.look import TraceView
from floatscope.analysis.measure import RunTables
from floatscope.analysis.qk import key_z
from floatscope.cli.main import app
from floatscope.errors import UserError
from floatscope.lab.twins.heldout import read
from floatscope.reports.build import build, write_figures
from floatscope.reports.charts import Lines, Map, Table
from floatscope.reports.compared import Compared
from floatscope.reports.paper import Read, foreword, region_flow, scores
from floatscope.schema import KEY_STATS
from floatscope.traces import Trace

IDS = ["temporal-drift", "absorption", "qk-decomposition", "retrieval-heads", "region-flow", "scores"]
NEW = 3


def traced(twin: str, folder: Path, samples: list, **settings: object) -> Path:
    list(fs.plan_trace(fs.load(f"twin:{twin}", device="cpu"), samples, folder, new_tokens=NEW, **settings))
    return folder


def paper(*paths: Path, detector: str = "zscore"):
    return build(list(paths), detector, explore=0, as_paper=True)[0]


def section(report, id):
    return next(each for each in report.sections if each.id == id)


def of_kind(charts, kind):
    return [chart for chart in charts if isinstance(chart, kind)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Gold first, last, and first again in a text as long as the first; one model has a control."""
    folder = tmp_path_factory.mktemp("runs")
    samples = [read("reading-5")[i] for i in (0, 4, 5)]
    return {twin: traced(twin, folder / twin, samples, controls=(0,) * (twin == "mdm")) for twin in ("arm", "mdm")}


@pytest.fixture(scope="module")
def built(runs):
    return build(list(runs.values()), explore=0, as_paper=True)


@pytest.fixture(scope="module")
def report(built):
    return built[0]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    return traced("mdm", tmp_path_factory.mktemp("one") / "one", read("reading-5")[:1])


@pytest.fixture(scope="module")
def by_their_rule(one):
    return paper(one, detector="af_absorption")


def test_every_figure_has_its_section_its_charts_and_a_note(report):
    assert [each.id for each in report.sections] == IDS
    for each in report.sections:
        assert each.charts
        assert "**In the paper" in each.shows
        assert "Not shown" not in each.shows
    assert "“Revealing the Attention Floating Mechanism in Masked Diffusion Models”" in report.summary[0]
    assert not any("comparison is not complete" in sentence for sentence in report.summary)


def test_maps_over_time_show_the_lift_of_a_sample_and_the_mean_of_those_of_one_length(report, runs):
    maps = {chart.title: chart for chart in section(report, "temporal-drift").charts}
    run = fs.open_run(runs["mdm"])
    first, last = run.trace("reading-5-0"), run.trace("reading-5-5")
    drawn = maps["twin:mdm, layer 7: reading-5-0"]
    np.testing.assert_allclose(np.array(drawn.values, float), first.received(7, scale="lift"), atol=6e-3)
    found = np.argwhere(TraceView(first).anchors[:, -1]).tolist()
    assert [[t, k] for t, k, kind in drawn.marks if kind == "anchor"] == found
    mean = maps["twin:mdm, layer 7: mean of 2 samples"]
    wanted = (first.received(7, scale="lift") + last.received(7, scale="lift")) / 2
    np.testing.assert_allclose(np.array(mean.values, float), wanted, atol=6e-3)
    assert {(t, k) for t, k, kind in mean.marks if kind == "top"} == set(enumerate(wanted.argmax(1)))


def test_texts_of_different_lengths_have_no_mean(tmp_path):
    run = traced("mdm", tmp_path / "run", ["What floats on the water?", "What sinks?"])
    shown = section(paper(run), "temporal-drift")
    assert "No two samples of twin:mdm have the same length" in shown.shows
    assert not any("mean of" in chart.title for chart in shown.charts)


@pytest.mark.parametrize(("twin", "step"), [("arm", 0), ("mdm", NEW // 2)])
def test_z_scores_of_keys_are_those_of_the_arrays(report, runs, twin, step):
    look = TraceView(fs.open_run(runs[twin]).trace("reading-5-0"))
    maps = [m for m in of_kind(section(report, "qk-decomposition").charts, Map) if m.model == f"twin:{twin}"]
    assert [m.title.split("\n")[0] for m in maps] == [f"twin:{twin}, layer {at}, step {step}" for at in (0, 4, 7)]
    for drawn, layer in zip(maps, (0, 4, 7), strict=True):
        assert drawn.y == ["qk", "cos", "norm"]
        eligible = np.isfinite(look.lift[step, layer, : len(drawn.x)])
        for name, row in zip(drawn.y, drawn.values, strict=True):
            stat = look.trace.arrays["key_stats"][step, layer, KEY_STATS.index(name), : len(drawn.x)].astype(float)
            wanted = np.where(eligible, (stat - stat[eligible].mean()) / stat[eligible].std(), np.nan)
            np.testing.assert_allclose(np.array(row, float), wanted, atol=1e-3)
        anchors = np.flatnonzero(look.anchors[step, layer])
        assert {key for _, key, _ in drawn.marks} == set(anchors)
        for key in anchors[:3]:
            token = look.trace.meta["pieces"][str(look.trace.arrays["tokens"][step, key])]
            assert f"{key} {json.dumps(token, ensure_ascii=False)}" in drawn.title


def test_keys_that_are_all_alike_have_no_z_score(runs):
    trace = fs.open_run(runs["mdm"]).trace("reading-5-0")
    flat = np.ones_like(trace.arrays["key_stats"])
    assert np.isnan(key_z(TraceView(replace(trace, arrays={**trace.arrays, "key_stats": flat})), 0)).all()


@pytest.mark.parametrize("step", [-1, NEW, 99])
def test_a_step_that_is_not_there_has_no_z_score(runs, step):
    look = TraceView(fs.open_run(runs["mdm"]).trace("reading-5-0"))
    with pytest.raises(UserError, match=f"'reading-5-0' has steps 0 to {NEW - 1}, got step {step}"):
        key_z(look, step)


def test_maps_of_heads_share_a_scale_for_each_score(report):
    maps = of_kind(section(report, "retrieval-heads").charts, Map)
    assert [(m.model, m.unit) for m in maps] == [(f"twin:{t}", s) for s in ("wu_set", "mass") for t in ("arm", "mdm")]
    assert maps[0].bounds == maps[1].bounds != maps[2].bounds == maps[3].bounds
    table = of_kind(section(report, "retrieval-heads").charts, Table)[0]
    assert "heads > 0.1" in table.columns


def test_flow_is_shown_by_the_place_of_the_gold_passage(report, runs):
    shown = section(report, "region-flow")
    maps = {chart.title: chart for chart in of_kind(shown.charts, Map)}
    groups = ("first, 2 samples", "last, 1 sample")
    assert list(maps) == [f"twin:{twin}: gold {group}" for group in groups for twin in ("arm", "mdm")]
    assert "No sample of twin:arm and twin:mdm has its gold passage in the middle." in shown.shows
    assert len({chart.bounds for chart in maps.values()}) == 1
    drawn = maps["twin:mdm: gold last, 1 sample"]
    documents = [f"document {number}" for number in range(1, 6)]
    assert drawn.y == ["question", *documents, "gold", "evidence", "answer", "bos", "template"]
    values = dict(zip(drawn.y, drawn.values, strict=True))
    assert values["gold"] == values["document 5"]
    table = flow(TraceView(fs.open_run(runs["mdm"]).trace("reading-5-4")))
    rows = table[(table["region"] == "answer") & (table["key_region"] == "question")]
    assert values["question"] == pytest.approx(rows["ratio"].tolist(), abs=6e-3)


def test_deciding_rows_are_those_of_the_samples_of_a_group(report, built):
    lines = of_kind(section(report, "region-flow").charts, Lines)
    assert [line.title for line in lines] == [
        f"Gold {place}: what deciding rows give it" for place in ("first", "last")
    ]
    of_model = [(series.model, series.control) for series in lines[1].series]
    assert of_model == [("twin:arm", False), ("twin:mdm", False), ("twin:mdm", True)]
    where = {"sample": "reading-5-4", "region": "gold"}
    assert lines[1].series[1].y == pytest.approx(built[1][1].table("answer_rows", where)["ratio"].tolist())


def test_groups_without_samples_and_samples_without_a_group_are_said(built):
    mdm = built[1][1]
    shows = lambda *gold: region_flow([answered(mdm, gold=list(gold))]).shows  # noqa: E731
    assert "No sample of twin:mdm has its gold passage first or in the middle." in shows("last", None, "last")
    left = "Left out of twin:mdm: 1 of 3 samples, which have no one gold passage among several."
    assert left in shows("last", None, "last")
    assert "No sample of twin:mdm has one gold passage among several; mark it" in shows(None, None, None)


def answered(run: Compared, names: tuple[str, ...] = (), **columns: object) -> Read:
    """The run, had it been asked these samples, or its own, with these results."""
    table = {"sample": list(names or run.run.done), "passages": 5.0, "gold": None, "acc": 0.0, "f1": 0.0, "both": 0.0}
    tables = {**run.measured.tables, "asked": pd.DataFrame({**table, **columns})}
    return Read(replace(run, measured=replace(run.measured, tables=tables)), [])


def marked(documents: int, gold: list[int], **meta: object) -> Trace:
    """Passages of two positions each; those in `gold` are."""
    names = [f"document {n}" for n in range(1, documents + 1)] + (["gold"] if gold else [])
    member = np.zeros((2 * documents + 1, len(names)), bool)
    for n in range(1, documents + 1):
        member[2 * n - 2 : 2 * n, [n - 1, *([documents] if n in gold else [])]] = True
    coords = {"region": (*names, "question")}
    member = np.column_stack([member, np.arange(len(member)) == len(member) - 1])
    return Trace("a", {"region_member": member}, {"region_member": ("position", "region")}, coords, meta)


@pytest.mark.parametrize(
    ("documents", "gold", "place"),
    [
        (5, [1], "first"),
        (5, [2], "middle"),
        (5, [4], "middle"),
        (5, [5], "last"),
        (12, [10], "middle"),
        (12, [12], "last"),
        (2, [2], "last"),
        (5, [2, 3], None),
        (5, [], None),
        (1, [1], None),
        (0, [], None),
    ],
)
def test_the_place_of_the_gold_passage(documents, gold, place):
    trace = marked(documents, gold)
    assert gold_place(trace) == place
    assert asked(TraceView(trace))["passages"].tolist() == [documents]


def test_scores_are_those_of_the_prediction_and_nothing_where_nothing_is_known():
    meta = {"answers": ["Velmora"], "prediction": "Velmora city", "acc": 1.0}
    row = asked(TraceView(marked(2, [1], **meta))).iloc[0]
    assert (row["acc"], row["f1"], row["both"]) == pytest.approx((100, 200 / 3, 250 / 3))
    bare = Trace("a", {}, {}, {}, {})
    assert asked(TraceView(bare))[["passages", "acc", "f1", "both"]].isna().all(axis=None)


def test_scores_are_beside_the_published_ones(report):
    ours, theirs = section(report, "scores").charts
    assert [row[:3] for row in ours.rows] == [
        ["twin:arm", "5", 3],
        ["twin:mdm", "5", 3],
        ["twin:mdm, untrained", "5", 3],
    ]
    assert theirs.rows[-1] == ["LLaDA", "22.52", "48.20", "+25.68"]
    assert "That takes runs of one model with passages and without." in section(report, "scores").shows


@pytest.mark.parametrize(
    ("asked_with", "gain"),
    [(("a", "b", "c"), "+66.7 [+0.0, +100.0]"), (("d", "e", "f"), "+66.7")],  # without shared questions no interval
)
def test_what_passages_add_is_told_where_a_model_has_both(built, asked_with, gain):
    mdm = replace(built[1][1], controls=[])
    closed = answered(replace(mdm, label="closed"), ("a", "b", "c"), passages=0.0)
    given = answered(mdm, asked_with, acc=[100.0, 100.0, 0.0])
    shown = scores([given, closed])
    ours, gains, _ = shown.charts
    assert [row[:2] for row in ours.rows] == [["twin:mdm", "5"], ["closed", "closed book"]]
    assert [row[:3] for row in gains.rows] == [["twin:mdm", "5", name] for name in ("acc", "F1", "mean of both")]
    assert gains.rows[0][-1] == gain
    assert "That takes" not in shown.shows


def test_scores_stand_beside_those_of_the_control(built):
    def seed(*acc: float) -> RunTables:
        table = {"sample": ["a", "b"], "passages": passages, "gold": None, "acc": acc, "f1": 0.0, "both": 0.0}
        return RunTables({"asked": pd.DataFrame(table)}, {})

    runs = []
    for passages, right in ((5.0, (100.0, 100.0)), (0.0, (100.0, 0.0))):
        run = replace(built[1][1], label=f"with {passages:.0f}", controls=[seed(0.0, 0.0), seed(0.0, passages)])
        runs.append(answered(run, ("a", "b"), passages=passages, acc=list(right)))
    ours, gains, _ = scores(runs).charts
    names = [f"with {n}{control}" for n in (5, 0) for control in ("", ", untrained")]
    assert [row[:4] for row in ours.rows] == [
        [names[0], "5", 2, "100.0 [100.0, 100.0]"],
        [names[1], "5", 2, "1.2 [0.0, 5.0]"],
        [names[2], "closed book", 2, "50.0 [0.0, 100.0]"],
        [names[3], "closed book", 2, "0.0 [0.0, 0.0]"],
    ]
    of_acc = {row[0]: row[-1] for row in gains.rows if row[2] == "acc"}
    assert of_acc["twin:mdm"].startswith("+50.0 [")
    assert of_acc["twin:mdm, untrained"].startswith("+1.2 [")


def test_the_rule_of_the_paper_is_named_where_it_is_used(by_their_rule, report):
    theirs, ours = (section(each, "absorption") for each in (by_their_rule, report))
    assert "**the anchors are theirs, by that very rule**" in theirs.shows
    assert "--detector af_absorption" in ours.shows
    for shown, name in ((theirs, "af_absorption"), (ours, "zscore(k=3.0, scale='lift')")):
        titles = [chart.title for chart in of_kind(shown.charts, Lines)]
        assert titles[-2:] == [f"Attention on the anchors, {name}"] * 2
        assert isinstance(shown.charts[-1], Table)


def test_a_detector_that_judges_no_heads_leaves_the_canvas(by_their_rule):
    shown = section(by_their_rule, "qk-decomposition")
    assert "Not shown for twin:mdm: af_absorption does not judge single heads" in shown.shows
    assert [type(chart) for chart in shown.charts] == [Map] * 3


def test_a_detector_that_cannot_fire_leaves_maps_without_anchors(one):
    report = paper(one, detector="zscore(k=99)")
    marks = [mark for chart in section(report, "temporal-drift").charts for mark in chart.marks]
    assert {kind for *_, kind in marks} == {"top", "commit"}
    assert len(of_kind(section(report, "absorption").charts, Lines)) == 4
    assert "no anchors" in section(report, "qk-decomposition").charts[0].title


@pytest.mark.parametrize(("there", "missing"), [("arm", "masked diffusion"), ("mdm", "autoregressive")])
def test_a_family_that_is_missing_is_said(built, there, missing):
    (said,) = [each for each in foreword([run for run in built[1] if run.family == there]) if "not complete" in each]
    other = {"arm": "mdm", "mdm": "arm"}[there]
    assert f"no {missing} model is among these runs" in said
    assert f"such as twin:{other}, with the same --data" in said


def test_texts_without_passages_and_answers_say_what_they_lack(tmp_path):
    report = paper(traced("arm", tmp_path / "run", ["What floats?"]))
    keys, heads, flow, scores = (section(report, id) for id in IDS[2:])
    assert "The first text of twin:arm is too short: too few of its keys" in keys.shows
    assert "Not shown for twin:arm: the trace of 'prompt-1' has no evidence to retrieve" in heads.shows
    assert "No sample of twin:arm has one gold passage among several" in flow.shows
    assert scores.shows.startswith("No sample of these runs has answers")
    assert heads.charts == flow.charts == scores.charts == []


def test_a_trace_that_keeps_little_says_what_it_lacks(tmp_path):
    watch = fs.Watch(fields=("received",))
    report = paper(traced("mdm", tmp_path / "run", read("reading-5")[:1], watch=watch))
    for id in IDS[:-1]:
        assert "Not shown for twin:mdm: " in section(report, id).shows
        assert section(report, id).charts == []


def test_figures_are_named_after_their_sections(report, tmp_path):
    few = [replace(each, charts=each.charts[:1]) for each in report.sections]
    names = [path.name for path in write_figures(replace(report, sections=few), tmp_path, ["svg"])]
    assert names == [
        "temporal-drift-01-twin-arm-layer-0-reading-5-0.svg",
        "absorption-01-attention-on-the-first-key.svg",
        "qk-decomposition-01-twin-arm-layer-0-step-0.svg",
        "retrieval-heads-01-twin-arm-tokens-of-the-evidence-copied.svg",
        "region-flow-01-twin-arm-gold-first-2-samples.svg",
    ]


def test_the_command_writes_the_page_and_the_tables(one, tmp_path):
    page, tables = tmp_path / "r.html", tmp_path / "t"
    words = [one, "--paper", "--out", page, "--tables", tables, "--explore", 0, "--json"]
    done = CliRunner().invoke(app, ["report", *map(str, words)])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert any("no autoregressive model is among these runs" in each for each in told["summary"])
    text = page.read_text()
    assert all(f'<section id="{id}">' in text for id in IDS)
    assert 't/flow.csv"' in text

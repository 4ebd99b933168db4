"""The paper's figures from our runs: charts, numbers that match the arrays, and notes about what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.analysis.qk_decomposition import key_zscores
from floatscope.analysis.region_flow import flow
from floatscope.analysis.run_tables import RunTables
from floatscope.analysis.sample_table import gold_position, samples
from floatscope.analysis.trace_view import TraceView
from floatscope.cli.main import app
from floatscope.errors import UserError
from floatscope.reports.build import build_report, write_figures
from floatscope.reports.charts import Lines, Map, Table
from floatscope.reports.paper import build_paper_introduction
from floatscope.reports.paper.passages import build_flow_section, build_scores_section
from floatscope.reports.paper.runs import PaperRun, _build_mean_map
from floatscope.reports.report_runs import ReportRun
from floatscope.schema import KEY_STATS
from floatscope.tasks.sample_files import read_samples
from floatscope.traces import Trace

IDS = ["temporal-drift", "absorption", "qk-decomposition", "retrieval-heads", "region-flow", "scores"]
NEW_TOKENS = 3


def trace_twin(twin: str, folder: Path, samples: list, **settings: object) -> Path:
    fs.trace(fs.load(f"twin:{twin}", device="cpu"), samples, folder, new_tokens=NEW_TOKENS, **settings)
    return folder


def build_paper(*paths: Path, detector: str = "zscore"):
    return build_report(list(paths), detector, explore=0, paper=True)[0]


def find_section(report, id):
    return next(each for each in report.sections if each.id == id)


def select_charts(charts, kind):
    return [chart for chart in charts if isinstance(chart, kind)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The gold passage first, last, and first again in a text of the same length; one model has a control."""
    folder = tmp_path_factory.mktemp("runs")
    samples = [sample for i, sample in enumerate(read_samples("twin:reading-5", 16)) if i in (0, 4, 15)]
    return {twin: trace_twin(twin, folder / twin, samples, controls=(0,) * (twin == "mdm")) for twin in ("arm", "mdm")}


@pytest.fixture(scope="module")
def built(runs):
    return build_report(list(runs.values()), explore=0, paper=True)


@pytest.fixture(scope="module")
def report(built):
    return built[0]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    return trace_twin("mdm", tmp_path_factory.mktemp("one") / "one", read_samples("twin:reading-5", 1))


@pytest.fixture(scope="module")
def by_script_rule(one):
    return build_paper(one, detector="af_absorption")


def test_every_figure_has_charts_and_a_note(report):
    assert [each.id for each in report.sections] == IDS
    for each in report.sections:
        assert each.charts
        assert "**In the paper" in each.text
        assert "Not shown" not in each.text
    assert "“Revealing the Attention Floating Mechanism in Masked Diffusion Models”" in report.summary[0]
    assert not any("comparison is incomplete" in sentence for sentence in report.summary)


def test_maps_show_the_lift_of_one_sample_and_the_mean_over_equal_lengths(report, runs):
    maps = {chart.title: chart for chart in find_section(report, "temporal-drift").charts}
    run = fs.open_run(runs["mdm"])
    first, last = run.trace("reading-5-0"), run.trace("reading-5-15")
    chart = maps["twin:mdm, layer 7: reading-5-0"]
    np.testing.assert_allclose(np.array(chart.values, float), first.received(7, scale="lift"), atol=6e-3)
    anchors = np.argwhere(TraceView(first).anchors[:, -1]).tolist()
    assert [[t, k] for t, k, kind in chart.marks if kind == "anchor"] == anchors
    mean = maps["twin:mdm, layer 7: mean of 2 samples"]
    expected = (first.received(7, scale="lift") + last.received(7, scale="lift")) / 2
    np.testing.assert_allclose(np.array(mean.values, float), expected, atol=6e-3)
    is_anchor = expected.max(1) >= 2
    assert {(t, k) for t, k, kind in mean.marks if kind == "top"} == {
        (t, k) for t, k in enumerate(expected.argmax(1)) if is_anchor[t]
    }


def test_mean_map_marks_the_top_key_only_where_it_is_an_anchor():
    lift = np.array([[0.5, 1.9, 0.6], [0.1, 0.2, 2.7], [2.0, 0.5, 0.5], [np.nan, 1.0, np.nan]])
    chart = _build_mean_map("a", 3, lift, 2)
    assert chart.title == "a, layer 3: mean of 2 samples"
    assert chart.marks == [(1, 2, "top"), (2, 0, "top")]


def test_texts_of_different_lengths_have_no_mean(tmp_path):
    run = trace_twin("mdm", tmp_path / "run", ["What floats on the water?", "What sinks?"])
    section = find_section(build_paper(run), "temporal-drift")
    assert "No two samples of twin:mdm have the same length" in section.text
    assert not any("mean of" in chart.title for chart in section.charts)


@pytest.mark.parametrize(("twin", "step"), [("arm", 0), ("mdm", NEW_TOKENS // 2)])
def test_z_scores_of_keys_match_the_arrays(report, runs, twin, step):
    view = TraceView(fs.open_run(runs[twin]).trace("reading-5-0"))
    maps = [m for m in select_charts(find_section(report, "qk-decomposition").charts, Map) if m.model == f"twin:{twin}"]
    assert [m.title.split("\n")[0] for m in maps] == [f"twin:{twin}, layer {at}, step {step}" for at in (0, 4, 7)]
    for chart, layer in zip(maps, (0, 4, 7), strict=True):
        assert chart.y == ["qk", "cos", "norm"]
        eligible = np.isfinite(view.lift[step, layer, : len(chart.x)])
        for name, row in zip(chart.y, chart.values, strict=True):
            stat = view.trace.arrays["key_stats"][step, layer, KEY_STATS.index(name), : len(chart.x)].astype(float)
            expected = np.where(eligible, (stat - stat[eligible].mean()) / stat[eligible].std(), np.nan)
            np.testing.assert_allclose(np.array(row, float), expected, atol=1e-3)
        anchors = np.flatnonzero(view.anchors[step, layer])
        assert {key for _, key, _ in chart.marks} == set(anchors)
        for key in anchors[:3]:
            token = view.trace.meta["pieces"][str(view.trace.arrays["tokens"][step, key])]
            assert f"{key} {json.dumps(token, ensure_ascii=False)}" in chart.title


def test_identical_keys_have_no_z_score(runs):
    trace = fs.open_run(runs["mdm"]).trace("reading-5-0")
    flat = np.ones_like(trace.arrays["key_stats"])
    assert np.isnan(key_zscores(TraceView(replace(trace, arrays={**trace.arrays, "key_stats": flat})), 0)).all()


@pytest.mark.parametrize("step", [-1, NEW_TOKENS, 99])
def test_missing_step_is_refused(runs, step):
    view = TraceView(fs.open_run(runs["mdm"]).trace("reading-5-0"))
    with pytest.raises(UserError, match=f"'reading-5-0' has steps 0 to {NEW_TOKENS - 1}, got step {step}"):
        key_zscores(view, step)


def test_head_maps_share_a_scale_per_score(report):
    maps = select_charts(find_section(report, "retrieval-heads").charts, Map)
    assert [(m.model, m.unit) for m in maps] == [(f"twin:{t}", s) for s in ("wu_set", "mass") for t in ("arm", "mdm")]
    assert maps[0].bounds == maps[1].bounds != maps[2].bounds == maps[3].bounds
    table = select_charts(find_section(report, "retrieval-heads").charts, Table)[0]
    assert "heads > 0.1" in table.columns


def test_flow_is_grouped_by_the_position_of_the_gold_passage(report, runs):
    section = find_section(report, "region-flow")
    maps = {chart.title: chart for chart in select_charts(section.charts, Map)}
    groups = ("first, 2 samples", "last, 1 sample")
    assert list(maps) == [f"twin:{twin}: gold passage {group}" for group in groups for twin in ("arm", "mdm")]
    assert "No sample of twin:arm and twin:mdm has its gold passage in the middle." in section.text
    assert len({chart.bounds for chart in maps.values()}) == 1
    chart = maps["twin:mdm: gold passage last, 1 sample"]
    documents = [f"document {number}" for number in range(1, 6)]
    assert chart.y == ["question", *documents, "gold", "evidence", "answer", "bos", "template"]
    values = dict(zip(chart.y, chart.values, strict=True))
    assert values["gold"] == values["document 5"]
    table = flow(TraceView(fs.open_run(runs["mdm"]).trace("reading-5-4")))
    rows = table[(table["region"] == "answer") & (table["key_region"] == "question")]
    assert values["question"] == pytest.approx(rows["ratio"].tolist(), abs=6e-3)


def test_predicting_rows_are_those_of_the_samples_of_a_group(report, built):
    lines = select_charts(find_section(report, "region-flow").charts, Lines)
    assert [line.title for line in lines] == [
        f"Gold passage {place}: attention of predicting rows" for place in ("first", "last")
    ]
    of_model = [(series.model, series.control) for series in lines[1].series]
    assert of_model == [("twin:arm", False), ("twin:mdm", False), ("twin:mdm", True)]
    where = {"sample": "reading-5-4", "region": "gold"}
    assert lines[1].series[1].y == pytest.approx(built[1][1].table("predicting_rows", where)["ratio"].tolist())


def test_groups_without_samples_and_samples_without_group_are_noted(built):
    mdm = built[1][1]
    flow_text = lambda *gold: build_flow_section([replace_samples(mdm, gold_position=list(gold))]).text  # noqa: E731
    assert "No sample of twin:mdm has its gold passage first or in the middle." in flow_text("last", None, "last")
    left = "Left out of twin:mdm: 1 of 3 samples, which do not have exactly one gold passage among several."
    assert left in flow_text("last", None, "last")
    assert "No sample of twin:mdm has exactly one gold passage among several; mark it" in flow_text(None, None, None)


def replace_samples(run: ReportRun, names: tuple[str, ...] = (), **columns: object) -> PaperRun:
    """The run with other samples or results."""
    table = {
        "sample": list(names or run.run.finished),
        "passages": 5.0,
        "gold_position": None,
        "acc": 0.0,
        "f1": 0.0,
        "mean_score": 0.0,
    }
    tables = {**run.tables.tables, "samples": pd.DataFrame({**table, **columns})}
    return PaperRun(replace(run, tables=replace(run.tables, tables=tables)), [])


def trace_with_passages(documents: int, gold: list[int], **meta: object) -> Trace:
    """A trace of passages of two positions each; `gold` lists the gold ones."""
    names = [f"document {n}" for n in range(1, documents + 1)] + (["gold"] if gold else [])
    member = np.zeros((2 * documents + 1, len(names)), bool)
    for n in range(1, documents + 1):
        member[2 * n - 2 : 2 * n, [n - 1, *([documents] if n in gold else [])]] = True
    coords = {"region": (*names, "question")}
    member = np.column_stack([member, np.arange(len(member)) == len(member) - 1])
    return Trace("a", {"region_member": member}, {"region_member": ("position", "region")}, coords, meta)


@pytest.mark.parametrize(
    ("documents", "gold", "position"),
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
def test_position_of_the_gold_passage(documents, gold, position):
    trace = trace_with_passages(documents, gold)
    assert gold_position(trace) == position
    assert samples(TraceView(trace))["passages"].tolist() == [documents]


def test_scores_are_those_of_the_prediction_and_nan_without_one():
    meta = {"answers": ["Velmora"], "prediction": "Velmora city", "acc": 1.0}
    row = samples(TraceView(trace_with_passages(2, [1], **meta))).iloc[0]
    assert (row["acc"], row["f1"], row["mean_score"]) == pytest.approx((100, 200 / 3, 250 / 3))
    bare = Trace("a", {}, {}, {}, {})
    assert samples(TraceView(bare))[["passages", "acc", "f1", "mean_score"]].isna().all(axis=None)


def test_scores_are_beside_the_published_ones(report):
    scores, published = find_section(report, "scores").charts
    assert [row[:3] for row in scores.rows] == [
        ["twin:arm", "5", 3],
        ["twin:mdm", "5", 3],
        ["twin:mdm, untrained", "5", 3],
    ]
    assert published.rows[-1] == ["LLaDA", "22.52", "48.20", "+25.68"]
    assert "A gain needs runs of one model with and without passages." in find_section(report, "scores").text


@pytest.mark.parametrize(
    ("names", "gain"),
    [(("a", "b", "c"), "+66.7 [+0.0, +100.0]"), (("d", "e", "f"), "+66.7")],  # without shared questions no interval
)
def test_gain_needs_runs_with_and_without_passages(built, names, gain):
    mdm = replace(built[1][1], controls=[])
    closed = replace_samples(replace(mdm, label="closed"), ("a", "b", "c"), passages=0.0)
    with_passages = replace_samples(mdm, names, acc=[100.0, 100.0, 0.0])
    section = build_scores_section([with_passages, closed])
    scores, gains, _ = section.charts
    assert [row[:2] for row in scores.rows] == [["twin:mdm", "5"], ["closed", "closed book"]]
    assert [row[:3] for row in gains.rows] == [["twin:mdm", "5", name] for name in ("acc", "F1", "mean of both")]
    assert gains.rows[0][-1] == gain
    assert "A gain needs" not in section.text


def test_scores_are_beside_those_of_the_control(built):
    def seed(*acc: float) -> RunTables:
        table = {
            "sample": ["a", "b"],
            "passages": passages,
            "gold_position": None,
            "acc": acc,
            "f1": 0.0,
            "mean_score": 0.0,
        }
        return RunTables({"samples": pd.DataFrame(table)}, {})

    runs = []
    for passages, right in ((5.0, (100.0, 100.0)), (0.0, (100.0, 0.0))):
        run = replace(built[1][1], label=f"with {passages:.0f}", controls=[seed(0.0, 0.0), seed(0.0, passages)])
        runs.append(replace_samples(run, ("a", "b"), passages=passages, acc=list(right)))
    scores, gains, _ = build_scores_section(runs).charts
    names = [f"with {n}{control}" for n in (5, 0) for control in ("", ", untrained")]
    assert [row[:4] for row in scores.rows] == [
        [names[0], "5", 2, "100.0 [100.0, 100.0]"],
        [names[1], "5", 2, "1.2 [0.0, 5.0]"],
        [names[2], "closed book", 2, "50.0 [0.0, 100.0]"],
        [names[3], "closed book", 2, "0.0 [0.0, 0.0]"],
    ]
    of_acc = {row[0]: row[-1] for row in gains.rows if row[2] == "acc"}
    assert of_acc["twin:mdm"].startswith("+50.0 [")
    assert of_acc["twin:mdm, untrained"].startswith("+1.2 [")


def test_rule_of_the_script_is_named_where_it_is_used(by_script_rule, report):
    by_script, by_default = (find_section(each, "absorption") for each in (by_script_rule, report))
    assert "the anchors follow the same rule as in the script" in by_script.text
    assert "--detector af_absorption" in by_default.text
    for section, name in ((by_script, "af_absorption"), (by_default, "zscore(k=3.0, scale='lift')")):
        titles = [chart.title for chart in select_charts(section.charts, Lines)]
        assert titles[-2:] == [f"Attention on the anchors, {name}"] * 2
        assert isinstance(section.charts[-1], Table)


def test_detector_without_heads_leaves_only_the_canvas_maps(by_script_rule):
    section = find_section(by_script_rule, "qk-decomposition")
    assert "Not shown for twin:mdm: af_absorption does not work on single heads" in section.text
    assert [type(chart) for chart in section.charts] == [Map] * 3


def test_detector_that_cannot_fire_leaves_maps_without_anchors(one):
    report = build_paper(one, detector="zscore(k=99)")
    marks = [mark for chart in find_section(report, "temporal-drift").charts for mark in chart.marks]
    assert {kind for *_, kind in marks} == {"top", "commit"}
    assert len(select_charts(find_section(report, "absorption").charts, Lines)) == 4
    assert "no anchors" in find_section(report, "qk-decomposition").charts[0].title


@pytest.mark.parametrize(("paradigm", "missing"), [("arm", "masked diffusion"), ("mdm", "autoregressive")])
def test_missing_paradigm_is_noted(built, paradigm, missing):
    runs = [run for run in built[1] if run.paradigm == paradigm]
    (sentence,) = [each for each in build_paper_introduction(runs) if "incomplete" in each]
    other = {"arm": "mdm", "mdm": "arm"}[paradigm]
    assert f"no {missing} model is among these runs" in sentence
    assert f"such as twin:{other}, with the same --data" in sentence


def test_texts_without_passages_and_answers_are_noted(tmp_path):
    report = build_paper(trace_twin("arm", tmp_path / "run", ["What floats?"]))
    keys, heads, flow, scores = (find_section(report, id) for id in IDS[2:])
    assert "The first text of twin:arm is too short: enough rows see too few of its keys" in keys.text
    assert "Not shown for twin:arm: the trace of 'prompt-1' has no evidence" in heads.text
    assert "No sample of twin:arm has exactly one gold passage among several" in flow.text
    assert scores.text.startswith("No sample of these runs has reference answers")
    assert heads.charts == flow.charts == scores.charts == []


def test_missing_fields_are_noted(tmp_path):
    watch = fs.Watch(fields=("received",))
    report = build_paper(trace_twin("mdm", tmp_path / "run", read_samples("twin:reading-5", 1), watch=watch))
    for id in IDS[:-1]:
        assert "Not shown for twin:mdm: " in find_section(report, id).text
        assert find_section(report, id).charts == []


@pytest.mark.slow
def test_figures_are_named_after_their_sections(report, tmp_path):
    few = [replace(each, charts=each.charts[:1]) for each in report.sections]
    names = [path.name for path in write_figures(replace(report, sections=few), tmp_path, ["svg"])]
    assert names == [
        "temporal-drift-01-twin-arm-layer-0-reading-5-0.svg",
        "absorption-01-attention-on-the-first-key.svg",
        "qk-decomposition-01-twin-arm-layer-0-step-0.svg",
        "retrieval-heads-01-twin-arm-share-of-evidence-tokens-copied.svg",
        "region-flow-01-twin-arm-gold-passage-first-2-samples.svg",
    ]


def test_command_writes_the_page_and_the_tables(one, tmp_path):
    page, tables = tmp_path / "r.html", tmp_path / "t"
    words = [one, "--paper", "--out", page, "--tables", tables, "--explore", 0, "--json"]
    result = CliRunner().invoke(app, ["report", *map(str, words)])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert any("no autoregressive model is among these runs" in each for each in record["summary"])
    text = page.read_text()
    assert all(f'<section id="{id}">' in text for id in IDS)
    assert 't/flow.csv"' in text

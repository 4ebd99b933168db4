"""From runs to a report: the numbers are those of the tables, missing data is explained, mistakes are one sentence."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.analysis.anchor_tables import absorption
from floatscope.analysis.claims import CLAIMS, registry_digest, registry_line
from floatscope.analysis.floating import floating_index, top_keys
from floatscope.analysis.statistics import difference, estimate
from floatscope.cli.main import app
from floatscope.reports.build import build_report, link_tables, report, write_figures, write_report, write_tables
from floatscope.reports.charts import Dots, Lines, Map, Table
from floatscope.reports.report_runs import ReportRun
from floatscope.tasks.sample_files import read_samples
from floatscope.traces import find_controls
from pairs import slow_except

NEW_TOKENS = 6
SHORT = "twin:reading-1"  # the small models have a token for each byte


def trace_run(model: fs.Model, folder: Path, count: int = 3, data: str = "twin:reading-5", **settings: object) -> Path:
    fs.trace(model, read_samples(data, count), folder, new_tokens=NEW_TOKENS, **settings)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {t: trace_run(fs.load(f"twin:{t}", device="cpu"), folder / t, controls=(0, 1)) for t in ("arm", "mdm")}


@pytest.fixture(scope="module")
def small_runs(tmp_path_factory) -> dict[str, Path]:
    """The same of two models with two layers and random weights, for tests that build a report of their own."""
    folder, runs = tmp_path_factory.mktemp("small"), {}
    for name, layout in (("arm", "llama"), ("mdm", "llada")):
        model = fs.load(fs.write_random(folder / f"small-{name}", layout, layers=2, width=32), device="cpu")
        runs[name] = folder / name
        trace_run(model, runs[name], data=SHORT, controls=(0, 1) if name == "mdm" else (0,))
    return runs


@pytest.fixture(scope="module")
def built(runs):
    return build_report(list(runs.values()))


def find_section(contents, id):
    return next(section for section in contents.sections if section.id == id)


def test_every_question_has_its_section_and_every_chart_its_control(built):
    contents, report_runs = built
    ids = ["models", "absorption", "anchors", "floating", "maps", "depth", "predicting-rows"]
    ids += ["retrieval", "flow", "qk", "contribution", "heads", "order"]
    assert [section.id for section in contents.sections] == ids
    assert contents.title == "Where twin:arm and twin:mdm look"
    for section in contents.sections:
        assert section.charts
        for chart in section.charts:
            if isinstance(chart, Lines | Dots):
                series = {(each.model, each.control) for each in chart.series}
                assert {(m, c) for m in ("twin:arm", "twin:mdm") for c in (False, True)} >= series
                without_control = {model for model, _ in series if (model, True) not in series}
                if chart.title.startswith("Does the leader change within a text? "):
                    group = chart.title.split("? ")[1].split()[0]  # a control without any anchor has no leader
                    without_anchor = {run.label for run in report_runs if not has_anchors(run, group)}
                    assert without_control == without_anchor, chart.title
                else:
                    assert not without_control, chart.title


def has_anchors(run: ReportRun, group: str) -> bool:
    tables = run.control_tables("floating")
    return any(table.loc[table["group"] == group, "anchor_steps"].any() for table in tables)


def test_lines_of_the_first_key_are_the_estimates_of_the_tables(built, runs):
    chart = next(c for c in find_section(built[0], "absorption").charts if isinstance(c, Lines))
    for name, path in runs.items():
        own = absorption(fs.open_run(path))
        controls = [absorption(fs.open_run(folder)) for folder in find_controls(path)]
        for tables, control in (([own], False), (controls, True)):
            expected = estimate([t[t["set"] == "first"] for t in tables], "lift", ["layer"])
            (series,) = [s for s in chart.series if s.model == f"twin:{name}" and s.control is control]
            assert series.y == pytest.approx(expected["mean"].tolist())
            assert series.low == pytest.approx(expected["low"].tolist())
            assert series.high == pytest.approx(expected["high"].tolist())


def test_models_are_compared_by_paired_differences(built, runs):
    table, _ = find_section(built[0], "models").charts
    assert isinstance(table, Table)
    assert table.columns == ["", "twin:arm", "twin:mdm", "twin:mdm − twin:arm"]
    index = {name: floating_index(top_keys(fs.open_run(path))) for name, path in runs.items()}
    for name, column, group in (
        ("leader changes across texts, all rows", "across", "all"),
        ("attention moved per step, all rows", "moved", "all"),
        ("attention moved per step, predicting rows", "moved", "predicting"),
    ):
        row = next(row for row in table.rows if row[0] == name)
        arm, mdm = (index[twin][index[twin]["group"] == group] for twin in ("arm", "mdm"))
        expected = difference(mdm, arm, column).iloc[0]
        digits = 4 if column == "moved" else 2
        numbers = f"{expected['mean']:+.{digits}f}"
        if np.isfinite(expected["low"]):  # one sample has no interval
            numbers += f" [{expected['low']:+.{digits}f}, {expected['high']:+.{digits}f}]"
        assert row[3] == numbers.replace("-", "−")


def test_published_claims_have_a_verdict_and_the_registry_is_named(built, small_runs):
    section = find_section(built[0], "models")
    table = section.charts[-1]
    assert table.columns == ["claim", "measured as", "compared", "twin:mdm and twin:arm", "verdict"]
    statements = [row[0] for row in table.rows]
    assert {CLAIMS[id].statement for id in ("moved-all", "moved-predicting", "first-token-sink")} <= set(statements)
    assert set(statements) <= {claim.statement for claim in CLAIMS.values()}
    assert len(registry_digest()) == 12
    assert registry_line() in section.method
    without_arm = build_report([small_runs["mdm"], small_runs["mdm"] / "untrained-0"], explore=0)[0]
    assert not any(registry_digest() in section.method for section in without_arm.sections)


@pytest.mark.slow
def test_page_of_an_arm_and_an_mdm_prints_the_registry_digest(small_runs, tmp_path):
    page = report(list(small_runs.values()), tmp_path / "both.html", explore=0)
    assert f"digest {registry_digest()}." in page.read_text()


def test_estimate_is_that_of_the_model_its_control_and_their_difference(built, runs):
    run = built[1][1]
    where = {"set": "first", "layer": 1}
    own, *controls = (
        table[(table["set"] == "first") & (table["layer"] == 1)]
        for table in (absorption(fs.open_run(path)) for path in (runs["mdm"], *find_controls(runs["mdm"])))
    )
    value = run.estimate("absorption", "lift", where)
    intervals = (value.model, value.control, run.difference_from_control("absorption", "lift", where))
    expected = (estimate(own, "lift"), estimate(controls, "lift"), difference(own, controls, "lift"))
    for interval, row in zip(intervals, expected, strict=True):
        assert (interval.mean, interval.low, interval.high) == pytest.approx(
            tuple(row.iloc[0][["mean", "low", "high"]])
        )
    assert value.model.mean > 3 * value.control.mean


def test_summary_names_each_model_with_its_control(built):
    result, sink, moved, leader, *_ = built[0].summary
    assert result.startswith("**twin:mdm against twin:arm:** ")
    for sentence, start, mentions in (
        (sink, "**Is there a sink?** ", 1),
        (moved, "**How much attention moves** ", 2),  # all rows, predicting rows
        (leader, "**How often the leading key changes** ", 2),
    ):
        assert sentence.startswith(start)
        for name in ("twin:arm", "twin:mdm"):
            assert len(re.findall(rf"\*\*[^*]+\*\*[^*]* in {name} \([^)]*untrained ", sentence)) == mentions


def test_sentences_about_floating_state_the_estimates(built):
    _, _, moved, leader, *_ = built[0].summary
    for run in built[1]:
        for sentence, column, digits in ((moved, "moved", 1), (leader, "within", 0)):
            for group in ("all", "predicting"):
                value = run.estimate("floating", column, {"group": group})
                model, control = (
                    "no anchor" if np.isnan(each.mean) else f"{100 * each.mean:.{digits}f} %"
                    for each in (value.model, value.control)
                )
                assert f"**{model}** in {run.label} (untrained {control})" in sentence


def test_summary_drops_no_model(small_runs, tmp_path):
    """A model without any anchor, and one that does not differ from its control, are named like the others."""
    fresh = fs.untrained(fs.load(small_runs["mdm"].parent / "small-mdm", device="cpu"), seed=7)
    flat = trace_run(fresh, tmp_path / "flat", data=SHORT, controls=(0,))
    contents, report_runs = build_report([small_runs["mdm"], flat], explore=0)
    labels = [run.label for run in report_runs]
    assert len(set(labels)) == 2
    for start in ("**Is there a sink?**", "**How much attention moves**", "**How often the leading key changes**"):
        (sentence,) = [each for each in contents.summary if each.startswith(start)]
        for label in labels:
            assert f" in {label} (" in sentence, (start, label)


QUESTIONS = {
    "**Which heads retrieve the evidence?**": ("retrieval", "active", {}),
    "**What does the answer attend to?**": ("predicting_rows", "ratio", {"region": "gold"}),
    "**Angle or norm?**": ("attribution", "angle", {}),
    "**Left to right?**": ("order", "kendall", {}),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_summary_lists_every_model_and_marks_unclear_differences_from_the_control(built, question):
    contents, report_runs = built
    table, value, where = QUESTIONS[question]
    (sentence,) = [sentence for sentence in contents.summary if sentence.startswith(question)]
    for run in report_runs:
        estimated = run.estimate(table, value, where)
        is_clear = run.difference_from_control(table, value, where).excludes_zero
        mark = "" if is_clear else ", no clear difference"
        model, control = (
            f"{100 * each.mean:.0f} %" if value in ("active", "angle") else f"{each.mean:.2f}".replace("-", "−")
            for each in (estimated.model, estimated.control)
        )
        assert re.search(
            rf"\*\*{model}\*\*( of their score advantage)? in {run.label} \(untrained {control}{mark}\)",
            sentence.split("Rescaling")[0],
        )


@pytest.mark.slow
def test_runs_without_influence_are_named_beside_one_that_has_it(small_runs, tmp_path):
    model = fs.load(small_runs["mdm"].parent / "small-mdm", device="cpu")
    watch = fs.Watch(influence=True)
    with_influence = trace_run(model, tmp_path / "influence", data=SHORT, watch=watch, controls=(0,))
    contents, report_runs = build_report([small_runs["mdm"], with_influence], explore=0)
    section = find_section(contents, "influence")
    assert section.text.endswith("Not shown for small-mdm (mdm): traced without --influence.")
    assert {series.model for chart in section.charts for series in chart.series} == {"small-mdm (influence)"}
    (sentence,) = [each for each in contents.summary if each.startswith("**Does attention match influence?**")]
    assert " in small-mdm (influence) (untrained " in sentence
    is_clear = report_runs[1].difference_from_control("influence", "received").excludes_zero
    assert ("no clear difference" in sentence) is not is_clear
    assert "Not shown" not in find_section(build_report([with_influence], explore=0)[0], "influence").text


def test_maps_show_the_layers_where_most_and_least_attention_moves(built, runs):
    charts = find_section(built[0], "maps").charts
    for name, path in runs.items():
        table = fs.analysis.floating(fs.open_run(path))
        moved = table[table["group"] == "all"].groupby("layer")["moved"].mean()
        trace = fs.open_run(path).trace("reading-5-0")
        for layer, note in ((int(moved.idxmax()), "moves most"), (int(moved.idxmin()), "moves least")):
            (chart,) = [c for c in charts if c.title == f"twin:{name}, layer {layer}, {note}: reading-5-0"]
            assert isinstance(chart, Map)
            np.testing.assert_allclose(np.array(chart.values, float), trace.received(layer, scale="lift"), atol=6e-3)
            path_of_anchors = [(t, k) for t, k in enumerate(trace.anchor_path(layer).tolist()) if k >= 0]
            assert [(t, k) for t, k, kind in chart.marks if kind == "top"] == path_of_anchors
    assert len(charts) == 4


def test_all_commits_include_the_ends_of_text(built, runs):
    contents, (run,) = build_report([runs["mdm"]], explore=0, commits="all")
    answer_steps, all_steps = (
        each.table("top_keys").groupby("sample")["step"].nunique() for each in (built[1][1], run)
    )
    assert (run.commits, built[1][1].commits) == ("all", "answer")
    assert set(all_steps) == {NEW_TOKENS}
    assert (answer_steps < all_steps).all()
    assert find_section(contents, "floating").method.startswith("All steps and commits count")


def test_distances_from_the_top_key_are_beside_a_random_mask(tmp_path):
    # Questions for which the leading key of some layer is a mask for a while.
    run = trace_run(fs.load("twin:mdm", device="cpu"), tmp_path / "mdm", data="twin:unanswerable")
    contents, report_runs = build_report([run])
    table = find_section(contents, "order").charts[-1]
    assert table.columns[:5] == ["model", "commits of", "steps that count", "at the top key", "at a random mask"]
    assert [row[:2] for row in table.rows] == [["twin:mdm", "the same step"], ["twin:mdm", "the next step"]]
    coupling = report_runs[0].table("coupling")
    for lag, row in enumerate(table.rows):
        of_lag = coupling[coupling["lag"] == lag]
        assert row[2] == str(int(of_lag["steps"].sum()))
        assert len(row) == len(table.columns)


def test_tables_have_every_sample_of_every_run_and_control(built, tmp_path):
    files = write_tables(built[1], tmp_path / "tables")
    assert {path.stem for path in files} >= {"absorption", "floating", "structure"}
    assert {path.stem for path in files} == set(built[1][0].tables.tables) | set(built[1][1].tables.tables)
    table = pd.read_csv(tmp_path / "tables" / "absorption.csv", keep_default_na=False)
    pd.testing.assert_frame_equal(
        table.drop(columns=["percent", "uniform", "lift"]),
        pd.read_parquet(tmp_path / "tables" / "absorption.parquet").drop(columns=["percent", "uniform", "lift"]),
        check_dtype=False,
    )
    assert set(table["control"]) == {"", "untrained 0", "untrained 1"}
    assert len(table) == 2 * 3 * 3 * 8 * 4  # models, runs, samples, layers, sets
    linked = link_tables(built[0], tmp_path / "tables", tmp_path / "pages" / "report.html")
    assert find_section(linked, "absorption").table_file == "../tables/absorption.csv"


@pytest.mark.slow
def test_every_chart_becomes_a_figure(built, tmp_path):
    contents, _ = built
    charts = [c for section in contents.sections for c in section.charts if not isinstance(c, Table)]
    files = write_figures(contents, tmp_path, ["svg"])
    assert len(files) == len(charts) == len(set(files))
    assert all(path.read_text().startswith("<?xml") for path in files)


def test_run_without_a_control_is_named(tmp_path, small_runs):
    shutil.copytree(small_runs["mdm"], tmp_path / "bare", ignore=shutil.ignore_patterns("untrained-*"))
    contents, _ = build_report([tmp_path / "bare"])
    assert any(sentence.startswith("No untrained control for small-mdm: ") for sentence in contents.summary)
    assert "models" not in [section.id for section in contents.sections]


def test_incomplete_run_lists_its_missing_samples(tmp_path, small_runs):
    shutil.copytree(small_runs["mdm"], tmp_path / "half")
    (tmp_path / "half" / "samples" / "reading-1-1.safetensors").unlink()
    contents, _ = build_report([tmp_path / "half"])
    assert "**small-mdm** is incomplete: 1 of 3 samples are missing (reading-1-1)." in contents.summary


def test_models_of_different_depth_share_the_relative_depth(tmp_path, small_runs):
    small = fs.load(fs.write_random(tmp_path / "small", layers=3, width=32), device="cpu")
    fs.trace(small, ["What floats?", "What sinks?"], tmp_path / "run", new_tokens=4, controls=(0,))
    contents, _ = build_report([small_runs["mdm"], tmp_path / "run"], explore=0)
    assert any("the charts use relative depth" in sentence for sentence in contents.summary)
    assert any("different samples" in sentence for sentence in contents.summary)
    chart = next(c for c in find_section(contents, "absorption").charts if isinstance(c, Lines))
    assert chart.x_label == "relative depth"
    assert [len(s.x) for s in chart.series] == [2, 2, 3, 3]
    assert all(s.x[0] == 0 and s.x[-1] == 1 for s in chart.series)


def test_different_tokenizers_are_noted(tmp_path):
    runs = []
    for name, model in (("a", "twin:mdm"), ("b", fs.write_random(tmp_path / "b", layers=8, width=32))):
        runs.append(tmp_path / f"run-{name}")
        fs.trace(fs.load(model, device="cpu"), ["What floats?"], runs[-1], new_tokens=4)
    summary = build_report(runs, explore=0)[0].summary
    assert any(sentence.startswith("The models tokenize the texts differently") for sentence in summary)
    assert not any("relative depth" in sentence for sentence in summary)


def test_section_says_which_fields_a_trace_lacks(tmp_path):
    model = fs.load("twin:mdm", device="cpu")
    watch = fs.Watch(fields=("received", "uniform", "visible_rows", "eligible"))
    path = trace_run(model, tmp_path / "few", 1, watch=watch)
    contents, (run,) = build_report([path], explore=0)
    assert "retrieval" in run.tables.missing
    assert "Not shown for twin:mdm: " in find_section(contents, "predicting-rows").text
    assert find_section(contents, "absorption").charts


def test_detector_that_cannot_fire_leaves_out_only_its_tables(small_runs):
    contents, _ = build_report([small_runs["mdm"]], detector="zscore(k=99)", explore=0)
    (sentence,) = [each for each in contents.summary if each.startswith("Not measured")]
    assert sentence.startswith("Not measured for **small-mdm**: anchors, ")
    assert "because zscore(k=99) cannot fire on " in sentence
    assert find_section(contents, "floating").charts
    table = find_section(contents, "absorption").charts[-1]
    assert [row[1] for row in table.rows] == ["first", "top", "top 5"]


def test_control_without_all_samples_is_left_out_and_named(tmp_path, small_runs):
    shutil.copytree(small_runs["mdm"], tmp_path / "run")
    (tmp_path / "run" / "untrained-0" / "samples" / "reading-1-1.safetensors").unlink()
    contents, (run,) = build_report([tmp_path / "run"], explore=0)
    assert len(run.controls) == 1
    (sentence,) = [each for each in contents.summary if each.startswith("Left out: ")]
    assert sentence.startswith(
        "Left out: untrained-0 of **small-mdm**, because samples of the model are missing there; "
    )
    shutil.rmtree(tmp_path / "run" / "untrained-1" / "samples")
    contents, (run,) = build_report([tmp_path / "run"], explore=0)
    assert run.controls == []
    assert any(sentence.startswith("Left out: untrained-0 and untrained-1") for sentence in contents.summary)


def test_controls_are_measured_on_the_samples_of_the_model(tmp_path, small_runs):
    shutil.copytree(small_runs["mdm"], tmp_path / "half")
    (tmp_path / "half" / "samples" / "reading-1-1.safetensors").unlink()
    _, (run,) = build_report([tmp_path / "half"], explore=0)
    assert [set(table["sample"]) for table in run.control_tables("floating")] == [{"reading-1-0", "reading-1-2"}] * 2


@pytest.mark.parametrize("layers", slow_except([1, 2], 1))
def test_one_sample_of_a_shallow_model_has_numbers_without_intervals(tmp_path, layers):
    small = fs.load(fs.write_random(tmp_path / "small", layers=layers, width=32), device="cpu")
    fs.trace(small, ["What floats?"], tmp_path / "run", new_tokens=3, controls=(0,))
    contents, _ = build_report([tmp_path / "run"])
    assert any("too few for a reliable interval" in sentence for sentence in contents.summary)
    chart = next(c for c in find_section(contents, "absorption").charts if isinstance(c, Lines))
    assert all(low is None for series in chart.series for low in series.low)
    assert not any(re.search(r"\[[\d.−]+, [\d.−]+\]", sentence) for sentence in contents.summary)


@pytest.mark.slow
def test_two_runs_of_one_model_are_labelled_by_folder(tmp_path, small_runs):
    shutil.copytree(small_runs["mdm"], tmp_path / "again")
    _, report_runs = build_report([small_runs["mdm"], tmp_path / "again"], explore=0)
    assert [run.label for run in report_runs] == ["small-mdm (mdm)", "small-mdm (again)"]


@pytest.mark.slow
def test_report_writes_the_page_the_tables_and_the_figures(small_runs, tmp_path):
    out, counts = tmp_path / "r.html", []
    files = write_report(
        [fs.open_run(small_runs["mdm"])],
        out,
        tables=tmp_path / "t",
        figures=tmp_path / "f",
        figure_formats=("svg",),
        explore=0,
        on_progress=lambda done, total: counts.append((done, total)),
    )
    assert counts == [(done, 9) for done in range(1, 10)]  # a run and its two controls, 3 samples each
    assert files.page == out
    assert 't/absorption.csv"' in out.read_text()
    assert all(path.stat().st_size for path in (*files.tables, *files.figures))
    assert {path.suffix for path in files.figures} == {".svg"}
    assert report([str(small_runs["mdm"])], tmp_path / "one.html", explore=0) == tmp_path / "one.html"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out": "page.txt"}, "the page must end in .html, such as report.html, got page.txt"),
        ({"figure_formats": ["bmp"]}, "unknown figure format 'bmp'"),
        ({"detector": "zscor"}, "unknown detector 'zscor'"),
        ({"commits": "some"}, "unknown commits to count 'some'"),
    ],
)
def test_wrong_arguments_are_refused(small_runs, arguments, message):
    with pytest.raises(fs.UserError, match=message):
        report([small_runs["mdm"]], **arguments)


def run_command(*words: object):
    return CliRunner().invoke(app, ["report", *map(str, words)])


@pytest.mark.slow
def test_command_prints_json_or_the_summary(small_runs, tmp_path):
    page, tables = tmp_path / "r.html", tmp_path / "t"
    result = run_command(small_runs["mdm"], "--out", page, "--tables", tables, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["page"] == str(page)
    assert all(Path(path).stat().st_size for path in record["tables"])
    result = run_command(small_runs["mdm"], "--out", page)
    assert result.exit_code == 0
    assert result.stdout.rstrip().endswith(f"page: {page}")
    assert "**" not in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere"),
        (["{mdm}", "{mdm}"], "a run is given twice; give each run once"),
        (["{mdm}", "--out", "page.txt"], "report.html, got page.txt"),
        (["{mdm}", "--detector", "zscor"], "unknown detector 'zscor' (did you mean 'zscore'?)"),
        (["{mdm}", "--commits", "al"], "unknown commits to count 'al' (did you mean 'all'?)"),
        (["{mdm}", "--figure-format", "bmp", "--figures", "f"], "unknown figure format 'bmp'"),
    ],
)
def test_mistakes_are_one_sentence(small_runs, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = run_command(*(word.format(mdm=small_runs["mdm"]) for word in words))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("floatscope: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_run_without_finished_samples_is_refused(tmp_path):
    with fs.create_run(tmp_path / "empty", {"model": "m"}, ["a", "b"]):
        pass
    with pytest.raises(fs.UserError, match="has no finished sample of 2; trace them first"):
        ReportRun.open(tmp_path / "empty", "m")


def test_reports_load_no_heavy_library():
    program = (
        "import sys, floatscope.reports.build, floatscope.reports.score_table, floatscope.reports.study_report,"
        " floatscope.reports.stress_report\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib', 'scipy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

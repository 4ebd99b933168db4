"""From runs to a report: its numbers are those of the tables, what is missing is said, mistakes are one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.analysis import absorption, difference, estimate, floating_index, trace_views
from floatscope.analysis.floating import tops
from floatscope.cli.main import app
from floatscope.lab.twins.heldout import read
from floatscope.reports.build import build, linked, write_figures, write_tables
from floatscope.reports.charts import Dots, Lines, Map, Table
from floatscope.reports.compared import Compared
from floatscope.traces import controls

NEW = 6


def traced(model: fs.Model, folder: Path, count: int = 3, **settings: object) -> Path:
    samples = read("reading-5")[:count]
    list(fs.plan_trace(model, samples, folder, new_tokens=NEW, **settings))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {t: traced(fs.load(f"twin:{t}", device="cpu"), folder / t, controls=(0, 1)) for t in ("arm", "mdm")}


@pytest.fixture(scope="module")
def built(runs):
    return build(list(runs.values()))


def section(report, id):
    return next(each for each in report.sections if each.id == id)


def test_every_question_has_its_section_and_every_chart_its_control(built):
    report, _ = built
    asked = ["models", "absorption", "anchors", "floating", "maps", "depth", "reading"]
    asked += ["retrieval", "flow", "qk", "carried", "heads", "order"]
    assert [each.id for each in report.sections] == asked
    assert report.title == "Where twin:arm and twin:mdm look"
    for each in report.sections:
        assert each.charts
        for chart in each.charts:
            if isinstance(chart, Lines | Dots):
                shown = {(series.model, series.control) for series in chart.series}
                assert {(m, c) for m in ("twin:arm", "twin:mdm") for c in (False, True)} >= shown
                assert all((model, True) in shown for model, control in shown), chart.title


def test_the_lines_of_the_first_key_are_the_estimates_of_the_tables(built, runs):
    chart = next(c for c in section(built[0], "absorption").charts if isinstance(c, Lines))
    for name, path in runs.items():
        own = absorption(fs.open_run(path))
        others = [absorption(fs.open_run(each)) for each in controls(path)]
        for tables, control in (([own], False), (others, True)):
            told = estimate([t[t["set"] == "first"] for t in tables], "lift", ["layer"])
            (series,) = [s for s in chart.series if s.model == f"twin:{name}" and s.control is control]
            assert series.y == pytest.approx(told["mean"].tolist())
            assert series.low == pytest.approx(told["low"].tolist())
            assert series.high == pytest.approx(told["high"].tolist())


def test_models_are_compared_sample_by_sample(built, runs):
    (table,) = section(built[0], "models").charts
    assert isinstance(table, Table)
    assert table.columns == ["", "twin:arm", "twin:mdm", "twin:mdm − twin:arm"]
    row = next(row for row in table.rows if row[0] == "floating across texts")
    index = {
        name: floating_index(pd.concat([tops(look) for look in trace_views(fs.open_run(path))]))
        for name, path in runs.items()
    }
    apart = difference(index["mdm"], index["arm"], "across").iloc[0]
    assert row[3] == f"{apart['mean']:+.2f} [{apart['low']:+.2f}, {apart['high']:+.2f}]"


def test_a_number_is_the_models_its_controls_and_their_difference(built, runs):
    run = built[1][1]
    where = {"set": "first", "layer": 1}
    own, *others = (
        table[(table["set"] == "first") & (table["layer"] == 1)]
        for table in (absorption(fs.open_run(path)) for path in (runs["mdm"], *controls(runs["mdm"])))
    )
    number = run.number("absorption", "lift", where)
    wanted = (estimate(own, "lift"), estimate(others, "lift"), difference(own, others, "lift"))
    for found, told in zip((number.own, number.control, run.beyond("absorption", "lift", where)), wanted, strict=True):
        assert (found.mean, found.low, found.high) == pytest.approx(tuple(told.iloc[0][["mean", "low", "high"]]))
    assert number.own.mean > 3 * number.control.mean


def test_the_summary_names_each_model_with_its_control(built):
    said = " ".join(built[0].summary[:4])  # the sink; whether it moves; a verdict for each
    for name in ("twin:arm", "twin:mdm"):
        assert said.count(f"in {name} (") == 3  # the sink, within, across
        assert f"the top key of {name} moves" in said
    assert said.count("untrained") == 6


NEWER = {
    "**Which heads read the evidence?**": ("retrieval", "active", {}),
    "**What flows into the answer?**": ("flow", "ratio", {"region": "answer", "key_region": "question"}),
    "**Angle or norm?**": ("attribution", "angle", {}),
    "**From left to right?**": ("order", "kendall", {}),
}


@pytest.mark.parametrize("question", NEWER)
def test_the_summary_tells_what_is_surely_apart_from_the_control(built, question):
    report, compared = built
    table, value, where = NEWER[question]
    sure = [run for run in compared if run.beyond(table, value, where).sure]
    said = [sentence for sentence in report.summary if sentence.startswith(question)]
    assert len(said) == bool(sure)
    percent = value in ("active", "angle")
    for run in sure:
        number = run.number(table, value, where)
        own, control = (
            f"{100 * each.mean:.0f} %" if percent else f"{each.mean:.2f}".replace("-", "−")
            for each in (number.own, number.control)
        )
        assert f"**{own}** in {run.label} (untrained {control})" in said[0]
    for run in compared:
        assert (run in sure) == any(f" in {run.label} (" in sentence.split(";")[0] for sentence in said)


def test_runs_without_influence_are_named_beside_one_that_has_it(runs, tmp_path):
    model = fs.load("twin:mdm", device="cpu")
    moved = traced(model, tmp_path / "moved", watch=fs.Watch(influence=True), controls=(0,))
    report, compared = build([*runs.values(), moved], explore=0)
    shown = section(report, "influence")
    assert shown.shows.endswith("Not shown for twin:arm and twin:mdm (mdm): traced without --influence.")
    assert {series.model for chart in shown.charts for series in chart.series} == {"twin:mdm (moved)"}
    assert (compared[2].beyond("influence", "received").sure) == any(
        sentence.startswith("**Does attention move what is written?**") for sentence in report.summary
    )
    assert "Not shown" not in section(build([moved], explore=0)[0], "influence").shows


def test_a_map_shows_the_lift_of_its_trace(built, runs):
    chart = next(c for c in section(built[0], "maps").charts if c.title.startswith("twin:mdm, layer 7"))
    assert isinstance(chart, Map)
    trace = fs.open_run(runs["mdm"]).trace("reading-5-0")
    np.testing.assert_allclose(np.array(chart.values, float), trace.received(7, scale="lift"), atol=6e-3)
    assert [(t, k) for t, k, kind in chart.marks if kind == "top"] == list(enumerate(trace.top_key(7).tolist()))


def test_tables_hold_every_sample_of_every_run_and_control(built, tmp_path):
    written = write_tables(built[1], tmp_path / "tables")
    assert {path.stem for path in written} >= {"absorption", "floating", "structure", "answer_rows", "heads"}
    table = pd.read_csv(tmp_path / "tables" / "absorption.csv", keep_default_na=False)
    pd.testing.assert_frame_equal(
        table.drop(columns=["percent", "uniform", "lift"]),
        pd.read_parquet(tmp_path / "tables" / "absorption.parquet").drop(columns=["percent", "uniform", "lift"]),
        check_dtype=False,
    )
    assert set(table["control"]) == {"", "untrained 0", "untrained 1"}
    assert len(table) == 2 * 3 * 3 * 8 * 4  # models, runs, samples, layers, sets
    named = linked(built[0], tmp_path / "tables", tmp_path / "pages" / "report.html")
    assert section(named, "absorption").table_name == "../tables/absorption.csv"


def test_figures_are_drawn_for_every_chart(built, tmp_path):
    report, _ = built
    charts = [c for each in report.sections for c in each.charts if not isinstance(c, Table)]
    written = write_figures(report, tmp_path, ["svg"])
    assert len(written) == len(charts) == len(set(written))
    assert all(path.read_text().startswith("<?xml") for path in written)


def test_a_run_without_a_control_is_told_so(tmp_path, runs):
    shutil.copytree(runs["mdm"], tmp_path / "bare", ignore=shutil.ignore_patterns("untrained-*"))
    report, _ = build([tmp_path / "bare"])
    assert any(each.startswith("There is no untrained control beside twin:mdm: ") for each in report.summary)
    assert "models" not in [each.id for each in report.sections]


def test_a_half_written_run_says_what_is_missing(tmp_path, runs):
    shutil.copytree(runs["mdm"], tmp_path / "half")
    (tmp_path / "half" / "samples" / "reading-5-1.safetensors").unlink()
    report, _ = build([tmp_path / "half"])
    assert "**twin:mdm** is not finished: 1 of 3 samples are missing (reading-5-1)." in report.summary


def test_models_of_other_depth_are_drawn_by_relative_depth(tmp_path, runs):
    small = fs.load(fs.write_random(tmp_path / "small", layers=3, width=32), device="cpu")
    list(fs.plan_trace(small, ["What floats?", "What sinks?"], tmp_path / "run", new_tokens=12, controls=(0,)))
    report, _ = build([runs["mdm"], tmp_path / "run"])
    assert any("drawn by relative depth" in sentence for sentence in report.summary)
    assert any("different samples" in sentence for sentence in report.summary)
    chart = next(c for c in section(report, "absorption").charts if isinstance(c, Lines))
    assert chart.x_label == "relative depth"
    assert [len(s.x) for s in chart.series] == [8, 8, 3, 3]
    assert all(s.x[0] == 0 and s.x[-1] == 1 for s in chart.series)


def test_models_of_other_tokenizers_are_told_so(tmp_path):
    runs = []
    for name, model in (("a", "twin:mdm"), ("b", fs.write_random(tmp_path / "b", layers=8, width=32))):
        runs.append(tmp_path / f"run-{name}")
        list(fs.plan_trace(fs.load(model, device="cpu"), ["What floats?"], runs[-1], new_tokens=12))
    said = build(runs, explore=0)[0].summary
    assert any(each.startswith("The models cut texts into different tokens") for each in said)
    assert not any("relative depth" in each for each in said)


def test_what_a_trace_does_not_hold_is_said_where_it_would_be(tmp_path):
    model = fs.load("twin:mdm", device="cpu")
    watch = fs.Watch(fields=("received", "uniform", "seen", "eligible"))
    run = traced(model, tmp_path / "few", 1, watch=watch)
    report, (compared,) = build([run], explore=0)
    assert "heads" in compared.measured.missing
    assert "Not shown for twin:mdm: " in section(report, "reading").shows
    assert section(report, "absorption").charts


def test_a_detector_that_cannot_fire_is_said_and_the_rest_is_shown(runs):
    report, _ = build([runs["mdm"]], detector="zscore(k=99)", explore=0)
    (said,) = [sentence for sentence in report.summary if sentence.startswith("Not measured")]
    assert said.startswith("Not measured for **twin:mdm**: anchors, identity, ")
    assert "because zscore(k=99) cannot fire on " in said
    assert section(report, "floating").charts
    table = section(report, "absorption").charts[-1]
    assert [row[1] for row in table.rows] == ["first", "top", "top 5"]


def test_a_control_that_lacks_samples_is_left_out_and_named(tmp_path, runs):
    shutil.copytree(runs["mdm"], tmp_path / "run")
    (tmp_path / "run" / "untrained-0" / "samples" / "reading-5-1.safetensors").unlink()
    report, (compared,) = build([tmp_path / "run"], explore=0)
    assert len(compared.controls) == 1
    (said,) = [each for each in report.summary if each.startswith("Left out: ")]
    assert said.startswith("Left out: untrained-0 of **twin:mdm**, which lacks samples the model has; ")
    shutil.rmtree(tmp_path / "run" / "untrained-1" / "samples")
    report, (compared,) = build([tmp_path / "run"], explore=0)
    assert compared.controls == []
    assert any(each.startswith("Left out: untrained-0 and untrained-1") for each in report.summary)


def test_controls_are_measured_on_the_samples_the_model_has(tmp_path, runs):
    shutil.copytree(runs["mdm"], tmp_path / "half")
    (tmp_path / "half" / "samples" / "reading-5-1.safetensors").unlink()
    _, (compared,) = build([tmp_path / "half"], explore=0)
    assert [set(each["sample"]) for each in compared.control_tables("floating")] == [{"reading-5-0", "reading-5-2"}] * 2


@pytest.mark.parametrize("layers", [1, 2])
def test_one_sample_of_a_shallow_model_has_numbers_and_no_intervals(tmp_path, layers):
    small = fs.load(fs.write_random(tmp_path / "small", layers=layers, width=32), device="cpu")
    list(fs.plan_trace(small, ["What floats?"], tmp_path / "run", new_tokens=3, controls=(0,)))
    report, _ = build([tmp_path / "run"])
    assert any("too few for an interval" in each for each in report.summary)
    chart = next(c for c in section(report, "absorption").charts if isinstance(c, Lines))
    assert all(low is None for series in chart.series for low in series.low)
    assert not any("moves less" in each or "moves more" in each for each in report.summary)


def test_two_runs_of_one_model_are_told_apart(tmp_path, runs):
    shutil.copytree(runs["mdm"], tmp_path / "again")
    assert [run.label for run in build([runs["mdm"], tmp_path / "again"], explore=0)[1]] == [
        "twin:mdm (mdm)",
        "twin:mdm (again)",
    ]


def ask(*words: object):
    return CliRunner().invoke(app, ["report", *map(str, words)])


def test_the_command_writes_the_page_the_tables_and_the_figures(runs, tmp_path):
    page, tables, figures = tmp_path / "r.html", tmp_path / "t", tmp_path / "f"
    done = ask(*runs.values(), "--out", page, "--tables", tables, "--figures", figures, "--format", "png", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["page"] == str(page)
    assert 't/absorption.csv"' in page.read_text()
    assert all(Path(path).stat().st_size for path in told["tables"] + told["figures"])
    words = ask(*runs.values(), "--out", page)
    assert words.exit_code == 0
    assert words.stdout.rstrip().endswith(f"page: {page}")
    assert "**" not in words.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere"),
        (["{mdm}", "{mdm}"], "a run is given twice; give each once"),
        (["{mdm}", "--out", "page.txt"], "--out names the page, such as report.html, got page.txt"),
        (["{mdm}", "--detector", "zscor"], "unknown detector 'zscor' (did you mean 'zscore'?)"),
        (["{mdm}", "--format", "bmp", "--figures", "f"], "unknown format 'bmp'"),
    ],
)
def test_mistakes_are_one_sentence(runs, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    done = ask(*(word.format(mdm=runs["mdm"]) for word in words))
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("floatscope: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_run_with_nothing_finished_is_refused(tmp_path):
    with fs.create_run(tmp_path / "empty", {"model": "m"}, ["a", "b"]):
        pass
    with pytest.raises(fs.UserError, match="has no finished sample of 2; trace them first"):
        Compared.of(tmp_path / "empty", "m", "zscore")

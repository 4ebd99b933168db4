"""`floatscope study`: run, resumed, summarised."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.analysis.evaluations import open_evaluation
from floatscope.analysis.studies import is_dormant
from floatscope.cli.main import app
from floatscope.reports.charts import Map
from floatscope.reports.study_report import build_study_report
from floatscope.tasks.sample_files import read_samples, write_samples


@pytest.fixture
def data(tmp_path):
    write_samples(tmp_path / "reading-5.jsonl", read_samples("twin:reading-5", 10))
    return tmp_path / "reading-5.jsonl"


def run(*words, code=0):
    result = CliRunner().invoke(app, ["study", *map(str, words)], env={"COLUMNS": "120"})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_a_small_study_prints_its_effects_and_resumes(data, tmp_path):
    model = fs.write_random(tmp_path / "small", layers=2, width=32)
    words = ["sinks", model, "--data", data, "--limit", 2, "--new-tokens", 2, "--out", tmp_path / "s"]
    words += ["--set", "counts=1", "--set", "draws=1", "--set", "types=none"]
    output = run(*words)
    assert "small, 1:" in output
    assert "equal mass" in output
    assert (tmp_path / "s" / "report.html").stat().st_size > 1000
    names = {"baseline", "anchors-1", "anchors-1-mass-0", "anchors-1-random-0", "middle-1"}
    (folder,) = {path.parent.parent for path in (tmp_path / "s").glob("*/*/predictions.jsonl")}
    assert {path.name for path in folder.iterdir() if path.is_dir()} == names
    before = {name: (folder / name / "predictions.jsonl").read_bytes() for name in names}
    record = json.loads(run(*words, "--json"))
    assert {name: (folder / name / "predictions.jsonl").read_bytes() for name in names} == before
    assert {row["condition"] for row in record["effects"]} == names


@pytest.mark.slow
def test_sinks_prints_a_table_and_a_finding_for_each_model(data, tmp_path):
    words = ["sinks", "twin:mdm", "twin:arm", "--data", data, "--limit", 2, "--new-tokens", 4, "--out", tmp_path / "s"]
    words += ["--set", "counts=2", "--set", "draws=1", "--set", "types=structural"]
    output = run(*words)
    for model in ("twin:mdm", "twin:arm"):
        assert f"{model}, 2:" in output
    assert "middle-2" in output
    assert "equal mass" in output
    assert "equal count" in output
    assert (tmp_path / "s" / "report.html").stat().st_size > 1000
    folder = tmp_path / "s" / "twin-mdm"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {
        "baseline", "anchors-2", "anchors-2-mass-0", "anchors-2-random-0", "middle-2",
        "anchors-2-structural", "anchors-2-structural-mass-0",
    }  # fmt: skip
    table = pd.read_csv(tmp_path / "s" / "effects.csv").set_index(["model", "condition"])
    own, control = (open_evaluation(folder / name).table["acc"] for name in ("anchors-2", "anchors-2-mass-0"))
    assert table.loc[("twin:mdm", "anchors-2"), "acc_effect"] == pytest.approx(own.mean() - control.mean())
    before = (folder / "anchors-2" / "predictions.jsonl").read_bytes()
    record = json.loads(run(*words, "--json"))  # resumes, and changes nothing
    assert (folder / "anchors-2" / "predictions.jsonl").read_bytes() == before
    assert len(record["findings"]) == 4  # by number and by type
    assert len(record["effects"]) == 14


@pytest.mark.slow
def test_heads_traces_some_samples_and_zeroes_heads_on_the_others(data, tmp_path):
    record = json.loads(run("heads", "twin:arm", "--data", data, "--new-tokens", 4, "--out", tmp_path / "h", "--set",
                          "counts=2", "--set", "draws=1", "--json"))  # fmt: skip
    assert "heads are found on 8 samples" in record["notes"]["twin:arm"][0]
    assert {row["n"] for row in record["effects"]} == {2}
    assert (tmp_path / "h" / "twin-arm" / "traced" / "run.json").exists()


@pytest.mark.slow
def test_dormant_maps_the_heads_and_counts_the_dormant_ones(data, tmp_path):
    words = ["dormant", "twin:arm", "--data", data, "--limit", 2, "--new-tokens", 4, "--out", tmp_path / "d"]
    output = run(*words, "--set", "layers=0,3")
    assert "of 16 heads of twin:arm are dormant by loss" in output
    table = pd.read_csv(tmp_path / "d" / "effects.csv")
    charts = build_study_report("dormant", [tmp_path / "d" / "twin-arm"]).sections[0].charts
    change, asleep = (chart for chart in charts if isinstance(chart, Map))
    assert change.y == asleep.y == [0, 3]
    assert change.values[1][5] == pytest.approx(table.set_index("condition").loc["head-3-5", "nll_change"])
    assert sum(map(sum, asleep.values)) == int(is_dormant(table).sum())


@pytest.mark.slow
def test_blank_finds_that_the_gold_passage_matters(data, tmp_path):
    record = json.loads(run("blank", "twin:arm", "--data", data, "--limit", 2, "--new-tokens", 4, "--out",
                          tmp_path / "b", "--set", "draws=1", "--json"))  # fmt: skip
    conditions = {row["condition"]: row for row in record["effects"]}
    assert conditions["gold"]["nll_change"] > conditions["bos"]["nll_change"]
    assert "acc" not in conditions["gold"]
    assert record["findings"][0].startswith("most missed by twin:arm: ")


def test_mistakes_are_reported_before_a_model_is_opened(data, tmp_path):
    words = ["twin:arm", "--data", data, "--out", tmp_path / "x"]
    assert "unknown study" in run("sink", *words, code=2)
    assert "option of sinks" in run("sinks", *words, "--set", "k=3", code=2)
    assert not (tmp_path / "x").exists()

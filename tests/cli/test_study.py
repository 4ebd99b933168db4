"""`floatscope study`: run, gone on with, read."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from typer.testing import CliRunner

from floatscope.analysis.evaluations import open_evaluation
from floatscope.analysis.studies import is_dormant
from floatscope.cli.main import app
from floatscope.lab.twins.heldout import read, write
from floatscope.reports.charts import Map
from floatscope.reports.studied import studied


@pytest.fixture
def data(tmp_path):
    write(tmp_path / "reading-5.jsonl", read("reading-5")[:10])
    return tmp_path / "reading-5.jsonl"


def run(*words, code=0):
    result = CliRunner().invoke(app, ["study", *map(str, words)], env={"COLUMNS": "120"})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_sinks_of_two_models_in_a_table_and_a_sentence_each(data, tmp_path):
    words = ["sinks", "twin:mdm", "twin:arm", "--data", data, "--limit", 2, "--new-tokens", 4, "--out", tmp_path / "s"]
    words += ["--set", "counts=2", "--set", "draws=1"]
    said = run(*words)
    for model in ("twin:mdm", "twin:arm"):
        assert f"costs {model}" in said
    assert "middle-2" in said
    assert (tmp_path / "s" / "report.html").stat().st_size > 1000
    folder = tmp_path / "s" / "twin-mdm"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {
        "baseline", "anchors-2", "anchors-2-random-0", "middle-2"
    }  # fmt: skip
    table = pd.read_csv(tmp_path / "s" / "effects.csv").set_index(["model", "arm"])
    own, control = (open_evaluation(folder / name).table["acc"] for name in ("anchors-2", "anchors-2-random-0"))
    assert table.loc[("twin:mdm", "anchors-2"), "acc_effect"] == pytest.approx(own.mean() - control.mean())
    before = (folder / "anchors-2" / "predictions.jsonl").read_bytes()
    told = json.loads(run(*words, "--json"))  # goes on with what is there
    assert (folder / "anchors-2" / "predictions.jsonl").read_bytes() == before
    assert len(told["found"]) == 2
    assert len(told["effects"]) == 8


def test_heads_are_found_traced_and_zeroed(data, tmp_path):
    told = json.loads(run("heads", "twin:arm", "--data", data, "--new-tokens", 4, "--out", tmp_path / "h", "--set",
                          "counts=2", "--set", "draws=1", "--json"))  # fmt: skip
    assert "heads are found on 8 samples" in told["notes"]["twin:arm"][0]
    assert {row["n"] for row in told["effects"]} == {2}
    assert (tmp_path / "h" / "twin-arm" / "traced" / "run.json").exists()


def test_heads_are_mapped_and_those_that_are_dormant_counted(data, tmp_path):
    said = run("dormant", "twin:arm", "--data", data, "--limit", 2, "--new-tokens", 4, "--out", tmp_path / "d", "--set",
               "layers=0,3")  # fmt: skip
    assert "of 16 heads of twin:arm are dormant by loss" in said
    table = pd.read_csv(tmp_path / "d" / "effects.csv")
    charts = studied("dormant", [tmp_path / "d" / "twin-arm"]).sections[0].charts
    change, asleep = (chart for chart in charts if isinstance(chart, Map))
    assert change.y == asleep.y == [0, 3]
    assert change.values[1][5] == pytest.approx(table.set_index("arm").loc["head-3-5", "nll_change"])
    assert sum(map(sum, asleep.values)) == int(is_dormant(table).sum())


def test_the_gold_passage_is_missed(data, tmp_path):
    told = json.loads(run("blank", "twin:arm", "--data", data, "--limit", 2, "--new-tokens", 4, "--out",
                          tmp_path / "b", "--set", "draws=1", "--json"))  # fmt: skip
    arms = {row["arm"]: row for row in told["effects"]}
    assert arms["gold"]["nll_change"] > arms["bos"]["nll_change"]
    assert "acc" not in arms["gold"]
    assert told["found"][0].startswith("most missed by twin:arm: ")


def test_what_is_wrong_is_said_before_a_model_is_opened(data, tmp_path):
    words = ["nowhere", "--data", data, "--out", tmp_path / "x"]
    assert "unknown study" in run("sink", *words, code=2)
    assert "option of sinks" in run("sinks", *words, "--set", "k=3", code=2)
    assert not (tmp_path / "x").exists()

"""A stress test: an evaluation for each point on the same questions, a curve, a page."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.main import app
from floatscope.errors import UserError
from floatscope.evaluating import open_evaluation
from floatscope.stressing import curve, gap, stress
from floatscope.twins.heldout import read


@pytest.fixture(scope="module")
def arm():
    return fs.load("twin:arm", device="cpu")


def test_the_gold_passage_moves_and_nothing_else(arm, tmp_path):
    made = stress(arm, read("reading-5")[:4], tmp_path / "place", "position", new_tokens=6)
    met = [point.name for point, _ in made]
    assert set(met) == {"gold-0", "gold-1", "gold-2", "gold-3", "gold-4", "closed-book", "oracle", "shuffled"}
    assert made.finished == made.total == 4 * 8
    assert list(stress(arm, read("reading-5")[:4], tmp_path / "place", "position", new_tokens=6)) == []
    table = curve([tmp_path / "place"]).set_index("name")
    for name in met:
        own = open_evaluation(tmp_path / "place" / name).table
        assert table.loc[name, "acc"] == own["acc"].mean()
        assert set(own["sample"]) == {sample.id for sample in read("reading-5")[:4]}
    assert table.loc["gold-2", "acc"] > table.loc["closed-book", "acc"]
    own = open_evaluation(tmp_path / "place" / "gold-1").table
    lift = (own["gold_mass"] / own["gold_share"]).mean()
    assert table.loc["gold-1", "gold_lift"] == pytest.approx(lift)


def test_gaps_by_hand():
    rows = [("m", "s", value, acc) for value, acc in enumerate([0.9, 0.5, 0.7, 1.0])] + [("m", "s", None, 0.0)]
    table = pd.DataFrame(rows, columns=["model", "series", "value", "acc"])
    (row,) = gap(table).itertuples()
    assert (row.best, row.worst, row.gap) == (1.0, 0.5, 0.5)
    assert row.dip == pytest.approx(0.95 - 0.5)


def test_the_command_draws_models_together(tmp_path):
    data = tmp_path / "few.jsonl"
    data.write_text("".join(json.dumps(sample.as_json()) + "\n" for sample in read("reading-5")[:3]))
    words = ["stress", "twin:arm", "twin:mdm", "--data", str(data), "--kind", "query", "--new-tokens", "6"]
    said = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out"), "--set", "placements=before,after"])
    assert said.exit_code == 0, said.output
    assert "twin:mdm" in said.output
    table = pd.read_csv(tmp_path / "out" / "curve.csv")
    assert table[["model", "name"]].to_numpy().tolist() == [
        [model, name] for model in ("twin:arm", "twin:mdm") for name in ("before", "after")
    ]
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


def test_mistakes_are_one_sentence(arm, tmp_path):
    with pytest.raises(UserError, match="unknown"):
        stress(arm, read("reading-5")[:3], tmp_path / "x", "posittion")
    with pytest.raises(UserError, match="holds no stress test"):
        curve([tmp_path])
    missing, out = str(tmp_path / "no.jsonl"), str(tmp_path / "o")
    wrong = CliRunner().invoke(app, ["stress", "twin:arm", "--data", missing, "--kind", "noise", "--out", out])
    assert wrong.exit_code == 2

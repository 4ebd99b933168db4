"""The pair study: verdicts follow their rules, and the runs of two tiny models become a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import floatscope as fs

STUDIES = Path(__file__).parent.parent / "studies"
PLACES = {"Mira": "Rome", "Tom": "Bonn", "Ilse": "Lyon", "Aron": "Oslo", "Dana": "Kyiv", "Otto": "Bern"}


@pytest.fixture(autouse=True)
def _studies_on_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(STUDIES / "pair"), str(STUDIES), *sys.path])


def make_estimate(low, high):
    from verdicts import Estimate

    return Estimate((low + high) / 2, low, high, 24)


def test_verdict_follows_from_the_interval_and_the_margin():
    from verdicts import judge

    assert judge(make_estimate(0.01, 0.20), 0.05) == "supported"
    assert judge(make_estimate(0.01, 0.02), 0.05) == "supported, within the margin"
    assert judge(make_estimate(-0.20, -0.01), 0.05) == "contradicted"
    assert judge(make_estimate(-0.02, -0.01), 0.05) == "contradicted, within the margin"
    assert judge(make_estimate(-0.20, -0.01), 0.05, is_threshold=True) == "not supported"
    assert judge(make_estimate(-0.04, 0.04), 0.05) == "not supported: no difference beyond the margin"
    assert judge(make_estimate(-0.06, 0.04), 0.05) == "not supported: no gain beyond the margin"
    assert judge(make_estimate(-0.04, 0.06), 0.05) == "inconclusive"
    assert judge(make_estimate(0.0, 0.0), 0.05) == "inconclusive: no variation between questions"
    assert judge(make_estimate(np.nan, np.nan), 0.05) == "inconclusive: not measured"
    assert judge(make_estimate(0.1, 0.2), 0.05, "both are at the ceiling") == "inconclusive: both are at the ceiling"


def test_scores_at_the_floor_or_the_ceiling_are_inconclusive():
    from verdicts import find_limit

    names = ["arm before", "arm after", "mdm before", "mdm after"]
    assert find_limit(pd.Series([0.5, 0.6, 0.3, 0.2], names)) == ""
    assert find_limit(pd.Series([0.0, 0.99, 0.1, 0.98], names)) == "both are at the ceiling"
    assert find_limit(pd.Series([0.99, 0.7, 0.99, 0.98], names)) == ""
    assert find_limit(pd.Series([0.5, 0.3, 0.04, 0.01], names)) == "the MDM is at the floor"


def test_bootstrap_gives_the_interval_of_statistics_bootstrap():
    from verdicts import bootstrap

    arm = np.tile([0.0, 1.0], 50)
    table = pd.DataFrame({"arm": arm, "mdm": 0.5 * arm})
    ratio = bootstrap(table, lambda m: m["mdm"] / m["arm"])
    assert (ratio.mean, ratio.low, ratio.high, ratio.n) == pytest.approx((0.5, 0.5, 0.5, 100))
    mean = bootstrap(table, lambda m: m["arm"])
    assert mean.low == pytest.approx(0.4, abs=0.02)
    assert mean.high == pytest.approx(0.6, abs=0.02)
    assert bootstrap(table.iloc[:0], lambda m: m["arm"]).n == 0


FLOATS = {"arm": 0.1, "arm untrained": 0.1, "mdm": 0.5, "mdm untrained": 0.3}
READS = {"arm": 0.1, "arm untrained": 0.0, "mdm": 0.5, "mdm untrained": 0.0}
SINKS = {"arm": 40.0, "arm untrained": 1.0, "mdm": 2.0, "mdm untrained": 1.0}
BEARS = {"arm before": 0.5, "arm after": 0.2, "mdm before": 0.5, "mdm after": 0.4}
GAINS = {"arm before": 0.1, "arm after": 0.2, "mdm before": 0.1, "mdm after": 0.5}
PLACED = {f"{who} {place}": score for who in ("arm", "mdm") for place, score in enumerate((0.4, 0.5, 0.5, 0.5, 0.5))}
HURT = {"arm control": 1.0, "arm edited": 3.0, "mdm control": 1.0, "mdm edited": 1.5}
LOST = {"arm control": 0.8, "arm edited": 0.2, "mdm control": 0.8, "mdm edited": 0.6}
COPIES = {("arm", 0, 0): 1.0, ("arm", 0, 1): 0.0, ("mdm", 0, 0): 0.5, ("mdm", 0, 1): 0.5}
TRUE_WHEN = {  # (beginning of the claim, beginning of its measure) → means for which it is true
    ("The first token is less of a sink", ""): SINKS,
    ("Anchors are dispersed", ""): SINKS,
    ("Anchors float over steps", ""): FLOATS,
    ("The anchor set changes over steps", ""): FLOATS,
    ("The position of the top key varies between texts", ""): FLOATS,
    ("Anchors float over layers", ""): FLOATS,
    ("Shallow layers attend to structure, deep layers to content", ""): READS,
    ("Deep layers attend to the gold passage", ""): READS,
    ("Predicting rows distinguish the gold passage from others", ""): READS,
    ("MDMs gain more from passages", ""): GAINS,
    ("MDMs are more robust to distractors", ""): BEARS,
    ("MDMs are less sensitive to the position of the gold passage", "score retained"): BEARS,
    ("MDMs are less sensitive to the position of the gold passage", "best − worst"): PLACED | {"arm 0": 0.1},
    ("MDMs are less sensitive to the position of the question", ""): BEARS,
    ("Masking", "NLL"): HURT,
    ("Masking", "points lost"): LOST,
    ("MDMs need", "NLL"): {"mdm control": 1.0, "mdm edited": 1.5},
    ("MDMs need", "points lost"): {"mdm control": 0.8, "mdm edited": 0.6},
    ("Retrieval is spread over more heads", ""): COPIES,
    ("MDMs depend less on their retrieval heads", "NLL"): HURT,
}


def swap_paradigms(means: dict) -> dict:
    """Return the means with ARM and MDM exchanged."""
    other = {"arm": "mdm", "mdm": "arm"}
    names = {of: (other[of[0]], *of[1:]) if isinstance(of, tuple) else other[of[:3]] + of[3:] for of in means}
    return {names[of]: value for of, value in means.items()}


def test_every_tested_number_is_positive_if_the_claim_is_true_and_negative_with_the_models_exchanged():
    """A test with the wrong sign would invert its verdict."""
    from paper_claims import CLAIMS

    statement, used = "", set()
    for claim in CLAIMS:
        statement = statement if claim.statement.startswith("…") else claim.statement
        (key,) = (k for k in TRUE_WHEN if statement.startswith(k[0]) and claim.measure.startswith(k[1]))
        used.add(key)
        assert float(claim.difference(pd.DataFrame(TRUE_WHEN[key], index=[0])).iloc[0]) > 0, (
            claim.statement,
            claim.measure,
        )
        if "ARM" in claim.tested:
            false = pd.DataFrame(swap_paradigms(TRUE_WHEN[key]), index=[0])
            assert float(claim.difference(false).iloc[0]) < 0, (claim.statement, claim.measure)
    assert used == set(TRUE_WHEN)


def test_ratios_without_the_first_token(tmp_path):
    from paper_claims import content, gold, gold_preference
    from trace_tables import read_table

    where = {"sample": "a", "layer": 0, "depth": 0.0}
    (pd.DataFrame([{**where, "set": "content", "share": 0.3, "base": 0.45, "contribution": 0.4}])).to_parquet(
        tmp_path / "structure.parquet"
    )
    first = {**where, "set": "first", "percent": 40.0, "uniform": 10.0, "contribution": 20.0}
    pd.DataFrame([first, {**first, "set": "top", "percent": 90.0}]).to_parquet(tmp_path / "absorption.parquet")
    regions = {"bos": (0.5, 0.0), "gold": (0.2, 0.1), "other documents": (0.2, 0.3), "question": (0.1, 0.6)}
    rows = [{**where, "region": name, "mass": mass, "base": base} for name, (mass, base) in regions.items()]
    pd.DataFrame(rows).to_parquet(tmp_path / "predicting_rows.parquet")
    with pytest.raises(fs.UserError, match="not finished"):
        read_table(tmp_path, "structure")
    (tmp_path / "run.json").write_text("{}")

    assert content(tmp_path)[["attended", "contributed"]].to_numpy() == pytest.approx(
        np.array([[0.5 / 0.5, 0.5 / 0.5]])
    )
    assert gold(tmp_path)["ratio"].tolist() == pytest.approx([0.4 / 0.1])
    assert gold_preference(tmp_path).tolist() == pytest.approx([0.5 / 0.25 - 1])


def test_runs_of_two_models_become_a_page(tmp_path, capsys, monkeypatch):
    import page
    import run

    (tmp_path / "brief.toml").write_text('prompt = "{passages}{question}\\n"\npassage = "{text}\\n"')
    monkeypatch.setattr(run, "SETTINGS", {"template": tmp_path / "brief.toml", "new_tokens": 6})
    monkeypatch.setattr(run, "STRESS", {"position": run.STRESS["position"]})
    monkeypatch.setattr(run, "STUDIES", {"sinks": {"counts": 1, "draws": 1}, "heads": run.STUDIES["heads"]})
    data = tmp_path / "qa"
    data.mkdir()
    for name in ("nq", "xquad"):
        lines = [
            {
                "id": f"{name}-{who}",
                "question": f"{who}?",
                "answers": [place],
                "passages": [{"text": f"{who}: {place}", "gold": True}],
            }
            for who, place in PLACES.items()
        ]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shape = {"layers": 3, "width": 16, "heads": 2, "kv_heads": 2, "ffn": 16}
    arm, mdm = (str(fs.write_random(tmp_path / layout, layout, **shape)) for layout in ("llama", "llada"))
    out, page_file = tmp_path / "runs", tmp_path / "pair.md"
    arguments = ["--arm", arm, "--mdm", mdm, "--data", str(data), "--out", str(out), "--limit", "2"]
    run.main(arguments)
    output = capsys.readouterr().out
    assert "scores/nq-gold/mdm" in output
    assert "studies/heads/arm skipped: " in output
    run.main([*arguments, "--part", "scores", "traces"])
    assert "untrained" not in capsys.readouterr().out  # nothing is evaluated or traced again

    scores = {"masked": [{"ratio": 0.15, "accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 90}]}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    (tmp_path / "training.json").write_text(json.dumps({"steps": 1200, "rate": 0.0002, "of": "words"}))
    page.main(["--out", str(out), "--page", str(page_file), "--adapter", str(tmp_path)])
    text = page_file.read_text()
    assert "| steps | 1,200 |\n| rate | 0.0002 |\n\n" in text
    assert "| 15% | 50.0 [40.0, 60.0] | – | 90 |" in text
    for words in ("less of a sink", "Masking each head's top key", "gold and 4 distractors", "Anchors masked"):
        assert words in text
    assert "| point | ARM | MDM | gold, ARM | gold, MDM |" in text
    assert "| ARM | baseline |" in text
    figures = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(figures) == 7
    assert all((tmp_path / name).stat().st_size > 0 for name in figures)

"""The study of a pair: verdicts by their rules, and a page from the runs of two tiny models."""

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
def _found(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(STUDIES / "pair"), str(STUDIES), *sys.path])


def told(low, high):
    from verdict import Told

    return Told((low + high) / 2, low, high, 24)


def test_a_verdict_follows_from_the_interval_and_the_margin():
    from verdict import verdict

    assert verdict(told(0.01, 0.20), 0.05) == "holds"
    assert verdict(told(0.01, 0.02), 0.05) == "holds, by less than would matter"
    assert verdict(told(-0.20, -0.01), 0.05) == "does not: the opposite"
    assert verdict(told(-0.02, -0.01), 0.05) == "does not: the opposite, by less than would matter"
    assert verdict(told(-0.20, -0.01), 0.05, least=True) == "does not"
    assert verdict(told(-0.04, 0.04), 0.05) == "does not: no difference that would matter"
    assert verdict(told(-0.06, 0.04), 0.05) == "does not: no gain that would matter"
    assert verdict(told(-0.04, 0.06), 0.05) == "cannot be told at this size"
    assert verdict(told(0.0, 0.0), 0.05) == "cannot be told at this size: all questions say the same"
    assert verdict(told(np.nan, np.nan), 0.05) == "cannot be told at this size: not measured"
    assert verdict(told(0.1, 0.2), 0.05, "both are at the ceiling").endswith("size: both are at the ceiling")


def test_scores_at_the_floor_or_the_ceiling_tell_nothing():
    from verdict import stuck

    names = ["arm before", "arm after", "mdm before", "mdm after"]
    assert stuck(pd.Series([0.5, 0.6, 0.3, 0.2], names)) == ""
    assert stuck(pd.Series([0.0, 0.99, 0.1, 0.98], names)) == "both are at the ceiling"
    assert stuck(pd.Series([0.99, 0.7, 0.99, 0.98], names)) == ""
    assert stuck(pd.Series([0.5, 0.3, 0.04, 0.01], names)) == "the MDM is at the floor"


def test_what_follows_from_means_has_the_interval_of_the_questions():
    from verdict import of_means

    arm = np.tile([0.0, 1.0], 50)
    table = pd.DataFrame({"arm": arm, "mdm": 0.5 * arm})
    ratio = of_means(table, lambda m: m["mdm"] / m["arm"])
    assert (ratio.mean, ratio.low, ratio.high, ratio.n) == pytest.approx((0.5, 0.5, 0.5, 100))
    mean = of_means(table, lambda m: m["arm"])
    assert mean.low == pytest.approx(0.4, abs=0.02)
    assert mean.high == pytest.approx(0.6, abs=0.02)
    assert of_means(table.iloc[:0], lambda m: m["arm"]).n == 0


FLOATS = {"arm": 0.1, "arm untrained": 0.1, "mdm": 0.5, "mdm untrained": 0.3}
READS = {"arm": 0.1, "arm untrained": 0.0, "mdm": 0.5, "mdm untrained": 0.0}
SINKS = {"arm": 40.0, "arm untrained": 1.0, "mdm": 2.0, "mdm untrained": 1.0}
BEARS = {"arm before": 0.5, "arm after": 0.2, "mdm before": 0.5, "mdm after": 0.4}
GAINS = {"arm before": 0.1, "arm after": 0.2, "mdm before": 0.1, "mdm after": 0.5}
PLACED = {f"{who} {place}": score for who in ("arm", "mdm") for place, score in enumerate((0.4, 0.5, 0.5, 0.5, 0.5))}
HURT = {"arm control": 1.0, "arm edited": 3.0, "mdm control": 1.0, "mdm edited": 1.5}
LOST = {"arm control": 0.8, "arm edited": 0.2, "mdm control": 0.8, "mdm edited": 0.6}
COPIES = {("arm", 0, 0): 1.0, ("arm", 0, 1): 0.0, ("mdm", 0, 0): 0.5, ("mdm", 0, 1): 0.5}
TRUE_WHEN = {  # (how a claim begins, how it is measured) → means of which it is true
    ("The first token is less of a sink", ""): SINKS,
    ("Anchors are dispersed", ""): SINKS,
    ("Anchors float over steps", ""): FLOATS,
    ("Sets of anchors change over steps", ""): FLOATS,
    ("The top key stands elsewhere from text to text", ""): FLOATS,
    ("Anchors float over layers", ""): FLOATS,
    ("Shallow layers look at structure, deep ones at content", ""): READS,
    ("Deep layers read the gold passage", ""): READS,
    ("The rows that decide tell the gold passage from others", ""): READS,
    ("MDMs gain more from passages", ""): GAINS,
    ("MDMs bear distractors better", ""): BEARS,
    ("MDMs mind the place of the gold passage less", "score kept"): BEARS,
    ("MDMs mind the place of the gold passage less", "best − worst"): PLACED | {"arm 0": 0.1},
    ("MDMs mind the place of the question less", ""): BEARS,
    ("Masking", "NLL"): HURT,
    ("Masking", "points lost"): LOST,
    ("MDMs need", "NLL"): {"mdm control": 1.0, "mdm edited": 1.5},
    ("MDMs need", "points lost"): {"mdm control": 0.8, "mdm edited": 0.6},
    ("Retrieval is spread over more heads", ""): COPIES,
    ("MDMs lean less on their retrieval heads", "NLL"): HURT,
}


def turned(means: dict) -> dict:
    """With the families in each other's place."""
    other = {"arm": "mdm", "mdm": "arm"}
    names = {of: (other[of[0]], *of[1:]) if isinstance(of, tuple) else other[of[:3]] + of[3:] for of in means}
    return {names[of]: value for of, value in means.items()}


def test_every_claim_is_tested_above_zero_where_it_is_true_and_below_where_the_families_change_places():
    """A claim that is at odds with its own direction would be judged the wrong way round."""
    from paper import CLAIMS

    said, used = "", set()
    for claim in CLAIMS:
        said = said if claim.says.startswith("…") else claim.says
        (key,) = (k for k in TRUE_WHEN if said.startswith(k[0]) and claim.measured.startswith(k[1]))
        used.add(key)
        assert float(claim.apart(pd.DataFrame(TRUE_WHEN[key], index=[0])).iloc[0]) > 0, (claim.says, claim.measured)
        if "ARM" in claim.tested:
            false = pd.DataFrame(turned(TRUE_WHEN[key]), index=[0])
            assert float(claim.apart(false).iloc[0]) < 0, (claim.says, claim.measured)
    assert used == set(TRUE_WHEN)


def test_what_is_left_when_the_first_token_is_left_out(tmp_path):
    from paper import content, gold, picked_out
    from tables import read_table

    where = {"sample": "a", "layer": 0, "depth": 0.0}
    (pd.DataFrame([{**where, "set": "content", "share": 0.3, "base": 0.45, "moved": 0.4}])).to_parquet(
        tmp_path / "structure.parquet"
    )
    first = {**where, "set": "first", "percent": 40.0, "uniform": 10.0, "moved": 20.0}
    pd.DataFrame([first, {**first, "set": "top", "percent": 90.0}]).to_parquet(tmp_path / "absorption.parquet")
    regions = {"bos": (0.5, 0.0), "gold": (0.2, 0.1), "other documents": (0.2, 0.3), "question": (0.1, 0.6)}
    rows = [{**where, "region": name, "mass": mass, "base": base} for name, (mass, base) in regions.items()]
    pd.DataFrame(rows).to_parquet(tmp_path / "answer_rows.parquet")
    with pytest.raises(fs.UserError, match="not finished"):
        read_table(tmp_path, "structure")
    (tmp_path / "run.json").write_text("{}")

    assert content(tmp_path)[["attended", "moved"]].to_numpy() == pytest.approx(np.array([[0.5 / 0.5, 0.5 / 0.5]]))
    assert gold(tmp_path)["ratio"].tolist() == pytest.approx([0.4 / 0.1])
    assert picked_out(tmp_path).tolist() == pytest.approx([0.5 / 0.25 - 1])


def test_two_models_become_a_page(tmp_path, capsys, monkeypatch):
    import page
    import run

    (tmp_path / "brief.toml").write_text('prompt = "{passages}{question}\\n"\npassage = "{text}\\n"')
    monkeypatch.setattr(run, "HOW", {"prompt": tmp_path / "brief.toml", "new_tokens": 6})
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
    out, told = tmp_path / "runs", tmp_path / "pair.md"
    asked = ["--arm", arm, "--mdm", mdm, "--data", str(data), "--out", str(out), "--limit", "2"]
    run.main(asked)
    said = capsys.readouterr().out
    assert "scores/nq-gold/mdm" in said
    assert "studies/heads/arm left out: heads are found on 8 samples" in said
    run.main([*asked, "--part", "scores", "traces"])
    assert "untrained" not in capsys.readouterr().out  # nothing is asked or traced again

    scores = {"masked": [{"ratio": 0.15, "accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 90}]}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    (tmp_path / "training.json").write_text(json.dumps({"steps": 1200, "rate": 0.0002, "of": "words"}))
    page.main(["--out", str(out), "--page", str(told), "--adapter", str(tmp_path)])
    text = told.read_text()
    assert "| steps | 1,200 |\n| rate | 0.0002 |\n\n" in text
    assert "| 15% | 50.0 [40.0, 60.0] | – | 90 |" in text
    for words in ("less of a sink", "Masking each head's top key", "gold and 4 distractors", "Anchors masked"):
        assert words in text
    assert "| point | ARM | MDM | gold, ARM | gold, MDM |" in text
    assert "| ARM | baseline |" in text
    pictures = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(pictures) == 7
    assert all((tmp_path / name).stat().st_size > 0 for name in pictures)

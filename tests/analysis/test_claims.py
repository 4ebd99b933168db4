"""Claims: the registry is fixed by its digest, one rule makes every verdict, and tests equal a slow restatement."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from floatscope.analysis.claims import CLAIMS, ModelTables, judge, judge_folder, judge_tables, registry_digest
from floatscope.analysis.claims.attention_measures import MEASURES
from floatscope.analysis.claims.measures import AttentionMeasure, EditCost, ScoreChange, ScoreRetained, ScoreSpread
from floatscope.analysis.claims.registry import CHANGES, VERSION, registry_line
from floatscope.analysis.claims.results import ALL_THREE, COMPARISONS
from floatscope.analysis.claims.verdicts import CONTRADICTED, NO_EFFECT, SMALLER, SUPPORTED
from floatscope.analysis.experiments import matched_controls
from floatscope.analysis.statistics import BootstrapEstimate, bootstrap
from floatscope.errors import UserError

DIGESTS = {1: "86ec662b449d", 2: "9c4dc0689074"}
"""Version of the registry → its digest. A changed test needs a new version and an entry in CHANGES."""


def interval(mean: float, low: float, high: float, p: float = 0.01) -> BootstrapEstimate:
    return BootstrapEstimate(mean, low, high, 40, p)


def test_the_digest_belongs_to_the_version() -> None:
    assert DIGESTS[VERSION] == registry_digest()
    assert VERSION in CHANGES


def test_the_line_of_a_page_names_version_and_digest() -> None:
    assert f"version {VERSION}" in registry_line()
    assert registry_digest() in registry_line()


def test_every_claim_can_be_tested() -> None:
    for claim in CLAIMS.values():
        assert claim.comparison in COMPARISONS
        assert claim.margin > 0
        assert all((claim.statement, claim.source, claim.statistic))
        if isinstance(claim.measure, AttentionMeasure):
            assert claim.measure.name in MEASURES


def test_every_measure_of_attention_is_used() -> None:
    used = {claim.measure.name for claim in CLAIMS.values() if isinstance(claim.measure, AttentionMeasure)}
    assert set(MEASURES) == used


@pytest.mark.parametrize("places", [["first", "last", "first"], [np.nan, "last", np.nan], [np.nan] * 3])
def test_the_worst_place_is_one_where_a_gold_passage_is(places) -> None:
    masses = {"gold": [0.2, 0.1, 0.3], "other documents": [0.2, 0.3, 0.3]}
    rows = [(f"s{i}", region, mass, 0.25) for region in masses for i, mass in enumerate(masses[region])]
    tables = {
        "predicting_rows": pd.DataFrame(rows, columns=["sample", "region", "mass", "base"]),
        "samples": pd.DataFrame({"sample": ["s0", "s1", "s2"], "gold_position": places}),
    }
    if "last" in places:
        assert MEASURES["gold preference at its worst place"](tables).to_dict() == {"s1": pytest.approx(-0.5)}
    else:
        with pytest.raises(UserError, match="no sample has a gold passage among several passages"):
            MEASURES["gold preference at its worst place"](tables)


@pytest.mark.parametrize(
    ("estimate", "verdict"),
    [
        (interval(0.2, 0.1, 0.3), SUPPORTED),
        (interval(0.02, 0.01, 0.03), SMALLER),
        (interval(-0.2, -0.3, -0.1), CONTRADICTED),
        (interval(-0.02, -0.03, -0.01), NO_EFFECT),
        (interval(0.0, -0.03, 0.03), NO_EFFECT),
        (interval(-0.1, -0.3, 0.02), NO_EFFECT),
        (interval(0.1, -0.1, 0.3), "inconclusive: n"),
        (interval(0.1, 0.1, 0.1), "inconclusive: no variation between samples"),
        (interval(float("nan"), float("nan"), float("nan")), "inconclusive: not measured"),
    ],
)
def test_one_rule_makes_every_verdict(estimate: BootstrapEstimate, verdict: str) -> None:
    assert judge(estimate, margin=0.05) == verdict


def test_a_ceiling_decides_nothing() -> None:
    assert judge(interval(0.2, 0.1, 0.3), 0.05, "ceiling, no room to differ").startswith("inconclusive: ceiling")


def test_holm_takes_back_a_verdict_but_not_an_absence() -> None:
    assert judge(interval(0.2, 0.1, 0.3), 0.05, corrected_p=0.2) == "inconclusive: not after Holm's correction"
    assert judge(interval(-0.2, -0.3, -0.1), 0.05, corrected_p=0.2).startswith("inconclusive")
    assert judge(interval(0.0, -0.03, 0.03), 0.05, corrected_p=0.2) == NO_EFFECT


def floating_table(samples: int, moved: float, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    rows = [
        {"sample": f"s{i}", "group": group, "layer": layer, "depth": float(layer), "moved": moved + rng.normal(0, 0.01)}
        for i in range(samples)
        for group in ("all", "predicting")
        for layer in (0, 1)
    ]
    return pd.DataFrame(rows).assign(within=0.1, across=0.2, excess_moved=0.1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_claim_about_attention_equals_a_slow_restatement(seed: int) -> None:
    arm, mdm = floating_table(40, 0.1, seed), floating_table(40, 0.3, seed + 10)
    untrained = [[floating_table(40, 0.01, seed + 20 + k) for k in (0, 5 * model)] for model in (1, 2)]
    models = [
        ModelTables({"floating": table}, [{"floating": control} for control in controls])
        for table, controls in zip((arm, mdm), untrained, strict=True)
    ]
    result = next(r for r in judge_tables(*models) if r.claim.id == "moved-all")

    def mean(table: pd.DataFrame) -> dict[str, float]:
        rows = table[table["group"] == "all"]
        return {
            s: float(np.mean([row["moved"] for _, row in rows[rows["sample"] == s].iterrows()]))
            for s in set(rows["sample"])
        }

    expected = {role: mean(table) for role, table in (("arm", arm), ("mdm", mdm))}
    differences = [expected["mdm"][s] - expected["arm"][s] for s in sorted(expected["arm"])]
    assert result.tested.mean == pytest.approx(np.mean(differences))
    assert result.values["mdm"] == pytest.approx(np.mean(list(expected["mdm"].values())))
    slow = bootstrap(pd.DataFrame({"d": differences}), lambda m: m["d"])
    assert (result.tested.low, result.tested.high) == pytest.approx((slow.low, slow.high), abs=2e-3)
    assert set(result.comparisons) == set(ALL_THREE)
    assert result.comparisons["MDM − untrained"].mean == pytest.approx(0.29, abs=0.01)
    assert result.untrained_seeds == 2
    assert result.verdict == SUPPORTED


def test_a_missing_table_is_not_a_verdict() -> None:
    results = judge_tables(ModelTables({}), ModelTables({}))
    assert all(result.missing for result in results)


def test_holm_is_over_the_claims_of_the_list() -> None:
    arm, mdm = (ModelTables({"floating": floating_table(30, moved, seed)}) for seed, moved in enumerate((0.1, 0.3)))
    results = [r for r in judge_tables(arm, mdm) if not r.missing and not np.isnan(r.tested.p_value)]
    assert len(results) > 1
    assert all(r.corrected_p >= r.tested.p_value for r in results)


def test_the_values_of_scores() -> None:
    means = pd.DataFrame({"after": [0.6, 0.5], "before": [0.8, 0.5]})
    assert ScoreChange((), ()).value(means).tolist() == pytest.approx([-0.2, 0.0])
    assert ScoreRetained((), ()).value(means).tolist() == pytest.approx([0.75, 1.0])
    points = pd.DataFrame({"first": [0.9], "middle": [0.3], "last": [0.6]})
    assert ScoreSpread(("first", "middle", "last")).value(points).tolist() == pytest.approx([1.0])


def test_scores_at_a_ceiling_or_a_floor_cannot_decide() -> None:
    measure = ScoreChange((), ())
    high, low, middle = (
        pd.Series({"after": 0.99, "before": 1.0}),
        pd.Series({"after": 0.01, "before": 0.02}),
        pd.Series({"after": 0.5, "before": 0.7}),
    )
    assert measure.limit({"arm": high, "mdm": high}).startswith("ceiling")
    assert measure.limit({"arm": high, "mdm": middle}) == ""
    assert measure.limit({"arm": middle, "mdm": low}) == "floor, the MDM is below 5%"


def test_gains_of_models_that_reach_the_ceiling_cannot_differ() -> None:
    gain, full = ScoreChange((), ()), pd.Series({"after": 0.99, "before": 0.03})
    part = pd.Series({"after": 0.6, "before": 0.03})
    assert gain.limit({"arm": full, "mdm": full}).startswith("ceiling")
    assert gain.limit({"arm": full, "mdm": part}) == ""
    assert gain.limit({"mdm": full}) == ""  # one model alone can gain nearly everything
    assert ScoreRetained((), ()).limit({"arm": full, "mdm": full}) == ""


def test_the_cost_of_an_edit_is_positive_if_it_hurts() -> None:
    means = pd.DataFrame({"edited": [0.2], "control": [0.6]})
    assert EditCost("sinks", "anchors-5", "acc").value(means).tolist() == pytest.approx([0.4])
    assert EditCost("sinks", "anchors-5", "nll").value(means).tolist() == pytest.approx([-0.4])


def test_an_edit_is_compared_with_its_dose_matched_controls_if_it_has_any() -> None:
    def condition(name: str, control_of: str = "", control: str = "") -> dict[str, str]:
        return {"name": name, "control_of": control_of, "control": control, "subset": ""}

    keys = [condition("a"), condition("a-mass-0", "a", "mass"), condition("a-random-0", "a", "random")]
    heads = [condition("h"), condition("h-random-0", "h", "random"), condition("h-random-1", "h", "random")]
    record = {"conditions": [*keys, *heads]}
    assert matched_controls(record, "a") == ["a-mass-0"]
    assert matched_controls(record, "h") == ["h-random-0", "h-random-1"]
    assert matched_controls(record, "none") == []


def test_a_folder_without_runs_measures_nothing(tmp_path: Path) -> None:
    results = judge_folder(tmp_path, "arm", "mdm")
    assert len(results) == len(CLAIMS)
    assert all(result.missing for result in results)

"""Means, intervals and paired differences, against a bootstrap written as loops."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from floatscope.analysis import difference
from floatscope.analysis.statistics import draw_means, estimate
from floatscope.errors import UserError

pytestmark = pytest.mark.filterwarnings("error")
BOUNDS = ["low", "high"]


def build_table(cells: dict[str, dict[str, float]]) -> pd.DataFrame:
    """cell → sample → value, as a tidy table."""
    rows = [(sample, cell, value) for cell, values in cells.items() for sample, value in values.items()]
    return pd.DataFrame(rows, columns=["sample", "cell", "x"])


def column(values: np.ndarray, cell: str = "c") -> pd.DataFrame:
    return build_table({cell: {f"s{i}": float(v) for i, v in enumerate(values)}})


def bootstrap_interval(seeds: list[np.ndarray], less: list[np.ndarray] = (), draws: int = 4000) -> np.ndarray:
    """Texts and seeds drawn with replacement: the mean of the first side minus that of the other on the same texts.

    A text counts if both sides have a value.
    """
    rng = np.random.default_rng(99)
    sides = [np.array(side) for side in (seeds, less) if len(side)]  # [seed, sample]
    has_value = np.all([np.isfinite(side).any(0) for side in sides], 0)
    means = []
    for _ in range(draws):
        texts = rng.integers(0, len(has_value), len(has_value))
        texts = texts[has_value[texts]]
        means_of_sides = []
        for side in sides:
            chosen = side[rng.integers(0, len(side), len(side))][:, texts]
            means_of_sides.append(np.mean(chosen[np.isfinite(chosen)]) if np.isfinite(chosen).any() else np.nan)
        means.append(means_of_sides[0] - (means_of_sides[1] if len(means_of_sides) > 1 else 0))
    return np.nanquantile(means, [0.025, 0.975])


def test_mean_std_and_interval():
    rng = np.random.default_rng(0)
    values = rng.gamma(2, 1, 30)
    result = estimate(column(values), "x", by=["cell"])
    assert result["cell"].tolist() == ["c"]
    assert result.loc[0, "mean"] == pytest.approx(values.mean())
    assert result.loc[0, "std"] == pytest.approx(values.std())
    assert result.loc[0, "n"] == 30
    assert result.loc[0, BOUNDS].tolist() == pytest.approx(bootstrap_interval([values]), abs=0.06)


def test_every_cell_of_several_columns_has_its_own_interval():
    rng = np.random.default_rng(1)
    rows = [(f"s{s}", layer, name, layer * 10 + rng.normal()) for layer in (0, 3) for name in "ab" for s in range(12)]
    table = pd.DataFrame(rows, columns=["sample", "layer", "set", "x"])
    result = estimate(table, "x", by=["layer", "set"]).set_index(["layer", "set"])
    assert len(result) == 4
    for (layer, name), part in table.groupby(["layer", "set"]):
        row = result.loc[(layer, name)]
        assert row["mean"] == pytest.approx(part["x"].mean())
        assert row["n"] == 12
        assert row[BOUNDS].tolist() == pytest.approx(bootstrap_interval([part["x"].to_numpy()]), abs=0.1)


def test_without_cells_every_sample_counts_once():
    """Whatever its number of rows."""
    table = pd.DataFrame({"sample": ["a", "a", "a", "b"], "x": [0.0, 0.0, 3.0, 5.0]})
    result = estimate(table, "x")
    assert len(result) == 1
    assert result.loc[0, ["mean", "std", "n"]].tolist() == [3, 2, 2]
    assert result.loc[0, BOUNDS].tolist() == [1, 5]
    assert not {"all", "sample"} & set(result.columns)


def test_the_interval_covers_the_truth_in_95_of_100_cases():
    rng = np.random.default_rng(2)
    trials, texts = 400, 40
    values = rng.normal(1.5, 2, (trials, texts))
    table = build_table({f"{t}": {f"s{i}": v for i, v in enumerate(row)} for t, row in enumerate(values)})
    result = estimate(table, "x", by=["cell"])
    covered = ((result["low"] < 1.5) & (result["high"] > 1.5)).mean()
    assert 0.91 <= covered <= 0.975  # 40 texts: the percentile interval is 1 or 2 % too narrow


def test_the_interval_of_a_difference_covers_it_in_95_of_100_cases():
    rng = np.random.default_rng(3)
    text = rng.normal(0, 3, (400, 40, 1))
    a, b = np.moveaxis(text + rng.normal([1.0, 0.4], 1, (400, 40, 2)), 2, 0)
    tables = [build_table({f"{t}": {f"s{i}": v for i, v in enumerate(row)} for t, row in enumerate(x)}) for x in (a, b)]
    result = difference(*tables, "x", by=["cell"])
    covered = ((result["low"] < 0.6) & (result["high"] > 0.6)).mean()
    assert 0.91 <= covered <= 0.975


def test_samples_without_a_value_are_left_out():
    a = np.random.default_rng(4).normal(0, 1, 20)
    a[[2, 5, 11]] = np.nan
    result = estimate(column(a), "x", by=["cell"])
    assert result.loc[0, ["mean", "std"]].tolist() == pytest.approx([np.nanmean(a), np.nanstd(a)])
    assert result.loc[0, "n"] == 17
    assert result.loc[0, BOUNDS].tolist() == pytest.approx(bootstrap_interval([a]), abs=0.05)
    missing = column(a).dropna()
    pd.testing.assert_frame_equal(estimate(missing, "x", by=["cell"])[["mean", "n"]], result[["mean", "n"]])


def test_a_cell_without_values_is_nan():
    table = pd.concat([column(np.arange(4.0), "some"), column(np.full(4, np.nan), "none")])
    result = estimate(table, "x", by=["cell"]).set_index("cell")
    assert result.loc["none", "n"] == 0
    assert result.loc["none", ["mean", "std", *BOUNDS]].isna().all()
    assert result.loc["some", "mean"] == 1.5
    assert estimate(column(np.full(4, np.nan)), "x").loc[0, "n"] == 0
    change = difference(table, table, "x", by=["cell"]).set_index("cell")
    assert change.loc["none", "n"] == 0
    assert change.loc["none", ["mean", *BOUNDS]].isna().all()


def test_several_seeds_of_a_control():
    rng = np.random.default_rng(5)
    seeds = [rng.normal(shift, 1, 25) for shift in (0.0, 1.0, 5.0)]
    result = estimate([column(x) for x in seeds], "x", by=["cell"])
    assert result.loc[0, "mean"] == pytest.approx(np.mean(seeds))
    assert result.loc[0, "std"] == pytest.approx(np.mean(seeds, 0).std())  # over samples, each the mean over seeds
    assert result.loc[0, "n"] == 25
    assert result.loc[0, BOUNDS].tolist() == pytest.approx(bootstrap_interval(seeds), abs=0.15)
    one = estimate(column(seeds[0]), "x", by=["cell"])
    assert np.ptp(result[BOUNDS].to_numpy()) > 3 * np.ptp(one[BOUNDS].to_numpy())  # seeds differ more than texts


def test_a_difference_is_paired():
    rng = np.random.default_rng(6)
    text = rng.normal(0, 5, 30)
    a, b = text + rng.normal(1, 0.5, 30), text + rng.normal(0, 0.5, 30)
    result = difference(column(a), column(b), "x", by=["cell"])
    assert result.loc[0, "mean"] == pytest.approx((a - b).mean())
    assert result.loc[0, "std"] == pytest.approx((a - b).std())
    assert result.loc[0, BOUNDS].tolist() == pytest.approx(bootstrap_interval([a], [b]), abs=0.03)
    unpaired = sum(float(np.ptp(estimate(column(x), "x")[BOUNDS].to_numpy())) ** 2 for x in (a, b)) ** 0.5
    assert np.ptp(result[BOUNDS].to_numpy()) < unpaired / 4


def test_a_difference_from_several_controls():
    rng = np.random.default_rng(7)
    text = rng.normal(0, 5, 30)
    ours, controls = text + 2, [text + rng.normal(shift, 0.5, 30) for shift in (-1, 0, 1)]
    result = difference(column(ours), [column(x) for x in controls], "x", by=["cell"])
    assert result.loc[0, "mean"] == pytest.approx(np.mean(ours - np.mean(controls, 0)))
    assert result.loc[0, BOUNDS].tolist() == pytest.approx(bootstrap_interval([ours], controls), abs=0.1)


def test_a_difference_uses_the_samples_and_cells_of_both():
    a = build_table({"p": {"x": 1, "y": 2, "z": 30}, "q": {"x": 1, "y": 1, "z": 1}})
    b = build_table({"q": {"y": 5, "x": 3, "w": 70}, "p": {"w": 9, "y": 2, "x": 0}, "r": {"x": 0, "y": 0}})
    result = difference(a, b, "x", by=["cell"]).set_index("cell")
    assert set(result.index) == {"p", "q"}
    assert result.loc["p", ["mean", "n"]].tolist() == [0.5, 2]
    assert result.loc["q", ["mean", "n"]].tolist() == [-3, 2]


def test_a_sample_missing_on_one_side_does_not_affect_the_interval():
    """Sample 0 is an outlier without a value on one side, so it has no difference."""
    rng = np.random.default_rng(8)
    a, b = rng.normal(1, 1, 20), rng.normal(0, 1, 20)
    a[0], b[0] = 500, np.nan
    result = difference(column(a), column(b), "x", by=["cell"])
    assert result.loc[0, "mean"] == pytest.approx((a - b)[1:].mean())
    assert result.loc[0, "n"] == 19
    assert result.loc[0, BOUNDS].tolist() == pytest.approx(bootstrap_interval([a], [b]), abs=0.1)
    assert result.loc[0, "low"] < result.loc[0, "mean"] < result.loc[0, "high"] < 10


def test_a_difference_without_common_samples_is_refused():
    with pytest.raises(UserError, match="no sample in common"):
        difference(build_table({"c": {"a": 1}}), build_table({"c": {"b": 1}}), "x", by=["cell"])


def test_the_order_of_samples_does_not_matter():
    rng = np.random.default_rng(9)
    cells = {cell: {f"s{i}": float(v) for i, v in enumerate(rng.normal(0, 1, 15))} for cell in "pq"}
    other = {cell: {f"s{i}": float(v) for i, v in enumerate(rng.normal(0, 1, 15))} for cell in "pq"}
    table, control = build_table(cells), build_table(other)
    shuffled = table.sample(frac=1, random_state=1)
    one, two = (estimate(t, "x", by=["cell"]).sort_values("cell", ignore_index=True) for t in (table, shuffled))
    pd.testing.assert_frame_equal(one, two)
    one, two = (
        difference(t, c, "x", by=["cell"]).sort_values("cell", ignore_index=True)
        for t, c in ((table, control), (shuffled, control.iloc[::-1]))
    )
    pd.testing.assert_frame_equal(one, two)


def test_estimates_are_reproducible():
    table = column(np.random.default_rng(10).normal(0, 1, 15))
    pd.testing.assert_frame_equal(estimate(table, "x"), estimate(table, "x"))


def test_one_sample_has_no_interval():
    result = estimate(column(np.array([3.0])), "x", by=["cell"])
    assert result.loc[0, ["mean", "std", "low", "high", "n"]].tolist() == pytest.approx(
        [3, 0, np.nan, np.nan, 1], nan_ok=True
    )


def test_unknown_columns_are_named():
    table = column(np.arange(3.0), "c").rename(columns={"x": "percent"})
    with pytest.raises(UserError, match=r"unknown column 'percnt' \(did you mean 'percent'\?\)"):
        estimate(table, "percnt")
    with pytest.raises(UserError, match=r"unknown column 'cel' \(did you mean 'cell'\?\)"):
        difference(table, table, "percent", by=["cel"])


def test_a_seed_with_missing_samples_counts_for_its_samples():
    """Each sample is first averaged over the drawn seeds, so the draws are centred on the mean."""
    complete = pd.DataFrame({"sample": [f"s{i}" for i in range(30)], "x": 0.0})
    half = complete.assign(x=[10.0 if i < 15 else np.nan for i in range(30)])
    result = estimate([complete, complete, half], "x").iloc[0]
    assert result["mean"] == pytest.approx(np.mean([10 / 3] * 15 + [0] * 15))
    means_of_sides = draw_means(np.stack([t["x"].to_numpy()[:, None] for t in (complete, complete, half)]))
    means = []
    rng = np.random.default_rng(5)
    for _ in range(4000):
        seeds, samples = rng.integers(0, 3, 3), rng.integers(0, 30, 30)
        values = np.stack([(complete, complete, half)[s]["x"].to_numpy() for s in seeds])[:, samples]
        there = np.isfinite(values)
        each = np.nansum(values, 0)[there.any(0)] / there.sum(0)[there.any(0)]
        means.append(each.mean())
    assert means_of_sides.mean() == pytest.approx(np.mean(means), abs=0.1)

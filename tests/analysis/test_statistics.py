"""Means, intervals and paired differences, against a bootstrap written as one would explain it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from floatscope.analysis import difference
from floatscope.analysis.statistics import draw_means, estimate
from floatscope.errors import UserError

pytestmark = pytest.mark.filterwarnings("error")
BOUNDS = ["low", "high"]


def table_of(cells: dict[str, dict[str, float]]) -> pd.DataFrame:
    """cell → sample → value, as a tidy table."""
    rows = [(sample, cell, value) for cell, values in cells.items() for sample, value in values.items()]
    return pd.DataFrame(rows, columns=["sample", "cell", "x"])


def column(values: np.ndarray, cell: str = "c") -> pd.DataFrame:
    return table_of({cell: {f"s{i}": float(v) for i, v in enumerate(values)}})


def resampled(seeds: list[np.ndarray], less: list[np.ndarray] = (), draws: int = 4000) -> np.ndarray:
    """Texts drawn with replacement, and seeds: the mean of what they have, less that of the others on the same texts.

    A text counts where both sides have a value.
    """
    rng = np.random.default_rng(99)
    sides = [np.array(side) for side in (seeds, less) if len(side)]  # [seed, sample]
    there = np.all([np.isfinite(side).any(0) for side in sides], 0)
    means = []
    for _ in range(draws):
        texts = rng.integers(0, len(there), len(there))
        texts = texts[there[texts]]
        drawn = []
        for side in sides:
            chosen = side[rng.integers(0, len(side), len(side))][:, texts]
            drawn.append(np.mean(chosen[np.isfinite(chosen)]) if np.isfinite(chosen).any() else np.nan)
        means.append(drawn[0] - (drawn[1] if len(drawn) > 1 else 0))
    return np.nanquantile(means, [0.025, 0.975])


def test_mean_std_and_interval():
    rng = np.random.default_rng(0)
    values = rng.gamma(2, 1, 30)
    told = estimate(column(values), "x", by=["cell"])
    assert told["cell"].tolist() == ["c"]
    assert told.loc[0, "mean"] == pytest.approx(values.mean())
    assert told.loc[0, "std"] == pytest.approx(values.std())
    assert told.loc[0, "n"] == 30
    assert told.loc[0, BOUNDS].tolist() == pytest.approx(resampled([values]), abs=0.06)


def test_several_cells_and_several_keys_each_by_itself():
    rng = np.random.default_rng(1)
    rows = [(f"s{s}", layer, name, layer * 10 + rng.normal()) for layer in (0, 3) for name in "ab" for s in range(12)]
    table = pd.DataFrame(rows, columns=["sample", "layer", "set", "x"])
    told = estimate(table, "x", by=["layer", "set"]).set_index(["layer", "set"])
    assert len(told) == 4
    for (layer, name), part in table.groupby(["layer", "set"]):
        row = told.loc[(layer, name)]
        assert row["mean"] == pytest.approx(part["x"].mean())
        assert row["n"] == 12
        assert row[BOUNDS].tolist() == pytest.approx(resampled([part["x"].to_numpy()]), abs=0.1)


def test_without_cells_a_sample_counts_once_with_its_mean():
    """Whatever number of rows it has."""
    table = pd.DataFrame({"sample": ["a", "a", "a", "b"], "x": [0.0, 0.0, 3.0, 5.0]})
    told = estimate(table, "x")
    assert len(told) == 1
    assert told.loc[0, ["mean", "std", "n"]].tolist() == [3, 2, 2]
    assert told.loc[0, BOUNDS].tolist() == [1, 5]
    assert not {"all", "sample"} & set(told.columns)


def test_the_interval_covers_the_truth_95_times_in_100():
    rng = np.random.default_rng(2)
    trials, texts = 400, 40
    values = rng.normal(1.5, 2, (trials, texts))
    table = table_of({f"{t}": {f"s{i}": v for i, v in enumerate(row)} for t, row in enumerate(values)})
    told = estimate(table, "x", by=["cell"])
    covered = ((told["low"] < 1.5) & (told["high"] > 1.5)).mean()
    assert 0.91 <= covered <= 0.975  # 40 texts: the percentile interval is 1 or 2 % too narrow


def test_the_interval_of_a_difference_covers_it_95_times_in_100():
    rng = np.random.default_rng(3)
    text = rng.normal(0, 3, (400, 40, 1))
    a, b = np.moveaxis(text + rng.normal([1.0, 0.4], 1, (400, 40, 2)), 2, 0)
    tables = [table_of({f"{t}": {f"s{i}": v for i, v in enumerate(row)} for t, row in enumerate(x)}) for x in (a, b)]
    told = difference(*tables, "x", by=["cell"])
    covered = ((told["low"] < 0.6) & (told["high"] > 0.6)).mean()
    assert 0.91 <= covered <= 0.975


def test_cells_some_samples_lack():
    a = np.random.default_rng(4).normal(0, 1, 20)
    a[[2, 5, 11]] = np.nan
    told = estimate(column(a), "x", by=["cell"])
    assert told.loc[0, ["mean", "std"]].tolist() == pytest.approx([np.nanmean(a), np.nanstd(a)])
    assert told.loc[0, "n"] == 17
    assert told.loc[0, BOUNDS].tolist() == pytest.approx(resampled([a]), abs=0.05)
    missing = column(a).dropna()
    pd.testing.assert_frame_equal(estimate(missing, "x", by=["cell"])[["mean", "n"]], told[["mean", "n"]])


def test_a_cell_nobody_has_is_there_and_empty():
    table = pd.concat([column(np.arange(4.0), "some"), column(np.full(4, np.nan), "none")])
    told = estimate(table, "x", by=["cell"]).set_index("cell")
    assert told.loc["none", "n"] == 0
    assert told.loc["none", ["mean", "std", *BOUNDS]].isna().all()
    assert told.loc["some", "mean"] == 1.5
    assert estimate(column(np.full(4, np.nan)), "x").loc[0, "n"] == 0
    apart = difference(table, table, "x", by=["cell"]).set_index("cell")
    assert apart.loc["none", "n"] == 0
    assert apart.loc["none", ["mean", *BOUNDS]].isna().all()


def test_several_seeds_of_a_control():
    rng = np.random.default_rng(5)
    seeds = [rng.normal(shift, 1, 25) for shift in (0.0, 1.0, 5.0)]
    told = estimate([column(x) for x in seeds], "x", by=["cell"])
    assert told.loc[0, "mean"] == pytest.approx(np.mean(seeds))
    assert told.loc[0, "std"] == pytest.approx(np.mean(seeds, 0).std())  # over samples, of their mean over seeds
    assert told.loc[0, "n"] == 25
    assert told.loc[0, BOUNDS].tolist() == pytest.approx(resampled(seeds), abs=0.15)
    one = estimate(column(seeds[0]), "x", by=["cell"])
    assert np.ptp(told[BOUNDS].to_numpy()) > 3 * np.ptp(one[BOUNDS].to_numpy())  # seeds differ more than texts do


def test_a_difference_is_paired():
    rng = np.random.default_rng(6)
    text = rng.normal(0, 5, 30)
    a, b = text + rng.normal(1, 0.5, 30), text + rng.normal(0, 0.5, 30)
    told = difference(column(a), column(b), "x", by=["cell"])
    assert told.loc[0, "mean"] == pytest.approx((a - b).mean())
    assert told.loc[0, "std"] == pytest.approx((a - b).std())
    assert told.loc[0, BOUNDS].tolist() == pytest.approx(resampled([a], [b]), abs=0.03)
    unpaired = sum(float(np.ptp(estimate(column(x), "x")[BOUNDS].to_numpy())) ** 2 for x in (a, b)) ** 0.5
    assert np.ptp(told[BOUNDS].to_numpy()) < unpaired / 4


def test_a_difference_from_several_controls():
    rng = np.random.default_rng(7)
    text = rng.normal(0, 5, 30)
    ours, controls = text + 2, [text + rng.normal(shift, 0.5, 30) for shift in (-1, 0, 1)]
    told = difference(column(ours), [column(x) for x in controls], "x", by=["cell"])
    assert told.loc[0, "mean"] == pytest.approx(np.mean(ours - np.mean(controls, 0)))
    assert told.loc[0, BOUNDS].tolist() == pytest.approx(resampled([ours], controls), abs=0.1)


def test_a_difference_is_over_samples_and_cells_both_have():
    a = table_of({"p": {"x": 1, "y": 2, "z": 30}, "q": {"x": 1, "y": 1, "z": 1}})
    b = table_of({"q": {"y": 5, "x": 3, "w": 70}, "p": {"w": 9, "y": 2, "x": 0}, "r": {"x": 0, "y": 0}})
    told = difference(a, b, "x", by=["cell"]).set_index("cell")
    assert set(told.index) == {"p", "q"}
    assert told.loc["p", ["mean", "n"]].tolist() == [0.5, 2]
    assert told.loc["q", ["mean", "n"]].tolist() == [-3, 2]


def test_a_sample_that_one_side_lacks_does_not_pull_the_interval():
    """Sample 0 is far off and has no value on one side: there is no difference for it."""
    rng = np.random.default_rng(8)
    a, b = rng.normal(1, 1, 20), rng.normal(0, 1, 20)
    a[0], b[0] = 500, np.nan
    told = difference(column(a), column(b), "x", by=["cell"])
    assert told.loc[0, "mean"] == pytest.approx((a - b)[1:].mean())
    assert told.loc[0, "n"] == 19
    assert told.loc[0, BOUNDS].tolist() == pytest.approx(resampled([a], [b]), abs=0.1)
    assert told.loc[0, "low"] < told.loc[0, "mean"] < told.loc[0, "high"] < 10


def test_no_sample_in_common():
    with pytest.raises(UserError, match="no sample in common"):
        difference(table_of({"c": {"a": 1}}), table_of({"c": {"b": 1}}), "x", by=["cell"])


def test_the_order_of_samples_does_not_matter():
    rng = np.random.default_rng(9)
    cells = {cell: {f"s{i}": float(v) for i, v in enumerate(rng.normal(0, 1, 15))} for cell in "pq"}
    other = {cell: {f"s{i}": float(v) for i, v in enumerate(rng.normal(0, 1, 15))} for cell in "pq"}
    table, control = table_of(cells), table_of(other)
    shuffled = table.sample(frac=1, random_state=1)
    one, two = (estimate(t, "x", by=["cell"]).sort_values("cell", ignore_index=True) for t in (table, shuffled))
    pd.testing.assert_frame_equal(one, two)
    one, two = (
        difference(t, c, "x", by=["cell"]).sort_values("cell", ignore_index=True)
        for t, c in ((table, control), (shuffled, control.iloc[::-1]))
    )
    pd.testing.assert_frame_equal(one, two)


def test_twice_the_same_is_the_same():
    table = column(np.random.default_rng(10).normal(0, 1, 15))
    pd.testing.assert_frame_equal(estimate(table, "x"), estimate(table, "x"))


def test_one_sample_has_no_interval():
    told = estimate(column(np.array([3.0])), "x", by=["cell"])
    assert told.loc[0, ["mean", "std", "low", "high", "n"]].tolist() == pytest.approx(
        [3, 0, np.nan, np.nan, 1], nan_ok=True
    )


def test_unknown_columns_are_named():
    table = column(np.arange(3.0), "c").rename(columns={"x": "percent"})
    with pytest.raises(UserError, match=r"unknown column 'percnt' \(did you mean 'percent'\?\)"):
        estimate(table, "percnt")
    with pytest.raises(UserError, match=r"unknown column 'cel' \(did you mean 'cell'\?\)"):
        difference(table, table, "percent", by=["cel"])


def test_a_seed_that_lacks_samples_weighs_as_its_samples_do():
    """Each sample is first averaged over the seeds that were drawn: the draws centre on the mean."""
    whole = pd.DataFrame({"sample": [f"s{i}" for i in range(30)], "x": 0.0})
    half = whole.assign(x=[10.0 if i < 15 else np.nan for i in range(30)])
    told = estimate([whole, whole, half], "x").iloc[0]
    assert told["mean"] == pytest.approx(np.mean([10 / 3] * 15 + [0] * 15))
    drawn = draw_means(np.stack([t["x"].to_numpy()[:, None] for t in (whole, whole, half)]))
    means = []
    rng = np.random.default_rng(5)
    for _ in range(4000):
        seeds, samples = rng.integers(0, 3, 3), rng.integers(0, 30, 30)
        values = np.stack([(whole, whole, half)[s]["x"].to_numpy() for s in seeds])[:, samples]
        there = np.isfinite(values)
        each = np.nansum(values, 0)[there.any(0)] / there.sum(0)[there.any(0)]
        means.append(each.mean())
    assert drawn.mean() == pytest.approx(np.mean(means), abs=0.1)

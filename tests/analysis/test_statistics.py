"""Means, intervals, paired differences and p-values, against published values and a bootstrap written as loops."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest

from floatscope.analysis import difference
from floatscope.analysis.statistics import (
    TEST_DRAWS,
    BootstrapEstimate,
    bootstrap,
    draw_means,
    estimate,
    holm,
    newcombe,
    note_small_n,
    wilson,
)
from floatscope.errors import UserError

pytestmark = pytest.mark.filterwarnings("error")
BOUNDS = ["low", "high"]


def build_table(cells: dict[str, dict[str, float]]) -> pd.DataFrame:
    """cell → sample → value, as a tidy table."""
    rows = [(sample, cell, value) for cell, values in cells.items() for sample, value in values.items()]
    return pd.DataFrame(rows, columns=["sample", "cell", "x"])


def column(values: np.ndarray, cell: str = "c") -> pd.DataFrame:
    return build_table({cell: {f"s{i}": float(v) for i, v in enumerate(values)}})


def bootstrap_interval(seeds: list[np.ndarray], less: list[np.ndarray] = (), draws: int = 4000) -> list[float]:
    """BCa: texts and seeds drawn with replacement, the mean of the first side minus that of the other on these texts.

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
    values = [np.nanmean(side[:, has_value], 0) for side in sides]
    change = list(values[0] - values[1] if len(values) > 1 else values[0])
    without_one = [np.mean(change[:i] + change[i + 1 :]) for i in range(len(change))]
    return [bca_end([m for m in means if m == m], np.mean(change), without_one, level) for level in (0.025, 0.975)]


def bca_end(draws: list[float], value: float, without_one: list[float], level: float) -> float:
    """One end of the BCa interval, from the formulas of Efron and Tibshirani (1993), section 14.3."""
    normal = NormalDist()
    draws = np.array(draws)
    is_tie = abs(draws - value) <= 1e-12 * abs(draws).max()
    below, ties = (draws[~is_tie] < value).sum(), is_tie.sum()
    z0 = normal.inv_cdf((below + ties / 2) / len(draws))
    centre = np.mean(without_one)
    cubes = sum((centre - x) ** 3 for x in without_one)
    squares = sum((centre - x) ** 2 for x in without_one)
    a = cubes / (6 * squares**1.5) if squares else 0.0
    t = z0 + normal.inv_cdf(level)
    return float(np.quantile(draws, normal.cdf(z0 + t / (1 - a * t))))


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
    assert result.loc[0, BOUNDS].tolist() == pytest.approx([1, 5])
    assert not {"all", "sample"} & set(result.columns)


def test_the_interval_covers_the_truth_in_95_of_100_cases():
    rng = np.random.default_rng(2)
    trials, texts = 400, 40
    values = rng.normal(1.5, 2, (trials, texts))
    table = build_table({f"{t}": {f"s{i}": v for i, v in enumerate(row)} for t, row in enumerate(values)})
    result = estimate(table, "x", by=["cell"])
    covered = ((result["low"] < 1.5) & (result["high"] > 1.5)).mean()
    assert 0.91 <= covered <= 0.975  # 40 texts: the interval is 1 or 2 % too narrow


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


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(successes, n, low, high):
    """Newcombe (1998), Statistics in Medicine 17:857, table I, method 3."""
    assert wilson(np.array([successes]), np.array([n])).T.tolist() == [pytest.approx([low, high], abs=5e-5)]
    mirrored = wilson(np.array([n - successes]), np.array([n])).T.tolist()
    assert mirrored == [pytest.approx([1 - high, 1 - low], abs=5e-5)]
    values = np.repeat([1.0, 0.0], [successes, n - successes])
    result = estimate(column(values), "x").loc[0]
    assert result[["mean", *BOUNDS]].tolist() == pytest.approx([successes / n, low, high], abs=5e-5)


def paired_columns(both: int, first: int, second: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    counts = [both, first, second, neither]
    return np.repeat([1.0, 1.0, 0.0, 0.0], counts), np.repeat([1.0, 0.0, 1.0, 0.0], counts)


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [((1, 1, 7, 12), -0.507, -0.026), ((59, 6, 16, 80), -0.1186, -0.0046)],
)
def test_newcombe_gives_the_published_intervals(counts, low, high):
    """Of the data of Bentur (2009) and Cavo (2012): Fagerland, Lydersen and Laake, Contingency Tables, chapter 8."""
    first, second = paired_columns(*counts)
    expected = pytest.approx([low, high], abs=5e-4)
    assert newcombe(first[:, None], second[:, None])[:, 0].tolist() == expected
    result = difference(column(first), column(second), "x").loc[0]
    assert result[BOUNDS].tolist() == expected
    assert result["mean"] == pytest.approx((counts[1] - counts[2]) / sum(counts))
    swapped = difference(column(second), column(first), "x").loc[0]
    assert swapped[BOUNDS].tolist() == pytest.approx([-result["high"], -result["low"]])


@pytest.mark.parametrize("seed", range(8))
def test_newcombe_equals_the_formulas_for_one_table(seed):
    """Both signs of the correlation, and columns of one value; samples without a value are left out."""
    rng = np.random.default_rng(seed)
    first = (rng.random((25, 40)) < rng.random(40)).astype(float)
    second = np.where(rng.random((25, 40)) < rng.random(40), first, 1 - first)
    second[:, :4], first[:, 2:6] = 1, 0
    missing = rng.random((25, 40)) < 0.1
    first[missing] = second[missing] = np.nan
    bounds = newcombe(first, second)
    for cell in range(40):
        pairs = [(x, y) for x, y in zip(first[:, cell], second[:, cell], strict=True) if x == x]
        e, f, g, h = (sum(pair == each for pair in pairs) for each in [(1, 1), (1, 0), (0, 1), (0, 0)])
        n = e + f + g + h
        (l2, u2), (l3, u3) = (score_interval(k, n) for k in (e + f, e + g))
        product = (e + f) * (g + h) * (e + g) * (f + h)
        cross = e * h - f * g
        phi = 0 if not product else (cross if cross < 0 else max(cross - n / 2, 0)) / product**0.5
        d2, d3, theta = (e + f) / n, (e + g) / n, (f - g) / n
        delta = ((d2 - l2) ** 2 - 2 * phi * (d2 - l2) * (u3 - d3) + (u3 - d3) ** 2) ** 0.5
        epsilon = ((u2 - d2) ** 2 - 2 * phi * (u2 - d2) * (d3 - l3) + (d3 - l3) ** 2) ** 0.5
        assert bounds[:, cell].tolist() == pytest.approx([theta - delta, theta + epsilon])


def score_interval(successes: int, n: int) -> tuple[float, float]:
    """The shares p with |successes / n − p| = 1.96 √(p (1 − p) / n): the roots of a quadratic."""
    z = NormalDist().inv_cdf(0.975)
    low, high = np.sort(np.roots([1 + z * z / n, -(2 * successes / n + z * z / n), (successes / n) ** 2]).real)
    return float(low), float(high)


def test_proportions_are_found_by_cell():
    """0 and 1 in one table; not several seeds, not a column with values beyond 0 and 1."""
    binary, other = np.repeat([1.0, 0.0], [9, 3]), np.linspace(0, 0.9, 12)
    both = pd.concat([column(binary, "binary"), column(other, "other")])
    result = estimate(both, "x", by=["cell"]).set_index("cell")
    assert result.loc["binary", BOUNDS].tolist() == pytest.approx(score_interval(9, 12))
    assert result.loc["other", BOUNDS].tolist() == pytest.approx(bootstrap_interval([other]), abs=0.02)
    counts = pd.concat([column(np.zeros(12), "none"), column(np.arange(12.0), "some")])
    assert estimate(counts, "x", by=["cell"]).loc[0, ["mean", *BOUNDS]].tolist() == [0, 0, 0]
    assert estimate([column(np.ones(12))] * 2, "x").loc[0, BOUNDS].tolist() == [1, 1]
    assert estimate(column(np.ones(12)), "x").loc[0, BOUNDS].tolist() == pytest.approx(score_interval(12, 12))
    change = difference(column(binary), column(other), "x").loc[0]
    assert change[BOUNDS].tolist() == pytest.approx(bootstrap_interval([binary], [other]), abs=0.05)


@pytest.mark.parametrize("value", [0.1, -3.7, 1e9])
def test_equal_values_have_an_interval_without_width(value):
    values = np.full(7, value)
    for tables in (column(values), [column(values)] * 3):
        result = estimate(tables, "x").loc[0]
        assert result["low"] == result["high"] == result["mean"] == pytest.approx(value)
    result = bootstrap(pd.DataFrame({"x": values}), lambda m: m["x"])
    assert result.low == result.high == result.mean == pytest.approx(value)
    assert np.isnan(result.p_value)


@pytest.mark.parametrize("seed", range(6))
def test_the_interval_equals_the_formulas_on_the_same_draws(seed):
    """Skewed values with ties and gaps, one seed or three."""
    rng = np.random.default_rng(seed)
    values = np.round(rng.lognormal(0, 1, (1 + 2 * (seed % 2), 9, 5)), 1)
    values[rng.random(values.shape) < 0.1] = np.nan
    tables = [
        pd.concat([column(values[s, :, c], f"{c}") for c in range(5)], ignore_index=True) for s in range(len(values))
    ]
    result = estimate(tables, "x", by=["cell"])
    for c, draws in enumerate(draw_means(values).T):
        samples = [np.nanmean(x) for x in values[:, :, c].T if np.isfinite(x).any()]
        without_one = [np.mean(samples[:i] + samples[i + 1 :]) for i in range(len(samples))]
        kept_draws = [x for x in draws if x == x]
        expected = [bca_end(kept_draws, np.mean(samples), without_one, level) for level in (0.025, 0.975)]
        assert result.loc[c, BOUNDS].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("draw", "truth", "at_least"),
    [
        (lambda rng, shape: rng.random(shape) < 0.9, 0.9, 0.93),
        (lambda rng, shape: rng.random(shape) < 0.5, 0.5, 0.93),
        (lambda rng, shape: rng.normal(2, 1, shape), 2.0, 0.88),
        (lambda rng, shape: rng.exponential(1, shape), 1.0, 0.86),
    ],
)
def test_intervals_cover_the_truth_at_n_12(draw, truth, at_least):
    values = draw(np.random.default_rng(1), (1000, 12)).astype(float)
    result = estimate(pd.concat([column(row, f"{i}") for i, row in enumerate(values)]), "x", by=["cell"])
    assert ((result["low"] <= truth) & (truth <= result["high"])).mean() >= at_least
    if truth == 0.9:
        low, high = np.quantile(draw_means(values.T[None]), [0.025, 0.975], axis=0)
        assert 0.68 <= ((low <= truth) & (truth <= high)).mean() <= 0.76  # why a percentile bootstrap is not used


def test_a_paired_difference_of_proportions_is_covered_at_n_12():
    """A question that both answer, only the first, only the second or none: with probability .7, .2, .05 and .05."""
    outcome = np.random.default_rng(2).choice(4, (12, 2000), p=[0.7, 0.2, 0.05, 0.05])
    low, high = newcombe((outcome <= 1).astype(float), ((outcome == 0) | (outcome == 2)).astype(float))
    assert 0.93 <= ((low <= 0.15) & (high >= 0.15)).mean() <= 0.99


def score_table(seed: int, n: int = 40) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    text = rng.gamma(2, 1, n)
    columns = {"arm": text + rng.gamma(1, 1, n), "mdm": text + rng.gamma(1, 1.5, n)}
    return pd.DataFrame(columns, index=[f"s{i}" for i in range(n)])


STATISTICS = {
    "difference": lambda m: m["mdm"] - m["arm"],
    "ratio": lambda m: m["mdm"] / m["arm"],
    "log ratio": lambda m: np.log(m["mdm"] / m["arm"]),
}


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("seed", range(4))
def test_a_bootstrap_equals_loops(seed, name):
    table, statistic = score_table(seed), STATISTICS[name]
    result = bootstrap(table, statistic)
    rows, rng = table.to_dict("records"), np.random.default_rng(50 + seed)

    def measure(some: list[dict[str, float]]) -> float:
        return float(statistic({name: sum(row[name] for row in some) / len(some) for name in table}))

    draws = [measure([rows[i] for i in rng.integers(0, len(rows), len(rows))]) for _ in range(3000)]
    without_one = [measure(rows[:i] + rows[i + 1 :]) for i in range(len(rows))]
    low, high = (bca_end(draws, measure(rows), without_one, level) for level in (0.025, 0.975))
    assert (result.mean, result.n) == (pytest.approx(measure(rows)), len(rows))
    assert [result.low, result.high] == pytest.approx([low, high], abs=0.08 * (high - low))
    for p in (0.003, 0.01, 0.03, 0.1, 0.3, 0.6):
        low, high = (bca_end(draws, measure(rows), without_one, level) for level in (p / 2, 1 - p / 2))
        if not p / 1.5 < result.p_value < p * 1.5:  # not at the edge, where the draws decide
            assert (result.p_value < p) == (low > 0 or high < 0)


@pytest.mark.parametrize("shift", np.linspace(-0.5, 0.5, 9))
def test_the_p_value_is_below_5_percent_if_the_interval_excludes_0(shift):
    table = score_table(3).assign(shift=shift)
    result = bootstrap(table, lambda m: m["mdm"] - m["arm"] + m["shift"] - 0.5)
    assert abs(result.p_value - 0.05) > 0.002  # not at the edge, where the draws decide
    assert (result.p_value < 0.05) == (result.low > 0 or result.high < 0)


@pytest.mark.parametrize("seed", range(6))
def test_at_the_level_of_the_p_value_an_end_of_the_interval_is_0(seed):
    """The square of a skewed mean is biased and skewed."""
    values = np.random.default_rng(seed).lognormal(0, 1, (1, 15, 1))
    threshold = values.mean() ** 2 * (0.5, 1.8)[seed % 2]

    def statistic(means: dict[str, np.ndarray]) -> np.ndarray:
        return means["x"] ** 2 - threshold

    result = bootstrap(pd.DataFrame({"x": values.ravel()}), statistic)
    draws = statistic({"x": draw_means(values, TEST_DRAWS)[:, 0]})
    without_one = [statistic({"x": np.delete(values, i).mean()}) for i in range(15)]
    level = result.p_value / 2 if result.mean > 0 else 1 - result.p_value / 2
    assert 0.001 < result.p_value < 0.9
    assert bca_end(draws, result.mean, without_one, level) == pytest.approx(0, abs=2e-3 * np.ptp(draws))


def test_p_values_are_uniform_if_the_statistic_is_0():
    rng = np.random.default_rng(4)
    p = [bootstrap(pd.DataFrame({"x": rng.normal(0, 1, 40)}), lambda m: m["x"]).p_value for _ in range(150)]
    assert 0.01 <= np.mean(np.array(p) < 0.05) <= 0.11
    assert np.mean(p) == pytest.approx(0.5, abs=0.08)


def test_the_p_value_has_the_resolution_of_the_draws():
    table = score_table(0)
    for sign in (1, -1):
        result = bootstrap(table, lambda m, sign=sign: sign * m["arm"])
        assert result.p_value == 2 / TEST_DRAWS
        assert result.format_p_value() == "p < 0.0002"
    assert BootstrapEstimate(0.1, 0.0, 0.2, 12, 0.0312).format_p_value() == "p = 0.031"
    never_negative = pd.DataFrame({"x": [0.0] * 9 + [1.0] * 3})  # a draw without a 1 is 0: the interval includes 0
    result = bootstrap(never_negative, lambda m: m["x"])
    assert result.p_value > 2 / TEST_DRAWS
    assert (result.p_value < 0.05) == (result.low > 0)


def test_a_bootstrap_draws_seeds_as_well():
    seeds = [score_table(i).assign(mdm=lambda t, i=i: t["mdm"] + 3 * i) for i in range(3)]
    result, one = bootstrap(seeds, STATISTICS["difference"]), bootstrap(seeds[1], STATISTICS["difference"])
    change = [table["mdm"].to_numpy() - table["arm"].to_numpy() for table in seeds]
    assert result.mean == pytest.approx(np.mean(change))
    assert [result.low, result.high] == pytest.approx(bootstrap_interval(change), abs=0.2)
    assert result.high - result.low > 2 * (one.high - one.low)
    paired = difference(*([long_table(table, name) for table in seeds] for name in ("mdm", "arm")), "x").loc[0]
    assert [result.low, result.high] == pytest.approx(paired[BOUNDS].tolist(), abs=0.2)


def long_table(table: pd.DataFrame, name: str) -> pd.DataFrame:
    return pd.DataFrame({"sample": table.index, "x": table[name].to_numpy()})


def test_a_bootstrap_uses_complete_samples_in_any_order():
    table = score_table(5)
    expected = bootstrap(table.drop(index=["s3", "s7"]), STATISTICS["ratio"])
    missing = table.copy()
    missing.loc["s3", "arm"] = missing.loc["s7", "mdm"] = np.nan
    assert bootstrap(missing, STATISTICS["ratio"]) == expected
    assert bootstrap(missing.sample(frac=1, random_state=0)[["mdm", "arm"]], STATISTICS["ratio"]) == expected
    named = missing.rename_axis("sample").reset_index()
    assert bootstrap(named, STATISTICS["ratio"]) == expected
    assert expected.n == 38
    assert bootstrap([missing, table], STATISTICS["ratio"]).n == 38


def test_a_bootstrap_without_data_or_variation_has_no_interval():
    table = score_table(6)
    empty = bootstrap(table.iloc[:0], STATISTICS["ratio"])
    assert empty.n == 0
    assert np.isnan([empty.mean, empty.low, empty.high, empty.p_value]).all()
    single = bootstrap(table.iloc[:1], STATISTICS["ratio"])
    assert single.mean == pytest.approx(table["mdm"].iloc[0] / table["arm"].iloc[0])
    assert np.isnan([single.low, single.high, single.p_value]).all()
    half = bootstrap(table.assign(mdm=table["arm"] / 2), STATISTICS["ratio"])
    assert (half.mean, half.low, half.high) == pytest.approx((0.5, 0.5, 0.5))
    assert np.isnan(half.p_value)
    assert half.format_p_value() == "–"
    undefined = bootstrap(table.assign(arm=0.0), STATISTICS["ratio"])
    assert np.isnan([undefined.mean, undefined.low, undefined.p_value]).all()
    sometimes = bootstrap(table.assign(arm=[1.0] + [0.0] * 39), STATISTICS["ratio"])  # 0 / 0 in a third of the draws
    assert np.isfinite([sometimes.low, sometimes.high, sometimes.p_value]).all()


def test_a_bootstrap_refuses_tables_that_do_not_fit():
    table = score_table(7)
    with pytest.raises(UserError, match="need the same columns"):
        bootstrap([table, table.rename(columns={"arm": "llama"})], STATISTICS["ratio"])
    with pytest.raises(UserError, match="a sample has several rows"):
        bootstrap(pd.concat([table, table]), STATISTICS["ratio"])


@pytest.mark.parametrize("seed", range(5))
def test_holm_equals_a_loop(seed):
    rng = np.random.default_rng(seed)
    p = np.round(rng.random(8) ** 3, 2).tolist()
    p[seed] = float("nan")
    tests = [x for x in p if x == x]
    expected = []
    for x in p:
        ranks = [sorted(tests).index(y) for y in tests if y <= x]
        expected.append(min(1.0, max(sorted(tests)[r] * (len(tests) - r) for r in ranks)) if x == x else float("nan"))
    assert holm(p).tolist() == pytest.approx(expected, nan_ok=True)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.01, float("nan"), 0.5, 0.9]).tolist() == pytest.approx([0.03, float("nan"), 1, 1], nan_ok=True)
    assert holm([]).tolist() == []


def test_a_small_n_is_noted():
    assert note_small_n([200, 29]) == "n < 30: intervals are approximate."
    assert note_small_n([30, 1, 0]) == note_small_n([]) == ""

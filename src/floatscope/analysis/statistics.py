"""Means with their 95 % intervals from tables with a row per sample, paired differences, and p-values.

    table = absorption(run)                                             # a row per sample, layer and set
    estimate(table, "lift", by=["layer", "set"])                        # mean, std, low, high, n
    estimate([control_0, control_1], "lift", by=["layer", "set"])       # several controls: seeds are drawn as well
    difference(table, [control_0, control_1], "lift", by=["layer"])     # on the samples both have
    bootstrap(scores, lambda m: m["mdm"] - m["arm"])                    # any statistic of column means, with a p-value
    holm([0.01, 0.04, 0.03])                                            # p-values corrected for several tests

| values                                             | interval                                               |
|----------------------------------------------------|--------------------------------------------------------|
| 0 or 1, one table                                  | Wilson                                                 |
| difference of two such columns on the same samples | Newcombe, paired (square-and-add, method 10)           |
| anything else                                      | BCa bootstrap over samples, nested over several seeds  |

Sources: Wilson 1927; Newcombe 1998, Statistics in Medicine 17:2635; Efron 1987; Holm 1979.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, UInt16

from floatscope.errors import UserError, unknown_choice

BOOTSTRAP_DRAWS = 2000
TEST_DRAWS = 10_000
"""Draws of `bootstrap`: the smallest p-value that it can return is 2 / TEST_DRAWS."""
SMALL_N = 30
LEVELS = (0.025, 0.975)
TIE = 1e-12
"""Numbers that differ by less than this share of the largest value are equal up to rounding."""
COUNTS_PER_BLOCK = 2_000_000

Tables: TypeAlias = "pd.DataFrame | Sequence[pd.DataFrame]"
Statistic: TypeAlias = Callable[[pd.DataFrame], pd.Series]
"""Column means, a row per resample → the statistic of each row."""
Bounds: TypeAlias = Float[np.ndarray, "bound cell"]


@dataclass(frozen=True)
class BootstrapEstimate:
    """A statistic with its 95 % BCa interval, the number of samples, and the two-sided p-value of "it is 0"."""

    mean: float
    low: float
    high: float
    n: int
    p_value: float

    def format_p_value(self) -> str:
        """`p = 0.031`, or `p < 0.0002` at the resolution of the bootstrap; `–` without a p-value."""
        if np.isnan(self.p_value):
            return "–"
        return f"p < {2 / TEST_DRAWS:g}" if self.p_value <= 2 / TEST_DRAWS else f"p = {self.p_value:.2g}"


def estimate(tables: Tables, value: str, by: Sequence[str] = ()) -> pd.DataFrame:
    """Return the mean of a column with its 95 % interval: a row per cell of `by`.

    The columns are those of `by` and mean, std (over samples), low, high, n (the samples with a value). Several tables
    are seeds of one control: a sample counts with its mean over seeds, and the bootstrap draws seeds as well.

    The interval is Wilson's for a cell of one table whose values are all 0 or 1, and BCa otherwise. A column with a
    value below 0 or above 1 is not a proportion, so its cells are all BCa. Equal values have a BCa interval without
    width. One sample has no interval.

        fs.analysis.estimate(fs.analysis.absorption(run), "lift", by=["layer", "set"])
    """
    if not by and all(table.empty for table in _as_list(tables)):
        return pd.DataFrame({"mean": [np.nan], "std": [np.nan], "low": [np.nan], "high": [np.nan], "n": [0]})
    cube, cells, _ = _build_cube(tables, value, by)
    values, is_share = _mean_over_seeds(cube), _find_proportions(cube)
    bounds = np.empty((2, len(cells)))
    bounds[:, is_share] = wilson(np.nansum(values[:, is_share], 0), np.isfinite(values[:, is_share]).sum(0))
    bounds[:, ~is_share] = _bca_of_means(values[:, ~is_share], draw_means(cube[:, :, ~is_share]))
    return _summarise(cells, values, bounds)


def difference(a: Tables, b: Tables, value: str, by: Sequence[str] = ()) -> pd.DataFrame:
    """Return the paired difference a − b, over the samples and cells that both have, in the columns of `estimate`.

    The interval is Newcombe's for two cells of 0 and 1 (one table each), and BCa otherwise.
    """
    first, first_cells, first_samples = _build_cube(a, value, by)
    second, second_cells, second_samples = _build_cube(b, value, by)
    samples = [name for name in first_samples if name in set(second_samples)]
    if not samples:
        raise UserError("the two have no sample in common, so there is no paired difference; trace both on one file")
    cells = first_cells.index.intersection(second_cells.index, sort=False)
    columns = [first_cells.index.get_indexer(cells), second_cells.index.get_indexer(cells)]
    rows = [[names.index(name) for name in samples] for names in (first_samples, second_samples)]
    left, right = (cube[:, r][:, :, c] for cube, r, c in zip((first, second), rows, columns, strict=True))
    change = _mean_over_seeds(left) - _mean_over_seeds(right)
    left, right = (np.where(np.isfinite(change), cube, np.nan) for cube in (left, right))
    is_share = _find_proportions(left) & _find_proportions(right)
    bounds = np.empty((2, len(cells)))
    bounds[:, is_share] = newcombe(left[0][:, is_share], right[0][:, is_share])
    left, right = left[:, :, ~is_share], right[:, :, ~is_share]
    bounds[:, ~is_share] = _bca_of_means(change[:, ~is_share], draw_means(left) - draw_means(right))
    return _summarise(first_cells.loc[cells], change, bounds)


def bootstrap(tables: Tables, statistic: Statistic) -> BootstrapEstimate:
    """Return a statistic of column means with its 95 % BCa interval and p-value, by a bootstrap over samples.

    A table has a row per sample, named by its index or by a column `sample`, and a column per measured number. Samples
    with a missing value are left out. Several tables are seeds: they have the same columns, a sample counts with its
    mean over seeds, and the bootstrap draws seeds as well. All columns of a table belong to its seed.

    The p-value is two-sided and tests whether the statistic is 0: it is the smallest level at which the BCa interval
    excludes 0. Its resolution is that of 10,000 draws, so 2 / 10,000 stands for "at most 0.0002". It is NaN, and the
    interval has no width, if all draws are equal. Draws for which the statistic is undefined (0 / 0) are left out.

    Values of 0 and 1 are bootstrapped like any others: near a ceiling or floor with small n the interval is too narrow.

        bootstrap(pd.DataFrame({"arm": […], "mdm": […]}), lambda means: means["mdm"] - means["arm"])
    """
    cube, columns = _stack_complete(_as_list(tables))
    n = cube.shape[1]
    if not n:
        return BootstrapEstimate(np.nan, np.nan, np.nan, 0, np.nan)
    values = cube.mean(0)
    mean = float(_apply(statistic, values.mean(0, keepdims=True), columns)[0])
    if n == 1 or np.isnan(mean):
        return BootstrapEstimate(mean, np.nan, np.nan, n, np.nan)
    draws = _apply(statistic, draw_means(cube, TEST_DRAWS), columns)[:, None]
    without_one = _apply(statistic, (values.sum(0) - values) / (n - 1), columns)[:, None]
    bca = _Bca(np.array([mean]), draws, _acceleration(np.nanmean(without_one) - without_one))
    (low,), (high,) = bca.bounds()
    return BootstrapEstimate(mean, float(low), float(high), n, float(bca.p_values()[0]))


def holm(p_values: Sequence[float]) -> Float[np.ndarray, " test"]:
    """Return p-values corrected for their number by Holm's method, in the same order; NaN stays NaN and is no test."""
    p = np.asarray(p_values, float)
    order = np.argsort(p)[: int(np.isfinite(p).sum())]  # NaN is sorted last
    corrected = np.full(p.shape, np.nan)
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return corrected


def wilson(successes: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Return the ends of Wilson's 95 % interval of successes / n; NaN for n = 0."""
    z = NormalDist().inv_cdf(LEVELS[1])
    n = np.where(np.asarray(n) > 0, n, np.nan)
    share = successes / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    low, high = np.where(successes == 0, 0.0, centre - half), np.where(successes == n, 1.0, centre + half)
    return np.where(np.isnan(n), np.nan, [low, high])


def newcombe(first: Float[np.ndarray, "sample cell"], second: Float[np.ndarray, "sample cell"]) -> Bounds:
    """Return the ends of Newcombe's 95 % interval of the difference between two columns of 0 and 1 on the same samples.

    Method 10 of Newcombe (1998): Wilson's intervals of both shares, squared and added, with their correlation φ. A
    positive φ is estimated with a continuity correction, and φ is 0 if a column has only one value. Samples without a
    value have NaN in both columns.
    """
    n = np.isfinite(first).sum(0).astype(float)
    both, one, other = np.nansum(first * second, 0), np.nansum(first, 0), np.nansum(second, 0)
    only_first, only_second = one - both, other - both
    cross = both * (n - both - only_first - only_second) - only_first * only_second
    numerator = np.where(cross > 0, np.maximum(0, cross - n / 2), cross)
    scale = np.sqrt(one * (n - one) * other * (n - other))
    phi = np.divide(numerator, scale, out=np.zeros_like(scale), where=scale > 0)
    (low_1, high_1), (low_2, high_2) = wilson(one, n), wilson(other, n)
    n = np.where(n > 0, n, np.nan)
    p_1, p_2 = one / n, other / n
    below = _add_squares(p_1 - low_1, high_2 - p_2, phi)
    above = _add_squares(high_1 - p_1, p_2 - low_2, phi)
    return np.stack([p_1 - p_2 - below, p_1 - p_2 + above])


def note_small_n(counts: Iterable[int]) -> str:
    """Return a sentence if any interval is over fewer than 30 samples; empty otherwise. One sample has no interval."""
    return f"n < {SMALL_N}: intervals are approximate." if any(1 < n < SMALL_N for n in counts) else ""


def draw_means(
    cube: Float[np.ndarray, "seed sample cell"], draws: int = BOOTSTRAP_DRAWS
) -> Float[np.ndarray, "draw cell"]:
    """Return bootstrap means: over samples drawn with replacement, each the mean over seeds drawn with replacement.

    The draws are the same for every cube of one size, so differences of two cubes are paired.
    """
    seeds, samples, cells = cube.shape
    sample_counts, seed_counts = _draw_counts(0, samples, draws), _draw_counts(1, seeds, draws)
    means = np.empty((draws, cells))
    for counts in np.unique(seed_counts, axis=0):  # few: three seeds can be drawn in ten ways
        has_counts = np.flatnonzero((seed_counts == counts).all(1))
        values = _mean_over_seeds(np.repeat(cube, counts, axis=0))
        has_value = np.isfinite(values)
        filled, is_complete = np.where(has_value, values, 0.0), bool(has_value.all())
        for block in np.array_split(has_counts, 1 + len(has_counts) * samples // COUNTS_PER_BLOCK):
            weights = sample_counts[block].astype(float)
            n = float(samples) if is_complete else weights @ has_value
            with np.errstate(divide="ignore", invalid="ignore"):
                means[block] = (weights @ filled) / n
    return means


@lru_cache(maxsize=8)
def _draw_counts(seed: int, n: int, draws: int) -> UInt16[np.ndarray, "draw item"]:
    """How often each of n items is drawn in n draws with replacement, by resample."""
    rng, counts = np.random.default_rng(seed), np.empty((draws, n), np.uint16)
    rows_per_block = max(1, COUNTS_PER_BLOCK // n)
    for start in range(0, draws, rows_per_block):
        rows = min(rows_per_block, draws - start)
        items = rng.integers(0, n, (rows, n)) + n * np.arange(rows)[:, None]
        counts[start : start + rows] = np.bincount(items.ravel(), minlength=rows * n).reshape(rows, n)
    counts.flags.writeable = False
    return counts


class _Bca:
    """The bias-corrected and accelerated bootstrap of many cells at once.

    The draw at rank q stands for the normal quantile z(q) = z0 + t / (1 − a t) with t = z0 + z(level), where z0 is the
    median bias of the draws and a the acceleration.
    """

    def __init__(
        self,
        estimates: Float[np.ndarray, " cell"],
        draws: Float[np.ndarray, "draw cell"],
        acceleration: Float[np.ndarray, " cell"],
    ) -> None:
        self.estimates, self.acceleration = estimates, acceleration
        self.ordered = np.sort(np.ascontiguousarray(draws.T), axis=1)  # NaN is sorted last
        self.count = np.isfinite(self.ordered).sum(1)
        with np.errstate(invalid="ignore"):
            self.tie = TIE * np.nanmax(np.abs(self.ordered), axis=1, initial=0.0)
        below, up_to = self._shares(estimates)
        self.z0 = self._quantile((below + up_to) / 2)
        last = np.take_along_axis(self.ordered, np.maximum(self.count - 1, 0)[:, None], 1)[:, 0]
        self.is_constant = ~(last - self.ordered[:, 0] > self.tie)

    def bounds(self) -> Bounds:
        """The ends of the 95 % interval; the estimate itself if all draws are equal, NaN without draws."""
        t = self.z0 + np.array([[NormalDist().inv_cdf(level)] for level in LEVELS])
        rank = _normal_cdf(self.z0 + _stretch(t, -self.acceleration)) * np.maximum(self.count - 1, 0)
        lower = np.floor(rank).astype(int)
        upper = np.minimum(lower + 1, np.maximum(self.count - 1, 0))
        low, high = (np.take_along_axis(self.ordered, index.T, 1).T for index in (lower, upper))
        bounds = np.where(self.is_constant, self.estimates, low + (rank - lower) * (high - low))
        return np.where(self.count > 0, bounds, np.nan)

    def p_values(self) -> Float[np.ndarray, " cell"]:
        """The smallest two-sided level at which the interval excludes 0, at least 2 / draws; NaN if it has no width."""
        below, up_to = self._shares(np.zeros_like(self.estimates))
        p = 2 * np.minimum(self._level(up_to), 1 - self._level(below))  # 0 below the lower end, or above the upper
        p = np.clip(p, 2 / np.maximum(self.count, 1), 1)
        return np.where(self.is_constant | (self.count == 0), np.nan, p)

    def _level(self, share: Float[np.ndarray, " cell"]) -> Float[np.ndarray, " cell"]:
        """The one-sided level whose end of the interval has this share of the draws below it."""
        level = _normal_cdf(_stretch(self._quantile(share) - self.z0, self.acceleration) - self.z0)
        return np.where(share <= 0, 0.0, np.where(share >= 1, 1.0, level))

    def _shares(self, at: Float[np.ndarray, " cell"]) -> tuple[np.ndarray, np.ndarray]:
        """The shares of draws below a value, and below or equal to it."""
        count = np.maximum(self.count, 1)
        below = (self.ordered < (at - self.tie)[:, None]).sum(1) / count
        return below, (self.ordered <= (at + self.tie)[:, None]).sum(1) / count

    def _quantile(self, share: Float[np.ndarray, " cell"]) -> Float[np.ndarray, " cell"]:
        """The normal quantile of a share of the draws; one more draw on either side keeps it finite."""
        edge = 1 / (self.count + 2)
        return _normal_quantile(np.clip(share, edge, 1 - edge))


def _as_list(tables: Tables) -> list[pd.DataFrame]:
    return [tables] if isinstance(tables, pd.DataFrame) else list(tables)


def _build_cube(
    tables: Tables, value: str, by: Sequence[str]
) -> tuple[Float[np.ndarray, "seed sample cell"], pd.DataFrame, list[str]]:
    """The values, the cells (their index is their key) and the samples."""
    seeds = _as_list(tables)
    keys = list(by) or ["all"]
    wide = []
    for table in seeds:
        for name in (value, *by):
            if name not in table.columns:
                raise unknown_choice("column", name, table.columns)
        keyed = table if by else table.assign(all="")
        wide.append(keyed.groupby(["sample", *keys], sort=False)[value].mean().unstack(keys, sort=False))
    columns = wide[0].columns
    for pivot in wide[1:]:
        columns = columns.append(pivot.columns.difference(columns, sort=False))
    samples = sorted({name for table in seeds for name in table["sample"]})  # one order: the draws are by position
    cells = columns.to_frame(index=True)
    if not by:
        cells = cells.drop(columns="all")
    cube = np.stack([pivot.reindex(index=samples, columns=columns).to_numpy(float) for pivot in wide])
    return cube, cells, samples


def _mean_over_seeds(cube: Float[np.ndarray, "seed sample cell"]) -> Float[np.ndarray, "sample cell"]:
    """Each sample's mean over the seeds that have a value; NaN if none has."""
    n = np.isfinite(cube).sum(0)
    return np.where(n > 0, np.nansum(cube, 0) / n.clip(1), np.nan)


def _find_proportions(cube: Float[np.ndarray, "seed sample cell"]) -> Bool[np.ndarray, " cell"]:
    """The cells of one table that have only 0 and 1, in a column that stays between them."""
    if len(cube) > 1 or ((cube < 0) | (cube > 1)).any():
        return np.zeros(cube.shape[2], bool)
    return ((cube == 0) | (cube == 1) | np.isnan(cube)).all((0, 1))


def _stack_complete(tables: list[pd.DataFrame]) -> tuple[Float[np.ndarray, "seed sample column"], pd.Index]:
    """The samples that have every value in every table, sorted by name, and the names of the columns."""
    seeds = [(table.set_index("sample") if "sample" in table else table).dropna() for table in tables]
    columns, samples = seeds[0].columns, seeds[0].index
    for table in seeds:
        if set(table.columns) != set(columns):
            raise UserError(f"the tables of several seeds need the same columns, got {list(columns)} and {list(table)}")
        if not table.index.is_unique:
            raise UserError("a sample has several rows; give a table with a row per sample")
        samples = samples.intersection(table.index)
    samples = samples.sort_values()  # one order: the draws are by position
    return np.stack([table.loc[samples, columns].to_numpy(float) for table in seeds]), columns


def _apply(statistic: Statistic, means: Float[np.ndarray, "row column"], columns: pd.Index) -> np.ndarray:
    """The statistic of each row, NaN where it is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        result = np.asarray(statistic(pd.DataFrame(means, columns=columns)), float)
    return np.where(np.isfinite(result), result, np.nan)


def _bca_of_means(values: Float[np.ndarray, "sample cell"], draws: Float[np.ndarray, "draw cell"]) -> Bounds:
    """The interval of the mean of each cell. Leaving one sample out moves the mean by its deviation / (n − 1)."""
    mean = np.nansum(values, 0) / np.maximum(np.isfinite(values).sum(0), 1)
    return _Bca(mean, draws, _acceleration(values - mean)).bounds()


def _acceleration(deviations: Float[np.ndarray, "sample cell"]) -> Float[np.ndarray, " cell"]:
    """A sixth of the skewness of the jackknife; 0 if nothing varies."""
    scale = np.sqrt(np.nansum(deviations**2, 0))
    standard = np.divide(deviations, scale, out=np.zeros_like(deviations), where=scale > 0)
    return np.nansum(standard**3, 0) / 6


def _stretch(t: np.ndarray, acceleration: np.ndarray) -> np.ndarray:
    """t / (1 + a t); ±∞ beyond its pole. With −a it is the inverse."""
    divisor = 1 + acceleration * t
    return np.divide(t, divisor, out=np.copysign(np.inf, t), where=divisor > 0)


def _add_squares(x: np.ndarray, y: np.ndarray, correlation: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(0, x**2 + y**2 - 2 * correlation * x * y))


_normal_cdf = np.vectorize(NormalDist().cdf, otypes=[float])
_normal_quantile = np.vectorize(NormalDist().inv_cdf, otypes=[float])


def _summarise(cells: pd.DataFrame, values: Float[np.ndarray, "sample cell"], bounds: Bounds) -> pd.DataFrame:
    n = np.isfinite(values).sum(0)
    count = np.where(n > 0, n, np.nan)
    mean = np.nansum(values, 0) / count
    std = np.sqrt(np.nansum((values - mean) ** 2, 0) / count)
    low, high = np.where(n > 1, bounds, np.nan)  # one sample says nothing about others
    return cells.reset_index(drop=True).assign(mean=mean, std=std, low=low, high=high, n=n)

"""Means with their 95 % intervals from tables with a row per sample, and paired differences between models.

    table = absorption(run)                                             # a row per sample, layer and set
    estimate(table, "lift", by=["layer", "set"])                        # mean, std, low, high, n
    estimate([control_0, control_1], "lift", by=["layer", "set"])       # several controls: seeds are drawn as well
    difference(table, [control_0, control_1], "lift", by=["layer"])     # on the samples both have

Intervals are percentile bootstraps over samples: the texts might have been others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Float

from floatscope.errors import UserError, unknown_choice

BOOTSTRAP_DRAWS = 2000
Tables: TypeAlias = "pd.DataFrame | Sequence[pd.DataFrame]"


def estimate(tables: Tables, value: str, by: Sequence[str] = ()) -> pd.DataFrame:
    """Return the mean of a column with its 95 % interval: a row per cell of `by`.

    The columns are those of `by` and mean, std (over samples), low, high, n (the samples with a value). Several tables
    are seeds of one control: a sample counts with its mean over seeds, and the bootstrap draws seeds as well.

        fs.analysis.estimate(fs.analysis.absorption(run), "lift", by=["layer", "set"])
    """
    if not by and all(table.empty for table in _as_list(tables)):
        return pd.DataFrame({"mean": [np.nan], "std": [np.nan], "low": [np.nan], "high": [np.nan], "n": [0]})
    cube, cells, _ = _build_cube(tables, value, by)
    return _summarise(cells, _mean_over_seeds(cube), draw_means(cube))


def difference(a: Tables, b: Tables, value: str, by: Sequence[str] = ()) -> pd.DataFrame:
    """Return the paired difference a − b, over the samples and cells that both have, in the columns of `estimate`."""
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
    return _summarise(first_cells.loc[cells], change, draw_means(left) - draw_means(right))


def draw_means(cube: Float[np.ndarray, "seed sample cell"]) -> Float[np.ndarray, "draw cell"]:
    """Return bootstrap means: over samples drawn with replacement, each the mean over seeds drawn with replacement.

    The draws are the same for every cube of one size, so differences of two cubes are paired.
    """
    seeds, samples, cells = cube.shape
    sample_counts = np.random.default_rng(0).multinomial(samples, np.full(samples, 1 / samples), BOOTSTRAP_DRAWS)
    seed_counts = np.random.default_rng(1).multinomial(seeds, np.full(seeds, 1 / seeds), BOOTSTRAP_DRAWS)
    means = np.empty((BOOTSTRAP_DRAWS, cells))
    for counts in np.unique(seed_counts, axis=0):  # few: three seeds can be drawn in ten ways
        has_counts = (seed_counts == counts).all(1)
        values = _mean_over_seeds(np.repeat(cube, counts, axis=0))
        has_value, weights = np.isfinite(values), sample_counts[has_counts].astype(float)
        with np.errstate(divide="ignore", invalid="ignore"):
            means[has_counts] = (weights @ np.where(has_value, values, 0.0)) / (weights @ has_value)
    return means


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


def _summarise(
    cells: pd.DataFrame, values: Float[np.ndarray, "sample cell"], draws: Float[np.ndarray, "draw cell"]
) -> pd.DataFrame:
    n = np.isfinite(values).sum(0)
    count = np.where(n > 0, n, np.nan)
    mean = np.nansum(values, 0) / count
    std = np.sqrt(np.nansum((values - mean) ** 2, 0) / count)
    low, high = np.where(n > 1, _quantiles(draws), np.nan)  # one sample says nothing about others
    return cells.reset_index(drop=True).assign(mean=mean, std=std, low=low, high=high, n=n)


def _quantiles(draws: Float[np.ndarray, "draw cell"]) -> Float[np.ndarray, "bound cell"]:
    is_empty = ~np.isfinite(draws).any(0)
    bounds = np.nanquantile(np.where(is_empty, 0.0, draws), [0.025, 0.975], axis=0)
    return np.where(is_empty, np.nan, bounds)

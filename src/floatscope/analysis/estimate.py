"""From one row per sample to a mean with its 95 % interval, and to paired differences between models.

    table = absorption(run)                                             # a row per sample, layer and set
    estimate(table, "lift", by=["layer", "set"])                        # mean, std, low, high, n
    estimate([control_0, control_1], "lift", by=["layer", "set"])       # several controls: seeds are drawn as well
    difference(table, [control_0, control_1], "lift", by=["layer"])     # on the samples both have

Intervals are bootstrapped over samples: what was measured on these texts might have been measured on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Float

from floatscope.errors import UserError, unknown_choice

DRAWS = 2000
Tables: TypeAlias = "pd.DataFrame | Sequence[pd.DataFrame]"


def estimate(tables: Tables, value: str, by: Sequence[str] = ()) -> pd.DataFrame:
    """A row per cell of `by`: mean, standard deviation over samples, interval, number of samples that have one."""
    if not by and all(table.empty for table in _several(tables)):
        return pd.DataFrame({"mean": [np.nan], "std": [np.nan], "low": [np.nan], "high": [np.nan], "n": [0]})
    cube, cells, _ = _cube(tables, value, by)
    return _told(cells, _over_seeds(cube), _draw(cube))


def difference(a: Tables, b: Tables, value: str, by: Sequence[str] = ()) -> pd.DataFrame:
    """a − b, of every sample both have a value for; the interval is that of the difference."""
    first, cells, ours = _cube(a, value, by)
    second, theirs_cells, theirs = _cube(b, value, by)
    samples = [name for name in ours if name in set(theirs)]
    if not samples:
        raise UserError("the two have no sample in common, so there is no paired difference; trace both on one file")
    shared = cells.index.intersection(theirs_cells.index, sort=False)
    rows = [cells.index.get_indexer(shared), theirs_cells.index.get_indexer(shared)]
    pick = [[names.index(name) for name in samples] for names in (ours, theirs)]
    left, right = (cube[:, p][:, :, r] for cube, p, r in zip((first, second), pick, rows, strict=True))
    apart = _over_seeds(left) - _over_seeds(right)
    left, right = (np.where(np.isfinite(apart), cube, np.nan) for cube in (left, right))
    return _told(cells.loc[shared], apart, _draw(left) - _draw(right))


def _several(tables: Tables) -> list[pd.DataFrame]:
    return [tables] if isinstance(tables, pd.DataFrame) else list(tables)


def _cube(
    tables: Tables, value: str, by: Sequence[str]
) -> tuple[Float[np.ndarray, "seed sample cell"], pd.DataFrame, list[str]]:
    """The values, the cells (their index is their key), the samples."""
    several = _several(tables)
    keys = list(by) or ["all"]
    wide = []
    for table in several:
        for name in (value, *by):
            if name not in table.columns:
                raise unknown_choice("column", name, table.columns)
        whole = table if by else table.assign(all="")
        wide.append(whole.groupby(["sample", *keys], sort=False)[value].mean().unstack(keys, sort=False))
    columns = wide[0].columns
    for each in wide[1:]:
        columns = columns.append(each.columns.difference(columns, sort=False))
    samples = sorted({name for table in several for name in table["sample"]})  # in one order: the draws are by place
    cells = columns.to_frame(index=True)
    if not by:
        cells = cells.drop(columns="all")
    stacked = np.stack([each.reindex(index=samples, columns=columns).to_numpy(float) for each in wide])
    return stacked, cells, samples


def _draw(cube: Float[np.ndarray, "seed sample cell"]) -> Float[np.ndarray, "draw cell"]:
    """Means over samples drawn with replacement, each the mean over seeds drawn likewise; the same draws for every cube
    of one size."""
    seeds, samples, cells = cube.shape
    chosen = np.random.default_rng(0).multinomial(samples, np.full(samples, 1 / samples), DRAWS)
    of_seeds = np.random.default_rng(1).multinomial(seeds, np.full(seeds, 1 / seeds), DRAWS)
    means = np.empty((DRAWS, cells))
    for mix in np.unique(of_seeds, axis=0):  # few: three seeds can be drawn in ten ways
        values = _over_seeds(np.repeat(cube, mix, axis=0))
        there, of_mix = np.isfinite(values), chosen[(of_seeds == mix).all(1)].astype(float)
        with np.errstate(divide="ignore", invalid="ignore"):
            means[(of_seeds == mix).all(1)] = (of_mix @ np.where(there, values, 0.0)) / (of_mix @ there)
    return means


def _over_seeds(cube: Float[np.ndarray, "seed sample cell"]) -> Float[np.ndarray, "sample cell"]:
    """Each sample's mean over the seeds that have one; NaN where none has."""
    n = np.isfinite(cube).sum(0)
    return np.where(n > 0, np.nansum(cube, 0) / n.clip(1), np.nan)


def _told(
    cells: pd.DataFrame, values: Float[np.ndarray, "sample cell"], draws: Float[np.ndarray, "draw cell"]
) -> pd.DataFrame:
    n = np.isfinite(values).sum(0)
    some = np.where(n > 0, n, np.nan)
    mean = np.nansum(values, 0) / some
    std = np.sqrt(np.nansum((values - mean) ** 2, 0) / some)
    low, high = np.where(n > 1, _quantiles(draws), np.nan)  # one sample says nothing of others
    return cells.reset_index(drop=True).assign(mean=mean, std=std, low=low, high=high, n=n)


def _quantiles(draws: Float[np.ndarray, "draw cell"]) -> Float[np.ndarray, "bound cell"]:
    empty = ~np.isfinite(draws).any(0)
    bounds = np.nanquantile(np.where(empty, 0.0, draws), [0.025, 0.975], axis=0)
    return np.where(empty, np.nan, bounds)

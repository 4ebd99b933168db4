"""`Trace`: everything one sample left behind while its canvas was decoded, as named arrays.

One trace holds one sample, cut to its own keys, so it does not depend on the batch it was decoded in. Arrays are numpy,
`axes[name]` names their axes, `coords` names what lies along an axis; floats that were not measured are NaN.

    trace.arrays["received"], trace.axes["received"]    # [step, layer, group, key]
    trace.received(layer=3, scale="lift")               # [step, key], 1 = as much as uniform attention would give
    trace.plot(layer=3, path="floating.png")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from floatscope.errors import UserError, unknown_choice
from floatscope.schema import MIN_VISIBLE_ROWS, State

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

Array = np.ndarray[Any, np.dtype[Any]]

SCALES = ("mean", "sum", "percent", "visible", "lift")
VIEWS = ("prefix", "row")


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """One sample's trace. `layout.OWN` and `capture.fields.FIELDS` say what each array means."""

    sample: str
    arrays: Mapping[str, Array]
    axes: Mapping[str, tuple[str, ...]]
    coords: Mapping[str, tuple[str, ...]]
    meta: Mapping[str, Any]

    def __post_init__(self) -> None:
        sizes = {axis: (len(names), f"coords['{axis}']") for axis, names in self.coords.items()}
        for name, array in self.arrays.items():
            axes = self.axes.get(name, ())
            if len(axes) != array.ndim:
                raise UserError(
                    f"array '{name}' has {array.ndim} axes, and {len(axes)} names for them: {', '.join(axes)}"
                )
            for axis, size in zip(axes, array.shape, strict=True):
                known, where = sizes.setdefault(axis, (size, f"array '{name}'"))
                if known != size:
                    raise UserError(f"axis '{axis}' is {size} long in array '{name}' and {known} long in {where}")
        object.__setattr__(self, "meta", plain_json(self.meta, "meta"))

    def __repr__(self) -> str:
        sizes = {
            axis: n for name in self.arrays for axis, n in zip(self.axes[name], self.arrays[name].shape, strict=True)
        }
        shape = ", ".join(f"{axis} {sizes[axis]}" for axis in ("step", "layer", "key", "commit") if axis in sizes)
        return f"Trace('{self.sample}': {shape}; {len(self.arrays)} arrays)"

    def received(
        self,
        layer: int | None = None,
        group: str = "all",
        scale: str = "mean",
        head: int | None = None,
        view: str = "prefix",
        eligible: bool = False,
    ) -> Float[np.ndarray, "step key"]:
        """Received attention r[step, key] of a query group, for one layer or (None) the mean over layers.

        `scale` is one of docs/methods.md: `mean`, `sum` (times the step's number of keys), `percent`, `visible` (mean
        over the rows that may see the key), `lift` (over what uniform attention would give under the layer's own mask;
        for several layers the mean of their lifts).

        A model with a cache shows its rows one step at a time. The view `prefix` adds up those shown so far, since
        causal rows never change: step t is its whole prefix, as in a model that computes every row anew. The view `row`
        is the rows new in a step alone. Predicting rows are those of their step in both. `eligible=True` leaves NaN
        where too few rows see a key for it to be ranked: the last keys under a causal mask.
        """
        over_layers: Array = self._scaled(self._layer_rows(layer), group, scale, head, view, eligible).mean(1)
        return over_layers.astype(np.float32)

    def by_layer(
        self,
        group: str = "all",
        scale: str = "mean",
        head: int | None = None,
        view: str = "prefix",
        eligible: bool = False,
    ) -> Float[np.ndarray, "step layer key"]:
        """The same for every layer at once."""
        each: Array = self._scaled(self._layer_rows(None), group, scale, head, view, eligible)
        return each.astype(np.float32)

    def uniform(self, group: str = "all", view: str = "prefix") -> Float[np.ndarray, "step layer key"]:
        """What `by_layer` would be, on the `mean` scale, if every row attended uniformly."""
        g, running = self._group(group, view)
        u = self._field("uniform", 'it comes with keep="summary" or more')
        each: Array = self._so_far(u[:, self.arrays["layer_visibility"], g], group, running)
        return each.astype(np.float32)

    def contribution(self, group: str = "all", view: str = "prefix") -> Float[np.ndarray, "step layer key"]:
        """What `by_layer` is on the `mean` scale, each head's part times the norm its value adds to the stream."""
        g, running = self._group(group, view)
        c = self._field("contribution", 'it comes with keep="summary" or more')
        each: Array = self._so_far(c[:, :, g], group, running)
        return each.astype(np.float32)

    def _scaled(
        self, rows: list[int], group: str, scale: str, head: int | None, view: str, eligible: bool
    ) -> Float[np.ndarray, "step layer key"]:
        if scale not in SCALES:
            raise unknown_choice("scale", scale, SCALES)
        means = self._means(head)
        g, running = self._group(group, view)
        at = self.arrays["layer_visibility"][rows]
        r = self._so_far(means[:, rows, g], group, running)  # [step, layer, key]
        with np.errstate(divide="ignore", invalid="ignore"):
            # A key that no row of the group may see has u = r = 0: its lift is not 0 but undefined.
            if scale == "lift":
                u = self._field("uniform", f"scale 'lift' divides by it; use one of {', '.join(SCALES[:3])}")
                r = r / self._so_far(u[:, at, g], group, running)
            elif scale == "visible":
                seen = self._field("seen", f"scale 'visible' divides by it; use one of {', '.join(SCALES[:3])}")
                r = r * self._count(self._new_rows(group)[:, None, None], running)
                r = r / self._count(seen[:, at, g], running)
            else:
                r = r * {"mean": 1.0, "percent": 100.0, "sum": self.arrays["keys"][:, None, None]}[scale]
        if eligible:
            enough = self._field("eligible", "eligible=True reads it; leave it out")[:, at, g] == 1
            if running:
                rows_so_far = self._count(self._new_rows(group)[:, None, None], running)
                enough = self._count(self.arrays["seen"][:, at, g], running) >= rows_so_far.clip(1, MIN_VISIBLE_ROWS)
            r = np.where(enough, r, np.nan)
        return r

    def top_key(
        self, layer: int | None = None, group: str = "all", head: int | None = None, view: str = "prefix"
    ) -> Int[np.ndarray, " step"]:
        """The eligible key of largest lift at each step; −1 where the group has no rows."""
        lift = self.received(layer, group, "lift", head, view, eligible=True)
        ranked = np.where(np.isnan(lift), -np.inf, lift)
        top: Array = np.where(np.isfinite(ranked).any(1), ranked.argmax(1), -1)
        return top

    def to_xarray(self) -> xr.Dataset:
        """The same arrays under the same names, as stored: of a cached model each step's new rows.

        `ds.received.sel(layer=3, group="masked").mean("step")`; `key` beyond a step's canvas is NaN.
        """
        import xarray as xr

        coords: dict[str, Any] = {axis: list(names) for axis, names in self.coords.items() if axis != "layer"}
        coords["layer"] = self.arrays["layers"]
        if "layer" in self.coords:
            coords["layer_name"] = ("layer", list(self.coords["layer"]))
        # netCDF attributes are strings and numbers; whatever is nested goes in as JSON text.
        attrs = {k: v if type(v) in (str, int, float) else json.dumps(v) for k, v in self.meta.items()}
        variables = {name: (self.axes[name], array) for name, array in self.arrays.items()}
        return xr.Dataset(variables, coords=coords, attrs={"sample": self.sample, **attrs})

    def plot(
        self,
        layer: int | None = None,
        group: str = "all",
        scale: str = "lift",
        path: str | Path | None = None,
        *,
        head: int | None = None,
        view: str = "prefix",
    ) -> Figure:
        """The temporal map M[step, key] with masks, commits and the top key of each step; saved if `path` is given."""
        from floatscope.traces.plot import temporal_map

        return temporal_map(self, layer=layer, group=group, scale=scale, path=path, head=head, view=view)

    def _field(self, name: str, why: str) -> Array:
        if name not in self.arrays:
            raise UserError(f"the trace of '{self.sample}' does not keep '{name}': {why}")
        return self.arrays[name]

    def _layer_rows(self, layer: int | None) -> list[int]:
        kept = self.arrays["layers"].tolist()
        if layer is None:
            return list(range(len(kept)))
        if layer not in kept:
            whole = kept == list(range(kept[0], kept[-1] + 1))
            held = f"{kept[0]} to {kept[-1]}" if whole else ", ".join(map(str, kept))
            raise UserError(f"layer {layer} is not in the trace of '{self.sample}', which holds layers {held}")
        return [kept.index(layer)]

    def _means(self, head: int | None) -> Array:
        """`received` of the head mean or of one head, [step, layer, group, key]."""
        if head is None:
            return self._field("received", 'it comes with keep="summary" or more')
        per_head = self._field("received_heads", 'one head\'s received attention comes with keep="heads" or more')
        heads = per_head.shape[2]
        if not 0 <= head < heads:
            raise UserError(f"head {head} is not in the trace of '{self.sample}', which holds heads 0 to {heads - 1}")
        return per_head[:, :, head]

    def _group(self, group: str, view: str) -> tuple[int, bool]:
        """The group's number, and whether its rows are added up over the steps."""
        if view not in VIEWS:
            raise unknown_choice("view", view, VIEWS)
        if group not in self.coords["group"]:
            raise unknown_choice("group", group, self.coords["group"])
        running = view == "prefix" and self.meta.get("rows") == "cache" and group != "predicting"
        return self.coords["group"].index(group), running

    def _new_rows(self, group: str) -> Array:
        """How many rows of the group each step adds; the rows new in a step are the last of its keys."""
        if group == "predicting":
            decided = set(zip(self.arrays["commit_step"].tolist(), self.arrays["commit_row"].tolist(), strict=True))
            return np.bincount([step for step, _ in decided], minlength=len(self.arrays["keys"]))
        state = {"masked": State.MASKED, "committed": State.COMMITTED}.get(group)
        if state is None:
            return self.arrays["queries"]
        key = np.arange(self.arrays["states"].shape[1])
        keys, queries = self.arrays["keys"][:, None], self.arrays["queries"][:, None]
        new = (key < keys) & (key >= keys - queries)
        counts: Array = (new & (self.arrays["states"] == state)).sum(1)
        return counts

    def _count(self, new: Array, running: bool) -> Array:
        counted: Array = new.clip(0).cumsum(0) if running else new.clip(0)
        return counted

    def _so_far(self, mean: Array, group: str, running: bool) -> Array:
        """As it is, or over the steps so far Σ n_t·mean_t / Σ n_t, n_t the rows new at step t; NaN before any."""
        if not running:
            return mean.astype(np.float64)
        n = self._new_rows(group).astype(np.float64)[:, None, None]
        there = (np.arange(mean.shape[-1]) < self.arrays["keys"][:, None])[:, None]  # [step, 1, key]
        # A row gave exactly 0 to the keys that came after it, though its own step holds NaN there.
        total = np.cumsum(np.where(there & (n > 0), n * mean, 0.0), 0)
        with np.errstate(invalid="ignore"):
            return np.where(there, total / np.cumsum(n, 0), np.nan)


def plain_json(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """`value` as JSON gives it back (tuples become lists), so that what is written equals what will be read."""
    try:
        kept: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    except TypeError as error:
        raise UserError(f"{what} must be plain JSON (text, numbers, lists, dicts): {error}") from error
    except ValueError as error:
        raise UserError(f"{what} holds a number JSON has no word for ({error}); write inf or nan as text") from error
    return kept

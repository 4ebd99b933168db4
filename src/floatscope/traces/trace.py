"""`Trace`: what was captured while one sample was decoded, as named numpy arrays.

A trace holds one sample cut to its own keys, so it does not depend on the batch it was decoded in. `axes[name]` names
the axes of an array and `coords[axis]` names the entries along an axis. A float that was not measured is NaN.

    trace.arrays["received"], trace.axes["received"]    # [step, layer, group, key]
    trace.received(layer=3, scale="lift")               # [step, key]; 1 is the share under uniform attention
    trace.plot(layer=3, path="floating.png")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from jaxtyping import Bool, Float, Int

from floatscope.errors import UserError, unknown_choice
from floatscope.schema import (
    FIELDS,
    MIN_ANCHOR_LIFT,
    MIN_VISIBLE_ROWS,
    ON_REQUEST,
    UNDECIDED,
    MaskKind,
    MaskStructure,
    RowSource,
    State,
)
from floatscope.traces.upgrade import infer_masks

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

Array = np.ndarray[Any, np.dtype[Any]]

SCALES = ("mean", "sum", "percent", "visible", "lift")
VIEWS = ("prefix", "row")


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """The trace of one sample. `trace_fields.TRACE_FIELDS` and `schema.FIELDS` say what each array means.

    Example:
        trace = fs.decode(fs.load("twin:mdm"), "Where does Mira live?", new_tokens=4, watch=fs.Watch()).trace
        trace.received(layer=3, scale="lift")  # [step, key]
        trace.top_key(layer=3)  # [step]
    """

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
                raise UserError(f"array '{name}' has {array.ndim} axes but {len(axes)} axis names: {', '.join(axes)}")
            for axis, size in zip(axes, array.shape, strict=True):
                known, where = sizes.setdefault(axis, (size, f"array '{name}'"))
                if known != size:
                    raise UserError(f"axis '{axis}' has length {size} in array '{name}' and {known} in {where}")
        object.__setattr__(self, "meta", to_plain_json(self.meta, "meta"))

    def __repr__(self) -> str:
        sizes = {
            axis: n for name in self.arrays for axis, n in zip(self.axes[name], self.arrays[name].shape, strict=True)
        }
        shape = ", ".join(f"{axis} {sizes[axis]}" for axis in ("step", "layer", "key", "commit") if axis in sizes)
        return f"Trace('{self.sample}': {shape}; {len(self.arrays)} arrays)"

    @property
    def tokens(self) -> Int[np.ndarray, "step key"]:
        """The token ids that the forward of each step saw; −1 beyond the canvas of the step."""
        return self.arrays["tokens"]

    @property
    def pieces(self) -> dict[int, str] | None:
        """Token id → its text, for every id in the trace; None if the trace does not store the texts."""
        if "pieces" not in self.meta:
            return None
        return {int(i): text for i, text in self.meta["pieces"].items()}

    @property
    def text(self) -> str | None:
        """The text of the canvas after the last step, prompt included and special tokens left out; None if the trace
        does not store the texts."""
        pieces, special_ids = self.pieces, set(self.meta.get("special_ids", ()))
        if pieces is None:
            return None
        return "".join(pieces[i] for i in self.arrays["tokens_after"].tolist() if i not in special_ids)

    @property
    def masks(self) -> tuple[MaskStructure, ...]:
        """The attention mask of each entry of the `visibility` axis; `layer_visibility` says which one a layer has."""
        if "masks" not in self.meta:
            visible_rows = self.require("visible_rows")[:, :, self.coords["group"].index("all")]
            return infer_masks(visible_rows, self.arrays["keys"], self.arrays["queries"])
        return tuple(MaskStructure(MaskKind(mask["kind"]), mask["size"]) for mask in self.meta["masks"])

    @property
    def is_edit(self) -> Bool[np.ndarray, " commit"]:
        """Which commits overwrite a committed token (token editing): the step that makes them saw it committed."""
        step, position, states = self.arrays["commit_step"], self.arrays["commit_position"], self.arrays["states"]
        if self.meta.get("state") == "final":  # one step after all commits
            return np.zeros(len(step), bool)
        inside = position < states.shape[1]  # a growing canvas commits after its keys
        is_edit: np.ndarray = inside & (states[step, np.where(inside, position, 0)] == State.COMMITTED)
        return is_edit

    @property
    def is_last_commit(self) -> Bool[np.ndarray, " commit"]:
        """Which commits write the final token of their position: all, without token editing and renoising."""
        position = self.arrays["commit_position"][::-1]  # commits are in the order of their steps
        is_last = np.zeros(len(position), bool)
        is_last[np.unique(position, return_index=True)[1]] = True
        return is_last[::-1]

    @property
    def is_renoised(self) -> Bool[np.ndarray, "step key"]:
        """Which positions lose their committed token to noise again at each step (renoising)."""
        states = self.arrays["states"]
        is_renoised = np.zeros(states.shape, bool)
        is_renoised[:-1] = (states[:-1] == State.COMMITTED) & (states[1:] == State.NOISE)
        return is_renoised

    def require(self, name: str, remedy: str = "") -> Array:
        """Return a stored array; raise a `UserError` with a remedy if the trace does not store it."""
        if name not in self.arrays:
            level = FIELDS[name].level
            by_level = f'it is part of level="{level}" and above'
            remedy = remedy or ("trace with --experts, or fs.Watch(experts=True)" if level == ON_REQUEST else by_level)
            raise UserError(f"the trace of '{self.sample}' does not store '{name}': {remedy}")
        return self.arrays[name]

    @overload
    def received(
        self,
        layer: None = None,
        group: str = "all",
        scale: str = "mean",
        head: int | None = None,
        view: str = "prefix",
        eligible: bool = False,
    ) -> Float[np.ndarray, "step layer key"]: ...

    @overload
    def received(
        self,
        layer: int | Literal["mean"],
        group: str = "all",
        scale: str = "mean",
        head: int | None = None,
        view: str = "prefix",
        eligible: bool = False,
    ) -> Float[np.ndarray, "step key"]: ...

    def received(
        self,
        layer: int | Literal["mean"] | None = None,
        group: str = "all",
        scale: str = "mean",
        head: int | None = None,
        view: str = "prefix",
        eligible: bool = False,
    ) -> Float[np.ndarray, "step ... key"]:
        """Return the attention that each key receives from a query group.

            trace.received()                          # [step, layer, key]
            trace.received(layer=3, group="masked")   # [step, key]
            trace.received(layer="mean")              # [step, key], the mean over layers

        Args:
            layer: the model's layer number, "mean" for the mean over layers, None for every layer.
            group: the query group: all, masked, committed or predicting.
            scale: mean (over rows), sum (mean times the number of keys), percent, visible (mean over the rows that may
                see the key) or lift (divided by the value under uniform attention and the layer's own mask).
            head: one head, in a trace of level "heads" or above; None is the mean over heads.
            view: "prefix" or "row"; it matters only for a model with a cache, which computes its rows one step at a
                time. "prefix" accumulates the rows so far: causal rows never change, so this equals a forward over the
                whole prefix. "row" is the new rows of each step alone. Predicting rows are those of their step in both,
                and so are the rows of a block-causal model: with its cache, those of the current block.
            eligible: if True, only eligible keys have values: those that enough rows see at every step of the trace.
                A key that joins a growing text, or that only a few rows see, has NaN at all steps.
        """
        values = self._received_on_scale(self._layer_indices(layer), group, scale, head, view, eligible)
        if layer is not None:
            values = values.mean(1)
        return values.astype(np.float32)

    def uniform(self, group: str = "all", view: str = "prefix") -> Float[np.ndarray, "step layer key"]:
        """Return what `received` would be, on the scale "mean", if every row attended uniformly."""
        g, is_running = self._group_index(group, view)
        stored = self.require("uniform")
        values = self._accumulate(stored[:, self.arrays["layer_visibility"], g], group, is_running)
        return values.astype(np.float32)

    def contribution(self, group: str = "all", view: str = "prefix") -> Float[np.ndarray, "step layer key"]:
        """Return `received` on the scale "mean", each head weighted by ‖W_O v‖, the norm of what its value adds."""
        g, is_running = self._group_index(group, view)
        stored = self.require("contribution")
        values = self._accumulate(stored[:, :, g], group, is_running)
        return values.astype(np.float32)

    def top_key(
        self,
        layer: int | Literal["mean"] | None = None,
        group: str = "all",
        head: int | None = None,
        view: str = "prefix",
    ) -> Int[np.ndarray, "step ..."]:
        """Return the eligible key of largest lift, [step, layer] or with a layer [step]; −1 where there is none.

        It is the top key of every table, map, figure and page: eligible keys are those of `received(eligible=True)`.
        """
        return self._leading_key(layer, group, head, view, min_lift=0.0)

    def anchor_path(
        self,
        layer: int | Literal["mean"] | None = None,
        group: str = "all",
        head: int | None = None,
        view: str = "prefix",
    ) -> Int[np.ndarray, "step ..."]:
        """Return `top_key` where it is an anchor, with a lift of at least 2; −1 elsewhere.

        The floating index counts this path, and maps, figures and the explorer draw it.
        """
        return self._leading_key(layer, group, head, view, MIN_ANCHOR_LIFT)

    def to_xarray(self) -> xr.Dataset:
        """Return the stored arrays as a dataset with named axes; of a cached model, each step has its new rows only.

        The coordinate `token` gives the text of each key after the last step, if the trace stores the texts.

            data = trace.to_xarray()
            data.received.sel(layer=3, group="masked").mean("step")
        """
        import xarray as xr

        coords: dict[str, Any] = {axis: list(names) for axis, names in self.coords.items() if axis != "layer"}
        coords["layer"] = self.arrays["layers"]
        if "layer" in self.coords:
            coords["layer_name"] = ("layer", list(self.coords["layer"]))
        if (pieces := self.pieces) is not None:
            final = self.arrays["tokens_after"][: self.tokens.shape[1]].tolist()
            coords["token"] = ("key", [pieces[i] for i in final])
        # netCDF attributes are strings and numbers, so nested values become JSON text.
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
        """Draw the temporal map M[step, key] with masks, commits and top keys; save it if `path` is given.

        Without a layer it is the mean over layers. The other arguments are those of `received`.
        """
        from floatscope.traces.temporal_map import draw_temporal_map

        return draw_temporal_map(self, layer=layer, group=group, scale=scale, path=path, head=head, view=view)

    def _leading_key(
        self, layer: int | Literal["mean"] | None, group: str, head: int | None, view: str, min_lift: float
    ) -> Int[np.ndarray, "step ..."]:
        """The eligible key of largest lift; −1 where that is below `min_lift`, or nothing was measured."""
        lift: Array = self.received(layer, group, "lift", head, view, eligible=True)
        ranked = np.where(np.isnan(lift), -np.inf, lift)
        return np.where(ranked.max(-1) >= min_lift, ranked.argmax(-1), -1)

    def _received_on_scale(
        self, layers: list[int], group: str, scale: str, head: int | None, view: str, eligible: bool
    ) -> Float[np.ndarray, "step layer key"]:
        if scale not in SCALES:
            raise unknown_choice("scale", scale, SCALES)
        means = self._received_means(head)
        g, is_running = self._group_index(group, view)
        visibility = self.arrays["layer_visibility"][layers]
        r = self._accumulate(means[:, layers, g], group, is_running)  # [step, layer, key]
        with np.errstate(divide="ignore", invalid="ignore"):
            # A key that no row of the group may see has u = r = 0: its lift is undefined, not 0.
            if scale == "lift":
                u = self.require("uniform", f"scale 'lift' divides by it; use one of {', '.join(SCALES[:3])}")
                r = r / self._accumulate(u[:, visibility, g], group, is_running)
            elif scale == "visible":
                visible_rows = self.require(
                    "visible_rows", f"scale 'visible' divides by it; use one of {', '.join(SCALES[:3])}"
                )
                r = r * self._accumulate_counts(self.count_rows(group)[:, None, None], is_running)
                r = r / self._accumulate_counts(visible_rows[:, visibility, g], is_running)
            else:
                r = r * {"mean": 1.0, "percent": 100.0, "sum": self.arrays["keys"][:, None, None]}[scale]
        if eligible:
            is_eligible = self.require("eligible", "eligible=True reads it; leave it out")[:, visibility, g] == 1
            rows = self._accumulate_counts(self.count_rows(group)[:, None, None], is_running)
            if is_running:
                visible_rows = self._accumulate_counts(self.arrays["visible_rows"][:, visibility, g], is_running)
                is_eligible = visible_rows >= rows.clip(1, MIN_VISIBLE_ROWS)
            # A step without rows of the group decides nothing.
            r = np.where((is_eligible | (rows == 0)).all(0) & (rows > 0), r, np.nan)
        return r

    def _layer_indices(self, layer: int | Literal["mean"] | None) -> list[int]:
        layers = self.arrays["layers"].tolist()
        if layer is None or layer == "mean":
            return list(range(len(layers)))
        if layer not in layers:
            is_range = layers == list(range(layers[0], layers[-1] + 1))
            listed = f"{layers[0]} to {layers[-1]}" if is_range else ", ".join(map(str, layers))
            raise UserError(f"layer {layer} is not in the trace of '{self.sample}', which has layers {listed}")
        return [layers.index(layer)]

    def _received_means(self, head: int | None) -> Array:
        """`received` of the head mean or of one head, [step, layer, group, key]."""
        if head is None:
            return self.require("received")
        per_head = self.require("received_heads")
        heads = per_head.shape[2]
        if not 0 <= head < heads:
            raise UserError(f"head {head} is not in the trace of '{self.sample}', which has heads 0 to {heads - 1}")
        return per_head[:, :, head]

    def _group_index(self, group: str, view: str) -> tuple[int, bool]:
        """The index of the group, and whether its rows are accumulated over the steps."""
        if view not in VIEWS:
            raise unknown_choice("view", view, VIEWS)
        if group not in self.coords["group"]:
            raise unknown_choice("group", group, self.coords["group"])
        is_running = view == "prefix" and self.meta.get("rows") == RowSource.CACHE and group != "predicting"
        return self.coords["group"].index(group), is_running

    def count_rows(self, group: str) -> Array:
        """Return how many rows of the group each step computes, [step]: those of its last keys with that state."""
        if group == "predicting":
            rows = set(zip(self.arrays["commit_step"].tolist(), self.arrays["commit_row"].tolist(), strict=True))
            return np.bincount([step for step, _ in rows], minlength=len(self.arrays["keys"]))
        states = {"masked": UNDECIDED, "committed": (State.COMMITTED,)}.get(group)
        if states is None:
            return self.arrays["queries"]
        key = np.arange(self.arrays["states"].shape[1])
        keys, queries = self.arrays["keys"][:, None], self.arrays["queries"][:, None]
        is_new = (key < keys) & (key >= keys - queries)
        counts: Array = (is_new & np.isin(self.arrays["states"], states)).sum(1)
        return counts

    def _accumulate_counts(self, new: Array, is_running: bool) -> Array:
        counts: Array = new.clip(0).cumsum(0) if is_running else new.clip(0)
        return counts

    def _accumulate(self, mean: Array, group: str, is_running: bool) -> Array:
        """`mean` unchanged, or Σ n_t·mean_t / Σ n_t over the steps so far, n_t the new rows; NaN before any."""
        if not is_running:
            return mean.astype(np.float64)
        n = self.count_rows(group).astype(np.float64)[:, None, None]
        on_canvas = (np.arange(mean.shape[-1]) < self.arrays["keys"][:, None])[:, None]  # [step, 1, key]
        # A row gave exactly 0 to the keys that came after it, although its own step holds NaN there.
        total = np.cumsum(np.where(on_canvas & (n > 0), n * mean, 0.0), 0)
        with np.errstate(invalid="ignore"):
            return np.where(on_canvas, total / np.cumsum(n, 0), np.nan)


def to_plain_json(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return `value` as JSON gives it back (tuples become lists), so that what is written equals what is read.

    `name` says in an error message what the value is.
    """
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    except TypeError as error:
        raise UserError(f"{name} must be plain JSON (text, numbers, lists, dicts): {error}") from error
    except ValueError as error:
        raise UserError(f"{name} has a number that JSON cannot write ({error}); write inf or nan as text") from error
    return plain

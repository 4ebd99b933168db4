"""Flow: how much each region of the canvas takes from each other region, in one layer and through all layers up to it.

    flow(run)                 # a row per layer, region and key region: mass, mass per token, uniform attention
    rollout(run)              # a row per layer, region and key region: up to this layer, by tokens and by regions
    rollout_distance(run)     # a row per layer: how far the rollouts of two regions still differ
    region_importance(run)    # a row per key region: its share of everything that reaches the last layer
    partition_regions(trace)  # the regions that contain every position once, which rollouts run over

There are two rollouts, and they differ: `token` multiplies whole matrices and pools at the end, `pooled` pools every
layer to regions and multiplies those. Both run over the watched layers; a layer that was not watched passes on its
input.

A region is read at the steps at which it has rows. Of a cached model, all rows so far count, since causal rows never
change. A forward over a cache of finished blocks has the rows of the current block: `flow` is of these rows, the token
rollout is complete, and the pooled rollout, which needs all rows of each region, is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int, Num, Shaped

from floatscope.analysis.trace_view import TraceView, per_sample
from floatscope.errors import UserError
from floatscope.schema import MaskKind, MaskStructure, RowSource
from floatscope.traces import Trace

NESTED_REGIONS = ("evidence", "gold")
"""Regions that may lie inside others; those that do are not part of the partition."""


@per_sample
def flow(view: TraceView) -> pd.DataFrame:
    """What an average row of a region gives each key region, mean over heads and steps: a row per layer and pair.

    `mass`, `per_token` the same over the tokens of the key region, `base` the mass under uniform attention and the
    layer's own mask, `ratio` of mass and base. `base` is NaN for masks under which a later row does not see everything
    that an earlier row sees, such as windows.
    """
    trace, names = view.trace, _region_names(view.trace)
    size, rows = _region_sizes(trace), _region_rows(trace)
    per_step = _region_mass(trace, size)
    tokens = np.broadcast_to(size[:, None, None], per_step.shape)
    mass, tokens, base = (_mean_over_steps(x, rows) for x in (per_step, tokens, _uniform_mass(trace)))
    return _region_table(view, names, mass=mass, per_token=_divide(mass, tokens), base=base, ratio=_divide(mass, base))


@per_sample
def rollout(view: TraceView) -> pd.DataFrame:
    """What the rows of a region hold of each key region after this layer, mean over steps: a row per layer and pair.

    Each layer is ½·attention + ½·identity. `token` and `pooled` are the two rollouts.
    """
    names, size, token, pooled = _rollouts(view)
    return _region_table(view, names, token=_mean_over_steps(token, size), pooled=_mean_over_steps(pooled, size))


@per_sample
def rollout_distance(view: TraceView) -> pd.DataFrame:
    """The largest total variation distance between the rollouts of two regions, mean over steps: a row per layer.

    It is 0 if the rollouts of all regions are equal: the rollout has rank one and no longer depends on the row.
    """
    _, size, token, pooled = _rollouts(view)
    return pd.DataFrame(
        {
            "sample": view.sample,
            "layer": view.layers,
            "depth": view.depth,
            "token": _max_distance(token, size),
            "pooled": _max_distance(pooled, size),
        }
    )


@per_sample
def region_importance(view: TraceView) -> pd.DataFrame:
    """The share of each key region in the last layer's rollout, mean over positions and steps: a row per key region.

    `…_base` is the same rollout of uniform attention: the region's share of the keys under full attention, more for
    early keys under a causal mask. `…_ratio` is the ratio of both.
    """
    names, size, token, pooled = _rollouts(view)
    trace, indices = view.trace, _region_indices(view.trace, names)
    uniform = _roll_out_regions(_uniform_mass(trace)[:, :, indices][..., indices], size)
    if _is_partial(trace):
        uniform = np.full_like(uniform, np.nan)
    member = trace.arrays["region_member"][:, indices]
    shares = {
        "token": (_pool_positions(token[:, -1], size), _uniform_rollout(trace, member).mean(0)),
        "pooled": (_pool_positions(pooled[:, -1], size), _pool_positions(uniform[:, -1], size)),
    }
    table: dict[str, object] = {"sample": view.sample, "key_region": names}
    for kind, (share, base) in shares.items():
        table |= {kind: share, f"{kind}_base": base, f"{kind}_ratio": _divide(share, base)}
    return pd.DataFrame(table)


def partition_regions(trace: Trace) -> list[str]:
    """Return all regions except `evidence` and `gold` inside others; refuse unless every position is in exactly one."""
    names, member = _region_names(trace), trace.arrays["region_member"]
    for name in NESTED_REGIONS:
        if name in names:
            others = [other for other in names if other != name]
            if member[member[:, _region_indices(trace, [name])[0]]][:, _region_indices(trace, others)].any():
                names = others
    counts = member[:, _region_indices(trace, names)].sum(1)
    wrong = {"no region": int((counts == 0).sum()), "several": int((counts > 1).sum())}
    if any(wrong.values()):
        problem = " and ".join(f"{count} in {where}" for where, count in wrong.items() if count)
        raise UserError(
            f"a rollout over regions needs every position in exactly one region, but of the {len(counts)} positions of"
            f" '{trace.sample}' {problem}; give regions= that contain each position once"
        )
    return names


def _region_names(trace: Trace) -> list[str]:
    if not trace.coords.get("region") or "region_member" not in trace.arrays:
        raise UserError(f"the trace of '{trace.sample}' has no regions; trace samples with passages, or give regions=")
    return list(trace.coords["region"])


def _region_indices(trace: Trace, names: Sequence[str]) -> list[int]:
    return [trace.coords["region"].index(name) for name in names]


def _region_sizes(trace: Trace) -> Int[np.ndarray, "step region"]:
    """The number of positions of each region on the canvas: its keys, and its rows so far."""
    sizes: np.ndarray = np.cumsum(trace.arrays["region_member"], 0)[trace.arrays["keys"] - 1]
    return sizes


def _is_partial(trace: Trace) -> bool:
    """Whether a step has the rows of its current block only."""
    return bool(trace.meta.get("rows") == RowSource.BLOCK)


def _region_rows(trace: Trace) -> Int[np.ndarray, "step region"]:
    """The number of rows of each region: those so far, or those of the current block."""
    size, (keys, queries) = _region_sizes(trace), (trace.arrays[name] for name in ("keys", "queries"))
    if not _is_partial(trace):
        return size
    until = np.pad(np.cumsum(trace.arrays["region_member"], 0), ((1, 0), (0, 0)))
    return size - until[keys - queries]


def _region_mass(
    trace: Trace, size: Int[np.ndarray, "step region"]
) -> Float[np.ndarray, "step layer region key_region"]:
    """The mass of all rows so far, mean over heads; NaN before a region has any row."""
    mean = trace.require("regions").astype(np.float32).mean(2, dtype=np.float64)
    if trace.meta.get("rows") != RowSource.CACHE:
        return mean
    new = np.diff(size, axis=0, prepend=0)[:, None, :, None]
    with np.errstate(invalid="ignore"):
        return np.cumsum(np.where(new > 0, new * mean, 0.0), 0) / size[:, None, :, None]


def _rollouts(
    view: TraceView,
) -> tuple[
    list[str],
    Int[np.ndarray, "step region"],
    Float[np.ndarray, "step layer region key_region"],
    Float[np.ndarray, "step layer region key_region"],
]:
    """The regions, their sizes, the rollout by tokens and the one by regions."""
    names = partition_regions(view.trace)
    indices, size = _region_indices(view.trace, names), _region_sizes(view.trace)
    token = view.trace.require("rollout")[:, :, indices][..., indices].astype(np.float64)
    if _is_partial(view.trace):
        return names, size[:, indices], token, np.full_like(token, np.nan)
    mass = _region_mass(view.trace, size)[:, :, indices][..., indices]
    mass /= mass.sum(-1, keepdims=True)  # 1 up to the rounding of stored values, which many layers would accumulate
    return names, size[:, indices], token, _roll_out_regions(mass, size[:, indices])


def _roll_out_regions(
    mass: Float[np.ndarray, "step layer region key_region"], size: Int[np.ndarray, "step region"]
) -> Float[np.ndarray, "step layer region key_region"]:
    """F ← (½·M + ½·I) F from the first layer up. A region without rows keeps its input, and no other region sees it."""
    identity = np.eye(mass.shape[-1])
    mass = np.where((size > 0)[:, None, :, None], mass, identity)
    product, layers = np.broadcast_to(identity, mass[:, 0].shape), []
    for layer in range(mass.shape[1]):
        product = (mass[:, layer] + identity) / 2 @ product
        layers.append(product)
    return np.stack(layers, 1)


def _mean_over_steps(
    values: Num[np.ndarray, "step layer region key_region"], size: Int[np.ndarray, "step region"]
) -> Float[np.ndarray, "layer region key_region"]:
    """The mean over the steps at which a region has rows."""
    has_rows = (size > 0)[:, None, :, None]
    with np.errstate(invalid="ignore"):
        return np.where(has_rows, values, 0.0).sum(0) / has_rows.sum(0)


def _divide(values: Float[np.ndarray, "*axes"], base: Float[np.ndarray, "*axes"]) -> Float[np.ndarray, "*axes"]:
    """The ratio; NaN where the base is not positive."""
    return np.divide(values, base, out=np.full(values.shape, np.nan), where=base > 0)


def _max_distance(
    rows: Float[np.ndarray, "step layer region key_region"], size: Int[np.ndarray, "step region"]
) -> Float[np.ndarray, " layer"]:
    has_rows = size > 0
    both = has_rows[:, :, None] & has_rows[:, None]
    per_step = [  # layer by layer, because all pairs of regions for every key region take much memory
        np.where(both, np.abs(layer[:, :, None] - layer[:, None]).sum(-1) / 2, 0.0).max((1, 2))
        for layer in np.moveaxis(rows, 1, 0)
    ]
    return np.array(per_step).mean(1)


def _pool_positions(
    rows: Float[np.ndarray, "step region key_region"], size: Int[np.ndarray, "step region"]
) -> Float[np.ndarray, " key_region"]:
    """The mean over all positions, with each region weighted by its size, and then over steps."""
    weight = (size / size.sum(-1, keepdims=True))[..., None]
    return np.where(weight > 0, weight * rows, 0.0).sum(1).mean(0)


def _uniform_mass(trace: Trace) -> Float[np.ndarray, "step layer region key_region"]:
    """The mass under uniform attention; NaN where the mask is not known."""
    member, (first, stop), count = trace.arrays["region_member"], _visible_keys(trace), _region_rows(trace)
    mass = np.full((*first.shape[:2], member.shape[1], member.shape[1]), np.nan)
    for t, (n, queries) in enumerate(zip(trace.arrays["keys"], trace.arrays["queries"], strict=True)):
        rows = slice(n - queries if _is_partial(trace) else 0, n)
        for v in range(first.shape[1]):
            with np.errstate(invalid="ignore"):
                mass[t, v] = member[rows].T @ _mean_over_keys(member[:n], first[t, v, rows], stop[t, v, rows])
                mass[t, v] /= count[t, :, None]
    return mass[:, trace.arrays["layer_visibility"]]


def _uniform_rollout(trace: Trace, member: Bool[np.ndarray, "key region"]) -> Float[np.ndarray, "step region"]:
    """What the token rollout of uniform attention holds of each region in the last layer, mean over positions."""
    visible, layers = np.stack(_visible_keys(trace)), trace.arrays["layer_visibility"]
    shares = np.full((visible.shape[1], member.shape[1]), np.nan)
    rolled, rolled_visible = np.empty((0, member.shape[1])), visible[:, -1]
    for t in reversed(range(len(shares))):
        n = int(trace.arrays["keys"][t])
        keys = visible[:, t, :, :n]
        if n > len(rolled) or (keys != rolled_visible[..., :n]).any():  # else these rows are those of a later step
            rolled, rolled_visible = member[:n].astype(np.float64), keys
            for v in layers:
                rolled = (_mean_over_keys(rolled, *keys[:, v]) + rolled) / 2
        shares[t] = rolled[:n].mean(0)
    return shares


def _mean_over_keys(
    values: Shaped[np.ndarray, "key region"], first: Int[np.ndarray, " row"], stop: Int[np.ndarray, " row"]
) -> Float[np.ndarray, "row region"]:
    """The mean of each row over the keys it sees; NaN for a row that sees none."""
    before = np.pad(np.cumsum(values, 0, dtype=np.float64), ((1, 0), (0, 0)))  # [n, region]: among the first n keys
    with np.errstate(invalid="ignore"):
        return (before[stop] - before[first]) / (stop - first)[:, None]


def _visible_keys(
    trace: Trace,
) -> tuple[Int[np.ndarray, "step visibility row"], Int[np.ndarray, "step visibility row"]]:
    """The first key that each row so far may see, and the one after the last; none if the mask is not known."""
    keys, masks = trace.arrays["keys"], trace.masks
    queries = keys if _is_partial(trace) else trace.arrays["queries"]  # finished blocks see what they saw
    first, stop = np.zeros((2, len(keys), len(masks), int(keys.max())), int)
    for t, (n, rows) in enumerate(zip(keys, queries, strict=True)):
        cached = slice(0, n - rows)
        if rows < n:
            first[t, :, cached], stop[t, :, cached] = first[t - 1, :, cached], stop[t - 1, :, cached]
        row = np.arange(n - rows, n)
        for v, mask in enumerate(masks):
            if mask.is_known:
                stop[t, v, row] = np.minimum(_key_after(mask, row, int(n)), n)
                first[t, v, row] = np.maximum(row + 1 - mask.size, 0) if mask.kind is MaskKind.WINDOW else 0
    return first, stop


def _key_after(mask: MaskStructure, row: Int[np.ndarray, " row"], keys: int) -> Int[np.ndarray, " row"]:
    """The key after the last one that a row sees."""
    match mask.kind:
        case MaskKind.FULL:
            return np.full_like(row, keys)
        case MaskKind.BLOCK:
            return (row // mask.size + 1) * mask.size
        case _:
            return row + 1


def _region_table(
    view: TraceView, names: Sequence[str], **values: Float[np.ndarray, "layer region key_region"]
) -> pd.DataFrame:
    layers, n = len(view.layers), len(names)
    return pd.DataFrame(
        {
            "sample": view.sample,
            "layer": np.repeat(view.layers, n * n),
            "depth": np.repeat(view.depth, n * n),
            "region": np.tile(np.repeat(names, n), layers),
            "key_region": np.tile(names, layers * n),
            **{name: x.ravel() for name, x in values.items()},
        }
    )

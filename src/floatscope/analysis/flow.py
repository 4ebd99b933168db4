"""Flow: how much each region of the canvas takes from each other one, in a layer and through all layers up to it.

    flow(look)           # a row per layer, region and key region: mass, mass per token, beside uniform attention
    parts(trace)         # the regions that hold every position once; what follows runs over them
    rollout(look)        # a row per layer, region and key region: up to this layer, by tokens and by regions
    rank_one(look)       # a row per layer: how far a rollout still tells one region from another
    importance(look)     # a row per key region: its share of all that reaches the last layer

Two rollouts, which differ: `token` multiplies whole matrices and pools last, `pooled` pools every layer to regions and
multiplies those. Both run over the layers that were watched: one that was not passes on what it gets.

A region is read at the steps at which it has rows, and of a cached model all its rows so far are, since causal rows
never change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int, Num

from floatscope.analysis.kept import kept
from floatscope.analysis.look import TraceView
from floatscope.errors import UserError
from floatscope.traces import Trace

WITHIN = ("evidence", "gold")
"""Regions that may lie in others; where they do they are no parts."""


def flow(look: TraceView) -> pd.DataFrame:
    """`mass` an average row of a region puts on a key region (mean over heads, then over steps), `per_token` the same
    over the key region's tokens, `base` what uniform attention would put there under the layer's own mask, `ratio` of
    both. Masks under which a later row does not see all an earlier one does (windows) leave `base` empty."""
    trace, names = look.trace, _names(look.trace)
    size = _size(trace)
    each = _mass(trace, size)
    tokens = np.broadcast_to(size[:, None, None], each.shape)
    mass, tokens, base = (_over_steps(values, size) for values in (each, tokens, _base(trace, size)))
    return _table(look, names, mass=mass, per_token=_over(mass, tokens), base=base, ratio=_over(mass, base))


def parts(trace: Trace) -> list[str]:
    """All regions but `evidence` and `gold` where those lie in others; refused unless every position is in one."""
    names, member = _names(trace), trace.arrays["region_member"]
    for name in WITHIN:
        if name in names:
            others = [other for other in names if other != name]
            if member[member[:, _at(trace, [name])[0]]][:, _at(trace, others)].any():
                names = others
    held = member[:, _at(trace, names)].sum(1)
    wrong = {"no region": int((held == 0).sum()), "several": int((held > 1).sum())}
    if any(wrong.values()):
        told = " and ".join(f"{count} in {where}" for where, count in wrong.items() if count)
        raise UserError(
            f"a rollout over regions wants every position in one, and of the {len(held)} of '{trace.sample}' there are"
            f" {told}; give regions= that hold each once"
        )
    return names


def rollout(look: TraceView) -> pd.DataFrame:
    """`token` and `pooled`: what a region's rows hold of each key region after this layer and all before it, each layer
    being ½·attention + ½·identity; mean over steps."""
    names, size, token, pooled = _rollouts(look)
    return _table(look, names, token=_over_steps(token, size), pooled=_over_steps(pooled, size))


def rank_one(look: TraceView) -> pd.DataFrame:
    """The largest total variation distance between the rollouts of two regions, mean over steps: 0 where all are alike,
    and the rollout is that of any row."""
    _, size, token, pooled = _rollouts(look)
    return pd.DataFrame(
        {
            "sample": look.sample,
            "layer": look.layers,
            "depth": look.depth,
            "token": _apart(token, size),
            "pooled": _apart(pooled, size),
        }
    )


def importance(look: TraceView) -> pd.DataFrame:
    """The mean over all positions of the last layer's rollouts, then over steps. A `base` is the same rollout of
    uniform attention: the region's share of the keys under full attention, more for early keys under a causal mask."""
    names, size, token, pooled = _rollouts(look)
    trace, at = look.trace, _at(look.trace, names)
    even = _pooled(_base(trace, _size(trace))[:, :, at][..., at], size)
    found = {
        "token": (_total(token[:, -1], size), _even(trace, trace.arrays["region_member"][:, at]).mean(0)),
        "pooled": (_total(pooled[:, -1], size), _total(even[:, -1], size)),
    }
    table: dict[str, object] = {"sample": look.sample, "key_region": names}
    for way, (share, base) in found.items():
        table |= {way: share, f"{way}_base": base, f"{way}_ratio": _over(share, base)}
    return pd.DataFrame(table)


def _names(trace: Trace) -> list[str]:
    if not trace.coords.get("region") or "region_member" not in trace.arrays:
        raise UserError(f"the trace of '{trace.sample}' has no regions; trace samples with passages, or give regions=")
    return list(trace.coords["region"])


def _at(trace: Trace, names: Sequence[str]) -> list[int]:
    return [trace.coords["region"].index(name) for name in names]


def _size(trace: Trace) -> Int[np.ndarray, "step region"]:
    """The positions of each region on the canvas: its keys, and its rows so far."""
    counted: np.ndarray = np.cumsum(trace.arrays["region_member"], 0)[trace.arrays["keys"] - 1]
    return counted


def _mass(trace: Trace, size: Int[np.ndarray, "step region"]) -> Float[np.ndarray, "step layer region key_region"]:
    """Mean over heads, over all rows so far; NaN before a region has any."""
    mean = kept(trace, "regions").astype(np.float32).mean(2, dtype=np.float64)
    if trace.meta.get("rows") != "cache":
        return mean
    new = np.diff(size, axis=0, prepend=0)[:, None, :, None]
    with np.errstate(invalid="ignore"):
        return np.cumsum(np.where(new > 0, new * mean, 0.0), 0) / size[:, None, :, None]


def _rollouts(
    look: TraceView,
) -> tuple[
    list[str],
    Int[np.ndarray, "step region"],
    Float[np.ndarray, "step layer region key_region"],
    Float[np.ndarray, "step layer region key_region"],
]:
    """The parts, their sizes, the rollout by tokens and the one by regions."""
    names = parts(look.trace)
    at, size = _at(look.trace, names), _size(look.trace)
    token = kept(look.trace, "rollout")[:, :, at][..., at].astype(np.float64)
    mass = _mass(look.trace, size)[:, :, at][..., at]
    mass /= mass.sum(-1, keepdims=True)  # 1, but for the rounding of what is stored, which many layers would add up
    return names, size[:, at], token, _pooled(mass, size[:, at])


def _pooled(
    mass: Float[np.ndarray, "step layer region key_region"], size: Int[np.ndarray, "step region"]
) -> Float[np.ndarray, "step layer region key_region"]:
    """F ← (½·M + ½·I) F from the first layer up. A region without rows yet keeps to itself and is seen by none."""
    same = np.eye(mass.shape[-1])
    mass = np.where((size > 0)[:, None, :, None], mass, same)
    carried, layers = np.broadcast_to(same, mass[:, 0].shape), []
    for layer in range(mass.shape[1]):
        carried = (mass[:, layer] + same) / 2 @ carried
        layers.append(carried)
    return np.stack(layers, 1)


def _over_steps(
    values: Num[np.ndarray, "step layer region key_region"], size: Int[np.ndarray, "step region"]
) -> Float[np.ndarray, "layer region key_region"]:
    """The mean over the steps at which a region has rows."""
    there = (size > 0)[:, None, :, None]
    with np.errstate(invalid="ignore"):
        return np.where(there, values, 0.0).sum(0) / there.sum(0)


def _over(values: Float[np.ndarray, "*axes"], base: Float[np.ndarray, "*axes"]) -> Float[np.ndarray, "*axes"]:
    """Their ratio; NaN where there is nothing to divide by."""
    return np.divide(values, base, out=np.full(values.shape, np.nan), where=base > 0)


def _apart(
    rows: Float[np.ndarray, "step layer region key_region"], size: Int[np.ndarray, "step region"]
) -> Float[np.ndarray, " layer"]:
    there = size > 0
    both = there[:, :, None] & there[:, None]
    each = [  # layer by layer: a pair of regions for every key region takes room
        np.where(both, np.abs(layer[:, :, None] - layer[:, None]).sum(-1) / 2, 0.0).max((1, 2))
        for layer in np.moveaxis(rows, 1, 0)
    ]
    return np.array(each).mean(1)


def _total(
    rows: Float[np.ndarray, "step region key_region"], size: Int[np.ndarray, "step region"]
) -> Float[np.ndarray, " key_region"]:
    """Over all positions, each region weighing what it holds; then over steps."""
    weight = (size / size.sum(-1, keepdims=True))[..., None]
    return np.where(weight > 0, weight * rows, 0.0).sum(1).mean(0)


def _base(trace: Trace, size: Int[np.ndarray, "step region"]) -> Float[np.ndarray, "step layer region key_region"]:
    """The mass under uniform attention; NaN where the mask is not known."""
    member, reach = trace.arrays["region_member"], _reach(trace)
    before = np.pad(np.cumsum(member, 0), ((1, 0), (0, 0)))  # [n, region]: of the first n keys
    base = np.full((*reach.shape[:2], member.shape[1], member.shape[1]), np.nan)
    for t, n in enumerate(trace.arrays["keys"]):
        for kind, sees in enumerate(reach[t, :, :n]):
            if sees.all():
                with np.errstate(invalid="ignore"):
                    base[t, kind] = member[:n].T @ (before[sees] / sees[:, None]) / size[t, :, None]
    return base[:, trace.arrays["layer_visibility"]]


def _even(trace: Trace, member: Bool[np.ndarray, "key region"]) -> Float[np.ndarray, "step region"]:
    """What the token rollout of uniform attention would hold of each region in the last layer, mean over positions."""
    reach, layers = _reach(trace), trace.arrays["layer_visibility"]
    shares = np.full((len(reach), member.shape[1]), np.nan)
    rolled, of = np.empty((0, member.shape[1])), reach[-1]
    for t in reversed(range(len(reach))):
        n = int(trace.arrays["keys"][t])
        sees = reach[t, :, :n]
        if not sees.all():
            continue
        if n > len(rolled) or (sees != of[:, :n]).any():  # else these rows are those of a later step
            rolled, of = member[:n].astype(np.float64), sees
            for kind in layers:
                rolled = (np.cumsum(rolled, 0)[sees[kind] - 1] / sees[kind][:, None] + rolled) / 2
        shares[t] = rolled[:n].mean(0)
    return shares


def _reach(trace: Trace) -> Int[np.ndarray, "step visibility row"]:
    """How many keys, from the first on, each row so far may see; 0 where the mask is none of that kind, or no row."""
    group = trace.coords["group"].index("all")
    seen, uniform = (kept(trace, name)[:, :, group] for name in ("seen", "uniform"))
    reach = np.zeros(seen.shape, int)
    for t, (n, rows) in enumerate(zip(trace.arrays["keys"], trace.arrays["queries"], strict=True)):
        if rows < n:
            reach[t, :, : n - rows] = reach[t - 1, :, : n - rows]  # rows of a cache
        for kind in range(seen.shape[1]):
            reach[t, kind, n - rows : n] = _stairs(seen[t, kind, :n], uniform[t, kind, :n], int(rows))
    return reach


def _stairs(
    seen: Int[np.ndarray, " key"], uniform: Float[np.ndarray, " key"], rows: int
) -> Int[np.ndarray, " row"] | int:
    """Where each row sees what the one before it does, and maybe more (full, causal, by blocks), the number of rows
    that see a key tells which they are. What such a mask would make of uniform attention must be what is stored."""
    reach = np.searchsorted(-seen, np.arange(rows) - rows, side="right")  # keys that the last rows − i rows see
    if not reach.all():
        return 0
    even = np.cumsum(np.bincount(reach - 1, 1 / reach, len(seen))[::-1])[::-1] / rows
    return reach if np.allclose(even, uniform, rtol=1e-4) else 0


def _table(
    look: TraceView, names: Sequence[str], **values: Float[np.ndarray, "layer region key_region"]
) -> pd.DataFrame:
    layers, n = len(look.layers), len(names)
    return pd.DataFrame(
        {
            "sample": look.sample,
            "layer": np.repeat(look.layers, n * n),
            "depth": np.repeat(look.depth, n * n),
            "region": np.tile(np.repeat(names, n), layers),
            "key_region": np.tile(names, layers * n),
            **{name: each.ravel() for name, each in values.items()},
        }
    )

"""From what one layer received to the fields of `FIELDS`.

Two halves, because which rows are *predicting* is known only after the step's commits: `Raw` is what a layer leaves
during the forward, `summarise` makes the fields of several layers at once when the step is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from floatscope.canvas import Commits
from floatscope.capture.columns import COLUMNS, Columns, Ranked
from floatscope.capture.plan import Expected, Plan
from floatscope.schema import RANKS, TOP_STATS

OF_COLUMNS = frozenset(("top", "top_key", "turned", "key_stats", "contribution", "moments", "head_stats"))
"""The fields that read scores and norms of keys."""


@dataclass(frozen=True)
class Raw:
    """One layer, before the commits are known. Sums over rows, not means."""

    plan: int  # which of the step's plans
    half: bool  # the model's type has 8 or 11 bits
    received: Float[Tensor, "batch head column key"]  # the groups and, unless pooled already, the regions
    mass: Float[Tensor, "batch head"] | None  # of group `all`; None: the sum of `received`
    regions: Float[Tensor, "batch head column key_region"] | None  # pooled over key regions
    entropy: Float[Tensor, "batch head"] | None
    columns: Columns | None


def summarise(
    raws: Sequence[Raw],
    predicted: Float[Tensor, "layer batch head key"] | None,
    plan: Plan,
    want: Expected,
    fields: frozenset[str],
) -> dict[str, Tensor]:
    """The fields of layers that share a plan, all layers at once; `predicted` is what the predicting rows received."""
    received, G = torch.stack([raw.received for raw in raws]), plan.groups.shape[-1]
    out: dict[str, Tensor] = {}
    if plan.member is not None and plan.rows_in is not None and "regions" in fields:
        pooled = [raw.regions for raw in raws if raw.regions is not None]
        mass = torch.stack(pooled) if pooled else region_mass(received, plan.member)
        out["regions"] = mass[:, :, :, G:] / plan.rows_in[:, None, :, None]
    received = received[:, :, :, :G]
    rows = torch.zeros_like(received[:, :, :, 0]) if predicted is None else predicted
    received = torch.cat([received, rows[:, :, :, None]], 3)
    mean = received / want.count[:, None, :, None]  # an empty group is 0/0: NaN, "no such rows"
    if "received" in fields:
        out["received"] = mean.mean(2)
    if "received_heads" in fields:
        out["received_heads"] = mean
    if fields & OF_COLUMNS:
        lift = mean / want.uniform[:, None]
        eligible = want.eligible[:, None].expand(lift.shape[1:]) & lift.isfinite()
        lift = torch.where(eligible, lift, 0.0)
        found = [raw.columns for raw in raws if raw.columns is not None]
        columns = torch.stack([c.stats for c in found])
        seeing = torch.stack([c.query_norm[..., None] if c.seeing is None else c.seeing for c in found])
        norm = columns[..., COLUMNS.index("key_norm"), :] * seeing  # mean of |q_i||k_j|
        columns = torch.cat([columns, norm[..., None, :]], -2)
        if fields & {"top", "top_key", "turned"}:
            top = _top(lift, eligible, columns)
            out |= {name: value for name, value in top.items() if name in fields}
        if "turned" in fields:
            apart = [c.turned for c in found if c.turned is not None]
            out["turned"] = torch.stack(apart) if apart else _turned(top["top"][..., 0, :, :], eligible, columns)
        if "key_stats" in fields:
            out["key_stats"] = columns.mean(2)
        if "contribution" in fields:
            out["contribution"] = (mean * columns[:, :, :, None, COLUMNS.index("output_norm")]).mean(2)
        if "moments" in fields:
            out["moments"] = _moments(lift, eligible, columns)
        if "head_stats" in fields:
            entropy = torch.stack([raw.entropy for raw in raws if raw.entropy is not None])
            entropy = entropy.where(plan.ask.entropy_total > 0, torch.nan)  # no row sees more than one key
            gini = _gini(lift[..., 0, :], eligible[..., 0, :])
            first = mean[..., 0, :].gather(-1, plan.first_key[:, None, None].expand(*mean.shape[:3], 1))[..., 0]
            norms = [torch.stack([getattr(c, name) for c in found]) for name in ("output_norm", "query_norm")]
            out["head_stats"] = torch.stack([entropy.to(gini.dtype), gini, first, *norms], -1)
    return out


def region_mass(
    received: Float[Tensor, "*layer batch head column key"], member: Float[Tensor, "batch key region"]
) -> Float[Tensor, "*layer batch head column region"]:
    """What each column gives to each key region, in one product per sample."""
    pooled: Tensor = (received.flatten(-3, -2) @ member).unflatten(-2, received.shape[-3:-1])
    return pooled


def chosen_rows(
    p: Float[Tensor, "commit head key"],
    member: Float[Tensor, "batch key region"] | None,
    commits: Commits,
    fields: frozenset[str],
) -> dict[str, Tensor]:
    """The commit-axis fields from whole predicting rows."""
    out: dict[str, Tensor] = {}
    if "row_key" in fields or "row_mass" in fields:
        n = min(RANKS, p.shape[-1])
        mass, key = p.topk(n, -1)
        nothing = mass == 0  # hidden, padded or underflowed: no key to speak of
        pad = (0, RANKS - n)
        out["row_key"] = F.pad(key.int().masked_fill(nothing, -1), pad, value=-1)
        out["row_mass"] = F.pad(mass.masked_fill(nothing, torch.nan), pad, value=torch.nan)
    if "row_regions" in fields and member is not None:
        out["row_regions"] = p @ member[commits.sample.to(member.device)]
    if "rows" in fields:
        out["rows"] = p
    return out


def ranked(received: Float[Tensor, "batch head key"], plan: Plan) -> Ranked:
    """The top keys of group `all`, before the step is over."""
    want = plan.so_far
    lift = received / want.count[:, None, :1] / want.uniform[:, None, 0]
    eligible = want.eligible[:, 0]
    value, key = torch.where(eligible[:, None], lift, -1.0).topk(min(RANKS, lift.shape[-1]), -1)
    key = key.masked_fill(value < 0, -1)
    return Ranked(F.pad(key, (0, RANKS - key.shape[-1]), value=-1), eligible)


def _top(lift: Tensor, eligible: Tensor, columns: Tensor) -> dict[str, Tensor]:
    n = min(RANKS, lift.shape[-1])
    value, key = torch.where(eligible, lift, -1.0).topk(n, -1)  # [layer, batch, head, group, n]; no lift is negative
    stats = columns[..., None, :, :].expand(*key.shape[:4], *columns.shape[-2:])  # [.., group, stat, key]
    picked = stats.gather(-1, key[..., None, :].expand(*key.shape[:4], stats.shape[-2], n)).transpose(-1, -2)
    top = torch.cat([value[..., None], picked], -1)
    missing = value < 0
    top = top.masked_fill(missing[..., None], torch.nan)
    key = key.int().masked_fill(missing, -1)
    pad = RANKS - n
    return {
        "top_key": F.pad(key, (0, pad), value=-1),
        "top": F.pad(top, (0, 0, 0, pad), value=torch.nan),
    }


def _turned(top: Tensor, eligible: Tensor, columns: Tensor) -> Tensor:
    """Where one mean query q̄ serves all keys, |k_a| q̄·k̂_j is |k_a| qk_j / |k_j|: scores and norms tell it all."""
    unit = (columns[..., 0, :] / columns[..., 2, :].clamp_min(1e-30)).where(eligible[..., 0, :], 0.0)  # σ q̄·k̂_j
    score, norm = top[..., TOP_STATS.index("qk")], top[..., TOP_STATS.index("key_norm")]
    taken = torch.arange(1, RANKS + 1, device=top.device)
    left = eligible[..., 0, :].sum(-1, keepdim=True) - taken
    rest = (unit.sum(-1, keepdim=True) - (score / norm.clamp_min(1e-30)).cumsum(-1)) / left
    return (norm.cumsum(-1) / taken * rest).masked_fill(left <= 0, torch.nan)


def _moments(lift: Tensor, eligible: Tensor, columns: Tensor) -> Tensor:
    """[.., head, quantity, (n, Σ, Σ²)]: each group's lift over its eligible keys, the columns over group `all`'s."""
    keep = eligible[..., :1, :].expand(*columns.shape[:3], columns.shape[-2], -1)
    values = torch.cat([lift, torch.where(keep, columns, 0.0)], -2)
    n = torch.cat([eligible.expand(lift.shape).sum(-1), keep.sum(-1)], -1).to(values.dtype)
    return torch.stack([n, values.sum(-1), values.square().sum(-1)], -1)


def _gini(x: Float[Tensor, "*batch key"], keep: Bool[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """Gini coefficient over the kept entries: 0 = all alike, → 1 = one key has everything; NaN when none is kept."""
    n = keep.sum(-1)
    ordered = torch.where(keep, x, 0.0).sort(-1).values  # left-out keys sort to the front as zeros
    rank = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype) - (x.shape[-1] - n)[..., None]
    total = ordered.sum(-1)
    weighted = (2 * rank - n[..., None] - 1) * ordered
    return weighted.sum(-1) / (n * total)

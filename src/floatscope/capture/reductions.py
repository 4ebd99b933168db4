"""Build the fields of `schema.FIELDS` from the received attention of a layer.

There are two stages, because the *predicting* rows are known only after the step's commits: `LayerSums` holds the
sums of a layer during the forward, and `build_fields` turns several layers at once into fields when the step is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from floatscope.canvas import Commits
from floatscope.capture.key_stats import BASE_STATS, KeyStats, TopKeys
from floatscope.capture.plan import Baseline, Plan
from floatscope.schema import RANKS, TOP_STATS

KEY_STATS_FIELDS = frozenset(
    ("top", "top_key", "score_at_mean_direction", "key_stats", "contribution", "moments", "head_stats")
)
"""The fields that need the scores and norms of keys."""


@dataclass(frozen=True)
class LayerSums:
    """One layer before the commits are known: sums over rows, not means.

    plan_index  which of the step's plans the layer uses
    received    the groups and, unless `regions` is pooled already, the regions
    mass        of group `all`; None: the sum of `received`
    regions     received attention pooled over key regions; None: not pooled yet
    """

    plan_index: int
    is_half_precision: bool
    received: Float[Tensor, "batch head column key"]
    mass: Float[Tensor, "batch head"] | None
    regions: Float[Tensor, "batch head column key_region"] | None
    entropy: Float[Tensor, "batch head"] | None
    key_stats: KeyStats | None


def build_fields(
    layers: Sequence[LayerSums],
    predicting: Float[Tensor, "layer batch head key"] | None,
    plan: Plan,
    baseline: Baseline,
    fields: frozenset[str],
) -> dict[str, Tensor]:
    """Build the fields of layers that share a plan, layer axis first.

    predicting  what each key receives from the predicting rows; None: there are none
    fields      the names to build; those of other modules are ignored
    """
    received, G = torch.stack([layer.received for layer in layers]), plan.groups.shape[-1]
    out: dict[str, Tensor] = {}
    if plan.member is not None and plan.region_rows is not None and "regions" in fields:
        pooled = [layer.regions for layer in layers if layer.regions is not None]
        mass = torch.stack(pooled) if pooled else pool_key_regions(received, plan.member)
        out["regions"] = mass[:, :, :, G:] / plan.region_rows[:, None, :, None]
    received = received[:, :, :, :G]
    if predicting is None:
        predicting = torch.zeros_like(received[:, :, :, 0])
    received = torch.cat([received, predicting[:, :, :, None]], 3)
    mean = received / baseline.count[:, None, :, None]  # an empty group is 0/0: NaN means "no such rows"
    if "received" in fields:
        out["received"] = mean.mean(2)
    if "received_heads" in fields:
        out["received_heads"] = mean
    if fields & KEY_STATS_FIELDS:
        out |= _build_key_fields(layers, mean, plan, baseline, fields)
    return out


def build_row_fields(
    p: Float[Tensor, "commit head key"],
    member: Float[Tensor, "batch key region"] | None,
    commits: Commits,
    fields: frozenset[str],
) -> dict[str, Tensor]:
    """Build the fields with a commit axis from complete predicting rows."""
    out: dict[str, Tensor] = {}
    if "row_key" in fields or "row_mass" in fields:
        n = min(RANKS, p.shape[-1])
        mass, key = p.topk(n, -1)
        is_empty = mass == 0  # hidden, padded or underflowed keys
        pad = (0, RANKS - n)
        out["row_key"] = F.pad(key.int().masked_fill(is_empty, -1), pad, value=-1)
        out["row_mass"] = F.pad(mass.masked_fill(is_empty, torch.nan), pad, value=torch.nan)
    if "row_regions" in fields and member is not None:
        out["row_regions"] = p @ member[commits.sample.to(member.device)]
    if "rows" in fields:
        out["rows"] = p
    return out


def pool_key_regions(
    received: Float[Tensor, "*layer batch head column key"], member: Float[Tensor, "batch key region"]
) -> Float[Tensor, "*layer batch head column region"]:
    """Add up received attention over the keys of each region, in one product per sample."""
    pooled: Tensor = (received.flatten(-3, -2) @ member).unflatten(-2, received.shape[-3:-1])
    return pooled


def rank_keys(received: Float[Tensor, "batch head key"], plan: Plan) -> TopKeys:
    """The top keys of group `all`, before the step is over; `received` is the sum over its rows."""
    baseline = plan.baseline_before_commits
    lift = received / baseline.count[:, None, :1] / baseline.uniform[:, None, 0]
    eligible = baseline.eligible[:, 0]
    value, key = torch.where(eligible[:, None], lift, -1.0).topk(min(RANKS, lift.shape[-1]), -1)
    key = key.masked_fill(value < 0, -1)
    return TopKeys(F.pad(key, (0, RANKS - key.shape[-1]), value=-1), eligible)


def _build_key_fields(
    layers: Sequence[LayerSums],
    mean: Float[Tensor, "layer batch head group key"],
    plan: Plan,
    baseline: Baseline,
    fields: frozenset[str],
) -> dict[str, Tensor]:
    """Build the fields of KEY_STATS_FIELDS; `mean` is received attention on the mean scale."""
    out: dict[str, Tensor] = {}
    lift = mean / baseline.uniform[:, None]
    eligible = baseline.eligible[:, None].expand(lift.shape[1:]) & lift.isfinite()
    lift = torch.where(eligible, lift, 0.0)
    key_stats = [layer.key_stats for layer in layers if layer.key_stats is not None]
    stats = _stack_key_stats(key_stats)
    if fields & {"top", "top_key", "score_at_mean_direction"}:
        top = _top_fields(lift, eligible, stats)
        out |= {name: value for name, value in top.items() if name in fields}
    if "score_at_mean_direction" in fields:
        by_layer = [s.score_at_mean_direction for s in key_stats if s.score_at_mean_direction is not None]
        out["score_at_mean_direction"] = (
            torch.stack(by_layer) if by_layer else _score_at_mean_direction(top["top"][..., 0, :, :], eligible, stats)
        )
    if "key_stats" in fields:
        out["key_stats"] = stats.mean(2)
    if "contribution" in fields:
        out["contribution"] = (mean * stats[:, :, :, None, BASE_STATS.index("output_norm")]).mean(2)
    if "moments" in fields:
        out["moments"] = _moments(lift, eligible, stats)
    if "head_stats" in fields:
        entropy = torch.stack([layer.entropy for layer in layers if layer.entropy is not None])
        entropy = entropy.where(plan.spec.entropy_total > 0, torch.nan)  # no row sees more than one key
        gini = _gini(lift[..., 0, :], eligible[..., 0, :])
        first = mean[..., 0, :].gather(-1, plan.first_key[:, None, None].expand(*mean.shape[:3], 1))[..., 0]
        norms = [torch.stack([getattr(s, name) for s in key_stats]) for name in ("output_norm", "query_norm")]
        out["head_stats"] = torch.stack([entropy.to(gini.dtype), gini, first, *norms], -1)
    return out


def _stack_key_stats(key_stats: Sequence[KeyStats]) -> Float[Tensor, "layer batch head stat key"]:
    """The statistics of all layers in the order of `schema.KEY_STATS`: BASE_STATS, then `norm`."""
    stats = torch.stack([s.stats for s in key_stats])
    query_norms = [s.query_norm[..., None] if s.visible_query_norm is None else s.visible_query_norm for s in key_stats]
    norm = stats[..., BASE_STATS.index("key_norm"), :] * torch.stack(query_norms)  # mean of |q_i||k_j|
    return torch.cat([stats, norm[..., None, :]], -2)


def _top_fields(lift: Tensor, eligible: Tensor, stats: Tensor) -> dict[str, Tensor]:
    """`top_key` and `top`: the keys of largest lift of each group, with their statistics."""
    n = min(RANKS, lift.shape[-1])
    value, key = torch.where(eligible, lift, -1.0).topk(n, -1)  # [layer, batch, head, group, n]; no lift is negative
    stats = stats[..., None, :, :].expand(*key.shape[:4], *stats.shape[-2:])  # [.., group, stat, key]
    gathered = stats.gather(-1, key[..., None, :].expand(*key.shape[:4], stats.shape[-2], n)).transpose(-1, -2)
    top = torch.cat([value[..., None], gathered], -1)
    is_missing = value < 0
    top = top.masked_fill(is_missing[..., None], torch.nan)
    key = key.int().masked_fill(is_missing, -1)
    pad = RANKS - n
    return {
        "top_key": F.pad(key, (0, pad), value=-1),
        "top": F.pad(top, (0, 0, 0, pad), value=torch.nan),
    }


def _score_at_mean_direction(top: Tensor, eligible: Tensor, stats: Tensor) -> Tensor:
    """The field where all keys share one mean query q̄: |k_a| q̄·k̂_j = |k_a| qk_j / |k_j|, from scores and norms."""
    unit = (stats[..., 0, :] / stats[..., 2, :].clamp_min(1e-30)).where(eligible[..., 0, :], 0.0)  # σ q̄·k̂_j
    score, norm = top[..., TOP_STATS.index("qk")], top[..., TOP_STATS.index("key_norm")]
    n_top = torch.arange(1, RANKS + 1, device=top.device)
    n_rest = eligible[..., 0, :].sum(-1, keepdim=True) - n_top
    rest = (unit.sum(-1, keepdim=True) - (score / norm.clamp_min(1e-30)).cumsum(-1)) / n_rest
    return (norm.cumsum(-1) / n_top * rest).masked_fill(n_rest <= 0, torch.nan)


def _moments(lift: Tensor, eligible: Tensor, stats: Tensor) -> Tensor:
    """[.., head, quantity, (n, Σ, Σ²)]: each group's lift over its eligible keys, the stats over those of `all`."""
    counted = eligible[..., :1, :].expand(*stats.shape[:3], stats.shape[-2], -1)
    values = torch.cat([lift, torch.where(counted, stats, 0.0)], -2)
    n = torch.cat([eligible.expand(lift.shape).sum(-1), counted.sum(-1)], -1).to(values.dtype)
    return torch.stack([n, values.sum(-1), values.square().sum(-1)], -1)


def _gini(x: Float[Tensor, "*batch key"], counted: Bool[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """Gini coefficient over the counted entries: 0 = all equal, → 1 = one key has everything; NaN without entries."""
    n = counted.sum(-1)
    ordered = torch.where(counted, x, 0.0).sort(-1).values  # the other keys sort to the front as zeros
    rank = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype) - (x.shape[-1] - n)[..., None]
    total = ordered.sum(-1)
    weighted = (2 * rank - n[..., None] - 1) * ordered
    return weighted.sum(-1) / (n * total)

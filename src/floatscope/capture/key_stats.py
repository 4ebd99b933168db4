"""Statistics of each key without the attention matrix: mean score, mean cosine, and the norms of k, v and W_O v.

    stats = compute_key_stats(call, output, QueryRows.from_valid(valid), gram)
    stats.stats                                      # [batch, head, 5, key], in the order of BASE_STATS

Means run over the queries that see the key (suffix means under a causal mask). Under full visibility each mean is one
product with the mean query: mean_i σ q_i·k_j = σ (mean_i q_i)·k_j, mean_i cos_ij = (mean_i q̂_i)·k̂_j. And
|W_O v|² = vᵀ (W_OᵀW_O) v, so one [D, D] Gram matrix per head replaces the output projection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.capture.attention import AttentionCall
from floatscope.capture.visibility import Visibility
from floatscope.schema import MaskKind

BASE_STATS = ("qk", "cos", "key_norm", "value_norm", "output_norm")
"""The statistics computed here; `reductions` derives the last of `schema.KEY_STATS`, `norm`, from them."""
CHUNK = 2**24  # elements of a temporary tensor


@dataclass(frozen=True)
class KeyStats:
    """The statistics of one attention call.

    stats                    in the order of BASE_STATS; zero on padding
    output_norm, query_norm  mean norms of a head's output rows and queries
    visible_query_norm       mean norm of the queries that see a key; None: `query_norm` for every key
    score_at_mean_direction  the field of that name, where the mean query differs by key; None: `reductions` derives it
    """

    stats: Float[Tensor, "batch head 5 key"]
    output_norm: Float[Tensor, "batch head"]
    query_norm: Float[Tensor, "batch head"]
    visible_query_norm: Float[Tensor, "batch head key"] | None = None
    score_at_mean_direction: Float[Tensor, "batch head rank"] | None = None


@dataclass(frozen=True)
class TopKeys:
    """The keys of largest lift, largest first (-1: no more keys), and the keys that were eligible."""

    key: Int[Tensor, "batch head rank"]
    eligible: Bool[Tensor, "batch key"]


@dataclass(frozen=True)
class QueryRows:
    """The query rows that count, and the weight of one row in a mean. A mean over no rows is NaN."""

    valid: Bool[Tensor, "batch query"]
    share: Float[Tensor, " batch"]

    @staticmethod
    def from_valid(valid: Bool[Tensor, "batch query"]) -> QueryRows:
        """Give all valid rows of a sample the same weight."""
        return QueryRows(valid.contiguous(), 1 / valid.sum(-1))

    @cached_property
    def weight(self) -> Float[Tensor, "batch query"]:
        """The weight of every row: `share`, or 0 if the row is not valid."""
        return self.valid * self.share[:, None]


def compute_key_stats(
    call: AttentionCall,
    output: Float[Tensor, "batch head query value_dim"],
    rows: QueryRows,
    gram: Float[Tensor, "head dim dim"] | None,
    top: TopKeys | None = None,
) -> KeyStats:
    """Compute the statistics of every head and key in fp32.

    gram  W_OᵀW_O of each head; without it `output_norm` of a key is NaN
    top   the keys to compute `score_at_mean_direction` for; only used where the mean query differs by key
    """
    B, H, _, _ = call.query.shape
    out = torch.empty(B, H, len(BASE_STATS), call.visibility.keys, device=call.query.device)
    score_at_mean = None if top is None else torch.empty(top.key.shape, device=out.device)
    visible_query_norm = None
    if call.visibility.kind is not MaskKind.FULL:
        visible_query_norm = torch.empty(out[:, :, 0].shape, device=out.device)
    query_norm = torch.empty(B, H, device=out.device)
    step = max(1, CHUNK // (B * max(call.visibility.keys, call.visibility.queries) * call.query.shape[-1]))
    for h in range(0, H, step):
        heads = slice(h, min(h + step, H))
        q = call.query[:, heads].float()
        k, v = (_repeat_heads(x, heads, call.repeats).float() for x in (call.key, call.value))
        visibility = call.visibility
        if visibility.is_per_head and visibility.mask is not None:
            visibility = replace(visibility, mask=visibility.mask[:, heads])
        q_norm, k_norm = _norm(q), _norm(k)
        query_norm[:, heads] = (q_norm * rows.weight[:, None]).sum(-1)
        score, cosine, mean_query = _mean_products(visibility, q, q_norm, k, rows)
        if visible_query_norm is not None:
            mean_norm = mean_over_visible_queries(visibility, q_norm[..., None], rows.valid)
            visible_query_norm[:, heads] = mean_norm[..., 0]
        if score_at_mean is not None and top is not None and mean_query is not None:
            rotated = _score_at_mean_direction(mean_query, k, k_norm, top.key[:, heads], top.eligible)
            score_at_mean[:, heads] = call.scaling * rotated
        out[:, heads, 0] = score * call.scaling
        out[:, heads, 1] = cosine / k_norm.clamp_min(1e-30)
        out[:, heads, 2] = k_norm
        out[:, heads, 3] = _norm(v)
        if gram is None:
            out[:, heads, 4] = torch.nan
        else:
            out[:, heads, 4] = ((v @ gram[heads]) * v).sum(-1).clamp_min(0).sqrt()
    if call.visibility.valid is not None:
        out = torch.where(call.visibility.valid.to(out.device)[:, None, None], out, 0.0)
    output_norm = (_norm(output.float()) * rows.weight[:, None]).sum(-1)
    return KeyStats(out, output_norm, query_norm, visible_query_norm, score_at_mean)


def mean_over_visible_queries(
    visibility: Visibility, x: Float[Tensor, "batch head query dim"], valid: Bool[Tensor, "batch query"]
) -> Float[Tensor, "batch head key dim"]:
    """Mean of x over the valid queries that see each key."""
    B, H, Q, D = x.shape
    weight = valid.to(x.dtype)
    count = visibility.column_sum(weight[..., None]).clamp_min(1)  # [b, 1|h, key, 1]
    if visibility.is_per_head and visibility.mask is not None:
        by_head = [replace(visibility, mask=visibility.mask[:, h : h + 1]) for h in range(H)]
        sums = [one.column_sum(x[:, h] * weight[..., None])[:, 0] for h, one in enumerate(by_head)]
        return torch.stack(sums, 1) / count
    flat = (x * weight[:, None, :, None]).transpose(1, 2).reshape(B, Q, H * D)
    sums_by_head: Tensor = visibility.column_sum(flat)[:, 0].unflatten(-1, (H, D))
    return sums_by_head.transpose(1, 2) / count


def output_gram(weight: Float[Tensor, "out heads_dim"], heads: int) -> Float[Tensor, "head dim dim"]:
    """W_OᵀW_O of each head, from the weight [out, head · dim] of the output projection."""
    per_head: Tensor = weight.detach().float().unflatten(1, (heads, -1)).transpose(0, 1)  # [head, out, dim]
    return per_head.transpose(1, 2) @ per_head


def _mean_products(
    visibility: Visibility,
    q: Float[Tensor, "batch head query dim"],
    q_norm: Float[Tensor, "batch head query"],
    k: Float[Tensor, "batch head key dim"],
    rows: QueryRows,
) -> tuple[Float[Tensor, "batch head key"], Float[Tensor, "batch head key"], Tensor | None]:
    """Means of q·k and q̂·k over the queries that see a key, and the mean query of each key (None: one for all)."""
    inverse = 1 / q_norm.clamp_min(1e-30)
    if visibility.kind is MaskKind.FULL:  # the same queries see every key: one mean, one product
        share = rows.weight[:, None].expand_as(inverse)
        means = torch.stack([share, share * inverse], 2) @ q  # [b, h, 2, d]
        both = k @ means.transpose(-1, -2)  # [b, h, key, 2]
        return both[..., 0], both[..., 1], None
    mean = mean_over_visible_queries(visibility, q, rows.valid)
    mean_unit = mean_over_visible_queries(visibility, q * inverse[..., None], rows.valid)
    return (mean * k).sum(-1), (mean_unit * k).sum(-1), mean


def _score_at_mean_direction(
    mean_query: Float[Tensor, "batch head key dim"],
    k: Float[Tensor, "batch head key dim"],
    k_norm: Float[Tensor, "batch head key"],
    top: Int[Tensor, "batch head rank"],
    eligible: Bool[Tensor, "batch key"],
) -> Float[Tensor, "batch head rank"]:
    """Mean over the first r + 1 top keys a of |k_a| q̄_a·m.

    q̄_a is the mean of the queries that see a; m is the mean direction of the eligible keys that are not among the first
    r + 1. NaN past the last top key and where no eligible key is left.
    """
    R = top.shape[-1]
    unit = k / k_norm.clamp_min(1e-30)[..., None]
    total = (eligible[:, None, None].to(k.dtype) @ unit)[:, :, 0]  # [b, h, dim]
    index = top.clamp_min(0)
    q, top_unit = (x.gather(2, index[..., None].expand(*index.shape, x.shape[-1])) for x in (mean_query, unit))
    among_top = (q @ top_unit.mT).cumsum(-1)  # [b, h, a, r]: q̄_a with the directions of the first r + 1
    n_top = torch.arange(1, R + 1, device=k.device)
    n_rest = (eligible.sum(-1)[:, None, None] - n_top).to(k.dtype)  # [b, 1, r]
    rest = ((q * total[:, :, None]).sum(-1)[..., None] - among_top) / n_rest[:, :, None]
    score = (k_norm.gather(2, index)[..., None] * rest).triu().sum(-2) / n_top
    return score.masked_fill((top < 0) | (n_rest <= 0), torch.nan)


def _norm(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows"]:
    return x.square().sum(-1).sqrt()


def _repeat_heads(x: Float[Tensor, "batch kv_head key dim"], heads: slice, repeats: int) -> Tensor:
    """The keys or values that these query heads read."""
    if repeats == 1:
        return x[:, heads]
    return x[:, torch.arange(heads.start, heads.stop, device=x.device) // repeats]

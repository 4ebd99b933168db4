"""What a key is like, without the matrix: mean score, mean cosine, and the norms of k, v and W_O v.

Means run over the queries that see the key (METHODS: suffix means under a causal mask). Under full visibility they are
one product with the mean query: mean_i σ q_i·k_j = σ (mean_i q_i)·k_j, mean_i cos_ij = (mean_i q̂_i)·k̂_j. And
|W_O v|² = vᵀ (W_OᵀW_O) v, so a [D, D] Gram matrix per head stands for the output projection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from floatscope.capture.attention import Attention
from floatscope.capture.visibility import Visibility

COLUMNS = ("qk", "cos", "key_norm", "value_norm", "output_norm")
CHUNK = 2**24  # elements of a temporary


@dataclass(frozen=True)
class Columns:
    stats: Float[Tensor, "batch head 5 key"]  # in the order of COLUMNS; zero on padding
    output_norm: Float[Tensor, "batch head"]  # mean norm of a head's output rows
    query_norm: Float[Tensor, "batch head"]


@dataclass(frozen=True)
class Rows:
    """The query rows that count, and what one of them weighs in a mean."""

    valid: Bool[Tensor, "batch query"]
    share: Float[Tensor, " batch"]

    @staticmethod
    def of(valid: Bool[Tensor, "batch query"]) -> Rows:
        return Rows(valid.contiguous(), 1 / valid.sum(-1).clamp_min(1))


def columns(
    call: Attention,
    output: Float[Tensor, "batch head query value_dim"],
    rows: Rows,
    gram: Float[Tensor, "head dim dim"] | None,
) -> Columns:
    """The columns of `COLUMNS` for every head and key, fp32. Without a Gram matrix `output_norm` is NaN."""
    B, H, _, _ = call.query.shape
    out = torch.empty(B, H, len(COLUMNS), call.visible.keys, device=call.query.device)
    step = max(1, CHUNK // (B * max(call.visible.keys, call.visible.queries) * call.query.shape[-1]))
    for h in range(0, H, step):
        heads = torch.arange(h, min(h + step, H), device=out.device)
        q = call.query[:, h : h + step].float()
        k = call.key[:, heads // call.repeats].float()
        v = call.value[:, heads // call.repeats].float()
        see = call.visible
        if see.per_head and see.mask is not None:
            see = replace(see, mask=see.mask[:, h : h + step])
        unit = q / q.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        k_norm = k.norm(dim=-1)
        out[:, h : h + step, 0] = (mean_over_seeing(see, q, rows.valid) * k).sum(-1) * call.scaling
        out[:, h : h + step, 1] = (mean_over_seeing(see, unit, rows.valid) * k).sum(-1) / k_norm.clamp_min(1e-30)
        out[:, h : h + step, 2] = k_norm
        out[:, h : h + step, 3] = v.norm(dim=-1)
        if gram is None:
            out[:, h : h + step, 4] = torch.nan
        else:
            out[:, h : h + step, 4] = ((v @ gram[h : h + step]) * v).sum(-1).clamp_min(0).sqrt()
    if call.visible.valid is not None:
        out = torch.where(call.visible.valid.to(out.device)[:, None, None], out, 0.0)
    weight = (rows.valid * rows.share[:, None])[:, None]
    output_norm, query_norm = ((x.float().norm(dim=-1) * weight).sum(-1) for x in (output, call.query))
    return Columns(out, output_norm, query_norm)


def mean_over_seeing(
    see: Visibility, x: Float[Tensor, "batch head query dim"], valid: Bool[Tensor, "batch query"]
) -> Float[Tensor, "batch head key dim"]:
    """Mean of x over the valid queries that see each key (broadcast over keys when all keys are seen alike)."""
    B, H, Q, D = x.shape
    weight = valid.to(x.dtype)
    if see.kind == "full":
        total = torch.einsum("bhqd,bq->bhd", x, weight)
        return (total / weight.sum(-1).clamp_min(1)[:, None, None])[:, :, None]
    count = see.sum_over_seeing(weight[..., None]).clamp_min(1)  # [b, 1|h, key, 1]
    if see.per_head and see.mask is not None:
        alone = [replace(see, mask=see.mask[:, h : h + 1]) for h in range(H)]
        sums = [one.sum_over_seeing(x[:, h] * weight[..., None])[:, 0] for h, one in enumerate(alone)]
        return torch.stack(sums, 1) / count
    flat = (x * weight[:, None, :, None]).transpose(1, 2).reshape(B, Q, H * D)
    sums_by_head: Tensor = see.sum_over_seeing(flat)[:, 0].unflatten(-1, (H, D))
    return sums_by_head.transpose(1, 2) / count


def gram(weight: Float[Tensor, "out heads_dim"], heads: int) -> Float[Tensor, "head dim dim"]:
    """W_OᵀW_O per head, from the output projection's weight [out, head · dim]."""
    per_head: Tensor = weight.detach().float().unflatten(1, (heads, -1)).transpose(0, 1)  # [head, out, dim]
    return per_head.transpose(1, 2) @ per_head

"""What a key is like, without the matrix: mean score, mean cosine, and the norms of k, v and W_O v.

Means run over the queries that see the key (suffix means under a causal mask). Under full visibility they are
one product with the mean query: mean_i σ q_i·k_j = σ (mean_i q_i)·k_j, mean_i cos_ij = (mean_i q̂_i)·k̂_j. And
|W_O v|² = vᵀ (W_OᵀW_O) v, so a [D, D] Gram matrix per head stands for the output projection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
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
    seeing: Float[Tensor, "batch head key"] | None = None  # mean norm of the queries that see a key; None: `query_norm`
    turned: Float[Tensor, "batch head rank"] | None = None  # where those queries differ by key


@dataclass(frozen=True)
class Ranked:
    """The keys of largest lift, and those that could be among them."""

    key: Int[Tensor, "batch head rank"]
    eligible: Bool[Tensor, "batch key"]


@dataclass(frozen=True)
class Rows:
    """The query rows that count, and what one of them weighs in a mean; a mean over no rows is NaN."""

    valid: Bool[Tensor, "batch query"]
    share: Float[Tensor, " batch"]

    @staticmethod
    def of(valid: Bool[Tensor, "batch query"]) -> Rows:
        return Rows(valid.contiguous(), 1 / valid.sum(-1))

    @cached_property
    def weight(self) -> Float[Tensor, "batch query"]:
        return self.valid * self.share[:, None]


def columns(
    call: Attention,
    output: Float[Tensor, "batch head query value_dim"],
    rows: Rows,
    gram: Float[Tensor, "head dim dim"] | None,
    ranked: Ranked | None = None,
) -> Columns:
    """The stats of every head and key, fp32. Without a Gram matrix `output_norm` is NaN. The `ranked` keys are turned
    here if their mean queries differ."""
    B, H, _, _ = call.query.shape
    out = torch.empty(B, H, len(COLUMNS), call.visible.keys, device=call.query.device)
    turned = None if ranked is None else torch.empty(ranked.key.shape, device=out.device)
    seeing = None if call.visible.kind == "full" else torch.empty(out[:, :, 0].shape, device=out.device)
    query_norm = torch.empty(B, H, device=out.device)
    step = max(1, CHUNK // (B * max(call.visible.keys, call.visible.queries) * call.query.shape[-1]))
    for h in range(0, H, step):
        some = slice(h, min(h + step, H))
        q = call.query[:, some].float()
        k, v = (_of_heads(x, some, call.repeats).float() for x in (call.key, call.value))
        see = call.visible
        if see.per_head and see.mask is not None:
            see = replace(see, mask=see.mask[:, some])
        q_norm, k_norm = _norm(q), _norm(k)
        query_norm[:, some] = (q_norm * rows.weight[:, None]).sum(-1)
        score, cosine, mean = _mean_products(see, q, q_norm, k, rows)
        if seeing is not None:
            seeing[:, some] = mean_over_seeing(see, q_norm[..., None], rows.valid)[..., 0]
        if turned is not None and ranked is not None and mean is not None:
            turned[:, some] = call.scaling * _turned(mean, k, k_norm, ranked.key[:, some], ranked.eligible)
        out[:, some, 0] = score * call.scaling
        out[:, some, 1] = cosine / k_norm.clamp_min(1e-30)
        out[:, some, 2] = k_norm
        out[:, some, 3] = _norm(v)
        if gram is None:
            out[:, some, 4] = torch.nan
        else:
            out[:, some, 4] = ((v @ gram[some]) * v).sum(-1).clamp_min(0).sqrt()
    if call.visible.valid is not None:
        out = torch.where(call.visible.valid.to(out.device)[:, None, None], out, 0.0)
    output_norm = (_norm(output.float()) * rows.weight[:, None]).sum(-1)
    return Columns(out, output_norm, query_norm, seeing, turned)


def _mean_products(
    see: Visibility,
    q: Float[Tensor, "batch head query dim"],
    q_norm: Float[Tensor, "batch head query"],
    k: Float[Tensor, "batch head key dim"],
    rows: Rows,
) -> tuple[Float[Tensor, "batch head key"], Float[Tensor, "batch head key"], Tensor | None]:
    """Mean over the queries that see a key of q·k, and of q̂·k; and, if it differs by key, that mean query."""
    inverse = 1 / q_norm.clamp_min(1e-30)
    if see.kind == "full":  # the same queries see every key: one mean, one product
        share = rows.weight[:, None].expand_as(inverse)
        means = torch.stack([share, share * inverse], 2) @ q  # [b, h, 2, d]
        both = k @ means.transpose(-1, -2)  # [b, h, key, 2]
        return both[..., 0], both[..., 1], None
    mean = mean_over_seeing(see, q, rows.valid)
    mean_unit = mean_over_seeing(see, q * inverse[..., None], rows.valid)
    return (mean * k).sum(-1), (mean_unit * k).sum(-1), mean


def _turned(
    mean: Float[Tensor, "batch head key dim"],
    k: Float[Tensor, "batch head key dim"],
    k_norm: Float[Tensor, "batch head key"],
    ranked: Int[Tensor, "batch head rank"],
    eligible: Bool[Tensor, "batch key"],
) -> Float[Tensor, "batch head rank"]:
    """Mean over the first r + 1 keys a of |k_a| q̄_a·m, m the mean direction of the eligible keys that are not among
    them; q̄_a the mean of the queries that see a. NaN beyond the keys there are, or where no other is left."""
    R = ranked.shape[-1]
    unit = k / k_norm.clamp_min(1e-30)[..., None]
    total = (eligible[:, None, None].to(k.dtype) @ unit)[:, :, 0]  # [b, h, dim]
    at = ranked.clamp_min(0)
    q, top = (x.gather(2, at[..., None].expand(*at.shape, x.shape[-1])) for x in (mean, unit))
    among = (q @ top.mT).cumsum(-1)  # [b, h, a, r]: q̄_a with the directions of the first r + 1
    taken = torch.arange(1, R + 1, device=k.device)
    left = (eligible.sum(-1)[:, None, None] - taken).to(k.dtype)  # [b, 1, r]
    rest = ((q * total[:, :, None]).sum(-1)[..., None] - among) / left[:, :, None]
    score = (k_norm.gather(2, at)[..., None] * rest).triu().sum(-2) / taken
    return score.masked_fill((ranked < 0) | (left <= 0), torch.nan)


def _norm(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows"]:
    return x.square().sum(-1).sqrt()


def _of_heads(x: Float[Tensor, "batch kv_head key dim"], heads: slice, repeats: int) -> Tensor:
    """Keys or values as some query heads read them."""
    if repeats == 1:
        return x[:, heads]
    return x[:, torch.arange(heads.start, heads.stop, device=x.device) // repeats]


def mean_over_seeing(
    see: Visibility, x: Float[Tensor, "batch head query dim"], valid: Bool[Tensor, "batch query"]
) -> Float[Tensor, "batch head key dim"]:
    """Mean of x over the valid queries that see each key."""
    B, H, Q, D = x.shape
    weight = valid.to(x.dtype)
    count = see.column_sum(weight[..., None]).clamp_min(1)  # [b, 1|h, key, 1]
    if see.per_head and see.mask is not None:
        alone = [replace(see, mask=see.mask[:, h : h + 1]) for h in range(H)]
        sums = [one.column_sum(x[:, h] * weight[..., None])[:, 0] for h, one in enumerate(alone)]
        return torch.stack(sums, 1) / count
    flat = (x * weight[:, None, :, None]).transpose(1, 2).reshape(B, Q, H * D)
    sums_by_head: Tensor = see.column_sum(flat)[:, 0].unflatten(-1, (H, D))
    return sums_by_head.transpose(1, 2) / count


def gram(weight: Float[Tensor, "out heads_dim"], heads: int) -> Float[Tensor, "head dim dim"]:
    """W_OᵀW_O per head, from the output projection's weight [out, head · dim]."""
    per_head: Tensor = weight.detach().float().unflatten(1, (heads, -1)).transpose(0, 1)  # [head, out, dim]
    return per_head.transpose(1, 2) @ per_head

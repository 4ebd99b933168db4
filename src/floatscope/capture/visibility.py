"""Which keys a query may see, as structure instead of a matrix.

A [T, T] mask is the one thing a watched forward must not build, so a mask is kept as what made it: a kind and a size,
the key padding, or a rule over indices; `bias` and `allowed` expand it for a block of queries at a time. A mask
that arrives as a tensor is kept as it is, boolean (True = visible) or additive.

    Visibility.causal(512, 512, valid=padding)      # 512 queries, 512 keys, left or right padding
    Visibility.window(1, 600, size=128)             # one cached decoding step under a sliding window

Query i stands at key index `offset + i`. Positions are counted from a sample's first valid key, so left padding moves
no window and no block border.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.errors import UserError

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) indices, broadcast against each other → visible or not; query and key count from key 0."""

HIDDEN = -1e30
"""Added to a score instead of -inf: exp gives exactly 0 and 0 · HIDDEN stays finite."""

EXPANDED = 2**22
"""Pairs of query and key spelled out at a time where a mask has no structure to count with."""

HIDES = torch.finfo(torch.float16).min / 2
"""An additive mask hides below this: -inf, -1e9 and the least number of any type do, a steep ALiBi does not."""


@dataclass(frozen=True)
class Visibility:
    kind: str  # "full" | "causal" | "window" | "block" | "rule" | "mask"
    queries: int
    keys: int
    offset: int = 0
    size: int = 0  # of the window or block
    valid: Bool[Tensor, "batch key"] | None = None  # None: no padding
    mask: Tensor | None = None  # [batch|1, head|1, query, key], boolean or additive
    rule: Rule | None = None
    batch: int = 1  # how many samples the rule tells apart
    elsewhere: dict[torch.device, Visibility] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def full(queries: int, keys: int, valid: Tensor | None = None, offset: int | None = None) -> Visibility:
        return Visibility("full", queries, keys, keys - queries if offset is None else offset, valid=padding(valid))

    @staticmethod
    def causal(queries: int, keys: int, valid: Tensor | None = None, offset: int | None = None) -> Visibility:
        return Visibility("causal", queries, keys, keys - queries if offset is None else offset, valid=padding(valid))

    @staticmethod
    def window(
        queries: int, keys: int, size: int, valid: Tensor | None = None, offset: int | None = None
    ) -> Visibility:
        """Causal, and no further back than `size` keys, the query's own included."""
        start = keys - queries if offset is None else offset
        return Visibility("window", queries, keys, start, size, padding(valid))

    @staticmethod
    def block(queries: int, keys: int, size: int, valid: Tensor | None = None, offset: int | None = None) -> Visibility:
        """Block-causal: everything in a query's own block of `size` and in the blocks before."""
        start = keys - queries if offset is None else offset
        return Visibility("block", queries, keys, start, size, padding(valid))

    @staticmethod
    def by_rule(
        queries: int, keys: int, rule: Rule, valid: Tensor | None = None, offset: int | None = None, batch: int = 1
    ) -> Visibility:
        start = keys - queries if offset is None else offset
        return Visibility("rule", queries, keys, start, valid=padding(valid), rule=rule, batch=batch)

    @staticmethod
    def by_mask(mask: Tensor, queries: int, keys: int, valid: Tensor | None = None) -> Visibility:
        """A boolean or additive mask, broadcastable to [batch, head, query, key]."""
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise UserError(f"an attention mask must be boolean or additive floating point, got {mask.dtype}")
        if mask.ndim > 4 or any(n not in (1, m) for n, m in zip(mask.shape[::-1], (keys, queries), strict=False)):
            raise UserError(
                f"an attention mask of shape {tuple(mask.shape)} does not fit {queries} queries and {keys} keys:"
                " it must broadcast to [batch, head, query, key]"
            )
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        mask = mask.expand(mask.shape[0], mask.shape[1], queries, keys)
        if mask.is_floating_point() and bool(((mask == 0) | (mask == 1)).all()) and bool((mask == 1).any()):
            raise UserError(
                "the attention mask is floating point but holds only 0 and 1: added to scores it would hide nothing;"
                " pass mask.bool(), or 0 for visible and -inf for hidden"
            )
        return Visibility("mask", queries, keys, keys - queries, valid=padding(valid), mask=mask)

    @property
    def start(self) -> Int[Tensor, " batch"] | int:
        """Each sample's first valid key: where windows and blocks count from."""
        return 0 if self.valid is None else self.valid.int().argmax(-1)

    def contiguous(self) -> Visibility:
        """transformers asks this of a mask it makes before the forward (static caches, which `watch` then refuses)."""
        return self

    def to(self, device: torch.device | str, **_: Any) -> Visibility:
        """On another device, the same copy for all who ask: layers of a model may be spread over several."""
        device, there = torch.device(device), self.mask if self.valid is None else self.valid
        if there is None or there.device == device:
            return self
        if device not in self.elsewhere:
            valid, mask = (None if t is None else t.to(device) for t in (self.valid, self.mask))
            self.elsewhere[device] = replace(self, valid=valid, mask=mask, elsewhere={})
        return self.elsewhere[device]

    @property
    def per_head(self) -> bool:
        return self.mask is not None and self.mask.shape[1] > 1

    @cached_property
    def differs_by_head(self) -> bool:
        """Whether some head may see what another may not."""
        if self.mask is None or not self.per_head:
            return False
        for rows in self._row_blocks():
            seen = self._allowed_or_ones(rows, self.mask.device)
            if bool((seen != seen[:, :1]).any()):
                return True
        return False

    @property
    def plain(self) -> bool:
        """Every query sees every key."""
        return self.kind == "full" and self.valid is None

    def span(self, rows: slice) -> slice:
        """The keys some query of `rows` may see, at least one; the rest of the columns need not be computed."""
        first, last = self.offset + rows.start, self.offset + rows.stop - 1
        start, stop = 0, self.keys
        match self.kind:
            case "causal":
                stop = last + 1
            case "window":
                start, stop = first - self.size + 1, last + 1
            case "block" if self.valid is None:
                stop = (last // self.size + 1) * self.size
        stop = min(max(stop, 1), self.keys)  # queries may stand before the first key or beyond the last
        return slice(min(max(start, 0), stop - 1), stop)

    def allowed(self, rows: slice, keys: slice, device: torch.device | str = "cpu") -> Tensor | None:
        """Visible or not, [batch|1, head|1, rows, keys]; None when every pair is visible."""
        q = torch.arange(rows.start + self.offset, rows.stop + self.offset, device=device)[:, None]
        k = torch.arange(keys.start, keys.stop, device=device)
        seen: Tensor | None = None
        match self.kind:
            case "causal":
                seen = (k <= q)[None, None]
            case "window":
                seen = ((k <= q) & (k > q - self.size))[None, None]
            case "block":
                start = self.start if isinstance(self.start, int) else self.start.to(device)[:, None, None, None]
                seen = (k - start) // self.size <= (q - start) // self.size
                seen = seen if seen.ndim == 4 else seen[None, None]
            case "rule":
                seen = self._by_rule(q[:, 0], k)
            case "mask":
                assert self.mask is not None
                part = self.mask[:, :, rows, keys]
                seen = part if part.dtype == torch.bool else part > HIDES
        if self.valid is not None:
            keep = self.valid[:, None, None, keys].to(device)
            seen = keep.expand(-1, -1, q.numel(), -1) if seen is None else seen & keep
        return seen

    def bias(self, rows: slice, keys: slice) -> Tensor | None:
        """What is added to the visible scores, [batch|1, head|1, rows, keys]; None when nothing is."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return None
        return self.mask[:, :, rows, keys].float().clamp_min(HIDDEN)

    def allowed_in(self, sample: Int[Tensor, " row"], row: Int[Tensor, " row"]) -> Bool[Tensor, "row h key"] | None:
        """What queries of any samples see, [row, head|1, key]; None when they see everything."""
        seen: Tensor | None = None
        k = torch.arange(self.keys, device=row.device)
        match self.kind:
            case "full":
                pass
            case "rule":
                assert self.rule is not None
                b, q = (x[:, None, None, None] for x in (_among(sample, self.batch), row + self.offset))
                seen = self.rule(b, torch.zeros_like(b[:1]), q, k[None, None, None]).expand(len(row), 1, 1, len(k))[
                    :, 0
                ]
            case "mask":
                assert self.mask is not None
                part = self.mask[_among(sample, len(self.mask)), :, row]
                seen = part if part.dtype == torch.bool else part > HIDES
            case _:
                lo, hi = (x[_among(sample, len(x)), row, None, None] for x in self._key_interval(row.device))
                seen = (k >= lo) & (k < hi)
        if self.valid is not None:
            keep = self.valid.to(row.device)[sample, None]
            seen = keep if seen is None else seen & keep
        return seen

    def bias_in(self, sample: Int[Tensor, " row"], row: Int[Tensor, " row"]) -> Float[Tensor, "row h key"] | None:
        """What is added to the visible scores of queries of any samples; None when nothing is."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return None
        return self.mask[_among(sample, len(self.mask)), :, row].float().clamp_min(HIDDEN)

    def sample(self, b: int) -> tuple[Visibility, slice, slice]:
        """One sample with its padding cut away: its visibility and the slices of queries and keys that remain.

        Padding with holes in it is left in place, and so are queries that do not stand on the keys (cross-attention).
        """
        one = self
        if self.mask is not None and self.mask.shape[0] > 1:
            one = replace(self, mask=self.mask[b : b + 1])
        if self.rule is not None:
            rule = self.rule
            one = replace(one, rule=lambda _, h, q, k: rule(torch.full_like(h, b), h, q, k), batch=1)
        if self.valid is None:
            return one, slice(0, self.queries), slice(0, self.keys)
        first, stop, whole = self._spans[b]
        if not whole:
            return replace(one, valid=self.valid[b : b + 1]), slice(0, self.queries), slice(0, self.keys)
        keys = slice(first, stop)
        rows = slice(max(0, first - self.offset), max(0, min(self.queries, stop - self.offset)))
        if self.offset + self.queries != self.keys:
            rows = slice(0, self.queries)
        cut = replace(
            one,
            queries=rows.stop - rows.start,
            keys=stop - first,
            offset=self.offset + rows.start - first,
            valid=None,
            mask=None if one.mask is None else one.mask[:, :, rows, keys],
        )
        if cut.rule is not None:
            moved = cut.rule
            cut = replace(cut, rule=lambda b, h, q, k: moved(b, h, q + first, k + first))
        return cut, rows, keys

    def rows_from(self, first: int) -> Visibility:
        """The same for the queries from row `first` on."""
        mask = None if self.mask is None else self.mask[:, :, first:]
        return replace(self, queries=self.queries - first, offset=self.offset + first, mask=mask)

    # What follows is derived from the structure, over the whole batch at once. All of it is exact for padding too.

    def seen_keys(self, device: torch.device | str) -> Float[Tensor, "b head query"]:
        """n_i: how many keys each query may see, [batch|1, head|1, query]."""
        if self.kind in ("rule", "mask"):
            parts = [self._allowed_or_ones(rows, device).sum(-1) for rows in self._row_blocks()]
            return torch.cat(parts, -1).float()
        filled = torch.ones(1, self.keys, device=device) if self.valid is None else self.valid.to(device).float()
        total = torch.nn.functional.pad(filled.double().cumsum(-1), (1, 0))
        lo, hi = self._key_interval(device)
        return (total.gather(-1, hi) - total.gather(-1, lo)).float()[:, None, :]

    def column_sum(self, x: Float[Tensor, "b query c"]) -> Float[Tensor, "b2 head key c"]:
        """Σ of x[i] over the queries i that see key j, [batch, head|1, key, c]: how any column mean is taken."""
        if self.kind in ("rule", "mask"):
            total: Tensor | None = None
            for rows in self._row_blocks():
                seen = self._allowed_or_ones(rows, x.device).to(x.dtype)  # [b, h, rows, key]
                part = seen.transpose(-1, -2) @ x[:, None, rows]
                total = part if total is None else total + part
            assert total is not None
            return total
        if self.kind == "full":
            out = x.sum(1, keepdim=True).expand(-1, self.keys, -1)
        else:
            total = torch.nn.functional.pad(x.double().cumsum(1), (0, 0, 1, 0))
            lo, hi = self._query_interval(x.device)
            index = (lo.expand(len(x), -1), hi.expand(len(x), -1))
            width = x.shape[-1]
            gathered = [total.gather(1, i[..., None].expand(-1, -1, width)) for i in index]
            out = (gathered[1] - gathered[0]).to(x.dtype)
        if self.valid is not None:
            out = out * self.valid.to(x.device)[..., None]
        return out[:, None]

    def sees(self, keys: Int[Tensor, "batch head rank"]) -> Bool[Tensor, "batch head query rank"]:
        """Whether each row sees a few keys of each head."""
        B, H, n = keys.shape
        if self.kind in ("rule", "mask"):
            out = torch.empty(B, H, self.queries, n, dtype=torch.bool, device=keys.device)
            for rows in self._row_blocks():
                seen = self._allowed_or_ones(rows, keys.device)
                seen = seen.expand(B, H, -1, -1)
                out[:, :, rows] = seen.gather(-1, keys[:, :, None].expand(-1, -1, seen.shape[2], -1))
            return out
        lo, hi = (x[:, None, :, None] for x in self._key_interval(keys.device))
        at = keys[:, :, None]
        seen = (at >= lo) & (at < hi)
        if self.valid is not None:
            seen = seen & self.valid.to(keys.device)[:, None].expand(-1, H, -1).gather(-1, keys)[:, :, None]
        return seen.expand(B, H, self.queries, n)

    def sees_own(self, device: torch.device | str) -> Bool[Tensor, "b h query"] | None:
        """Whether each row sees the key it stands on; None: all do."""
        if self.kind not in ("rule", "mask"):
            return None
        parts = []
        for rows in self._row_blocks():
            seen = self._allowed_or_ones(rows, device)
            at = torch.arange(rows.start, rows.stop, device=device) + self.offset
            parts.append(seen[:, :, torch.arange(len(at), device=device), at])
        return torch.cat(parts, -1)

    def mean_seen(self, x: Float[Tensor, "batch head key dim"]) -> Float[Tensor, "batch head query dim"]:
        """Mean of x over the keys each row sees; zeros for one that sees none."""
        B, H, _, D = x.shape
        count = self.seen_keys(x.device).clamp_min(1)[..., None]  # [b, h, query, 1]
        x = x.float()
        if self.valid is not None:
            x = x * self.valid.to(x.device)[:, None, :, None]
        if self.kind == "full":
            return x.sum(2, keepdim=True).expand(-1, -1, self.queries, -1) / count
        if self.kind in ("rule", "mask"):
            blocks = [self._allowed_or_ones(rows, x.device).float() @ x for rows in self._row_blocks()]
            return torch.cat(blocks, 2) / count
        total = torch.nn.functional.pad(x.double().cumsum(2), (0, 0, 1, 0))
        ends = [i[:, None, :, None].expand(B, H, -1, D) for i in self._key_interval(x.device)]
        return ((total.gather(2, ends[1]) - total.gather(2, ends[0])) / count).float()

    def uniform(self, weights: Float[Tensor, "b query group"]) -> Float[Tensor, "b2 group key"]:
        """What uniform attention under this mask would give: u[g, j] = Σ_i weights[i, g] · 1[i sees j] / n_i."""
        n = self.seen_keys(weights.device)  # [b, h, query]
        if n.shape[1] == 1:
            share = weights / n[:, 0, :, None].clamp_min(1)
            return self.column_sum(share).mean(1).transpose(-1, -2)
        heads = [replace(self, mask=m[:, None]) for m in self.mask.unbind(1)]  # type: ignore[union-attr]
        return torch.stack([one.uniform(weights) for one in heads]).mean(0)

    def spans(self, device: torch.device) -> Int[Tensor, "batch 2"]:
        """First valid key and one past the last, for a kernel to read; made once for all layers."""
        return self._span_tensor.to(device)

    @cached_property
    def _span_tensor(self) -> Tensor:
        assert self.valid is not None
        return torch.tensor([span[:2] for span in self._spans], dtype=torch.int32, device=self.valid.device)

    @cached_property
    def _spans(self) -> list[tuple[int, int, bool]]:
        """Per sample: first valid key, one past the last, and whether everything between is valid."""
        assert self.valid is not None
        spans = []
        for row in self.valid.cpu():
            filled = row.nonzero()[:, 0].tolist()
            first, stop = (filled[0], filled[-1] + 1) if filled else (0, 0)
            spans.append((first, stop, len(filled) == stop - first))
        return spans

    def _key_interval(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """[lo, hi): the keys query i sees, each [batch|1, query]."""
        at = torch.arange(self.queries, device=device)[None] + self.offset
        zero, end = torch.zeros_like(at), torch.full_like(at, self.keys)
        match self.kind:
            case "causal":
                lo, hi = zero, at + 1
            case "window":
                lo, hi = at - self.size + 1, at + 1
            case "block":
                base = self._base(device)
                lo, hi = (zero + base * 0, ((at - base) // self.size + 1) * self.size + base)
            case _:
                lo, hi = zero, end
        lo, hi = lo.clamp(0, self.keys), hi.clamp(0, self.keys)
        if self.valid is not None:
            lo, hi = lo.expand(len(self.valid), -1), hi.expand(len(self.valid), -1)
        return lo, hi

    def _query_interval(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """[lo, hi): the queries that see key j, each [batch|1, key]."""
        at = torch.arange(self.keys, device=device)[None] - self.offset
        end = torch.full_like(at, self.queries)
        match self.kind:
            case "causal":
                lo, hi = at, end
            case "window":
                lo, hi = at, at + self.size
            case _:
                base = self._base(device)
                lo, hi = ((at + self.offset - base) // self.size) * self.size + base - self.offset, end
        return lo.clamp(0, self.queries), hi.clamp(0, self.queries)

    def _base(self, device: torch.device | str) -> Tensor | int:
        return 0 if isinstance(self.start, int) else self.start.to(device)[:, None]

    def _by_rule(self, q: Tensor, k: Tensor) -> Tensor:
        assert self.rule is not None
        b = torch.arange(self.batch, device=q.device)[:, None, None, None]
        h = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=q.device)
        seen = self.rule(b, h, q[None, None, :, None], k[None, None, None, :])
        return seen.expand(-1, -1, len(q), len(k))

    def _allowed_or_ones(self, rows: slice, device: torch.device | str) -> Tensor:
        seen = self.allowed(rows, slice(0, self.keys), device)
        if seen is None:
            return torch.ones(1, 1, rows.stop - rows.start, self.keys, dtype=torch.bool, device=device)
        return seen

    def _row_blocks(self) -> list[slice]:
        batch = max(
            self.batch, 1 if self.valid is None else len(self.valid), 1 if self.mask is None else len(self.mask)
        )
        heads = 1 if self.mask is None else self.mask.shape[1]
        step = max(1, EXPANDED // max(1, self.keys * batch * heads))
        return [slice(i, min(i + step, self.queries)) for i in range(0, self.queries, step)]


def _among(sample: Tensor, several: int) -> Tensor:
    """Which of `several` is a sample's: its own, or the one that is for all."""
    return sample if several > 1 else torch.zeros_like(sample)


def padding(valid: Tensor | None) -> Tensor | None:
    """Key padding as a boolean [batch, key], or None when nothing is padded."""
    if valid is None:
        return None
    valid = valid.bool()
    return None if bool(valid.all()) else valid

"""Which keys a query may see, as structure instead of a matrix.

A watched forward must not build a [T, T] mask. So a mask is stored as its structure: a kind and a size, the key
padding, or a rule over indices. `block_mask` and `block_bias` expand it for a block of queries at a time. A mask that
arrives as a tensor is stored unchanged, boolean (True = visible) or additive.

    Visibility.causal(512, 512, valid=padding)      # 512 queries, 512 keys, left or right padding
    Visibility.window(1, 600, size=128)             # one cached decoding step under a sliding window

Query i stands at key index `offset + i`. Windows and blocks count from a sample's first valid key, so left padding does
not shift them.
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
from floatscope.schema import MaskKind, MaskStructure

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) indices, broadcast against each other → visible or not; query and key count from key 0."""

HIDDEN_SCORE = -1e30
"""Added to a score instead of -inf: exp gives exactly 0, and 0 · HIDDEN_SCORE stays finite."""

PAIR_BLOCK = 2**22
"""Query-key pairs expanded at a time where a mask has no structure to count with."""

HIDING_THRESHOLD = torch.finfo(torch.float16).min / 2
"""An additive mask hides below this: -inf, -1e9 and the minimum of any dtype do, a steep ALiBi does not."""


class MaskIsRead(UserError, AttributeError):
    """A model reads its mask as if it were a tensor. An `AttributeError` too, so that `hasattr` says no."""


@dataclass(frozen=True)
class Visibility:
    """The keys each query may see. Build one with `full`, `causal`, `window`, `block`, `from_rule` or `from_mask`.

    offset  query i stands at key index offset + i
    size    of the window or block
    valid   key padding; None: no padding
    mask    [batch|1, head|1, query, key], boolean or additive
    batch   the number of samples that the rule distinguishes
    copies  this visibility on other devices
    """

    kind: MaskKind
    queries: int
    keys: int
    offset: int = 0
    size: int = 0
    valid: Bool[Tensor, "batch key"] | None = None
    mask: Tensor | None = None
    rule: Rule | None = None
    batch: int = 1
    copies: dict[torch.device, Visibility] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def full(queries: int, keys: int, valid: Tensor | None = None, offset: int | None = None) -> Visibility:
        """Every query sees every valid key. By default the queries are the last positions of the keys."""
        start = keys - queries if offset is None else offset
        return Visibility(MaskKind.FULL, queries, keys, start, valid=normalize_padding(valid))

    @staticmethod
    def causal(queries: int, keys: int, valid: Tensor | None = None, offset: int | None = None) -> Visibility:
        """A query sees its own key and all keys before it."""
        start = keys - queries if offset is None else offset
        return Visibility(MaskKind.CAUSAL, queries, keys, start, valid=normalize_padding(valid))

    @staticmethod
    def window(
        queries: int, keys: int, size: int, valid: Tensor | None = None, offset: int | None = None
    ) -> Visibility:
        """Causal, limited to the last `size` keys including the query's own."""
        start = keys - queries if offset is None else offset
        return Visibility(MaskKind.WINDOW, queries, keys, start, size, normalize_padding(valid))

    @staticmethod
    def block(queries: int, keys: int, size: int, valid: Tensor | None = None, offset: int | None = None) -> Visibility:
        """Block-causal: a query sees its own block of `size` keys and all blocks before it."""
        start = keys - queries if offset is None else offset
        return Visibility(MaskKind.BLOCK, queries, keys, start, size, normalize_padding(valid))

    @staticmethod
    def from_rule(
        queries: int, keys: int, rule: Rule, valid: Tensor | None = None, offset: int | None = None, batch: int = 1
    ) -> Visibility:
        """A rule over (batch, head, query, key) indices."""
        start = keys - queries if offset is None else offset
        return Visibility(MaskKind.RULE, queries, keys, start, valid=normalize_padding(valid), rule=rule, batch=batch)

    @staticmethod
    def from_mask(mask: Tensor, queries: int, keys: int, valid: Tensor | None = None) -> Visibility:
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
                "the attention mask is floating point but contains only 0 and 1: added to scores it would hide"
                " nothing; pass mask.bool(), or 0 for visible and -inf for hidden"
            )
        return Visibility(MaskKind.MASK, queries, keys, keys - queries, valid=normalize_padding(valid), mask=mask)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise MaskIsRead(
            f"the model reads its attention mask as a tensor (`mask.{name}`), to build another one from it or to use it"
            " outside of attention, which is not captured"
        )

    def __getitem__(self, index: Any) -> Any:
        raise MaskIsRead(
            "the model reads its attention mask as a tensor (`mask[…]`), to build another one from it or to use it"
            " outside of attention, which is not captured"
        )

    @property
    def first_valid_key(self) -> Int[Tensor, " batch"] | int:
        """Each sample's first valid key: where windows and blocks count from."""
        return 0 if self.valid is None else self.valid.int().argmax(-1)

    def contiguous(self) -> Visibility:
        """Return self. transformers calls this on a mask it prepares for a static cache, which `watch` then refuses."""
        return self

    def to(self, device: torch.device | str, **_: Any) -> Visibility:
        """This visibility on another device; layers on the same device share one copy."""
        device, tensor = torch.device(device), self.mask if self.valid is None else self.valid
        if tensor is None or tensor.device == device:
            return self
        if device not in self.copies:
            valid, mask = (None if t is None else t.to(device) for t in (self.valid, self.mask))
            self.copies[device] = replace(self, valid=valid, mask=mask, copies={})
        return self.copies[device]

    @property
    def structure(self) -> MaskStructure:
        """The mask without its lengths and padding."""
        return MaskStructure(self.kind, self.size)

    @property
    def is_per_head(self) -> bool:
        """Whether the mask has a head axis."""
        return self.mask is not None and self.mask.shape[1] > 1

    @cached_property
    def differs_by_head(self) -> bool:
        """Whether some head may see a key that another head may not see from the same row."""
        if self.mask is None or not self.is_per_head:
            return False
        for rows in self._row_blocks():
            visible = self._full_block_mask(rows, self.mask.device)
            if bool((visible != visible[:, :1]).any()):
                return True
        return False

    @property
    def is_unmasked(self) -> bool:
        """Whether every query sees every key."""
        return self.kind is MaskKind.FULL and self.valid is None

    @property
    def is_known_to_show_all(self) -> bool:
        """Whether kind, size and lengths imply that every row sees every key, padding aside."""
        reach = {  # one past the last key that the first row sees
            MaskKind.FULL: self.keys,
            MaskKind.CAUSAL: self.offset + 1,
            MaskKind.WINDOW: self.offset + 1 if self.offset + self.queries <= self.size else 0,
            MaskKind.BLOCK: (self.offset // max(self.size, 1) + 1) * self.size if self.valid is None else 0,
        }
        return reach.get(self.kind, 0) >= self.keys

    @property
    def has_padding_holes(self) -> bool:
        """Whether some sample has padding between valid keys."""
        return self.valid is not None and not all(is_gapless for _, _, is_gapless in self._valid_ranges)

    def find_padding(self) -> Bool[Tensor, "batch key"] | None:
        """The keys that are certainly padding; None if there are none.

        They are those that `valid` hides. In a mask that is a tensor, they are positions at an end of the sequence
        whose key no row sees, and whose own row sees nothing (Dream) or what all other rows see (a mask of keys).
        """
        if self.mask is None:
            return None if self.valid is None else ~self.valid
        visible = self.mask if self.mask.dtype == torch.bool else self.mask > HIDING_THRESHOLD
        visible = visible.any(1)  # [b, query, key]
        is_key_mask = (
            (visible == visible[:, :1]).all(-1).all(-1) if self.queries > 1 else visible.new_zeros(len(visible))
        )
        is_blind = ~visible.any(-1) | is_key_mask[:, None]  # [b, query]
        padding = torch.zeros(len(visible), self.keys, dtype=torch.bool, device=visible.device)
        padding[:, self.offset :] = ~visible.any(1)[:, self.offset :] & is_blind
        at_start = padding.long().cumprod(-1).bool()
        at_end = padding.flip(-1).long().cumprod(-1).flip(-1).bool()
        padding = at_start | at_end
        return padding if bool(padding.any()) else None

    def key_span(self, rows: slice) -> slice:
        """The smallest known range of keys that `rows` may see, at least one; other columns need not be computed."""
        first, last = self.offset + rows.start, self.offset + rows.stop - 1
        start, stop = 0, self.keys
        match self.kind:
            case MaskKind.CAUSAL:
                stop = last + 1
            case MaskKind.WINDOW:
                start, stop = first - self.size + 1, last + 1
            case MaskKind.BLOCK if self.valid is None:
                stop = (last // self.size + 1) * self.size
        stop = min(max(stop, 1), self.keys)  # queries may stand before the first key or beyond the last
        return slice(min(max(start, 0), stop - 1), stop)

    def block_mask(self, rows: slice, keys: slice, device: torch.device | str = "cpu") -> Tensor | None:
        """Whether each pair is visible, [batch|1, head|1, rows, keys]; None when every pair is."""
        q = torch.arange(rows.start + self.offset, rows.stop + self.offset, device=device)[:, None]
        k = torch.arange(keys.start, keys.stop, device=device)
        visible: Tensor | None = None
        match self.kind:
            case MaskKind.CAUSAL:
                visible = (k <= q)[None, None]
            case MaskKind.WINDOW:
                visible = ((k <= q) & (k > q - self.size))[None, None]
            case MaskKind.BLOCK:
                base = self._block_base(device)
                start = base[..., None, None] if isinstance(base, Tensor) else base
                visible = (k - start) // self.size <= (q - start) // self.size
                visible = visible if visible.ndim == 4 else visible[None, None]
            case MaskKind.RULE:
                visible = self._apply_rule(q[:, 0], k)
            case MaskKind.MASK:
                assert self.mask is not None
                part = self.mask[:, :, rows, keys]
                visible = part if part.dtype == torch.bool else part > HIDING_THRESHOLD
        if self.valid is not None:
            is_valid = self.valid[:, None, None, keys].to(device)
            visible = is_valid.expand(-1, -1, q.numel(), -1) if visible is None else visible & is_valid
        return visible

    def block_bias(self, rows: slice, keys: slice) -> Tensor | None:
        """What an additive mask adds to the scores, [batch|1, head|1, rows, keys]; None without an additive mask."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return None
        return self.mask[:, :, rows, keys].float().clamp_min(HIDDEN_SCORE)

    def row_mask(self, sample: Int[Tensor, " row"], row: Int[Tensor, " row"]) -> Bool[Tensor, "row h key"] | None:
        """The keys that single rows of any samples see, [row, head|1, key]; None when they see every key."""
        visible: Tensor | None = None
        k = torch.arange(self.keys, device=row.device)
        match self.kind:
            case MaskKind.FULL:
                pass
            case MaskKind.RULE:
                assert self.rule is not None
                b, q = (x[:, None, None, None] for x in (_batch_index(sample, self.batch), row + self.offset))
                visible = self.rule(b, torch.zeros_like(b[:1]), q, k[None, None, None])
                visible = visible.expand(len(row), 1, 1, len(k))[:, 0]
            case MaskKind.MASK:
                assert self.mask is not None
                part = self.mask[_batch_index(sample, len(self.mask)), :, row]
                visible = part if part.dtype == torch.bool else part > HIDING_THRESHOLD
            case _:
                lo, hi = (x[_batch_index(sample, len(x)), row, None, None] for x in self._key_interval(row.device))
                visible = (k >= lo) & (k < hi)
        if self.valid is not None:
            is_valid = self.valid.to(row.device)[sample, None]
            visible = is_valid if visible is None else visible & is_valid
        return visible

    def row_bias(self, sample: Int[Tensor, " row"], row: Int[Tensor, " row"]) -> Float[Tensor, "row h key"] | None:
        """What an additive mask adds to the scores of single rows of any samples; None without an additive mask."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return None
        return self.mask[_batch_index(sample, len(self.mask)), :, row].float().clamp_min(HIDDEN_SCORE)

    def unpadded_sample(self, b: int) -> tuple[Visibility, slice, slice]:
        """One sample without its padding: its visibility and the slices of the queries and keys that remain.

        Padding with holes stays in place, and so do queries that do not stand on the keys (cross-attention).
        """
        one = self
        if self.mask is not None and self.mask.shape[0] > 1:
            one = replace(self, mask=self.mask[b : b + 1])
        if self.rule is not None:
            rule = self.rule
            one = replace(one, rule=lambda _, h, q, k: rule(torch.full_like(h, b), h, q, k), batch=1)
        if self.valid is None:
            return one, slice(0, self.queries), slice(0, self.keys)
        first, stop, is_gapless = self._valid_ranges[b]
        if not is_gapless:
            return replace(one, valid=self.valid[b : b + 1]), slice(0, self.queries), slice(0, self.keys)
        keys = slice(first, stop)
        rows = slice(max(0, first - self.offset), max(0, min(self.queries, stop - self.offset)))
        if self.offset + self.queries != self.keys:
            rows = slice(0, self.queries)
        cropped = replace(
            one,
            queries=rows.stop - rows.start,
            keys=stop - first,
            offset=self.offset + rows.start - first,
            valid=None,
            mask=None if one.mask is None else one.mask[:, :, rows, keys],
        )
        if cropped.rule is not None:
            shifted = cropped.rule
            cropped = replace(cropped, rule=lambda b, h, q, k: shifted(b, h, q + first, k + first))
        return cropped, rows, keys

    def rows_from(self, first: int) -> Visibility:
        """The visibility of the queries from row `first` on."""
        mask = None if self.mask is None else self.mask[:, :, first:]
        return replace(self, queries=self.queries - first, offset=self.offset + first, mask=mask)

    # The methods below derive numbers from the structure, for the whole batch at once. They are exact for padding too.

    def count_visible_keys(self, device: torch.device | str) -> Float[Tensor, "b head query"]:
        """n_i: how many keys each query may see, [batch|1, head|1, query]."""
        if not self.structure.is_known:
            parts = [self._full_block_mask(rows, device).sum(-1) for rows in self._row_blocks()]
            return torch.cat(parts, -1).float()
        is_valid = torch.ones(1, self.keys, device=device) if self.valid is None else self.valid.to(device).float()
        total = torch.nn.functional.pad(is_valid.double().cumsum(-1), (1, 0))
        lo, hi = self._key_interval(device)
        return (total.gather(-1, hi) - total.gather(-1, lo)).float()[:, None, :]

    def column_sum(self, x: Float[Tensor, "b query c"]) -> Float[Tensor, "b2 head key c"]:
        """Σ of x[i] over the queries i that see key j, [batch, head|1, key, c]; column means are built on it."""
        if not self.structure.is_known:
            total: Tensor | None = None
            for rows in self._row_blocks():
                visible = self._full_block_mask(rows, x.device).to(x.dtype)  # [b, h, rows, key]
                part = visible.transpose(-1, -2) @ x[:, None, rows]
                total = part if total is None else total + part
            assert total is not None
            return total
        if self.kind is MaskKind.FULL:
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

    def can_see(self, keys: Int[Tensor, "batch head rank"]) -> Bool[Tensor, "batch head query rank"]:
        """Whether each row sees these keys of each head."""
        B, H, n = keys.shape
        if not self.structure.is_known:
            out = torch.empty(B, H, self.queries, n, dtype=torch.bool, device=keys.device)
            for rows in self._row_blocks():
                visible = self._full_block_mask(rows, keys.device)
                visible = visible.expand(B, H, -1, -1)
                out[:, :, rows] = visible.gather(-1, keys[:, :, None].expand(-1, -1, visible.shape[2], -1))
            return out
        lo, hi = (x[:, None, :, None] for x in self._key_interval(keys.device))
        key = keys[:, :, None]
        visible = (key >= lo) & (key < hi)
        if self.valid is not None:
            visible = visible & self.valid.to(keys.device)[:, None].expand(-1, H, -1).gather(-1, keys)[:, :, None]
        return visible.expand(B, H, self.queries, n)

    def can_see_own_key(self, device: torch.device | str) -> Bool[Tensor, "b h query"] | None:
        """Whether each row sees the key at its own position; None: all rows do."""
        if self.structure.is_known:
            return None
        parts = []
        for rows in self._row_blocks():
            visible = self._full_block_mask(rows, device)
            own = torch.arange(rows.start, rows.stop, device=device) + self.offset
            parts.append(visible[:, :, torch.arange(len(own), device=device), own])
        return torch.cat(parts, -1)

    def mean_over_visible_keys(self, x: Float[Tensor, "batch head key dim"]) -> Float[Tensor, "batch head query dim"]:
        """Mean of x over the keys each row sees; zeros for a row that sees none."""
        B, H, _, D = x.shape
        count = self.count_visible_keys(x.device).clamp_min(1)[..., None]  # [b, h, query, 1]
        x = x.float()
        if self.valid is not None:
            x = x * self.valid.to(x.device)[:, None, :, None]
        if self.kind is MaskKind.FULL:
            return x.sum(2, keepdim=True).expand(-1, -1, self.queries, -1) / count
        if not self.structure.is_known:
            blocks = [self._full_block_mask(rows, x.device).float() @ x for rows in self._row_blocks()]
            return torch.cat(blocks, 2) / count
        total = torch.nn.functional.pad(x.double().cumsum(2), (0, 0, 1, 0))
        ends = [i[:, None, :, None].expand(B, H, -1, D) for i in self._key_interval(x.device)]
        return ((total.gather(2, ends[1]) - total.gather(2, ends[0])) / count).float()

    def uniform_received(self, weights: Float[Tensor, "b query group"]) -> Float[Tensor, "b2 group key"]:
        """What each key receives under uniform attention: u[g, j] = Σ_i weights[i, g] · 1[i sees j] / n_i."""
        n = self.count_visible_keys(weights.device)  # [b, h, query]
        if n.shape[1] == 1:
            share = weights / n[:, 0, :, None].clamp_min(1)
            return self.column_sum(share).mean(1).transpose(-1, -2)
        heads = [replace(self, mask=m[:, None]) for m in self.mask.unbind(1)]  # type: ignore[union-attr]
        return torch.stack([one.uniform_received(weights) for one in heads]).mean(0)

    def valid_spans(self, device: torch.device) -> Int[Tensor, "batch 2"]:
        """The first valid key of each sample and one past the last, for a kernel; computed once for all layers."""
        return self._span_tensor.to(device)

    @cached_property
    def _span_tensor(self) -> Tensor:
        assert self.valid is not None
        return torch.tensor([span[:2] for span in self._valid_ranges], dtype=torch.int32, device=self.valid.device)

    @cached_property
    def _valid_ranges(self) -> list[tuple[int, int, bool]]:
        """Per sample: the first valid key, one past the last, and whether every key between them is valid."""
        assert self.valid is not None
        ranges = []
        for row in self.valid.cpu():
            index = row.nonzero()[:, 0].tolist()
            first, stop = (index[0], index[-1] + 1) if index else (0, 0)
            ranges.append((first, stop, len(index) == stop - first))
        return ranges

    def _key_interval(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """[lo, hi): the keys query i sees, each [batch|1, query]."""
        at = torch.arange(self.queries, device=device)[None] + self.offset
        zero, end = torch.zeros_like(at), torch.full_like(at, self.keys)
        match self.kind:
            case MaskKind.CAUSAL:
                lo, hi = zero, at + 1
            case MaskKind.WINDOW:
                lo, hi = at - self.size + 1, at + 1
            case MaskKind.BLOCK:
                base = self._block_base(device)
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
            case MaskKind.CAUSAL:
                lo, hi = at, end
            case MaskKind.WINDOW:
                lo, hi = at, at + self.size
            case _:
                base = self._block_base(device)
                lo, hi = ((at + self.offset - base) // self.size) * self.size + base - self.offset, end
        return lo.clamp(0, self.queries), hi.clamp(0, self.queries)

    def _block_base(self, device: torch.device | str) -> Tensor | int:
        """The key from which the blocks of each sample count, [batch, 1]; 0 without padding."""
        first = self.first_valid_key
        return first if isinstance(first, int) else first.to(device)[:, None]

    def _apply_rule(self, q: Tensor, k: Tensor) -> Tensor:
        assert self.rule is not None
        b = torch.arange(self.batch, device=q.device)[:, None, None, None]
        h = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=q.device)
        visible = self.rule(b, h, q[None, None, :, None], k[None, None, None, :])
        return visible.expand(-1, -1, len(q), len(k))

    def _full_block_mask(self, rows: slice, device: torch.device | str) -> Tensor:
        """`block_mask` on all keys, and ones where it is None."""
        visible = self.block_mask(rows, slice(0, self.keys), device)
        if visible is None:
            return torch.ones(1, 1, rows.stop - rows.start, self.keys, dtype=torch.bool, device=device)
        return visible

    def _row_blocks(self) -> list[slice]:
        """All query rows in blocks of at most PAIR_BLOCK pairs."""
        batch = max(
            self.batch, 1 if self.valid is None else len(self.valid), 1 if self.mask is None else len(self.mask)
        )
        heads = 1 if self.mask is None else self.mask.shape[1]
        step = max(1, PAIR_BLOCK // max(1, self.keys * batch * heads))
        return [slice(i, min(i + step, self.queries)) for i in range(0, self.queries, step)]


def normalize_padding(valid: Tensor | None) -> Tensor | None:
    """Key padding as a boolean [batch, key], or None when nothing is padded."""
    if valid is None:
        return None
    valid = valid.bool()
    return None if bool(valid.all()) else valid


def _batch_index(sample: Tensor, size: int) -> Tensor:
    """The index of each sample on a batch axis of `size`, which may be 1 and shared."""
    return sample if size > 1 else torch.zeros_like(sample)
